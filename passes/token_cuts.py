"""Tokens as each rank has its own: a leading dimension for every axis that cuts them.

Enters: values by token, [tokens, …]. Leaves: [data ranks, tensor ranks, own tokens, …], and the way back. A helper of
`dispatch_experts`.

Data ranks have rows of the batch. Tensor parallel ranks share all tokens of a row: each takes a part of the sequence,
which is padded where they do not divide it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.errors import PassError
from fxpar.ir.program import Program, ScalarType, TensorType, note, set_note, tensor_type
from fxpar.ir.step import batch_size
from fxpar.layout.symbolic_sizes import Size, divide, product, simplify
from fxpar.mesh.axes import Cuts
from fxpar.ops.shard_over import shard_over

aten = torch.ops.aten
fxp = torch.ops.fxpar


def part_of(size: Size, part: Fraction) -> Size:
    """A part of a size, rounded up."""
    of = part.denominator
    return simplify(sympy.floor((size * part.numerator + of - 1) / sympy.Integer(of)))


class Emitter:
    """Adds nodes in front of a place, each with a note like that of the operation it stands for."""

    def __init__(self, graph: fx.Graph, place: fx.Node) -> None:
        self.graph, self._place = graph, place
        self._note = replace(note(place), type=None, layout=None, needs=(), random=0)

    def like(self, node: fx.Node) -> None:
        """From here on nodes stand in front of this one, and for it."""
        self._place = node
        self._note = replace(note(node), type=None, layout=None, needs=(), random=0)

    def stand(self, place: fx.Node) -> None:
        """From here on nodes stand in front of this one, for what they stood for."""
        self._place = place

    def call(self, target: Any, args: Sequence[Any], kind: Any, **kwargs: Any) -> fx.Node:
        """An operation."""
        with self.graph.inserting_before(self._place):
            node = self.graph.create_node("call_function", target, tuple(args), kwargs)
        return set_note(node, replace(self._note, type=kind))

    def several(self, target: Any, args: Sequence[Any], kinds: tuple[TensorType, ...]) -> list[fx.Node]:
        """The results of an operation of several."""
        source = self.call(target, args, kinds)
        return [self.call(operator.getitem, (source, index), kind) for index, kind in enumerate(kinds)]

    def view(self, x: fx.Node, sizes: Sequence[Any], shape: Sequence[Size]) -> fx.Node:
        """The same elements in another shape.

        Args:
            sizes: numbers, nodes and at most one -1.
            shape: the same in symbols.
        """
        kind = tensor_type(x)
        if tuple(shape) == kind.shape:
            return x
        return self.call(aten.view.default, (x, list(sizes)), TensorType(kind.dtype, tuple(shape)))

    def permute(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        """Dimensions in another order; in memory the elements stay where they are."""
        kind = tensor_type(x)
        if list(dims) == list(range(len(kind.shape))):
            return x
        shape = tuple(kind.shape[dim] for dim in dims)
        return self.call(aten.permute.default, (x, list(dims)), TensorType(kind.dtype, shape))

    def over(self, x: fx.Node, dim: int, axis: str) -> fx.Node:
        """The value, cut there."""
        return self.call(shard_over, (x, dim), tensor_type(x), axis=axis)

    def size(self, x: fx.Node, dim: int) -> Any:
        """A dimension's size as a number, or as a node where it is no number."""
        size = tensor_type(x).shape[dim]
        return size if isinstance(size, int) else self.call(aten.sym_size.int, (x, dim), ScalarType(size))

    def number(self, target: Any, left: Any, right: int) -> Any:
        """Arithmetic on a size."""
        if isinstance(left, int):
            return target(left, right)
        kind = note(left).type
        assert isinstance(kind, ScalarType)
        value = (
            sympy.floor(kind.value / sympy.Integer(right)) if target is operator.floordiv else target(kind.value, right)
        )
        return self.call(target, (left, right), ScalarType(simplify(value)))

    def part(self, number: Any, size: Size, part: Fraction) -> tuple[Any, Size]:
        """A part of a size, rounded up: as a number or node, and in symbols."""
        times, of = part.numerator, part.denominator
        rows = number if times == 1 else self.number(operator.mul, number, times)
        if of > 1:
            rows = self.number(operator.floordiv, self.number(operator.add, rows, of - 1), of)
        return rows, part_of(size, part)

    def shifted(self, node: fx.Node, others: Mapping[fx.Node, fx.Node], kind: Any, count: int) -> fx.Node:
        """An operation on rows, of rows behind `count` more dimensions.

        Args:
            others: what takes the place of its operands.
            kind: type of the result.
        """
        args: tuple[Any, ...] = fx.map_arg(node.args, lambda arg: others.get(arg, arg))
        kwargs: dict[str, Any] = fx.map_arg(node.kwargs, lambda arg: others.get(arg, arg))
        names = [a.name for a in node.target._schema.arguments] if hasattr(node.target, "_schema") else []
        if "dim" in names and node.target is not operator.getitem:
            index = names.index("dim")
            dim = args[index] if index < len(args) else kwargs.get("dim", 0)
            dim = dim + count if dim >= 0 else dim
            if index < len(args):
                args = (*args[:index], dim, *args[index + 1 :])
            else:
                kwargs = {**kwargs, "dim": dim}
        return self.call(node.target, args, kind, **kwargs)


@dataclass(frozen=True)
class TokenCut:
    """How tokens are cut.

    Attributes:
        emit: adds nodes.
        axes: that cut them, with their sizes, the outermost first.
        batch: those that share out rows of the batch.
        sequence: the length of a row as a number or node, and its size; None where data ranks alone cut tokens.
        padded: the length that tensor ranks share out, as a node, and its size.
    """

    emit: Emitter
    axes: Mapping[str, int]
    batch: Mapping[str, int]
    sequence: tuple[Any, Size] | None
    part: tuple[Any, Size] | None

    @property
    def ranks(self) -> int:
        """Tensor parallel ranks that share the tokens of a row."""
        return int(product(n for axis, n in self.axes.items() if axis not in self.batch))

    def apart(self, value: fx.Node, per_token: int, fill: int = 0) -> fx.Node:
        """[tokens * per_token, f] → [lead, own tokens * per_token, f].

        Args:
            fill: what stands in padding.
        """
        emit, kind = self.emit, tensor_type(value)
        width, data = kind.shape[-1], tuple(self.batch.values())
        if self.sequence is None:
            local_rows = self._shared_out(kind.shape[0])
            return emit.view(value, (*data, -1, width), (*data, local_rows, width))
        assert self.part is not None
        (node, length), (part_node, part), n = self.sequence, self.part, self.ranks
        rows = divide(kind.shape[0], length * per_token)
        assert rows is not None
        wide = per_token * width
        blocks = emit.view(value, (-1, node, wide), (rows, length, wide))
        whole = simplify(part * n)
        if whole != length:
            padded = (blocks, emit.number(operator.mul, part_node, n), fill)
            blocks = emit.call(fxp.resize_rows.default, padded, TensorType(kind.dtype, (rows, whole, wide)))
        local_rows = self._shared_out(rows)
        shape = (*data, local_rows, n, part, wide)
        blocks = emit.view(blocks, (*data, -1, n, part_node, wide), shape)
        front = list(range(len(data)))
        blocks = emit.permute(blocks, [*front, len(data) + 1, len(data), len(data) + 2, len(data) + 3])
        for axis in self.axes:
            if axis not in self.batch:
                blocks = emit.over(blocks, len(data), axis)
        tokens = simplify(local_rows * part * per_token)
        return emit.view(blocks, (*data, n, -1, width), (*data, n, tokens, width))

    def _shared_out(self, rows: Size) -> Size:
        """What each data rank has of so many rows."""
        local_rows = divide(rows, product(self.batch.values()))
        if local_rows is None:
            raise PassError(
                f"{rows} rows are not shared out evenly by data ranks",
                where="dispatch_experts",
                remedy="run divide_batch",
            )
        return local_rows

    def together(self, value: fx.Node) -> fx.Node:
        """[lead, own tokens, f] → [tokens, f], without padding."""
        emit, kind = self.emit, tensor_type(value)
        width, data = kind.shape[-1], tuple(self.batch.values())
        if self.sequence is None:
            return emit.view(value, (-1, width), (simplify(product(data) * kind.shape[-2]), width))
        assert self.part is not None
        (node, length), (part_node, part), n = self.sequence, self.part, self.ranks
        local_rows = divide(kind.shape[-2], part)
        assert local_rows is not None
        blocks = emit.view(value, (*data, n, -1, part_node, width), (*data, n, local_rows, part, width))
        blocks = emit.permute(blocks, [*range(len(data)), len(data) + 1, len(data), len(data) + 2, len(data) + 3])
        rows, whole = simplify(product(data) * local_rows), simplify(part * n)
        whole_node = emit.number(operator.mul, part_node, n)
        blocks = emit.view(blocks, (-1, whole_node, width), (rows, whole, width))
        if whole != length:
            kind = TensorType(kind.dtype, (rows, length, width))
            blocks = emit.call(fxp.resize_rows.default, (blocks, node, 0), kind)
        return emit.view(blocks, (-1, width), (simplify(rows * length), width))


def token_cut(program: Program, emit: Emitter, tokens: Size, where: str, *, shared: bool) -> TokenCut:
    """How the tokens of a layer are cut.

    Args:
        shared: whether tensor parallel ranks compute all of them, or are to share them out.

    Raises:
        PassError: they are not the rows of the batch times a length that an input has.
    """
    plan = program.plan
    batch, features = plan.axes_for(Cuts.BATCH), {} if shared else plan.axes_for(Cuts.FEATURES)
    axes = {axis: n for axis, n in program.axes.items() if axis in batch or axis in features}
    if not features:
        return TokenCut(emit, axes, batch, None, None)
    length = divide(tokens, batch_size(program))
    node = None if length is None else _size_node(program, emit, length)
    if length is None or node is None:
        raise PassError(
            f"its {tokens} tokens are not rows of the batch of a length that an input has",
            where=where,
            remedy="pass the batch first, or set tp=1",
        )
    n = int(product(features.values()))
    part = simplify(sympy.floor((length + n - 1) / sympy.Integer(n)))
    part_node = emit.number(operator.floordiv, emit.number(operator.add, node, n - 1), n)
    return TokenCut(emit, axes, batch, (node, length), (part_node, part))


def _size_node(program: Program, emit: Emitter, size: Size) -> Any:
    """A size as a number, or as a node that reads it off an input."""
    if isinstance(size, int):
        return size
    for entry in program.inputs:
        for dim, other in enumerate(entry.type.shape):
            if other == size:
                return emit.size(program.node(entry.node), dim)
    return None
