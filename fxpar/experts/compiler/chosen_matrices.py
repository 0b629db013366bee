"""Products with a matrix for each pair of token and expert, `weight[indices]`, as grouped products of routed rows.

Enters: a graph in one spelling. Leaves: the same, in which what is computed of pairs is written with the operators of
`fxpar.ops.permute`. A helper of `canonicalize`.

Terms: see `choices`. A value *by pair* has leading dimensions whose sizes make M, [M, …] or [T, K, …], in the order of
the choice; what stands behind them is its *trail*. Its *rows* are the same sorted by expert, [M, trail].
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpar.experts.compiler.choices import ChosenRows, argument, aten, choices, chosen_of, fxp, plain
from fxpar.experts.compiler.matrix_products import Product, contraction, places_of, product_of
from fxpar.experts.compiler.row_operations import (
    ALONG,
    along,
    for_all_rows,
    is_pointwise,
    is_written,
    pointwise,
    with_trail,
)
from fxpar.ir.program import TensorType, is_tensor, note, operands, tensor_type
from fxpar.layout.symbolic_sizes import Size, product
from fxpar.rules import bind_arguments


def recognize_chosen(graph: fx.Graph) -> None:
    """Writes products with a matrix for each pair as grouped products of rows.

    Before::

        %w_pair = aten.index.Tensor(%w, [%chosen]) : f32[b*s, 2, 128, 64]
        %y = aten.einsum.default("tkoi,ti->tko", [%w_pair, %x]) : f32[b*s, 2, 128]
        %weighed = aten.mul.Tensor(%y, %weights) : f32[b*s, 2, 128]
        %sum = aten.sum.dim_IntList(%weighed, [1]) : f32[b*s, 128]

    After::

        %order, %counts = fxpar.sort_by_expert.default(%chosen, 8) : i64[2*b*s], i64[8]
        %rows = fxpar.moe_permute.default(%x, %order, 2) : f32[2*b*s, 64]
        %y = fxpar.grouped_linear.default(%rows, %w, %counts, False) : f32[2*b*s, 128]
        %sum = fxpar.moe_combine.default(%y, %weights, %order, float32) : f32[b*s, 128]

    Each step is an identity: a value by pair is its rows put back in order, a product with a pair's matrix is the
    grouped product of its row, and what is done to each pair by itself commutes with the order. So whatever else reads
    a value by pair, a draw of random bits too, reads the rows put back, and what is not known stays as it is.

    Only experts of a top-k over as many as there are matrices are recognised, which are all others for a token: so many
    places of buffers go by that.
    """
    chosen = choices(graph)
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        matrix_product = product_of(node, chosen)
        if matrix_product is not None and matrix_product.matrix.experts == chosen_of(matrix_product.matrix.choice):
            first.setdefault(matrix_product.matrix.choice, node)
    for choice, node in first.items():
        _Pairs(graph, choice, node, chosen).write()


@dataclass(frozen=True)
class _Sorted:
    """A value by pair as rows.

    Attributes:
        node: [M, trail], or several such.
        lead: how many leading dimensions the value by pair has.
    """

    node: fx.Node
    lead: int


class _Pairs(ChosenRows):
    """The pairs of one choice, being written as rows."""

    def __init__(self, graph: fx.Graph, choice: fx.Node, first: fx.Node, chosen: Mapping[fx.Node, fx.Node]) -> None:
        super().__init__(graph, choice, choice.next, first)
        self.places = {node for node, of in chosen.items() if of is choice}
        self.chosen_values = chosen
        self.sorted: dict[fx.Node, _Sorted] = {}
        self.tables: dict[fx.Node, fx.Node] = {}
        self.put_back: dict[fx.Node, fx.Node] = {}

    def write(self) -> None:
        """Goes through the graph; what becomes rows is dead where it stood, unless something else reads it."""
        passed = False
        for node in list(self.graph.nodes):
            passed = passed or node is self.choice
            if not passed:
                continue
            if node.op != "call_function":
                self.emit.stand(node)
            else:
                self.emit.like(node)
                if self._write(node):
                    continue
            node.args = fx.map_arg(node.args, self._as_it_was)
            node.kwargs = fx.map_arg(node.kwargs, self._as_it_was)

    def _write(self, node: fx.Node) -> bool:
        """Writes a node of pairs; whether nothing that it read is to be put back."""
        if node in self.places or node is self.chosen:
            return True
        product = product_of(node, self.chosen_values)
        if product is not None and self._product(node, product):
            return True
        table = self._table(node)
        if table is not None:
            self.tables[node] = table
        if not any(operand in self.sorted for operand in operands(node)):
            return True
        total = self._total(node)
        if total is not None:
            node.replace_all_uses_with(total)
            return True
        as_rows = self._each(node)
        if as_rows is not None:
            self.sorted[node] = as_rows
        return as_rows is not None

    # ------------------------------------------------------------------ values

    def _as_it_was(self, node: fx.Node) -> fx.Node:
        """A value by pair, put back in order."""
        as_rows = self.sorted.get(node)
        if as_rows is None or not is_tensor(node):
            return node
        if node not in self.put_back:
            kind, whole = tensor_type(node), tensor_type(as_rows.node)
            width = product(whole.shape[1:])
            flat = self.emit.view(as_rows.node, [-1, width], (self.rows, width))
            put = self.put(flat, self.rows, 1)
            self.put_back[node] = self._shaped(put, kind.shape)
        return self.put_back[node]

    def _shaped(self, flat: fx.Node, shape: tuple[Size, ...]) -> fx.Node:
        """Tokens or pairs in the author's shape."""
        if sum(not isinstance(size, int) for size in shape) < 2:
            return self.emit.view(flat, [size if isinstance(size, int) else -1 for size in shape], shape)
        lead = tensor_type(self.choice).shape
        known = {size: self.emit.size(self.choice, dim) for dim, size in enumerate(lead) if size in shape}
        return self.emit.view(flat, [known.get(size, size) for size in shape], shape)

    def can_shape(self, shape: tuple[Size, ...]) -> bool:
        """Whether each of several sizes that are no numbers is one of the choice."""
        symbolic = [size for size in shape if not isinstance(size, int)]
        return len(symbolic) < 2 or all(size in tensor_type(self.choice).shape for size in symbolic)

    def rows_of(self, value: fx.Node, lead: tuple[Size, ...]) -> fx.Node | None:
        """The rows of a value with those leading dimensions, or with 1 for K: the same for all pairs of a token."""
        as_rows, kind = self.sorted.get(value), tensor_type(value)
        if as_rows is not None:
            return as_rows.node if kind.shape[: as_rows.lead] == lead else None
        count = len(lead)
        if len(kind.shape) < count or not is_written(kind.shape[count:]):
            return None
        table = self.tables.get(plain(value))
        if table is not None and kind.shape[:count] == lead:
            width = product(kind.shape[count:])
            spread = self.spread(self.emit.view(table, [self.experts, -1], (self.experts, width)))
            return with_trail(self, spread, kind.shape[count:])
        if kind.shape[:count] == lead:
            tokens = self._tokens(value, product(kind.shape[count:]))
            if tokens is not None:
                return with_trail(self, self.taken(tokens, self.k), kind.shape[count:])
            return self._take(value, kind.shape[count:], 1)
        if count > 1 and kind.shape[:count] == (*lead[:-1], 1):
            return self._take(value, kind.shape[count:], self.k)
        return None

    def _take(self, value: fx.Node, trail: tuple[Size, ...], k: int) -> fx.Node:
        width, size = product(trail), self.rows if k == 1 else self.tokens
        return with_trail(self, self.taken(self.emit.view(plain(value), [-1, width], (size, width)), k), trail)

    def _tokens(self, value: fx.Node, width: Size) -> fx.Node | None:
        """The tokens [T, width] that a value by pair repeats for each of their experts."""
        value = plain(value)
        if value.target not in (aten.repeat_interleave.self_int, aten.expand.default):
            return None
        source = argument(value, 0)
        source_shape, shape = tensor_type(source).shape, tensor_type(value).shape
        repeated = (
            [dim for dim, size in enumerate(source_shape) if size != shape[dim]]
            if len(source_shape) == len(shape)
            else []
        )
        if len(repeated) != 1:
            return None
        (dim,) = repeated
        before = product(source_shape[: dim + (value.target is aten.repeat_interleave.self_int)])
        if before != self.tokens or product(source_shape) != product((before, width)):
            return None
        return self.emit.view(plain(source), [-1, width], (self.tokens, width))

    # ------------------------------------------------------------------ operations

    def _product(self, node: fx.Node, matrix_product: Product) -> bool:
        """A product with a matrix for each pair."""
        matrix = matrix_product.matrix
        if matrix.choice is not self.choice or matrix.experts != self.experts:
            return False
        lead = tensor_type(node).shape[: matrix.lead]
        if matrix_product.of_tokens:
            shape = tensor_type(matrix_product.vector).shape
            rows: fx.Node | None = None
            if matrix_product.vector not in self.sorted and is_written(shape[-1:]):
                rows = self._take(matrix_product.vector, shape[-1:], self.k)
        else:
            rows = self.rows_of(matrix_product.vector, lead)
        if rows is None:
            return False
        whole = tensor_type(matrix.source)
        wide, narrow = (whole.shape[2], whole.shape[1]) if not matrix_product.transposed else whole.shape[1:]
        rows = with_trail(self, rows, (wide,))
        weight = matrix.source
        if whole.dtype != matrix.dtype:
            cast = TensorType(matrix.dtype, whole.shape)
            weight = self.emit.call(aten._to_copy.default, (weight,), cast, dtype=matrix.dtype)
        kind = TensorType(tensor_type(node).dtype, (self.rows, narrow))
        grouped = self.emit.call(
            fxp.grouped_linear.default, (rows, weight, self.counts, matrix_product.transposed), kind
        )
        trail = tensor_type(node).shape[matrix.lead :]
        self.sorted[node] = _Sorted(with_trail(self, grouped, trail), matrix.lead)
        return True

    def _table(self, node: fx.Node) -> fx.Node | None:
        """What pairs take of their experts beside matrices, [E, …]: a bias, or one number."""
        if node.target is not aten.index.Tensor and node.target is not aten.index_select.default:
            return None
        kind = tensor_type(argument(node, 0))
        is_own = places_of(node) in self.places and kind.shape[0] == self.experts and kind.dtype.is_floating_point
        return argument(node, 0) if is_own and len(kind.shape) < 3 and is_written(kind.shape[1:]) else None

    def _total(self, node: fx.Node) -> fx.Node | None:
        """What adds up the pairs of each token."""
        weighed_total = self._weighed_total(node)
        if weighed_total is not None or node.target is not aten.sum.dim_IntList:
            return weighed_total
        arguments = bind_arguments(node)
        source = arguments["self"]
        as_rows, kind = self.sorted[source], tensor_type(source)
        dims = [int(dim) % len(kind.shape) for dim in arguments["dim"] or ()]
        if dims != [as_rows.lead - 1] or as_rows.lead < 2 or kind.shape[as_rows.lead - 1] != self.k:
            return None
        if tensor_type(node).dtype != kind.dtype:
            return None
        width = product(kind.shape[as_rows.lead :])
        rows = with_trail(self, as_rows.node, (width,))
        weighed = self.weighed(rows)
        total = self.put(rows, self.tokens, self.k) if weighed is None else self.moe_combine(*weighed, kind.dtype)
        return self._shaped(total, tensor_type(node).shape)

    def _weighed_total(self, node: fx.Node) -> fx.Node | None:
        """A product of the weights of each token's pairs with what its experts made: [T, K] with [T, K, h]."""
        for rows, weights in contraction(node):
            as_rows = self.sorted.get(rows)
            if as_rows is None or weights in self.sorted:
                continue
            kind = tensor_type(rows)
            if as_rows.lead != len(kind.shape) - 1 or as_rows.lead < 2 or kind.shape[as_rows.lead - 1] != self.k:
                continue
            if tensor_type(weights).dtype == kind.dtype == tensor_type(node).dtype:
                table = self.emit.view(plain(weights), [-1, self.k], (self.tokens, self.k))
                return self._shaped(self.moe_combine(as_rows.node, table, kind.dtype), tensor_type(node).shape)
        return None

    def _each(self, node: fx.Node) -> _Sorted | None:
        """What is done to each pair by itself."""
        if note(node).random:
            return None
        writer = _WRITERS.get(node.target)
        if writer is not None:
            return writer(self, node, bind_arguments(node))
        if is_pointwise(node):
            return self._pointwise(node)
        return self._along(node) if node.target in ALONG else None

    def _pointwise(self, node: fx.Node) -> _Sorted | None:
        kind = tensor_type(node)
        lead = next(self.sorted[operand].lead for operand in operands(node) if operand in self.sorted)
        others: dict[fx.Node, fx.Node] = {}
        for operand in operands(node):
            aligned = self._aligned(operand, kind.shape, lead)
            if aligned is None:
                return None
            others[operand] = aligned
        return _Sorted(pointwise(self, node, others, lead), lead)

    def _aligned(self, operand: fx.Node, shape: tuple[Size, ...], lead: int) -> fx.Node | None:
        """An operand that is broadcast to values by pair of that shape, as one that is to their rows."""
        broadcast = None if operand in self.sorted else for_all_rows(self, operand, len(shape) - lead)
        if broadcast is not None or len(tensor_type(operand).shape) != len(shape):
            return broadcast
        return self.rows_of(operand, shape[:lead])

    def _along(self, node: fx.Node) -> _Sorted | None:
        sources = operands(node)
        if any(operand not in self.sorted for operand in sources):
            return None
        lead = self.sorted[sources[0]].lead
        if any(self.sorted[operand].lead != lead for operand in sources):
            return None
        rows = along(self, node, {operand: self.sorted[operand].node for operand in sources}, lead)
        return None if rows is None else _Sorted(rows, lead)


def _view(pairs: _Pairs, node: fx.Node, arguments: Mapping[str, Any]) -> _Sorted | None:
    """Another shape of the same pairs, whose trails have as many elements."""
    as_rows, shape = pairs.sorted[arguments["self"]], tensor_type(node).shape
    for lead in range(1, len(shape) + 1):
        if product(shape[:lead]) == pairs.rows and (lead == 1 or shape[lead - 1] == pairs.k):
            if not is_written(shape[lead:]) or not pairs.can_shape(shape):
                return None
            return _Sorted(with_trail(pairs, as_rows.node, shape[lead:]), lead)
    return None


def _reshaped(pairs: _Pairs, node: fx.Node, arguments: Mapping[str, Any]) -> _Sorted | None:
    """A dimension of one element more or less in the trail."""
    as_rows, shape = pairs.sorted[arguments["self"]], tensor_type(node).shape
    lead = tensor_type(arguments["self"]).shape[: as_rows.lead]
    return (
        _Sorted(with_trail(pairs, as_rows.node, shape[as_rows.lead :]), as_rows.lead)
        if shape[: as_rows.lead] == lead
        else None
    )


def _item(pairs: _Pairs, node: fx.Node, arguments: Mapping[str, Any]) -> _Sorted | None:
    source, index = node.args
    as_rows = pairs.sorted.get(source)  # type: ignore[arg-type]
    kind = tensor_type(node)
    if as_rows is None:
        return None
    part = pairs.emit.call(
        operator.getitem, (as_rows.node, index), TensorType(kind.dtype, (pairs.rows, *kind.shape[as_rows.lead :]))
    )
    return _Sorted(part, as_rows.lead)


_WRITERS: Mapping[Any, Callable[[_Pairs, fx.Node, Mapping[str, Any]], _Sorted | None]] = {
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten.flatten.using_ints: _view,
    aten.unsqueeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    operator.getitem: _item,
}
