"""A training step of several microbatches.

Enters: microbatches, and how one is run whose gradients stay this rank's own. Leaves: the mean or the sum of the
losses, and the parameters' gradients of that, summed over the ranks once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxpar.ir.step import is_counted
from fxpar.runtime.expert_loads import Finished, Loads
from fxpar.runtime.grad_buffers import Finish, Waiting


@dataclass(frozen=True)
class Microbatch:
    """One of several that make a step.

    Attributes:
        index: which.
        count: how many there are.
        step: random state of the step, i64[3].
        unit: what counted in the loss of the first, by which the others are weighed; None where all weigh alike, or in
            the first.
        adds: whether the loss of the step is the sum of theirs.
    """

    index: int
    count: int
    step: Tensor
    unit: Tensor | None = None
    adds: bool = False

    @property
    def random_state(self) -> Tensor:
        """Returns seed, step and microbatch, i64[3]."""
        # Computed where the state is, so that the host waits for nothing.
        return torch.cat([self.step[:2], self.step[2:] + self.index])


@dataclass(frozen=True)
class MicrobatchResult:
    """What forward and backward of a microbatch, or of a step that has one, left.

    Attributes:
        loss: of it.
        outputs: those of the model, by name.
        unfinished: what this rank has of the gradients.
        finish: makes the parameters' gradients, by name, of what is unfinished. A collective call.
        signature: equal for those whose unfinished values may be added up.
        counted: what counted in its loss, where microbatches are weighed by that.
    """

    loss: Tensor
    outputs: Mapping[str, Tensor]
    unfinished: dict[str, Tensor]
    finish: Finish
    signature: Hashable
    counted: Tensor | None = None

    @property
    def rows(self) -> dict[str, Tensor]:
        """Returns what it says of rows that were routed, and of those without a place, by name of the output."""
        return {name: value for name, value in self.outputs.items() if is_counted(name)}


@dataclass(frozen=True)
class StepOptions:
    """What a step is called with besides batches.

    Attributes:
        scaler: scales the loss that is differentiated.
        optimizer: steps at the end.
        max_norm: of all gradients, to which they are clipped before.
    """

    scaler: torch.amp.GradScaler | None = None
    optimizer: Optimizer | None = None
    max_norm: float | None = None


@dataclass(frozen=True)
class StepResult:
    """What a step gives.

    Attributes:
        loss: of it.
        names: of the parameters that have gradients of it.
        norm: of all gradients before they were clipped; None where they were not.
        is_finite: with an optimizer, whether loss and norm are, a bool scalar on the device.
        load: of routed rows by rank; None where no rank holds other modules than another.
        has_overflowed: of a recorded step, whether rows of experts had no place, a bool scalar on the device: it has
            changed nothing then. None where all rows have places.
    """

    loss: Tensor
    names: tuple[str, ...]
    norm: Tensor | None = None
    is_finite: Tensor | None = None
    load: Loads | None = None
    has_overflowed: Tensor | None = None

    def copied(self) -> StepResult:
        """Returns it with copies of its tensors."""
        scalars = (self.norm, self.is_finite, self.has_overflowed)
        norm, is_finite, has_overflowed = (None if tensor is None else tensor.clone() for tensor in scalars)
        load = None if self.load is None else replace(self.load, counts=self.load.counts.clone())
        return StepResult(self.loss.clone(), self.names, norm, is_finite, load, has_overflowed)


def weight(counted: Tensor | None, microbatch: Microbatch) -> Tensor | float:
    """Returns the factor of a microbatch's loss: 1 in a sum, one over their number, or the words that it has.

    These are taken in units of the first's, so that half precision overflows no sooner.
    """
    if counted is None:
        return 1.0 if microbatch.adds else 1 / microbatch.count
    return counted / unit_of(counted if microbatch.unit is None else microbatch.unit)


def unit_of(counted: Tensor) -> Tensor:
    """Returns what counted in a microbatch as the unit of others: one where nothing did."""
    return counted.masked_fill(counted == 0, 1)


@torch.no_grad()
def run_microbatches(
    parts: Sequence[Any],
    state: Tensor,
    run: Callable[[Any, Microbatch], MicrobatchResult],
    finished: Finished,
    waiting: Waiting,
    adds: bool = False,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Returns the loss of a step, and its gradients by name of the parameter.

    Args:
        parts: the microbatches.
        state: random state of the step, i64[3].
        run: forward and backward of one.
        finished: makes gradients of what all have left (`Waiting.finished`).
        waiting: adds up what they leave.
        adds: whether the losses are added, in place of their mean.

    Microbatches whose programs leave other values for the parameter phase, as of other lengths, have one of their own.
    """
    losses: list[Tensor] = []
    counts: list[Tensor] = []
    totals: dict[Hashable, tuple[dict[str, Tensor], Finish]] = {}
    waiting.start()
    for index, part in enumerate(parts):
        left = run(part, Microbatch(index, len(parts), state, counts[0] if counts else None, adds))
        totals[left.signature] = waiting.sum_of(left.signature).add(left.unfinished), left.finish
        losses.append(left.loss)
        counts += [] if left.counted is None else [left.counted]
        del left  # the next one needs the memory
    if len(totals) == 1:
        ((signature, (total, finish_one)),) = totals.items()
        return _joined(losses, counts, finished(total, signature, finish_one), adds)

    def finish(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for index, (summed, finish_one) in enumerate(totals.values()):
            for name, gradient in finish_one({key: values[f"{index} {key}"] for key in summed}).items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return gradients

    groups = enumerate(total for total, _ in totals.values())
    combined = {f"{index} {name}": value for index, total in groups for name, value in total.items()}
    return _joined(losses, counts, finished(combined, tuple(totals), finish), adds)


def joined_loss(losses: Sequence[Tensor], adds: bool) -> Tensor:
    """Returns the loss of a step whose microbatches all weigh alike."""
    stacked = torch.stack([*losses])
    return stacked.sum() if adds else stacked.mean()


def _joined(
    losses: Sequence[Tensor], counts: Sequence[Tensor], gradients: Mapping[str, Tensor], adds: bool
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Returns the loss of the step. Gradients that were weighed by counts are divided by that of all."""
    if not counts:
        return joined_loss(losses, adds), gradients
    # The factor is one for all gradients, since each microbatch was already weighed in units of the first.
    counted = torch.stack([*counts])
    factor = unit_of(counted[0]) / counted.sum()
    loss = (torch.stack([*losses]) * counted).sum() / counted.sum()
    return loss, {name: gradient * factor for name, gradient in gradients.items()}
