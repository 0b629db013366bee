"""The coercions as plain functions of tensors, numbers and a group's name: what a lowered graph calls.

Arguments: the rank's tensor; where there is a cut, its dimension and pieces; the group's name and size; the rank's
index. What communicates is two calls, so that others may stand between them: `start_…` sends, and the other takes what
that gives, when it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """The ranks of one axis: name and size of their process group, and the symmetric buffer, if any."""

    name: str
    size: int
    symmetric_buffer: str = ""


# A cut: the dimension and its sharded pieces as (outer, run) in global elements; run is None for "all that is there",
# and (size, padded) where the ranks' blocks of a single run are padded.
Run = int | tuple[int, int] | None
Cut = tuple[int, Sequence[tuple[int, Run]]]
Pieces = Sequence[tuple[int, Run]]


# ---------------------------------------------------------------------- cuts


def _padding(cut: Cut) -> tuple[int, int] | None:
    """Returns size and padded size of a cut whose blocks are padded; None for other cuts."""
    run = cut[1][0][1]
    return run if isinstance(run, tuple) else None


def _runs(x: Tensor, cut: Cut, share: int) -> list[Tensor]:
    """Returns the pieces along the cut dimension; `share` is n for a rank's tensor and 1 for a whole one."""
    dim, pieces = cut
    if len(pieces) == 1:
        return [x]
    return list(x.split([outer * run // share for outer, run in pieces if isinstance(run, int)], dim))


def spread(x: Tensor, cut: Cut, n: int) -> Tensor:
    """Maps a whole tensor → [n, …]: the ranks' parts stacked, padding zero."""
    dim, pieces = cut
    padding = _padding(cut)
    if padding is not None:
        size, padded = padding
        share = -(-size // n)
        x = _lengthened(x, dim, share * n - size).unflatten(dim, (n, share)).movedim(dim, 0)
        return _lengthened(x, dim + 1, padded // n - share)
    parts = []
    for part, (outer, _) in zip(_runs(x, cut, 1), pieces, strict=True):
        blocks = part.unflatten(dim, (outer, n, part.shape[dim] // (outer * n)))
        parts.append(blocks.movedim(dim + 1, 0).flatten(dim + 1, dim + 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim + 1)


def _lengthened(x: Tensor, dim: int, count: int) -> Tensor:
    """Returns the tensor with `count` zeros more at the dimension's end."""
    return functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, count]) if count else x


def put_together(stacked: Tensor, cut: Cut) -> Tensor:
    """Maps [n, …] → a whole tensor: the inverse of `spread`."""
    dim, pieces = cut
    n = stacked.shape[0]
    padding = _padding(cut)
    if padding is not None:
        size = padding[0]
        return stacked.narrow(dim + 1, 0, -(-size // n)).movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, size)
    parts = []
    moved = (dim + 1, pieces)
    for part, (outer, _) in zip(_runs(stacked, moved, n), pieces, strict=True):
        blocks = part.unflatten(dim + 1, (outer, part.shape[dim + 1] // outer))
        parts.append(blocks.movedim(0, dim + 1).flatten(dim, dim + 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


# ---------------------------------------------------------------------- what a lowered graph calls


def same(x: Tensor) -> Tensor:
    """Returns the value as it is: such a coercion changes only the gradient's way."""
    return x


def start_sum(x: Tensor, group: str) -> Tensor:
    """Starts P → I, P → R."""
    return _c10d.all_reduce(x.contiguous(), "sum", group)  # type: ignore[no-any-return]


def arrived(started: Tensor) -> Tensor:
    """Waits for what `start_sum` sent, and returns it."""
    return _c10d.wait_tensor(started)  # type: ignore[no-any-return]


def start_gather(x: Tensor, group: str, size: int) -> Tensor:
    """Starts S → R, S → I: the ranks' tensors stacked, [n, …]."""
    return _c10d.all_gather_into_tensor(x.contiguous().unsqueeze(0), size, group)  # type: ignore[no-any-return]


def put_in_places(started: Tensor, dim: int, pieces: Pieces) -> Tensor:
    """Returns the global tensor: of `start_gather` by the cut, of `start_exchange` by the source's cut."""
    return put_together(arrived(started), (dim, pieces))


def start_scatter(x: Tensor, dim: int, pieces: Pieces, group: str, size: int) -> Tensor:
    """Starts P → S: the rank's shard of the sum, [1, …]."""
    stacked = spread(x, (dim, pieces), size).contiguous()
    return _c10d.reduce_scatter_tensor(stacked, "sum", size, group)  # type: ignore[no-any-return]


def scattered(started: Tensor) -> Tensor:
    """Waits for the shard of `start_scatter`, and returns it."""
    return arrived(started).squeeze(0)


def take(x: Tensor, dim: int, pieces: Pieces, size: int, index: Tensor) -> Tensor:
    """Takes a rank's shard of a global tensor: I → S, R → S."""
    # The index is a tensor, not a number: one graph, and one compiled kernel, serves all ranks.
    return spread(x, (dim, pieces), size).index_select(0, index.reshape(1)).squeeze(0)


def pad(x: Tensor, dim: int, pieces: Pieces, size: int, index: Tensor) -> Tensor:
    """Pads S → P: a global tensor with a rank's shard in its place and zeros elsewhere."""
    ranks = torch.arange(size, device=x.device).view(-1, *[1] * x.dim())
    return put_together(torch.where(ranks == index, x.unsqueeze(0), x.new_zeros(())), (dim, pieces))


def first_only(x: Tensor, index: Tensor) -> Tensor:
    """Keeps the value on rank 0 and returns zeros on the others: I → P, R → P."""
    # A choice and no product: zero times infinity would be NaN.
    return torch.where(index == 0, x, x.new_zeros(()))


def start_exchange(x: Tensor, dim: int, pieces: Pieces, group: str, size: int) -> Tensor:
    """Starts S(i) → S(j), by the target's cut: from each rank the part that is this one's, [n, …]."""
    counts = [1] * size
    stacked = spread(x, (dim, pieces), size).contiguous()
    return _c10d.all_to_all_single(stacked, counts, counts, group)  # type: ignore[no-any-return]


def recut(started: Tensor, source: tuple[int, Pieces], target: tuple[int, Pieces], size: int, index: Tensor) -> Tensor:
    """Cuts S(i) → S(i) by another factor, of `start_gather`.

    What two ranks exchange differs from pair to pair, so that an all-to-all would need other sizes on every rank.
    """
    return take(put_in_places(started, *source), *target, size, index)


# ---------------------------------------------------------------------- the same at once


def sum_over(x: Tensor, group: Group) -> Tensor:
    """Sums over the ranks of a group by an all-reduce."""
    return arrived(start_sum(x, group.name))


def max_over(x: Tensor, group: Group) -> Tensor:
    """Returns the largest values over the ranks of a group, by an all-reduce; it has no derivative."""
    return arrived(_c10d.all_reduce(x.contiguous(), "max", group.name))


def broadcast(x: Tensor, sender: int, group: Group) -> None:
    """Writes the tensor of a rank of a group, which is contiguous, into those of all its ranks."""
    arrived(_c10d.broadcast_(x, sender, group.name))


def gather_whole(x: Tensor, cut: Cut, group: Group) -> Tensor:
    """Gathers the whole of a shard by an all-gather."""
    return put_in_places(start_gather(x, group.name, group.size), *cut)


# Shards whose blocks several ranks hold need no sub-groups: the ranks' summands of shared blocks travel as one tensor
# in which each rank fills its own block and leaves zeros elsewhere, over the whole axis.


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


SharedSegments = Sequence[SharedSegment]


def _segments(x: Tensor, dim: int, lengths: Sequence[int | None]) -> list[Tensor]:
    return [x] if len(lengths) == 1 else list(x.split([length for length in lengths if length is not None], dim))


def _placed(x: Tensor, dim: int, outer: int, count: int, position: Tensor) -> Tensor:
    """Returns a tensor in which each run of `x` is the one at `position` of `count`, the others zero."""
    runs = x.unflatten(dim, (outer, x.shape[dim] // outer)).unsqueeze(dim + 1)
    places = torch.arange(count, device=x.device).view(-1, *[1] * (x.dim() - dim))
    return torch.where(places == position, runs, x.new_zeros(())).flatten(dim, dim + 2)


def _picked(x: Tensor, dim: int, outer: int, count: int, position: Tensor) -> Tensor:
    """Inverts `_placed`."""
    runs: Tensor = x.unflatten(dim, (outer, count, x.shape[dim] // (outer * count)))
    return runs.index_select(dim + 1, position.reshape(1)).flatten(dim, dim + 2)


def summand(grad: Tensor, dim: int, pieces: SharedSegments, n: int, index: Tensor) -> Tensor:
    """Returns a rank's summand of the gradients of the shared blocks: its own in their places, zeros elsewhere."""
    parts = []
    for piece, part in zip(pieces, _segments(grad, dim, [piece.length for piece in pieces]), strict=True):
        if piece.copies > 1:
            parts.append(_placed(part, dim, piece.outer, n // piece.copies, index // piece.copies))
    return torch.cat(parts, dim)


def restored(grad: Tensor, total: Tensor, dim: int, pieces: SharedSegments, n: int, index: Tensor) -> Tensor:
    """Returns a rank's gradient with the sums of the shared blocks in place of its own."""
    parts = _segments(grad, dim, [piece.length for piece in pieces])
    shared = [i for i, piece in enumerate(pieces) if piece.copies > 1]
    sizes = [parts[i].shape[dim] * (n // pieces[i].copies) for i in shared]
    for i, whole in zip(shared, total.split(sizes, dim), strict=True):
        piece = pieces[i]
        parts[i] = _picked(whole, dim, piece.outer, n // piece.copies, index // piece.copies)
    return torch.cat(parts, dim)


def _part(index: Tensor, piece: SharedSegment) -> Tensor:
    """Returns which part of its block a rank keeps: neighbours that share the part count as one."""
    return index % piece.copies // (piece.copies // piece.parts)


def split_shared(x: Tensor, dim: int, pieces: Sequence[Sequence[Any]], index: Tensor) -> Tensor:
    """Computes `fxpar.split_shared`: a rank's part of its blocks; pieces as tuples of `SharedSegment`'s fields."""
    shared = [SharedSegment(*p) for p in pieces]
    parts = []
    for piece, part in zip(shared, _segments(x, dim, [piece.length for piece in shared]), strict=True):
        parts.append(part if piece.parts == 1 else _picked(part, dim, piece.outer, piece.parts, _part(index, piece)))
    return torch.cat(parts, dim)


def pad_shared(x: Tensor, dim: int, pieces: Sequence[Sequence[Any]], index: Tensor) -> Tensor:
    """Computes `fxpar.pad_shared`; pieces are those of the result, as tuples of `SharedSegment`'s fields."""
    shared = [SharedSegment(*p) for p in pieces]
    lengths = [None if piece.length is None else piece.length // piece.parts for piece in shared]
    parts = []
    for piece, part in zip(shared, _segments(x, dim, lengths), strict=True):
        parts.append(part if piece.parts == 1 else _placed(part, dim, piece.outer, piece.parts, _part(index, piece)))
    return torch.cat(parts, dim)


def start_reduce_from_shared(
    x: Tensor, dim: int, pieces: Sequence[Sequence[Any]], group: str, size: int, index: Tensor
) -> Tensor:
    """Starts `fxpar.reduce_from_shared`; pieces as tuples of `SharedSegment`'s fields."""
    return start_sum(summand(x, dim, [SharedSegment(*p) for p in pieces], size, index), group)


def reduce_from_shared(
    started: Tensor, x: Tensor, dim: int, pieces: Sequence[Sequence[Any]], size: int, index: Tensor
) -> Tensor:
    """Waits for `start_reduce_from_shared`, and returns the gradient with the sums in place of the rank's own."""
    return restored(x, arrived(started), dim, [SharedSegment(*p) for p in pieces], size, index)
