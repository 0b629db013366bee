"""Grouped products of rows that a model sorts by expert itself, as routed rows.

Enters: a graph, and what its values are of a choice. Leaves: the same, in which what takes, spreads and adds up the
rows of tokens is written with the operators of `fxpar.experts.operators.permute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from fxpar.experts.compiler.choices import SHAPED, ChosenRows, argument, aten, chosen_of, fxp, is_zero, untransposed
from fxpar.experts.compiler.routing_facts import Facts, IndexKind, PairWeights, RoutingIndex, kind_of
from fxpar.ir.program import TensorType, tensor_type
from fxpar.rules import bind_arguments


def write_sorted(graph: fx.Graph, facts: Facts) -> None:
    """Rewrites grouped products of rows that stand sorted, and what takes these rows and adds them up.

    Before::

        %order = aten.argsort.stable(%flat) : i64[2*b*s]
        %tokens = aten.floor_divide.default(%order, 2) : i64[2*b*s]
        %rows = aten.index.Tensor(%x, [%tokens]) : f32[2*b*s, 64]
        %sizes = fxpar.group_sizes.default(%ends) : i64[8]
        %y = fxpar.grouped_linear.default(%rows, %w, %sizes, False) : f32[2*b*s, 128]
        %weighed = aten.mul.Tensor(%y, %weight_of_row) : f32[2*b*s, 128]
        %sum = aten.index_add.default(%zeros, 0, %tokens, %weighed) : f32[b*s, 128]

    After, as `recognize_experts` shows it, products are of the rows and counts of `fxpar.sort_by_expert`.
    """
    sorted_choices: dict[fx.Node, None] = {}
    for node in graph.find_nodes(op="call_function", target=fxp.grouped_linear.default):
        sizes = argument(node, 2)
        match fact := facts.get(sizes):
            case RoutingIndex(kind=IndexKind.SIZES) if tensor_type(sizes).shape[0] == chosen_of(fact.choice):
                sorted_choices[fact.choice] = None
    for choice in sorted_choices:
        _AuthorsRows(graph, choice, facts).write()


class _AuthorsRows(ChosenRows):
    """The rows of one choice that a model has sorted itself, which stand as those of fxpar do."""

    def __init__(self, graph: fx.Graph, choice: fx.Node, facts: Facts) -> None:
        self.facts = {node: fact for node, fact in facts.items() if fact.choice is choice}
        first = next(
            node
            for node, fact in self.facts.items()
            if isinstance(fact, PairWeights) or kind_of(fact) not in (None, IndexKind.CHOICE)
        )
        super().__init__(graph, choice, first, first)

    def write(self) -> None:
        """Rewrites what takes rows, computes with them and adds them up.

        What else reads the author's order reads this one: within an expert that of an unstable sort may differ.
        """
        for node in list(self.graph.nodes):
            if node.target is fxp.grouped_linear.default and self.kind(argument(node, 2)) is IndexKind.SIZES:
                rows, weight, _, transposed = node.args
                matrices, is_turned = untransposed(weight)
                node.args = (rows, matrices, self.counts, transposed != is_turned)
            moved = self._moved(node) if node.target in _MOVES else None
            if moved is not None:
                node.replace_all_uses_with(moved)
                self.graph.erase_node(node)
        for node in list(self.graph.nodes):
            if self.kind(node) is IndexKind.ORDER and node.target is not aten._to_copy.default:
                node.replace_all_uses_with(self.order)

    def kind(self, places: Any) -> IndexKind | None:
        """Returns what places say of the choice."""
        return kind_of(self.facts.get(places))

    def _moved(self, node: fx.Node) -> fx.Node | None:
        """Writes what takes rows at places, or adds to or replaces those at places."""
        (name, added), args = _MOVES[node.target], bind_arguments(node)
        base, (places, *more) = args["self"], args[name] if name == "indices" else [args[name]]
        shape = tensor_type(base).shape
        if more or args.get("dim", 0) % len(shape) != 0 or args.get("alpha", 1) != 1:
            return None
        if node.target in (aten.gather.default, aten.scatter_add.default) and len(shape) > 1:
            # The same place for all of a row.
            column = argument(places, 0) if places.target is aten.expand.default else places
            is_by_row = tensor_type(column).shape == (self.rows, 1) and column.target in SHAPED
            places = argument(column, 0) if is_by_row and tensor_type(places).shape[1:] == shape[1:] else None
        self.emit.like(node)
        if not added:
            return self._taken(base, self.kind(places))
        adds = node.target is not aten.index_put.default or args.get("accumulate", False)
        return self._put(base, self.kind(places), args[added], adds)

    def _taken(self, source: Any, places: IndexKind | None) -> fx.Node | None:
        """Takes rows at places of tokens or of pairs, the slices of experts, or pairs from their rows."""
        kind = tensor_type(source)
        size, is_matrix = kind.shape[:1], len(kind.shape) == 2
        if places is IndexKind.KEYS and size == (self.experts,) and is_matrix:
            return self.spread(source)
        if places is IndexKind.TOKENS and size == (self.tokens,) and is_matrix:
            return self.taken(source, self.k)
        if size != (self.rows,):
            return None
        if places is IndexKind.INVERSE and is_matrix:
            return self.put(source, self.rows, 1)
        if places is not IndexKind.ORDER or is_matrix:
            return self.taken(source, 1) if places is IndexKind.ORDER else None
        if len(kind.shape) > 2 or not kind.dtype.is_floating_point:
            return None
        column = self.taken(self.emit.view(source, [-1, 1], (self.rows, 1)), 1)
        return self.emit.view(column, [-1], (self.rows,))

    def _put(self, base: fx.Node, places: IndexKind | None, rows: Any, adds: bool) -> fx.Node | None:
        """Adds rows up at their tokens, or puts them back at their pairs."""
        if not isinstance(rows, fx.Node) or tensor_type(rows).shape[:1] != (self.rows,):
            return None
        kind = tensor_type(rows)
        if len(kind.shape) != 2 or kind.dtype != tensor_type(base).dtype:
            return None
        is_by_token = places is IndexKind.TOKENS or (places is IndexKind.ORDER and self.k == 1)
        if is_by_token and adds:
            size, k = self.tokens, self.k
        elif places is IndexKind.ORDER and is_zero(base):
            size, k = self.rows, 1
        else:
            return None
        if tensor_type(base).shape != (size, kind.shape[1]):
            return None
        weighed = None
        if (k > 1 or size == self.tokens) and len(rows.users) == 1:  # nothing else reads what is weighed
            weighed = self.weighed(rows)
        placed = self.put(rows, size, k) if weighed is None else self.moe_combine(*weighed, kind.dtype)
        shape = TensorType(kind.dtype, (size, kind.shape[1]))
        return placed if is_zero(base) else self.emit.call(aten.add.Tensor, (base, placed), shape)


# What moves rows: what it calls their places, and what it adds to others or puts in their place.
_MOVES: Mapping[Any, tuple[str, str]] = {
    aten.index.Tensor: ("indices", ""),
    aten.index_select.default: ("index", ""),
    aten.gather.default: ("index", ""),
    aten.scatter_add.default: ("index", "src"),
    aten.index_add.default: ("index", "source"),
    aten.index_put.default: ("indices", "values"),
}
