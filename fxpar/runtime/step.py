"""A training step of several microbatches.

Enters: microbatches, and how one is run whose gradients stay this rank's own. Leaves: the mean of the losses; the
parameters' gradients are those of that mean, summed over the ranks once, and added to what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpar.errors import InputError
from fxpar.ops.deferred import Reduction
from fxpar.program.program import Program
from fxpar.state.sharded_parameter import leaf_of


@dataclass(frozen=True)
class Microbatch:
    """One of several that make a step.

    Attributes:
        index: which.
        count: how many there are.
        step: random state of the step, i64[3].
        unit: what counted in the loss of the first, by which the others are weighed; None where all weigh alike, or in
            the first.
    """

    index: int
    count: int
    step: Tensor
    unit: Tensor | None = None

    @property
    def random_state(self) -> Tensor:
        """Seed, step and microbatch."""
        return torch.cat([self.step[:2], self.step[2:] + self.index])


@dataclass(frozen=True)
class Ran:
    """What a microbatch gave.

    Attributes:
        loss: detached.
        reductions: those that its gradients lack, by nodes of `program`.
        counted: what counted in its loss, where microbatches are weighed by that.
    """

    loss: Tensor
    reductions: tuple[Reduction, ...]
    program: Program
    counted: Tensor | None = None


def weighed(loss: Tensor, counted: Tensor | None, microbatch: Microbatch) -> Tensor:
    """What is differentiated of a microbatch: its loss over their number or, where words count, times those it has.

    These are taken in units of the first's, so that half precision overflows no sooner.
    """
    if counted is None:
        return loss / microbatch.count
    return loss * (counted / _unit(counted if microbatch.unit is None else microbatch.unit))


def _unit(counted: Tensor) -> Tensor:
    return counted.where(counted != 0, 1)


def run_microbatches(
    parts: Sequence[Any],
    parameters: Mapping[str, Tensor],
    state: Tensor,
    run: Callable[[Any, Microbatch], Ran],
) -> Tensor:
    """The mean loss of a step, differentiated.

    Args:
        parts: the microbatches.
        parameters: by name. Where a microbatch fails they have the gradients of before.
        state: random state of the step, i64[3].
        run: forward and backward of one.

    Raises:
        InputError: two microbatches lack other reductions.
    """
    leaves = [leaf_of(value) for value in parameters.values()]
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    is_done = False
    try:
        ran: list[Ran] = []
        for index, part in enumerate(parts):
            ran.append(run(part, Microbatch(index, len(parts), state, ran[0].counted if ran else None)))
            if ran[-1].reductions != ran[0].reductions:
                raise InputError(
                    "reduces other gradients than the first",
                    where=f"microbatch {index}",
                    remedy="pass microbatches of one structure and kind of sizes",
                )
        _reduce(ran[-1], parameters)
        total = _average(ran, leaves)
        is_done = True
    finally:
        for leaf, kept in zip(leaves, before, strict=True):
            if not is_done or leaf.grad is None:
                leaf.grad = kept
            elif kept is not None:
                leaf.grad = kept + leaf.grad
    return total


def _reduce(ran: Ran, parameters: Mapping[str, Tensor]) -> None:
    """Sums the ranks' gradients of parameters."""
    names = {p.node: p.fqn for p in ran.program.parameters}
    for reduction in ran.reductions:
        leaves = {node: leaf_of(parameters[names[node]]) for node in reduction.names}
        with torch.no_grad():
            for node, total in reduction.run({node: leaf.grad for node, leaf in leaves.items()}).items():
                leaves[node].grad = total


def _average(ran: Sequence[Ran], leaves: Sequence[Tensor]) -> Tensor:
    """The loss of the step. Gradients that were weighed by counts are divided by that of all."""
    losses = torch.stack([each.loss for each in ran])
    if ran[0].counted is None:
        return losses.mean()
    counts = torch.stack([each.counted for each in ran if each.counted is not None])
    factor = _unit(counts[0]) / counts.sum()
    for leaf in leaves:
        if leaf.grad is not None:
            leaf.grad.mul_(factor)
    return (losses * counts).sum() / counts.sum()
