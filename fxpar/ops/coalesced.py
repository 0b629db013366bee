"""One reduction for the gradients of many parameters, on local tensors (`fxpar.sum_gradients`).

Enters: a rank's parameters, and for each what of it several ranks hold; under mixed precision (`fxpar.program.mixed`)
main values and their copies. Leaves: the parameters, or the copies, as they are; their gradients are summed over the
axis in one flat tensor, in the type of the parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ops.collectives import Group, sum_over
from fxpar.ops.factored import Shared, restored, summand
from fxpar.program.mixed import MAIN

# Dimension and pieces of a weight of which ranks share blocks; None of one that every rank holds whole.
Held = tuple[int, Sequence[Sequence[Any]]] | None


class SumGradients(torch.autograd.Function):
    """Identity; one all-reduce of all gradients.

    A weight that the loss does not reach gets none, as without a bucket: an optimizer leaves it alone then. Which ones
    those are follows from the program, so that all ranks sum the same.
    """

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, group: Group, held: Sequence[Held], index: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """The same values; those of the copies where they follow the weights.

        Args:
            dtype: in which gradients are summed.
        """
        ctx.set_materialize_grads(False)
        ctx.group, ctx.dtype = group, dtype
        ctx.held = [None if item is None else (item[0], [Shared(*piece) for piece in item[1]]) for item in held]
        ctx.save_for_backward(index)
        ctx.rest = len(tensors) - len(held)
        return tuple(value.view_as(value) for value in tensors[-len(held) :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """The sums of the ranks' gradients; of what a rank holds alone its own."""
        (index,) = ctx.saved_tensors
        n, rest = ctx.group.size, [None] * ctx.rest
        given = [(grad.to(ctx.dtype), item) for grad, item in zip(grads, ctx.held, strict=True) if grad is not None]
        if not given:
            return None, None, None, None, *grads, *rest
        parts = [grad if item is None else summand(grad, item[0], item[1], n, index) for grad, item in given]
        flat = sum_over(torch.cat([part.reshape(-1) for part in parts]), ctx.group)
        totals = flat.split([part.numel() for part in parts])
        found = []
        for (grad, item), part, sums in zip(given, parts, totals, strict=True):
            total = sums.view(part.shape)
            found.append(total if item is None else restored(grad, total, item[0], item[1], n, index))
        remaining = iter(found)
        return None, None, None, None, *(None if grad is None else next(remaining) for grad in grads), *rest


def sum_gradients(
    weights: Sequence[Tensor], held: Sequence[Held], group: str, size: int, index: Tensor, copies: Sequence[Tensor] = ()
) -> Any:
    """`fxpar.sum_gradients`; pieces as tuples of `Shared`'s fields."""
    return SumGradients.apply(weights[0].dtype, Group(group, size), held, index, *weights, *copies)  # type: ignore[no-untyped-call]


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


def sum_gradient(main: Tensor, held: Held, group: str, size: int, index: Tensor, copy: Tensor) -> Tensor:
    """`fxpar.copy_to` or `fxpar.share` of one parameter that has main values."""
    (found,) = sum_gradients([main], [held], group, size, index, [copy])
    return found  # type: ignore[no-any-return]


def sum_widely(made: Tensor, held: Held, group: str, size: int, index: Tensor) -> Tensor:
    """`fxpar.copy_to` or `fxpar.share` of what half-precision parameters make: summed in float32, rounded once."""
    (found,) = SumGradients.apply(MAIN, Group(group, size), [held], index, made)  # type: ignore[no-untyped-call]
    return found  # type: ignore[no-any-return]


class Enter(torch.autograd.Function):
    """The copies; gradients in the type of the main values."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Main values, then as many copies."""
        ctx.set_materialize_grads(False)
        ctx.dtype = tensors[0].dtype
        return tuple(copy.view_as(copy) for copy in tensors[len(tensors) // 2 :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The same gradients."""
        return *(None if grad is None else grad.to(ctx.dtype) for grad in grads), *[None] * len(grads)


def enter(mains: Sequence[Tensor], copies: Sequence[Tensor]) -> list[Tensor]:
    """How parameters that have main values enter a program; those that are frozen by now as they are."""
    pairs = [(main, copy) for main, copy in zip(mains, copies, strict=True) if main.requires_grad]
    if not pairs:
        return list(copies)
    entered: Any = Enter.apply(*(main for main, _ in pairs), *(copy for _, copy in pairs))  # type: ignore[no-untyped-call]
    remaining = iter(entered)
    return [next(remaining) if main.requires_grad else copy for main, copy in zip(mains, copies, strict=True)]


_BUCKETS = (sum_gradients, enter)


def prune_buckets(graph: fx.Graph, results: Sequence[fx.Node]) -> None:
    """Takes weights that no result needs out of what many share: reductions of gradients, and casts.

    A compiled backward would give them zeros in place of no gradient, and an optimizer would move them.
    """
    needed: set[fx.Node] = set()
    pending = list(results)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += _inputs(node)
    for node in list(graph.nodes):
        if node.target not in _BUCKETS:
            continue
        lists: list[Any] = [arg for arg in node.args if isinstance(arg, list) and arg]
        values = lists[-1] if isinstance(lists[-1][0], fx.Node) else lists[0]  # copies, or weights that have none
        items = {user.args[1]: user for user in node.users}
        kept = [index for index in range(len(values)) if items.get(index) in needed]
        for index, item in items.items():
            if index in kept:
                item.args = (node, kept.index(index))
            else:
                item.replace_all_uses_with(values[index])
                graph.erase_node(item)
        node.args = tuple([arg[i] for i in kept] if isinstance(arg, list) and arg else arg for arg in node.args)
        if not kept:
            graph.erase_node(node)


def _inputs(node: fx.Node) -> list[fx.Node]:
    """What a node takes: an item of a bucket what is its own there, and what all items take, as the rank's index."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or source.target not in _BUCKETS:
        return node.all_input_nodes
    index: Any = node.args[1]
    own: list[Any] = [arg[index] if isinstance(arg, list) and arg else arg for arg in source.args]
    return [arg for arg in own if isinstance(arg, fx.Node)]
