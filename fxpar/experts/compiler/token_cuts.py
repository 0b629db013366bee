"""Tokens as each rank has its own: a leading dimension for every axis that cuts them.

Enters: values by token, [tokens, …]. Leaves: [data ranks, tensor ranks, own tokens, …], and the way back. A helper of
`dispatch_experts`.

Data ranks have rows of the batch. Tensor parallel ranks share all tokens of a row: each takes a part of the sequence,
which is padded where they do not divide it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
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

fxp = torch.ops.fxpar


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
