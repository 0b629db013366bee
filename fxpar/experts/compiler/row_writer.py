"""Writes operations on values by pair, or by row of one expert, as the same on rows that stand sorted by expert.

Terms: see `choices`. The leading dimensions of a value enumerate its pairs, or the rows of one expert; what stands
after them is its *trail*. The rows of all experts are [M, trail].
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx

from fxpar.experts.compiler.choices import SHAPED, ChosenRows, argument, aten, fxp, is_known, plain
from fxpar.experts.compiler.routing_facts import ByExpert
from fxpar.ir.program import TensorType, is_tensor, note, operands, output_types, tensor_type
from fxpar.layout.symbolic_sizes import Size, product
from fxpar.rules import bind_arguments
from fxpar.rules.table import rule_of
from fxpar.signatures.pointwise import pointwise_labels


@dataclass(frozen=True)
class SortedRows:
    """A value by pair, or of each expert's rows, as rows that stand sorted.

    Attributes:
        node: [M, trail], or several such.
        lead: how many leading dimensions the value has.
    """

    node: fx.Node
    lead: int


RowValue: TypeAlias = SortedRows | ByExpert
_Values: TypeAlias = Mapping[fx.Node, RowValue]


class RowWriter(ChosenRows):
    """Writes operations on rows of one choice."""

    def written(self, node: fx.Node, values: _Values) -> SortedRows | None:
        """Writes an operation that is done to each row by itself; returns None for another one.

        Args:
            values: its operands as rows and as slices of one expert; the others are what `aligned` says.
        """
        leads = {known.lead for operand in operands(node) if isinstance(known := values.get(operand), SortedRows)}
        if len(leads) != 1 or note(node).random:
            return None
        return _WRITERS.get(node.target, _pointwise)(self, node, values, *leads)

    def aligned(self, operand: fx.Node, shape: tuple[Size, ...], lead: int) -> fx.Node | None:
        """Returns an operand of which no row has anything for itself, as it is broadcast to rows.

        Args:
            shape: of the value to which it is broadcast.
            lead: how many of its dimensions are leading ones.
        """
        size = tensor_type(operand).shape
        trail = size[max(len(size) - len(shape) + lead, 0) :]
        if len(trail) == len(size):
            return operand
        is_same = is_known(trail) and product(size[: len(size) - len(trail)]) == 1
        return self.emit.view(operand, list(trail), trail) if is_same else None

    def spread_slices(self, taken: ByExpert, trail: tuple[Size, ...]) -> fx.Node:
        """Gives each row its expert's slice in the shape of a trail."""
        source = self.cast(taken)
        width = product(tensor_type(source).shape[1:])
        return self.with_trail(self.spread(self.emit.view(source, [self.experts, -1], (self.experts, width))), trail)

    def cast(self, taken: ByExpert) -> fx.Node:
        """Returns all experts' slices in the type in which they are taken."""
        kind = tensor_type(taken.source)
        if kind.dtype == taken.dtype:
            return taken.source
        kind = TensorType(taken.dtype, kind.shape)
        return self.emit.call(aten._to_copy.default, (taken.source,), kind, dtype=taken.dtype)

    def rows_of(self, value: fx.Node, trail: tuple[Size, ...], k: int) -> fx.Node:
        """Takes the rows of a value by token, with K for `k`, or by pair, with 1."""
        width, size = product(trail), self.rows if k == 1 else self.tokens
        return self.with_trail(self.taken(self.emit.view(plain(value), [-1, width], (size, width)), k), trail)

    def with_trail(self, rows: fx.Node, trail: tuple[Size, ...]) -> fx.Node:
        """Gives rows another trail of as many elements."""
        while rows.target is aten.view.default and tensor_type(rows).shape != (self.rows, *trail):
            source = argument(rows, 0)
            if tensor_type(source).shape[:1] != (self.rows,):
                break
            rows = source
        return self.emit.view(rows, [-1, *trail], (self.rows, *trail))

    def multiplied(self, node: fx.Node, rows: fx.Node, factors: Product, lead: int) -> SortedRows:
        """Writes a product of rows with their experts' matrices."""
        matrix = tensor_type(factors.matrix.source).shape[1:]
        narrow, wide = matrix[::-1] if factors.transposed else matrix
        rows, kind = self.with_trail(rows, (wide,)), TensorType(tensor_type(node).dtype, (self.rows, narrow))
        args = rows, self.cast(factors.matrix), self.counts, factors.transposed
        products = self.emit.call(fxp.grouped_linear.default, args, kind)
        return SortedRows(self.with_trail(products, tensor_type(node).shape[lead:]), lead)

    def call(self, node: fx.Node, others: Mapping[fx.Node, fx.Node], lead: int, dim: int | None = None) -> SortedRows:
        """Writes the same operation of other operands.

        Args:
            lead: how many leading dimensions its results have.
            dim: the dimension of rows along which it is; None for no such.
        """
        kinds = tuple(TensorType(kind.dtype, (self.rows, *kind.shape[lead:])) for kind in output_types(node))
        args: list[Any] = list(fx.map_arg(node.args, lambda arg: others.get(arg, arg)))
        kwargs: dict[str, Any] = fx.map_arg(node.kwargs, lambda arg: others.get(arg, arg))
        if dim is not None:
            place = [a.name for a in node.target._schema.arguments].index("dim")  # type: ignore[union-attr]
            if place < len(args):
                args[place] = dim
            else:
                kwargs["dim"] = dim
        return SortedRows(self.emit.call(node.target, args, kinds[0] if is_tensor(node) else kinds, **kwargs), lead)


def viewed_as(node: fx.Node, lead: int) -> tuple[int, tuple[Size, ...]] | None:
    """Returns how many leading dimensions a view has, and its trail; None where dimensions of the two are joined."""
    before, shape = tensor_type(argument(node, 0)).shape, tensor_type(node).shape
    extent = product(before[:lead])
    leads = [lead] if shape[:lead] == before[:lead] else range(1, len(shape) + 1)
    after = next((n for n in leads if product(shape[:n]) == extent and is_known(shape[n:])), None)
    return None if after is None else (after, shape[after:])


def _viewed(writer: RowWriter, node: fx.Node, values: _Values, lead: int) -> SortedRows | None:
    view, rows = viewed_as(node, lead), values[argument(node, 0)]
    if view is None or not isinstance(rows, SortedRows):
        return None
    return SortedRows(writer.with_trail(rows.node, view[1]), view[0])


def _along(writer: RowWriter, node: fx.Node, values: _Values, lead: int) -> SortedRows | None:
    """Writes an operation along a dimension of the trail, or what takes one of several results."""
    sources = operands(node)
    rows = {source: known.node for source in sources if isinstance(known := values.get(source), SortedRows)}
    if len(rows) < len(set(sources)):
        return None
    if node.target is operator.getitem:
        return writer.call(node, rows, lead)
    rank, dim = len(tensor_type(sources[0]).shape), bind_arguments(node).get("dim", 0)
    if not isinstance(dim, int) or dim % rank < lead:
        return None
    return writer.call(node, rows, lead, dim % rank - lead + 1)


def _pointwise(writer: RowWriter, node: fx.Node, values: _Values, lead: int) -> SortedRows | None:
    rule = rule_of(node.target)
    if rule is None or rule.labels is not pointwise_labels or not is_tensor(node):
        return None
    shape, others = tensor_type(node).shape, dict[fx.Node, fx.Node]()
    for operand in operands(node):
        known, size = values.get(operand), tensor_type(operand).shape
        aligned: fx.Node | None = None
        if known is None:
            aligned = writer.aligned(operand, shape, lead)
        elif isinstance(known, SortedRows):
            aligned = known.node if len(size) == len(shape) else None
        elif len(size) <= len(shape) - lead and not known.turned:
            aligned = writer.spread_slices(known, (*(1,) * (len(shape) - lead - len(size)), *size))
        if aligned is None:
            return None
        others[operand] = aligned
    return writer.call(node, others, lead)


_ALONG = (
    *(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default),
    *(aten.cat.default, aten.softmax.int, operator.getitem),
)
_WRITERS: Mapping[Any, Callable[[RowWriter, fx.Node, _Values, int], SortedRows | None]] = {
    **dict.fromkeys(SHAPED, _viewed),
    **dict.fromkeys(_ALONG, _along),
}


# ---------------------------------------------------------------------- products


@dataclass(frozen=True)
class Product:
    """A product of a matrix of each pair, or of one expert, with vectors.

    Attributes:
        matrix: the matrices.
        vector: by row, or by token with 1 for K.
        transposed: whether the experts' matrices stand [E, in, out].
        of_tokens: whether the vector has no dimension for K at all.
    """

    matrix: ByExpert
    vector: fx.Node
    transposed: bool
    of_tokens: bool = False


def product_of(node: fx.Node, slices: Mapping[fx.Node, Any]) -> Product | None:
    """Returns the product that an operation is, whose result is the row's.

    Args:
        slices: what is known of its operands.
    """
    if node.op != "call_function" or not is_tensor(node):
        return None
    if node.target is aten.einsum.default:
        return _of_einsum(node, slices)
    if node.target not in (aten.linear.default, aten.mm.default, aten.matmul.default, aten.bmm.default):
        return None
    left, right = argument(node, 0), argument(node, 1)
    rank = len(tensor_type(node).shape)
    for factor, vector, vector_dim in ((left, right, -1), (right, left, -2)):
        matrix = slices.get(factor)
        if not isinstance(matrix, ByExpert) or not matrix.is_matrix:
            continue
        is_transposed = (vector_dim == -2) != matrix.turned
        if matrix.lead == 0 and factor is right and len(tensor_type(left).shape) == rank:
            return Product(matrix, vector, is_transposed != (node.target is aten.linear.default))
        shape = tensor_type(vector).shape
        is_batched = matrix.lead == rank - 2 and node.target is not aten.linear.default
        is_vector = is_batched and len(shape) == rank and shape[vector_dim] == 1
        if is_vector and tensor_type(node).shape[:-2] == tensor_type(factor).shape[:-2]:
            return Product(matrix, vector, is_transposed)
    return None


def _of_einsum(node: fx.Node, slices: Mapping[fx.Node, Any]) -> Product | None:
    labels, factors, out = _einsum(node)
    for operand, vector in ((0, 1), (1, 0)) if factors else ():
        matrix = slices.get(factors[operand])
        if not isinstance(matrix, ByExpert) or not matrix.is_matrix:
            continue
        lead, sides = labels[operand][: matrix.lead], labels[operand][matrix.lead :]
        summed = [label for label in sides if label not in out]
        if len(summed) != 1 or out != lead + sides.replace(summed[0], ""):
            continue
        by_token = len(lead) > 1 and labels[vector] == lead[:-1] + summed[0]
        if by_token or labels[vector] == lead + summed[0]:
            is_inner_last = sides[1] == summed[0]  # [out, in], as in a linear layer
            return Product(matrix, factors[vector], is_inner_last == matrix.turned, by_token)
    return None


def _einsum(node: fx.Node) -> tuple[list[str], list[fx.Node], str]:
    """Returns the labels of an einsum of two operands, those, and its result's labels; no operands for others."""
    args = bind_arguments(node)
    equation, factors = str(args["equation"]).replace(" ", ""), list(args["tensors"])
    if "." in equation or "->" not in equation or len(factors) != 2:
        return [], [], ""
    inner, out = equation.split("->")
    labels, sizes = inner.split(","), dict[str, Size]()
    if any(len(set(term)) != len(term) for term in (*labels, out)):
        return [], [], ""
    for term, factor in zip(labels, factors, strict=True):
        for label, size in zip(term, tensor_type(factor).shape, strict=True):
            if sizes.setdefault(label, size) != size:  # broadcast
                return [], [], ""
    return labels, factors, out


def weighed_sums(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields values [T, K, h] by pair and weights [T, K] whose products are added up over K; T may be several sizes."""
    if node.target is aten.einsum.default:
        labels, factors, out = _einsum(node)
        for pairs, weights in ((0, 1), (1, 0)) if factors else ():
            lead = labels[pairs][:-1]
            if len(lead) > 1 and labels[weights] == lead and out == lead[:-1] + labels[pairs][-1:]:
                yield factors[pairs], factors[weights]
    elif node.target in (aten.bmm.default, aten.matmul.default):
        weights_, rows = argument(node, 0), argument(node, 1)
        left, right = tensor_type(weights_).shape, tensor_type(rows).shape
        if len(left) == len(right) > 2 and left[-2] == 1 and left[:-2] == right[:-2]:
            yield rows, weights_
