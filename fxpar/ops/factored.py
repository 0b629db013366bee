"""The coercions of shards whose blocks several ranks hold, on local tensors (`fxpar.ops.coercions`).

Enters: a rank's tensor, its cut as *runs* (outer, elements of a rank's block, blocks, …), a process group by name and
the rank's index on the axis as a tensor. Leaves: the rank's tensor in the other placement.

No sub-groups are needed: the ranks' summands of shared blocks travel as one tensor in which each rank fills its own
block and leaves zeros elsewhere, over the whole axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpar.ops.collectives import Group, arrived, start_sum


@dataclass(frozen=True)
class SharedSegment:
    """One piece of a cut in a rank's tensor.

    Attributes:
        length: elements along the dimension; None for all that there are.
        outer: repetitions of the run.
        copies: ranks that hold the same block: 1 of a plain piece, all of a whole segment.
        parts: how many parts of a block `split_shared` makes, of which a rank keeps one.
    """

    length: int | None
    outer: int
    copies: int
    parts: int = 1


Pieces = Sequence[SharedSegment]


def _segments(x: Tensor, dim: int, lengths: Sequence[int | None]) -> list[Tensor]:
    return [x] if len(lengths) == 1 else list(x.split([length for length in lengths if length is not None], dim))


def _placed(x: Tensor, dim: int, outer: int, count: int, position: Tensor) -> Tensor:
    """A tensor in which each run of `x` is the one at `position` of `count`, the others zero."""
    runs = x.unflatten(dim, (outer, x.shape[dim] // outer)).unsqueeze(dim + 1)
    places = torch.arange(count, device=x.device).view(-1, *[1] * (x.dim() - dim))
    return torch.where(places == position, runs, x.new_zeros(())).flatten(dim, dim + 2)


def _picked(x: Tensor, dim: int, outer: int, count: int, position: Tensor) -> Tensor:
    """The inverse of `_placed`."""
    runs: Tensor = x.unflatten(dim, (outer, count, x.shape[dim] // (outer * count)))
    return runs.index_select(dim + 1, position.reshape(1)).flatten(dim, dim + 2)


def summand(grad: Tensor, dim: int, pieces: Pieces, n: int, index: Tensor) -> Tensor:
    """A rank's summand of the gradients of the shared blocks: its own in their places, zeros elsewhere."""
    parts = []
    for piece, part in zip(pieces, _segments(grad, dim, [piece.length for piece in pieces]), strict=True):
        if piece.copies > 1:
            parts.append(_placed(part, dim, piece.outer, n // piece.copies, index // piece.copies))
    return torch.cat(parts, dim)


def restored(grad: Tensor, total: Tensor, dim: int, pieces: Pieces, n: int, index: Tensor) -> Tensor:
    """A rank's gradient with the sums of the shared blocks in place of its own."""
    parts = _segments(grad, dim, [piece.length for piece in pieces])
    shared = [i for i, piece in enumerate(pieces) if piece.copies > 1]
    sizes = [parts[i].shape[dim] * (n // pieces[i].copies) for i in shared]
    for i, whole in zip(shared, total.split(sizes, dim), strict=True):
        piece = pieces[i]
        parts[i] = _picked(whole, dim, piece.outer, n // piece.copies, index // piece.copies)
    return torch.cat(parts, dim)


def _part(index: Tensor, piece: SharedSegment) -> Tensor:
    """Which part of its block a rank keeps: neighbours that share the part count as one."""
    return index % piece.copies // (piece.copies // piece.parts)


def split_shared(x: Tensor, dim: int, pieces: Sequence[Sequence[Any]], index: Tensor) -> Tensor:
    """`fxpar.split_shared`: each rank keeps its part of its blocks; pieces as tuples of `SharedSegment`'s fields."""
    shared = [SharedSegment(*p) for p in pieces]
    parts = []
    for piece, part in zip(shared, _segments(x, dim, [piece.length for piece in shared]), strict=True):
        parts.append(part if piece.parts == 1 else _picked(part, dim, piece.outer, piece.parts, _part(index, piece)))
    return torch.cat(parts, dim)


def pad_shared(x: Tensor, dim: int, pieces: Sequence[Sequence[Any]], index: Tensor) -> Tensor:
    """`fxpar.pad_shared`; pieces are those of the result, as tuples of `SharedSegment`'s fields."""
    shared = [SharedSegment(*p) for p in pieces]
    lengths = [None if piece.length is None else piece.length // piece.parts for piece in shared]
    parts = []
    for piece, part in zip(shared, _segments(x, dim, lengths), strict=True):
        parts.append(part if piece.parts == 1 else _placed(part, dim, piece.outer, piece.parts, _part(index, piece)))
    return torch.cat(parts, dim)


def start_reduce_from_shared(
    x: Tensor, dim: int, pieces: Sequence[Sequence[Any]], group: str, size: int, index: Tensor
) -> Tensor:
    """`fxpar.reduce_from_shared`, on its way; pieces as tuples of `SharedSegment`'s fields."""
    return start_sum(summand(x, dim, [SharedSegment(*p) for p in pieces], size, index), Group(group, size))


def reduce_from_shared(
    started: Tensor, x: Tensor, dim: int, pieces: Sequence[Sequence[Any]], size: int, index: Tensor
) -> Tensor:
    """Of `start_reduce_from_shared`."""
    return restored(x, arrived(started), dim, [SharedSegment(*p) for p in pieces], size, index)
