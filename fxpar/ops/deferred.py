"""Reductions of parameters' gradients, taken out of a rank's graph: once a step, however many microbatches it has.

Enters: a lowered graph. Leaves: the same without them, and what is to be summed after the last microbatch. Gradients
are accumulated as each rank has them, under mixed precision in the main values' type, and summed in flat buckets.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fxpar.ops import bound, coalesced, factored
from fxpar.ops.collectives import Group
from fxpar.ops.factored import Shared, restored, summand
from fxpar.ops.groups import process_group


@dataclass(frozen=True)
class Reduction:
    """One flat sum.

    Attributes:
        names: placeholders of the parameters.
        held: for each what of it several ranks hold (`fxpar.ops.coalesced`).
        group: of the ranks that sum.
    """

    names: tuple[str, ...]
    held: tuple[coalesced.Held, ...]
    group: Group

    def run(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The sums of those gradients that are there, by name. A collective call.

        Which ones are there follows from the program, so that all ranks sum the same.
        """
        group = process_group(self.group)
        pairs = zip(self.names, self.held, strict=True)
        given = [(name, gradient, held) for name, held in pairs if (gradient := gradients[name]) is not None]
        found: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(gradient.dtype for _, gradient, _ in given):
            some = [item for item in given if item[1].dtype == dtype]
            index = torch.tensor(group.rank(), device=some[0][1].device)
            parts = [_part(gradient, held, self.group.size, index) for _, gradient, held in some]
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat, group=group)
            sums = flat.split([part.numel() for part in parts])
            for (name, gradient, held), part, total in zip(some, parts, sums, strict=True):
                found[name] = _restored(gradient, total.view(part.shape), held, self.group.size, index)
        return found


def _part(gradient: Tensor, held: coalesced.Held, n: int, index: Tensor) -> Tensor:
    if held is None:
        return gradient
    return summand(gradient, held[0], [Shared(*piece) for piece in held[1]], n, index)


def _restored(gradient: Tensor, total: Tensor, held: coalesced.Held, n: int, index: Tensor) -> Tensor:
    if held is None:
        return total
    return restored(gradient, total, held[0], [Shared(*piece) for piece in held[1]], n, index)


def take_out(graph: fx.Graph, parameters: Sequence[str]) -> tuple[Reduction, ...]:
    """Takes the reductions of parameters' gradients out of a lowered graph, in the order in which backward runs them.

    Args:
        parameters: names of the placeholders.
    """
    found: list[Reduction] = []
    for node in list(graph.nodes):
        taken = _TAKEN.get(node.target)
        if node.op == "call_function" and taken is not None:
            reduction = taken(graph, node, frozenset(parameters))
            found += [reduction] if reduction is not None else []
    return tuple(reversed(found))


def _named(values: Sequence[Any], parameters: frozenset[str]) -> tuple[str, ...] | None:
    """Names of the placeholders, where all values are parameters."""
    names = tuple(str(value.target) for value in values if isinstance(value, fx.Node) and value.op == "placeholder")
    return names if len(names) == len(values) and parameters.issuperset(names) else None


def _bucket(graph: fx.Graph, node: fx.Node, parameters: frozenset[str]) -> Reduction | None:
    weights, held, group, size, _, *rest = node.args
    names = _named(weights, parameters)  # type: ignore[arg-type]
    if names is None:
        return None
    values: Any = weights
    if rest:
        values = _entered(graph, node, weights, rest[0])  # type: ignore[arg-type]
    for item in list(node.users):
        item.replace_all_uses_with(values[item.args[1]])
        graph.erase_node(item)
    graph.erase_node(node)
    return Reduction(names, tuple(held), Group(group, size))  # type: ignore[arg-type]


def _entered(graph: fx.Graph, node: fx.Node, mains: Sequence[fx.Node], given: Sequence[fx.Node]) -> list[fx.Node]:
    """What a sum gives: the copies, whose gradients are those of the main values, or these as they are."""
    pairs = [(main, copy) for main, copy in zip(mains, given, strict=True) if copy is not main]
    if not pairs:
        return list(mains)
    with graph.inserting_before(node):
        entered = graph.call_function(coalesced.enter, ([main for main, _ in pairs], [copy for _, copy in pairs]))
        items = iter([graph.call_function(operator.getitem, (entered, index)) for index in range(len(pairs))])
    return [main if copy is main else next(items) for main, copy in zip(mains, given, strict=True)]


def _one(graph: fx.Graph, node: fx.Node, parameters: frozenset[str]) -> Reduction | None:
    main, held, group, size, _, copy = node.args
    return _replaced(graph, node, main, held, group, size, parameters, copy)


def _copied(graph: fx.Graph, node: fx.Node, parameters: frozenset[str]) -> Reduction | None:
    x, group, size = node.args
    return _replaced(graph, node, x, None, group, size, parameters)


def _shared(graph: fx.Graph, node: fx.Node, parameters: frozenset[str]) -> Reduction | None:
    x, dim, pieces, group, size, _ = node.args
    return _replaced(graph, node, x, (dim, pieces), group, size, parameters)


def _replaced(
    graph: fx.Graph,
    node: fx.Node,
    source: Any,
    held: Any,
    group: Any,
    size: Any,
    parameters: frozenset[str],
    copy: Any = None,
) -> Reduction | None:
    names = _named([source], parameters)
    if names is None:
        return None
    value = source if copy is None else _entered(graph, node, [source], [copy])[0]
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    return Reduction(names, (held,), Group(group, size))


_TAKEN: Mapping[Any, Any] = {
    coalesced.sum_gradients: _bucket,
    coalesced.sum_gradient: _one,
    bound.copy_to: _copied,
    factored.share: _shared,
}
