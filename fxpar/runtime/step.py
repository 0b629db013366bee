"""A training step of several microbatches.

Enters: microbatches, and how one is run whose gradients stay this rank's own. Leaves: the mean of the losses; the
parameters' gradients are those of that mean, summed over the ranks once, and added to what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpar.errors import InputError
from fxpar.ops.deferred import Reduction

Reductions = tuple[Reduction, ...]


@dataclass(frozen=True)
class Microbatch:
    """One of several that make a step.

    Attributes:
        index: which.
        count: how many there are.
        step: random state of the step, i64[3].
    """

    index: int
    count: int
    step: Tensor

    @property
    def random_state(self) -> Tensor:
        """Seed, step and microbatch."""
        return torch.cat([self.step[:2], self.step[2:] + self.index])


def run_microbatches(
    parts: Sequence[Any],
    leaves: Sequence[Tensor],
    state: Tensor,
    run: Callable[[Any, Microbatch], tuple[Tensor, Reductions]],
    reduce: Callable[[Reductions], None],
) -> Tensor:
    """The mean loss of a step, differentiated.

    Args:
        parts: the microbatches.
        leaves: of which autograd computes gradients. Where a microbatch fails they have those of before.
        state: random state of the step, i64[3].
        run: forward and backward of one; gives its loss, detached, and the reductions that its gradients lack.
        reduce: carries them out.

    Raises:
        InputError: two microbatches lack other reductions.
    """
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    is_done = False
    try:
        losses, first = [], None
        for index, part in enumerate(parts):
            loss, reductions = run(part, Microbatch(index, len(parts), state))
            if first is not None and reductions != first:
                raise InputError(
                    "reduces other gradients than the first",
                    where=f"microbatch {index}",
                    remedy="pass microbatches of one structure and kind of sizes",
                )
            first = reductions
            losses.append(loss)
        reduce(first or ())
        is_done = True
    finally:
        for leaf, kept in zip(leaves, before, strict=True):
            if not is_done or leaf.grad is None:
                leaf.grad = kept
            elif kept is not None:
                leaf.grad = kept + leaf.grad
    return torch.stack(losses).mean()
