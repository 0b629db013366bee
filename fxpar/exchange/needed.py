"""Tokens that go to those ranks alone that need them, and the sums of what these made of them, by copies.

Enters: a rank's end, its tensor, and which experts each token of all ranks has chosen. Leaves: what `expand_needed` and
`sum_needed` give (`fxpar.ops.selective_dispatch`). How many rows travel follows from the choice, but no size does: an
area has a place for every token of every rank, and only those are written, and read, that are needed. Both ends know
which.

This is what any mailbox does, and what a kernel of one must give (`fxpar.exchange.push_needed`).

Terms: `chosen` i64[n, t, K] are the experts of the t tokens of each of n ranks; rank r holds the experts from
r * per_rank on, `per_rank` of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxpar.exchange.sums import added, slot

if TYPE_CHECKING:
    from fxpar.exchange.symmetric_buffer import Mailbox

# Bytes in which the slots of an area begin: a GPU reads as many at once.
_GRAIN = 128


def needs(chosen: Tensor, per_rank: int, rank: int | Tensor) -> Tensor:
    """Of tokens that chose some experts each, i64[…, K], which a rank needs, bool[…]."""
    return torch.div(chosen, per_rank, rounding_mode="floor").eq(rank).any(-1)


def slot_stride(like: Tensor) -> int:
    """Bytes of an area from the slot of a rank to that of the next one, each for rows like [t, f]."""
    return -(-like.nbytes // _GRAIN) * _GRAIN


def expanded(line: Mailbox, buffer: int, x: Tensor, chosen: Tensor, per_rank: int) -> Tensor:
    """What this rank needs of the tokens of all.

    Args:
        x: [t, f], contiguous: its own tokens.

    Returns:
        [n, t, f], zero where it needs nothing.
    """
    stride = slot_stride(x)
    areas = line.areas(buffer, stride * line.size)
    with line.beside(buffer, x):
        for rank in line.others:
            copy_rows(_part(areas[rank], stride * line.rank, x), x, needs(chosen[line.rank], per_rank, rank))
            line.signal(rank, buffer, 0)
    line.join(buffer)
    line.wait(buffer, 0)
    came = [x if r == line.rank else _part(areas[line.rank], stride * r, x) for r in range(line.size)]
    return torch.stack([_only(part, needs(chosen[r], per_rank, line.rank)) for r, part in enumerate(came)])


def summed(line: Mailbox, buffer: int, x: Tensor, chosen: Tensor, per_rank: int) -> Tensor:
    """The sum of what the ranks made of this one's tokens, each of those that it needed, in the order of the ranks.

    Args:
        x: [n, t, f], contiguous: what this rank made of the tokens of all.

    Returns:
        [t, f].
    """
    like = x[line.rank]
    stride = slot_stride(like)
    areas = line.areas(buffer, stride * line.size)
    with line.beside(buffer, x):
        for rank in line.others:
            copy_rows(_part(areas[rank], stride * line.rank, like), x[rank], needs(chosen[rank], per_rank, line.rank))
            line.signal(rank, buffer, 0)
    line.join(buffer)
    line.wait(buffer, 0)
    came = [like if r == line.rank else _part(areas[line.rank], stride * r, like) for r in range(line.size)]
    return added([_only(part, needs(chosen[line.rank], per_rank, r)) for r, part in enumerate(came)])


def copy_rows(there: Tensor, rows: Tensor, needed: Tensor) -> None:
    """Writes the rows that are needed, bool[t], of [t, f], into memory of another rank."""
    there[needed] = rows[needed]


def _part(area: Tensor, begin: int, like: Tensor) -> Tensor:
    """A slot, as memory like another tensor."""
    return slot(area, begin, like).view(like.shape)


def _only(rows: Tensor, needed: Tensor) -> Tensor:
    """The rows that are needed, and zeros: what stands in the place of others may be anything."""
    return torch.where(needed.unsqueeze(-1), rows, rows.new_zeros(()))
