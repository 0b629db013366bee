"""One reduction for the gradients of many parameters, on local tensors (`fxpar.sum_gradients`).

Enters: a rank's parameters, and for each what of it several ranks hold. Leaves: the parameters as they are; their
gradients are summed over the axis in one flat tensor.
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
    def forward(ctx: Any, group: Group, held: Sequence[Held], index: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """The same values."""
        ctx.set_materialize_grads(False)
        ctx.group = group
        ctx.held = [None if item is None else (item[0], [Shared(*piece) for piece in item[1]]) for item in held]
        ctx.save_for_backward(index)
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """The sums of the ranks' gradients; of what a rank holds alone its own."""
        (index,) = ctx.saved_tensors
        n = ctx.group.size
        given = [(grad, item) for grad, item in zip(grads, ctx.held, strict=True) if grad is not None]
        if not given:
            return None, None, None, *grads
        parts = [grad if item is None else summand(grad, item[0], item[1], n, index) for grad, item in given]
        flat = sum_over(torch.cat([part.reshape(-1) for part in parts]), ctx.group)
        totals = flat.split([part.numel() for part in parts])
        found = []
        for (grad, item), part, sums in zip(given, parts, totals, strict=True):
            total = sums.view(part.shape)
            found.append(total if item is None else restored(grad, total, item[0], item[1], n, index))
        remaining = iter(found)
        return None, None, None, *(None if grad is None else next(remaining) for grad in grads)


def sum_gradients(weights: Sequence[Tensor], held: Sequence[Held], group: str, size: int, index: Tensor) -> Any:
    """`fxpar.sum_gradients`; pieces as tuples of `Shared`'s fields."""
    return SumGradients.apply(Group(group, size), held, index, *weights)  # type: ignore[no-untyped-call]
