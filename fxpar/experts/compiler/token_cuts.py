"""Leading dimensions for the axes that cut tokens, and for those that share out experts.

Enters: values by token, [tokens, …]. Leaves: [data ranks, tensor ranks, own tokens, …], what holders receive of these,
and the ways back.

Data ranks have rows of the batch. Tensor parallel ranks share all tokens of a row: each takes a part of the sequence,
which is padded where they do not divide it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.errors import PassError
from fxpar.experts.compiler.emitter import Emitter
from fxpar.ir.program import Program, TensorType, tensor_type
from fxpar.ir.step import batch_size
from fxpar.layout.symbolic_sizes import Size, divide, product, simplify
from fxpar.mesh.axes import Cuts
from fxpar.ops.rank_dim import expand_over

fxp = torch.ops.fxpar


@dataclass(frozen=True)
class TokenCut:
    """How tokens are cut.

    Attributes:
        emit: adds nodes.
        axes: that cut them, with their sizes, the outermost first.
        batch: those that share out rows of the batch.
        sequence: the length of a row as a number or node, and its size; None where data ranks alone cut tokens.
        part: what each tensor rank has of it, in the same form.
    """

    emit: Emitter
    axes: Mapping[str, int]
    batch: Mapping[str, int]
    sequence: tuple[Any, Size] | None
    part: tuple[Any, Size] | None

    @property
    def ranks(self) -> int:
        """Returns how many tensor parallel ranks share the tokens of a row."""
        return int(product(n for axis, n in self.axes.items() if axis not in self.batch))

    def apart(self, value: fx.Node, per_token: int, fill: int = 0) -> fx.Node:
        """Maps [tokens * per_token, f] → [lead, own tokens * per_token, f].

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
        """Returns what each data rank has of so many rows."""
        local_rows = divide(rows, product(self.batch.values()))
        if local_rows is None:
            raise PassError(
                f"{rows} rows are not shared out evenly by data ranks",
                where="dispatch_experts",
                remedy="run divide_batch",
            )
        return local_rows

    def together(self, value: fx.Node) -> fx.Node:
        """Maps [lead, own tokens, f] → [tokens, f], without padding."""
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


class HolderDims:
    """How the leading dimensions of what sources have become those of what holders have.

    Those of sources are [lead], the axes that cut tokens. Those of holders are [outer, holders]: other data axes, and
    the axes that share out experts. The rest is *merged* into rows there: axes that split each expert, and the sources
    among holders.

    Attributes:
        axes: that share out experts, with their sizes.
        ranks: how many holders there are.
        lead, outer: sizes of dimensions, as above.
        dims: sizes of [outer, holders].
        sources: how many of them a holder receives from.
    """

    def __init__(self, cut: TokenCut, axes: Mapping[str, int]) -> None:
        self._emit, self._names, self.axes, self.ranks = cut.emit, list(cut.axes), axes, prod(axes.values())
        self.lead = tuple(cut.axes.values())
        self._held = [i for i, axis in enumerate(self._names) if axis in axes]
        others = [i for i in range(len(self.lead)) if i not in self._held]
        self._outer = [i for i in others if self._names[i] in cut.batch]
        self._merged = [*(i for i in others if i not in self._outer), *self._held]
        self.outer = tuple(self.lead[i] for i in self._outer)
        self.dims, self.sources = (*self.outer, *axes.values()), prod(self.lead[i] for i in self._merged)

    def over(self, value: fx.Node) -> fx.Node:
        """Maps [holders, …], cut over them."""
        for dim, axis in enumerate(self.axes):
            value = self._emit.over(value, dim, axis)
        return value

    def share_out(self, weights: fx.Node) -> fx.Node:
        """Maps [experts, …] → [holders, experts of each, …], cut over them."""
        experts, *others = tensor_type(weights).shape
        shape = (*self.axes.values(), int(experts) // self.ranks, *others)
        return self.over(self._emit.view(weights, shape, shape))

    def to_holders(self, value: fx.Node, sizes: Sequence[Any], shape: Sequence[Size]) -> fx.Node:
        """Maps [lead, holders * n, …] → [outer, holders, merged, n, …]: what each holder receives.

        Args:
            sizes: of [n, …], as a view takes them.
            shape: the same in symbols.
        """
        count, dims = len(self.lead), (*self.lead, *self.axes.values())
        blocks, rank = self._emit.view(value, (*dims, *sizes), (*dims, *shape)), len(dims) + len(shape)
        for place, index in enumerate(self._held):
            blocks = self._emit.over(blocks, count + place, self._names[index])
        end = count + len(self._held)
        return self._emit.permute(blocks, [*self._outer, *range(count, end), *self._merged, *range(end, rank)])

    def to_sources(self, rows: fx.Node, node: Any, size: Size) -> fx.Node:
        """Maps [outer, …, merged * size, f] → [lead, …, size, f]: what each source gets back.

        Args:
            node: the size as a view takes it.
        """
        *dims, _, width = tensor_type(rows).shape
        front, merged = len(dims), tuple(self.lead[i] for i in self._merged)
        rows = self._emit.view(rows, (*dims, *merged, node, width), (*dims, *merged, size, width))
        place = {dim: i for i, dim in enumerate(self._outer)} | {dim: front + i for i, dim in enumerate(self._merged)}
        lead, end = [place[i] for i in range(len(self.lead))], front + len(merged)
        rows = self._emit.permute(rows, [*lead, *range(len(self._outer), front), end, end + 1])
        for index in sorted(self._merged):
            rows = self._emit.over(rows, index, self._names[index])
        return rows

    def joined(self, value: fx.Node) -> fx.Node:
        """Maps [lead, n, f] → [outer, sources * n, f]: what all sources have of which a holder receives."""
        count = len(self.lead)
        permuted = self._emit.permute(value, [*self._outer, *self._merged, count, count + 1])
        *_, rows, width = tensor_type(permuted).shape
        return self._emit.view(permuted, (*self.outer, -1, width), (*self.outer, simplify(rows * self.sources), width))

    def for_each(self, value: fx.Node) -> fx.Node:
        """Maps [outer, …] → [outer, holders, …]: the same for each holder."""
        for place, axis in enumerate(self.axes, len(self.outer)):
            value = self._emit.call(expand_over, (value, place), self.expanded(value, place, axis), axis=axis)
        return value

    def for_outer(self, value: fx.Node) -> fx.Node:
        """Maps [holders, …] → [outer, holders, …]: the same for each of the data axes outside of holders."""
        for place, (index, size) in enumerate(zip(self._outer, self.outer, strict=True)):
            kind = tensor_type(value)
            kind = TensorType(kind.dtype, (*kind.shape[:place], size, *kind.shape[place:]))
            value = self._emit.call(expand_over, (value, place), kind, axis=self._names[index])
        return value

    def expanded(self, value: fx.Node, place: int, axis: str) -> TensorType:
        """Returns the type of a value that stands once for each rank of a holders' axis."""
        kind = tensor_type(value)
        return TensorType(kind.dtype, (*kind.shape[:place], self.axes[axis], *kind.shape[place:]))


def token_cut(program: Program, emit: Emitter, tokens: Size, where: str, *, shared: bool) -> TokenCut:
    """Returns how the tokens of a layer are cut.

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
    """Returns a size as a number, or as a node that reads it off an input."""
    if isinstance(size, int):
        return size
    for entry in program.inputs:
        for dim, other in enumerate(entry.type.shape):
            if other == size:
                return emit.size(program.node(entry.node), dim)
    return None
