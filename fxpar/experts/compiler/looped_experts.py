"""Loops over experts, each of which computes all tokens or those that are its own, as routed rows.

Enters: a graph in one spelling. Leaves: the same, in which what a loop adds up is written with the operators of
`fxpar.ops.permute`. A helper of `canonicalize`.

Terms: see `choices`. A *term* is what an expert adds for its tokens: its results times its *column* of weights
(`expert_masks`). Of the nodes that do the same for each expert the first one's stands for all: what it makes of tokens
are *rows*, of its own parameters a *table* [E, …].
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.utils._pytree as pytree
from torch import fx

from fxpar.experts.compiler.choices import ChosenRows, argument, aten, choices, fxp, plain
from fxpar.experts.compiler.expert_masks import Loop, is_zero
from fxpar.experts.compiler.expert_terms import Term, added, is_loop, terms_of
from fxpar.experts.compiler.row_operations import (
    ALONG,
    along,
    for_all_rows,
    is_pointwise,
    is_written,
    pointwise,
    with_trail,
)
from fxpar.ir.program import TensorType, is_tensor, operands, tensor_type
from fxpar.layout.symbolic_sizes import Size, product
from fxpar.rules import bind_arguments

_VIEWS = (aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.flatten.using_ints)
_TURNS = (aten.t.default, aten.transpose.int, aten.mT.default, aten.permute.default)


def recognize_loops(graph: fx.Graph) -> None:
    """Writes loops over experts as rows.

    Before, for each expert e::

        %mask = aten.eq.Scalar(%chosen, e) : bool[b*s, 2]
        %weighed = aten.mul.Tensor(%weights, %mask) : f32[b*s, 2]
        %column = aten.sum.dim_IntList(%weighed, [-1], True) : f32[b*s, 1]
        %w_e = aten.select.int(%w, 0, e) : f32[128, 64]
        %y_e = aten.linear.default(%x, %w_e) : f32[b*s, 128]
        %term = aten.mul.Tensor(%y_e, %column) : f32[b*s, 128]
        %sum_e = aten.add.Tensor(%sum, %term) : f32[b*s, 128]

    After::

        %order, %counts = fxpar.sort_by_expert.default(%chosen, 8) : i64[2*b*s], i64[8]
        %rows = fxpar.moe_permute.default(%x, %order, 2) : f32[2*b*s, 64]
        %y = fxpar.grouped_linear.default(%rows, %w, %counts, False) : f32[2*b*s, 128]
        %sum = fxpar.moe_combine.default(%y, %weights, %order, float32) : f32[b*s, 128]

    A token has each expert of a top-k once, so that its column holds the weight of that pair, or 0. What an expert
    that it has not chosen makes of it, times 0, is left out, and so is the infinite number that it may be. Every expert
    of the choice must have a term, all terms must be alike but for their expert, and nothing random may be in them.
    """
    terms = terms_of(graph)
    if not terms:
        return
    done: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in done or node.op != "call_function":
            continue
        addends, base = added(node, terms, done)
        if is_loop(addends):
            ordered = sorted(addends, key=lambda term: term.column.expert)
            _LoopedRows(graph, node, ordered, base).write()


@dataclass(frozen=True)
class _Rows:
    """What experts make of tokens, [M, trail]; of several results several such.

    Attributes:
        node: the rows.
        lead: how many leading dimensions the values of one expert have.
    """

    node: fx.Node
    lead: int


@dataclass(frozen=True)
class _Table:
    """What experts have of their own, [E, …].

    Attributes:
        node: of all.
        turned: whether each expert's is the transpose of that.
    """

    node: fx.Node
    turned: bool = False


@dataclass(frozen=True)
class _Same:
    """What is one value for all experts."""

    node: fx.Node


_Value = _Rows | _Table | _Same


class _LoopedRows(ChosenRows):
    """A loop over experts, being written as rows.

    Args:
        total: what the loop makes.
        terms: of the experts in their order.
        base: what is in the sum beside.
    """

    def __init__(self, graph: fx.Graph, total: fx.Node, terms: Sequence[Term], base: fx.Node | None) -> None:
        self.column = terms[0].column
        super().__init__(graph, self.column.choice, total, total)
        self.total, self.terms, self.base, self.loop = total, terms, base, Loop(choices(graph))
        self.known: dict[tuple[fx.Node, ...], _Value | None] = {}

    def write(self) -> None:
        """Rewrites the sum, where all terms are alike."""
        rows = self._value(tuple(term.made for term in self.terms))
        kind = tensor_type(self.total)
        if not isinstance(rows, _Rows) or len(tensor_type(rows.node).shape) != 2:
            return
        weights = self.emit.view(plain(self.column.weights), [-1, self.k], (self.tokens, self.k))
        width = kind.shape[-1]
        summed = self.moe_combine(rows.node, weights, kind.dtype)
        if product(kind.shape[:-1]) != self.tokens or tensor_type(summed).shape[-1] != width:
            return
        if len(kind.shape) > 2:
            lead = [self.emit.size(self.choice, dim) for dim in range(len(kind.shape) - 1)]
            summed = self.emit.view(summed, [*lead, width], kind.shape)
        if self.base is not None and not is_zero(self.base):
            summed = self.emit.call(aten.add.Tensor, (self.base, summed), kind)
        self.total.replace_all_uses_with(summed)

    # ------------------------------------------------------------------ values

    def _value(self, nodes: tuple[fx.Node, ...]) -> _Value | None:
        if nodes not in self.known:
            self.known[nodes] = self._found(nodes)
        return self.known[nodes]

    def _found(self, nodes: tuple[fx.Node, ...]) -> _Value | None:
        """What nodes of the experts are together; None where they are not alike."""
        first = nodes[0]
        if all(node is first for node in nodes):
            return self._shared(first)
        table = self._own(nodes)
        if table is not None:
            return table
        if any(node.op != "call_function" or node.target is not first.target for node in nodes):
            return None
        if self.column.picks is not None and first.target in (aten.index.Tensor, aten.index_select.default):
            return self._picked(nodes)
        if first.target in _VIEWS:
            source = self._value(tuple(argument(node, 0) for node in nodes))
            return self._viewed(nodes, source) if isinstance(source, _Rows) else None
        values = self._operands(nodes)
        if values is None:
            return None
        if len(values) == 1 and isinstance(next(iter(values.values())), _Table):
            return self._of_table(first, next(iter(values.values())))
        if first.target in (aten.linear.default, aten.mm.default, aten.matmul.default):
            return self._product(first, values)
        if first.target is operator.getitem or first.target in ALONG or is_pointwise(first):
            return self._each(first, values)
        return None

    def _operands(self, nodes: tuple[fx.Node, ...]) -> dict[fx.Node, _Value] | None:
        """What the operands of the first node stand for; None where the calls differ in anything else."""
        leaves = [pytree.tree_flatten((node.args, dict(node.kwargs))) for node in nodes]
        if any(spec != leaves[0][1] for _, spec in leaves):
            return None
        by_operand: dict[fx.Node, _Value] = {}
        for peers in zip(*(values for values, _ in leaves), strict=True):
            if not isinstance(peers[0], fx.Node):
                if any(type(peer) is not type(peers[0]) or peer != peers[0] for peer in peers):
                    return None
                continue
            if not all(isinstance(peer, fx.Node) for peer in peers):
                return None
            value = self._value(peers)
            if value is None or by_operand.setdefault(peers[0], value) != value:
                return None
        return by_operand

    def _shared(self, node: fx.Node) -> _Value | None:
        """Tokens, where experts compute all of them; else what is the same for all."""
        kind = tensor_type(node) if is_tensor(node) else None
        lead = tensor_type(self.choice).shape[:-1]
        if kind is None:
            return None
        if self.column.picks is not None:
            return _Same(node) if not self._is_by_token(kind) else None
        if kind.shape[: len(lead)] != lead:
            return _Same(node) if not self._is_by_token(kind) else None
        trail = kind.shape[len(lead) :]
        if not is_written(trail):
            return None
        width = product(trail)
        rows = self.taken(self.emit.view(plain(node), [-1, width], (self.tokens, width)), self.k)
        return _Rows(with_trail(self, rows, trail), len(lead))

    def _is_by_token(self, kind: TensorType) -> bool:
        """Whether a value may have a dimension of tokens."""
        return not is_written(kind.shape) or self.tokens in kind.shape

    def _own(self, nodes: tuple[fx.Node, ...]) -> _Table | None:
        """Each expert's slice of what all have in one, or a parameter of its own."""
        first = nodes[0]
        if all(node.op == "placeholder" for node in nodes) and len(set(nodes)) == len(nodes):
            kinds = {tensor_type(node) for node in nodes}
            if len(kinds) != 1:
                return None
            (kind,) = kinds
            whole = TensorType(kind.dtype, (self.experts, *kind.shape))
            return _Table(self.emit.call(aten.stack.default, (list(nodes),), whole))
        if first.target is aten.select.int:
            selects = [bind_arguments(node) if node.target is aten.select.int else {} for node in nodes]
            places = [(select.get("self"), select.get("dim"), select.get("index")) for select in selects]
        elif first.target is operator.getitem and argument(first, 0).target is aten.unbind.int:
            unbound = argument(first, 0)
            if bind_arguments(unbound).get("dim", 0) != 0 or any(argument(node, 0) is not unbound for node in nodes):
                return None
            places = [(argument(unbound, 0), 0, argument(node, 1)) for node in nodes]
        else:
            return None
        source = places[0][0]
        if places != [(source, 0, e) for e in range(self.experts)] or not isinstance(source, fx.Node):
            return None
        return _Table(source) if tensor_type(source).shape[0] == self.experts else None

    def _picked(self, nodes: tuple[fx.Node, ...]) -> _Value | None:
        """The rows of each expert: `x[tokens]`, or `x[None, tokens]`."""
        sources = set[tuple[fx.Node, int, tuple[Size, ...]]]()
        for node, term in zip(nodes, self.terms, strict=True):
            args = bind_arguments(node)
            if node.target is aten.index.Tensor:
                *before, places = args["indices"]
            else:
                before, places = [None] * args["dim"], args["index"]
            pairs, shape = self.loop.picked(places), tensor_type(args["self"]).shape
            if pairs is None or pairs[1] != term.column.picks or any(index is not None for index in before):
                return None
            if shape[: len(before)] != (1,) * len(before) or shape[len(before)] != self.tokens:
                return None
            sources.add((plain(args["self"]), len(before), shape[len(before) + 1 :]))
        if len(sources) != 1:
            return None
        ((source, lead, trail),) = sources
        if not is_written(trail):
            return None
        width = product(trail)
        rows = self.taken(self.emit.view(plain(source), [-1, width], (self.tokens, width)), self.k)
        return _Rows(with_trail(self, rows, trail), lead + 1)

    # ------------------------------------------------------------------ operations

    def _viewed(self, nodes: tuple[fx.Node, ...], source: _Rows) -> _Rows | None:
        """Another shape of the same rows, whose trails have as many elements."""
        shapes = set[tuple[int, tuple[Size, ...]]]()
        for node in nodes:
            whole, shape = tensor_type(argument(node, 0)).shape, tensor_type(node).shape
            extent = product(whole[: source.lead])
            lead = next((n for n in range(1, len(shape) + 1) if product(shape[:n]) == extent), None)
            if lead is None or not is_written(shape[lead:]):
                return None
            shapes.add((lead, shape[lead:]))
        if len(shapes) != 1:
            return None
        ((lead, trail),) = shapes
        return _Rows(with_trail(self, source.node, trail), lead)

    def _of_table(self, node: fx.Node, table: _Value) -> _Table | None:
        """What is made of each expert's own alone: a transpose, a cast."""
        assert isinstance(table, _Table)
        rank = len(tensor_type(table.node).shape)
        if (
            node.target in _TURNS
            and rank == 3
            and tensor_type(node).shape == tensor_type(argument(node, 0)).shape[::-1]
        ):
            is_turn = tensor_type(node).shape[0] != tensor_type(node).shape[1] or _turns(node)
            return _Table(table.node, not table.turned) if is_turn else None
        if node.target is not aten._to_copy.default:
            return None
        dtype = tensor_type(node).dtype
        kind = TensorType(dtype, tensor_type(table.node).shape)
        return _Table(self.emit.call(aten._to_copy.default, (table.node,), kind, dtype=dtype), table.turned)

    def _product(self, node: fx.Node, values: Mapping[fx.Node, _Value]) -> _Rows | None:
        """Rows times the matrix of their expert."""
        factors = operands(node)
        left, right = (values[operand] for operand in factors) if len(factors) == 2 else (None, None)
        if not isinstance(left, _Rows) or not isinstance(right, _Table):
            return None
        rows, whole = tensor_type(left.node), tensor_type(right.node)
        if len(rows.shape) != 2 or len(whole.shape) != 3 or len(tensor_type(node).shape) != left.lead + 1:
            return None
        transposed = (node.target is not aten.linear.default) != right.turned
        kind = TensorType(tensor_type(node).dtype, (self.rows, tensor_type(node).shape[-1]))
        products = self.emit.call(fxp.grouped_linear.default, (left.node, right.node, self.counts, transposed), kind)
        return _Rows(products, left.lead)

    def _each(self, node: fx.Node, values: Mapping[fx.Node, _Value]) -> _Rows | None:
        """What is done to each row by itself."""
        leads = {value.lead for value in values.values() if isinstance(value, _Rows)}
        if len(leads) != 1:
            return None
        (lead,) = leads
        if node.target is operator.getitem:
            (source,) = values.values()
            kind = tensor_type(node)
            shape = TensorType(kind.dtype, (self.rows, *kind.shape[lead:]))
            return _Rows(self.emit.call(operator.getitem, (source.node, argument(node, 1)), shape), lead)
        if node.target in ALONG:
            if not all(isinstance(value, _Rows) for value in values.values()):
                return None
            rows = along(self, node, {operand: value.node for operand, value in values.items()}, lead)
            return None if rows is None else _Rows(rows, lead)
        trail = len(tensor_type(node).shape) - lead
        others = {operand: self._aligned(operand, value, trail) for operand, value in values.items()}
        if any(other is None for other in others.values()):
            return None
        return _Rows(pointwise(self, node, {o: other for o, other in others.items() if other is not None}, lead), lead)

    def _aligned(self, operand: fx.Node, value: _Value, trail: int) -> fx.Node | None:
        """An operand as it is broadcast to rows with a trail of so many dimensions."""
        if isinstance(value, _Same):
            return for_all_rows(self, value.node, trail)
        if isinstance(value, _Rows):
            return value.node if len(tensor_type(operand).shape) == trail + value.lead else None
        shape = tensor_type(operand).shape
        if value.turned or len(shape) > trail or not tensor_type(operand).dtype.is_floating_point:
            return None
        width = product(shape)
        spread = self.spread(self.emit.view(value.node, [self.experts, -1], (self.experts, width)))
        return with_trail(self, spread, (*(1,) * (trail - len(shape)), *shape))


def _turns(node: fx.Node) -> bool:
    """Whether it exchanges the dimensions of a matrix."""
    if node.target is aten.permute.default:
        return [dim % 2 for dim in argument(node, 1)] == [1, 0]
    if node.target is aten.transpose.int:
        return bool(argument(node, 1) % 2 != argument(node, 2) % 2)
    return True
