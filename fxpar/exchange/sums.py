"""Sums over the ranks of a mailbox by copies: blocks of rows go to their owners, which send the sums of these to all.

Enters: a rank's end and its tensor. Leaves: the sum, of the same bits on all ranks. Each rank sends as many bytes as
the tensor has, twice, but for its own part of them; over two ranks one copy of the whole is as much, and needs one way.

This is what any mailbox does, and what a kernel of one must give (`fxpar.exchange.push_blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fxpar.exchange.symmetric_buffer import Mailbox

# Bytes in which the slots of an area begin: a GPU reads as many at once.
_GRAIN = 128


@dataclass(frozen=True)
class RowBlocks:
    """Who owns which rows, and where in an area they are.

    An area has a slot for the owner's rows as each rank sends them, and behind these the sum of all rows.

    Attributes:
        rows: of the tensor.
        row_bytes: of each.
        ranks: how many there are.
    """

    rows: int
    row_bytes: int
    ranks: int

    @property
    def block(self) -> int:
        """Rows of each rank, but for the last ones, which may have fewer or none."""
        return -(-self.rows // self.ranks)

    @property
    def stride(self) -> int:
        """Bytes from slot to slot."""
        return -(-self.block * self.row_bytes // _GRAIN) * _GRAIN

    @property
    def sums(self) -> int:
        """The byte where the sum begins."""
        return self.stride * self.ranks

    @property
    def bytes(self) -> int:
        """Of an area."""
        return self.sums + self.rows * self.row_bytes

    def owned(self, rank: int) -> slice:
        """The rows of a rank."""
        return slice(min(rank * self.block, self.rows), min((rank + 1) * self.block, self.rows))


def slot(area: Tensor, begin: int, like: Tensor) -> Tensor:
    """Memory of an area, from some byte on, as a one-dimensional tensor of the bytes and the type of another."""
    return area[begin : begin + like.nbytes].view(like.dtype)


def row_blocks(x: Tensor, ranks: int) -> RowBlocks:
    """Those of x [rows, width]."""
    return RowBlocks(x.shape[0], x.shape[1] * x.itemsize, ranks)


def send_blocks(line: Mailbox, buffer: int, x: Tensor) -> None:
    """Sends to each other rank the rows that it owns of x [rows, width]; called in `beside`."""
    blocks = row_blocks(x, line.size)
    areas = line.areas(buffer, blocks.bytes)
    for rank in line.others:
        line.copy(areas[rank], blocks.stride * line.rank, x[blocks.owned(rank)])
        line.signal(rank, buffer, 0)


def sum_of_blocks(line: Mailbox, buffer: int, x: Tensor) -> Tensor:
    """The sum of what all ranks sent by `send_blocks`, in new memory."""
    blocks = row_blocks(x, line.size)
    areas = line.areas(buffer, blocks.bytes)
    line.wait(buffer, 0)
    local = x[blocks.owned(line.rank)]
    parts = [
        local if rank == line.rank else slot(areas[line.rank], blocks.stride * rank, local).view(local.shape)
        for rank in range(line.size)
    ]
    total = added(parts)
    begin = blocks.sums + blocks.owned(line.rank).start * blocks.row_bytes
    for rank in (line.rank, *line.others):
        line.copy(areas[rank], begin, total)
        if rank != line.rank:
            line.signal(rank, buffer, 1)
    line.wait(buffer, 1)
    return slot(areas[line.rank], blocks.sums, x).view(x.shape).clone()


def added(parts: Sequence[Tensor]) -> Tensor:
    """The sum in rank order, of half precision in float32, in new memory."""
    if len(parts) == 2:  # one rounding, and the same on both ranks
        return parts[0] + parts[1]
    kind = parts[0].dtype
    wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(kind)
