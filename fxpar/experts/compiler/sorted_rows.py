"""Grouped products of rows that a model sorts by expert itself, as routed rows.

Enters: a graph in one spelling. Leaves: the same, in which what sorts, takes, spreads and adds up the rows of tokens is
written with the operators of `fxpar.ops.permute`. A helper of `canonicalize`.

Terms: see `choices`. What else is known of a value is a `_RoutingValue`, and of which choice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import fx

from fxpar.experts.compiler.choices import SHAPED, ChosenRows, argument, chosen_of, is_choice
from fxpar.ir.program import TensorType, is_tensor, tensor_type
from fxpar.layout.symbolic_sizes import Size
from fxpar.rules import bind_arguments

aten, fxp = torch.ops.aten, torch.ops.fxpar


class _RoutingValue(Enum):
    """What a value is of a choice.

    Attributes:
        CHOICE: its experts, in order of tokens.
        SORT: what a sort of them gives.
        ORDER: places of the pairs, expert after expert.
        KEYS: the experts of those.
        TOKENS: the tokens of those.
        INVERSE: where each pair stands in that order.
        MARKS: for each pair and expert one or zero.
        COUNTS: pairs of each expert.
        ENDS: where each expert's pairs end in that order.
        SIZES: counts, of ends.
    """

    CHOICE = auto()
    SORT = auto()
    ORDER = auto()
    KEYS = auto()
    TOKENS = auto()
    INVERSE = auto()
    MARKS = auto()
    COUNTS = auto()
    ENDS = auto()
    SIZES = auto()


@dataclass(frozen=True)
class _Fact:
    """What is known of a value.

    Attributes:
        kind: what it is.
        choice: of which experts of tokens.
    """

    kind: _RoutingValue
    choice: fx.Node


_EXACT = (torch.int64, torch.int32, torch.float32, torch.float64)
_SORTS = (aten.sort.default, aten.sort.stable)
_ARGSORTS = (aten.argsort.default, aten.argsort.stable)
# What adds rows up at places, and what it calls the places.
_ADDS: Mapping[Any, str] = {aten.scatter_add.default: "src", aten.index_add.default: "source"}
_ZEROS = (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default)


def recognize_rows(graph: fx.Graph) -> None:
    """Writes rows that a model sorts itself as those of `fxpar.ops.permute`.

    Before::

        %order = aten.argsort.stable(%flat) : i64[2*b*s]
        %tokens = aten.floor_divide.default(%order, 2) : i64[2*b*s]
        %rows = aten.index.Tensor(%x, [%tokens]) : f32[2*b*s, 64]
        %sizes = fxpar.group_sizes.default(%ends) : i64[8]
        %y = fxpar.grouped_linear.default(%rows, %w, %sizes, True) : f32[2*b*s, 128]

    After::

        %order, %counts = fxpar.sort_by_expert.default(%chosen, 8) : i64[2*b*s], i64[8]
        %rows = fxpar.moe_permute.default(%x, %order, 2) : f32[2*b*s, 64]
        %y = fxpar.grouped_linear.default(%rows, %w, %counts, True) : f32[2*b*s, 128]

    Only experts that a top-k over as many as there are matrices has chosen are, which are all others for a token: so
    many places of buffers go by that. Whatever else reads the order reads that of the sort.
    """
    facts = _facts(graph)
    products: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.target is fxp.grouped_linear.default:
            sizes = facts.get(argument(node, 2))
            if sizes is not None and sizes.kind is _RoutingValue.SIZES and _counts(node) == chosen_of(sizes.choice):
                products[sizes.choice] = None
    for choice in products:
        _SortedRows(graph, choice, facts).write()


def _counts(product: fx.Node) -> Size:
    """How many experts' rows are counted for a product."""
    return tensor_type(argument(product, 2)).shape[0]


def _facts(graph: fx.Graph) -> dict[fx.Node, _Fact]:
    facts: dict[fx.Node, _Fact] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_choice(node):
            facts[node] = _Fact(_RoutingValue.CHOICE, node)
            continue
        source = argument(node, 0) if node.args else None
        known = facts.get(source) if isinstance(source, fx.Node) else None
        kind = None if known is None else _kind(node, known, facts)
        if known is not None and kind is not None:
            facts[node] = _Fact(kind, known.choice)
    return facts


def _kind(node: fx.Node, known: _Fact, facts: Mapping[fx.Node, _Fact]) -> _RoutingValue | None:
    """What a value is that is made of one of which something is known; None where nobody knows."""
    target, kind = node.target, known.kind
    if target is operator.getitem:
        return (_RoutingValue.KEYS, _RoutingValue.ORDER)[int(argument(node, 1))] if kind is _RoutingValue.SORT else None
    if target is aten._to_copy.default:
        return kind if is_tensor(node) and tensor_type(node).dtype in _EXACT else None
    if kind is _RoutingValue.CHOICE and target is aten.index.Tensor:
        (places, *more) = bind_arguments(node)["indices"]
        is_sorted = not more and facts.get(places) == _Fact(_RoutingValue.ORDER, known.choice)
        return _RoutingValue.KEYS if is_sorted and len(tensor_type(argument(node, 0)).shape) == 1 else None
    if kind is _RoutingValue.CHOICE:
        return _of_choice(node)
    if kind is _RoutingValue.ORDER:
        if target is aten.floor_divide.default or target is aten.div.Tensor_mode:
            return _RoutingValue.TOKENS if argument(node, 1) == tensor_type(known.choice).shape[-1] else None
        return _RoutingValue.INVERSE if target in _ARGSORTS and _ascends(node) else None
    if kind is _RoutingValue.MARKS and target is aten.sum.dim_IntList:
        rank, bound = len(tensor_type(argument(node, 0)).shape), bind_arguments(node)
        dims = {int(dim) % rank for dim in bound["dim"] or ()}
        return _RoutingValue.COUNTS if dims == set(range(rank - 1)) and not bound.get("keepdim", False) else None
    if kind is _RoutingValue.COUNTS and target is aten.cumsum.default:
        return _RoutingValue.ENDS
    return _RoutingValue.SIZES if kind is _RoutingValue.ENDS and target is fxp.group_sizes.default else None


def _of_choice(node: fx.Node) -> _RoutingValue | None:
    target, bound = node.target, bind_arguments(node)
    if target in SHAPED:
        return _RoutingValue.CHOICE
    is_flat = len(tensor_type(argument(node, 0)).shape) == 1
    if is_flat and target in _SORTS and _ascends(node):
        return _RoutingValue.SORT
    if is_flat and target in _ARGSORTS and _ascends(node):
        return _RoutingValue.ORDER
    if target is aten.histc.default:
        count = bound.get("bins", 100)
        return _RoutingValue.COUNTS if bound.get("min", 0) == 0 and bound.get("max", 0) in (count, count - 1) else None
    is_marked = target is aten.one_hot.default and bound.get("num_classes", -1) != -1
    return _RoutingValue.MARKS if is_marked or (target is aten.eq.Tensor and _numbers(bound["other"])) else None


def _numbers(value: Any) -> bool:
    """Whether these are the numbers of experts, 0, 1, …, along the last dimension."""
    while isinstance(value, fx.Node) and value.target in SHAPED and tensor_type(value).shape[-1] != 1:
        value = argument(value, 0)
    if not isinstance(value, fx.Node):
        return False
    is_first = value.target is aten.arange.default or (value.target is aten.arange.start and argument(value, 0) == 0)
    return is_first and len(tensor_type(value).shape) == 1


def _ascends(node: fx.Node) -> bool:
    return not bind_arguments(node).get("descending", False)


class _SortedRows(ChosenRows):
    """The rows of one choice, being rewritten."""

    def __init__(self, graph: fx.Graph, choice: fx.Node, facts: Mapping[fx.Node, _Fact]) -> None:
        self.facts = {node: fact.kind for node, fact in facts.items() if fact.choice is choice}
        # What is known of it beside its shape begins with a sort or a count.
        first = next(
            node for node in graph.nodes if self.facts.get(node, _RoutingValue.CHOICE) is not _RoutingValue.CHOICE
        )
        super().__init__(graph, choice, first, first)

    def write(self) -> None:
        """Rewrites what takes rows, computes with them and adds them up."""
        emit = self.emit
        for node in list(self.graph.nodes):
            writer = _WRITERS.get(node.target)
            if node.op == "call_function" and writer is not None:
                emit.like(node)
                rewritten = writer(self, node, bind_arguments(node))
                if rewritten is not None:
                    node.replace_all_uses_with(rewritten)
                    self.graph.erase_node(node)
        self._give_order()

    def _give_order(self) -> None:
        """What else reads the author's order reads this one: within an expert that of an unstable sort may differ."""
        for node in list(self.graph.nodes):
            if self.kind(node) is _RoutingValue.ORDER and node.target is not aten._to_copy.default:
                node.replace_all_uses_with(self.order)

    def kind(self, value: Any) -> _RoutingValue | None:
        """What is known of a value."""
        return self.facts.get(value) if isinstance(value, fx.Node) else None

    def along_rows(self, places: Any) -> _RoutingValue | None:
        """What is known of places that are the same along each row: [M] expanded to [M, f]."""
        if isinstance(places, fx.Node) and places.target is aten.expand.default:
            column = argument(places, 0)
            shape = tensor_type(column).shape
            if shape == (self.rows, 1) and column.target in SHAPED:
                return self.kind(argument(column, 0))
        return None

    def take(self, source: Any, places: _RoutingValue | None) -> fx.Node | None:
        """Rows at places of tokens or of pairs, and experts' numbers of rows."""
        if not isinstance(source, fx.Node) or places is None:
            return None
        kind = tensor_type(source)
        if places is _RoutingValue.KEYS and kind.shape[:1] == (self.experts,) and len(kind.shape) == 2:
            return self.spread(source)
        if places is _RoutingValue.TOKENS and kind.shape[:1] == (self.tokens,) and len(kind.shape) == 2:
            return self.taken(source, self.k)
        if places is not _RoutingValue.ORDER or kind.shape[:1] != (self.rows,) or len(kind.shape) > 2:
            return None
        if len(kind.shape) == 2:
            return self.taken(source, 1)
        if not kind.dtype.is_floating_point:
            return None
        column = self.taken(self.emit.view(source, [-1, 1], (self.rows, 1)), 1)
        return self.emit.view(column, [-1], (self.rows,))

    def put_at(self, base: Any, places: _RoutingValue | None, rows: Any, adds: bool) -> fx.Node | None:
        """Rows added up at their tokens, or put back at their pairs."""
        if not isinstance(rows, fx.Node) or tensor_type(rows).shape[:1] != (self.rows,):
            return None
        is_zero, kind = _is_zero(base), tensor_type(rows)
        if len(kind.shape) != 2 or kind.dtype != tensor_type(base).dtype:
            return None
        of_tokens = places is _RoutingValue.TOKENS or (places is _RoutingValue.ORDER and self.k == 1)
        if of_tokens and adds:
            size, k = self.tokens, self.k
        elif places is _RoutingValue.ORDER and is_zero:
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
        return placed if is_zero else self.emit.call(aten.add.Tensor, (base, placed), shape)


def _is_zero(value: Any) -> bool:
    if not isinstance(value, fx.Node):
        return False
    return bool(value.target in _ZEROS or (value.target is aten.full.default and argument(value, 1) in (0, False)))


def _index(layer: _SortedRows, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node | None:
    if len(bound["indices"]) != 1:
        return None
    places = layer.kind(bound["indices"][0])
    if places is _RoutingValue.INVERSE:
        kind = tensor_type(node)
        args = bound["self"], layer.order, layer.count(layer.rows), 1
        is_rows = len(kind.shape) == 2 and tensor_type(bound["self"]).shape == kind.shape
        return layer.emit.call(fxp.moe_unpermute.default, args, kind) if is_rows else None
    return layer.take(bound["self"], places)


def _select(layer: _SortedRows, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node | None:
    return layer.take(bound["self"], layer.kind(bound["index"])) if bound["dim"] == 0 else None


def _gather(layer: _SortedRows, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node | None:
    is_whole = tensor_type(bound["index"]).shape[1:] == tensor_type(bound["self"]).shape[1:]
    flat = layer.kind(bound["index"])
    if flat is not None and len(tensor_type(bound["index"]).shape) == 1:
        return layer.take(bound["self"], flat)
    return layer.take(bound["self"], layer.along_rows(bound["index"])) if bound["dim"] == 0 and is_whole else None


def _add(layer: _SortedRows, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node | None:
    if bound["dim"] != 0 or bound.get("alpha", 1) != 1:
        return None
    rows, wide = bound[_ADDS[node.target]], node.target is aten.scatter_add.default
    if wide and tensor_type(bound["index"]).shape != tensor_type(rows).shape:
        return None
    return layer.put_at(bound["self"], (layer.along_rows if wide else layer.kind)(bound["index"]), rows, True)


def _put(layer: _SortedRows, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node | None:
    if len(bound["indices"]) != 1:
        return None
    return layer.put_at(
        bound["self"], layer.kind(bound["indices"][0]), bound["values"], bool(bound.get("accumulate", False))
    )


def _product(layer: _SortedRows, node: fx.Node, bound: Mapping[str, Any]) -> None:
    """Counts are those of the sort, matrices those that the author holds."""
    if layer.kind(bound["counts"]) is not _RoutingValue.SIZES:
        return
    weight, transposed = bound["weight"], bound["transposed"]
    if weight.target is aten.transpose.int and {dim % 3 for dim in weight.args[1:]} == {1, 2}:
        weight, transposed = argument(weight, 0), not transposed
    node.args = (bound["x"], weight, layer.counts, transposed)


_WRITERS: Mapping[Any, Callable[[_SortedRows, fx.Node, Mapping[str, Any]], fx.Node | None]] = {
    aten.index.Tensor: _index,
    aten.index_select.default: _select,
    aten.gather.default: _gather,
    **dict.fromkeys(_ADDS, _add),
    aten.index_put.default: _put,
    fxp.grouped_linear.default: _product,
}
