"""One reduction for the gradients of many parameters, on local tensors (`fxpar.sum_gradients`).

Enters: a rank's parameters or their gradients, and for each what of it several ranks hold. Leaves: the parameters as
they are, whose gradients are summed over the axis in one flat tensor; or these sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpar.ops.collectives import Group, sum_over
from fxpar.ops.factored import Shared, restored, summand

# Dimension and pieces of a weight of which ranks share blocks; None of one that every rank holds whole.
Held = tuple[int, Sequence[Sequence[Any]]] | None


class SumGradients(torch.autograd.Function):
    """Identity; one all-reduce of all gradients.

    A weight that the loss does not reach gets none, as without a bucket: an optimizer leaves it alone then. Which ones
    those are follows from the program, so that all ranks sum the same.
    """

    @staticmethod
    def forward(ctx: Any, group: Group, held: Sequence[Held], index: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The same values."""
        ctx.set_materialize_grads(False)
        ctx.group, ctx.held = group, held
        ctx.save_for_backward(index)
        return tuple(value.view_as(value) for value in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """The sums of the ranks' gradients; of what a rank holds alone its own."""
        (index,) = ctx.saved_tensors
        given = [(grad, item) for grad, item in zip(grads, ctx.held, strict=True) if grad is not None]
        where = ctx.group.name, ctx.group.size, index
        sums = all_reduce_coalesced([grad for grad, _ in given], [item for _, item in given], *where) if given else ()
        remaining = iter(sums)
        return None, None, None, *(None if grad is None else next(remaining) for grad in grads)


def sum_gradients(weights: Sequence[Tensor], held: Sequence[Held], group: str, size: int, index: Tensor) -> Any:
    """`fxpar.sum_gradients`; pieces as tuples of `Shared`'s fields."""
    return SumGradients.apply(Group(group, size), held, index, *weights)  # type: ignore[no-untyped-call]


def all_reduce_coalesced(
    gradients: Sequence[Tensor], held: Sequence[Held], group: str, size: int, index: Tensor
) -> tuple[Tensor, ...]:
    """`fxpar.all_reduce_coalesced`; pieces as tuples of `Shared`'s fields."""
    pieces = [None if item is None else (item[0], [Shared(*piece) for piece in item[1]]) for item in held]
    pairs = list(zip(gradients, pieces, strict=True))
    parts = [grad if item is None else summand(grad, *item, size, index) for grad, item in pairs]
    flat = sum_over(torch.cat([part.reshape(-1) for part in parts]), Group(group, size))
    found = []
    totals = flat.split([part.numel() for part in parts])
    for (grad, item), part, sums in zip(pairs, parts, totals, strict=True):
        total = sums.view(part.shape)
        found.append(total if item is None else restored(grad, total, *item, size, index))
    return tuple(found)
