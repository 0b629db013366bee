"""A training step of several microbatches.

Enters: microbatches, and how one is run whose gradients stay this rank's own. Leaves: the mean or the sum of the
losses, and the parameters' gradients of that, summed over the ranks once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fxpar.runtime.grad_buffers import Finish


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
        """Seed, step and microbatch."""
        return torch.cat([self.step[:2], self.step[2:] + self.index])


@dataclass(frozen=True)
class Ran:
    """A step of which forward and backward have run.

    Attributes:
        outputs: those of the model, by name.
        unfinished: what this rank has of the gradients.
        finish: makes the parameters' gradients, by name, of what is unfinished. A collective call.
        signature: equal for steps whose unfinished values may be added up.
    """

    outputs: Mapping[str, Tensor]
    unfinished: dict[str, Tensor]
    finish: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    signature: Hashable


@dataclass(frozen=True)
class MicrobatchResult:
    """A microbatch that has run.

    Attributes:
        loss: of it.
        ran: what it left of gradients.
        counted: what counted in its loss, where microbatches are weighed by that.
        rows: of its experts, and those without a place, by name of the output (`fxpar.ir.step`).
    """

    loss: Tensor
    ran: Ran
    counted: Tensor | None = None
    rows: Mapping[str, Tensor] = field(default_factory=dict)


def weight(counted: Tensor | None, microbatch: Microbatch) -> Tensor | float:
    """By what a microbatch's loss is multiplied: 1 in a sum, one over their number, or where words count those it has.

    These are taken in units of the first's, so that half precision overflows no sooner.
    """
    if counted is None:
        return 1.0 if microbatch.adds else 1 / microbatch.count
    return counted / unit_of(counted if microbatch.unit is None else microbatch.unit)


def unit_of(counted: Tensor) -> Tensor:
    """What counted in a microbatch as the unit of others: one where nothing did."""
    return counted.masked_fill(counted == 0, 1)


@torch.no_grad()
def run_microbatches(
    parts: Sequence[Any],
    state: Tensor,
    run: Callable[[Any, Microbatch], MicrobatchResult],
    finished: Callable[[dict[str, Tensor], Hashable, Finish], Mapping[str, Tensor]],
    adds: bool = False,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss of a step, and its gradients by name of the parameter.

    Args:
        parts: the microbatches.
        state: random state of the step, i64[3].
        run: forward and backward of one.
        finished: makes gradients of what all have left (`Waiting.finished`).
        adds: whether the losses are added, in place of their mean.

    Microbatches whose programs leave other values for the parameter phase, as of other lengths, have one of their own.
    """
    done: list[MicrobatchResult] = []
    totals: dict[Hashable, tuple[dict[str, Tensor], Ran]] = {}
    for index, part in enumerate(parts):
        unit = done[0].counted if done else None
        completed = run(part, Microbatch(index, len(parts), state, unit, adds))
        total, ran = totals.get(completed.ran.signature, ({}, replace(completed.ran, unfinished={})))
        if not total:
            total = {name: value.clone() for name, value in completed.ran.unfinished.items()}
        else:
            torch._foreach_add_(list(total.values()), [completed.ran.unfinished[name] for name in total])
        totals[ran.signature] = total, ran
        done.append(replace(completed, ran=replace(completed.ran, unfinished={})))
    if len(totals) == 1:
        return _joined(done, finished(total, ran.signature, ran.finish), adds)

    def finish(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for index, (summed, ran) in enumerate(totals.values()):
            for name, gradient in ran.finish({key: values[f"{index} {key}"] for key in summed}).items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return gradients

    groups = enumerate(total for total, _ in totals.values())
    combined = {f"{index} {name}": value for index, total in groups for name, value in total.items()}
    return _joined(done, finished(combined, tuple(totals), finish), adds)


def joined_loss(losses: Sequence[Tensor], adds: bool) -> Tensor:
    """Returns the loss of a step whose microbatches all weigh alike."""
    stacked = torch.stack([*losses])
    return stacked.sum() if adds else stacked.mean()


def _joined(
    done: Sequence[MicrobatchResult], gradients: Mapping[str, Tensor], adds: bool
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss of the step. Gradients that were weighed by counts are divided by that of all."""
    if done[0].counted is None:
        return joined_loss([part.loss for part in done], adds), gradients
    losses = torch.stack([part.loss for part in done])
    counts = torch.stack([part.counted for part in done if part.counted is not None])
    factor = unit_of(counts[0]) / counts.sum()
    return (losses * counts).sum() / counts.sum(), {name: gradient * factor for name, gradient in gradients.items()}
