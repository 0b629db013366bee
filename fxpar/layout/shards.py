"""A rank's block of a whole tensor, and the whole from all blocks, by placement.

Enters: tensors and placements with concrete sizes. Leaves: slices and their inverse. Used to cut parameters, to compare
the ranks of a simulation with the single device, to put a full state dict together, and to read and write checkpoints.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxpar.layout.layout import Layout, Piece, Placement, share_of
from fxpar.layout.nesting import local_shape, pieces_of
from fxpar.layout.symbolic_sizes import Size, divide, evaluate, sign, simplify

# The arithmetic of shards through slices.


def _stride_frame(
    pieces: Sequence[Piece], start: int, stop: int, step: int, n: int
) -> tuple[int, int, tuple[Piece, ...]] | None:
    """Returns first and last bound, and pieces, of an interval of whole steps in which the slice picks one of each."""
    length = -(-(stop - start) // step) * step
    for phase in range(step):
        first = start - phase
        if first < 0 or first + length > sum(int(p.length) for p in pieces):
            continue
        sliced = slice_pieces(pieces, first, first + length)
        if sliced is not None and all(
            divide(p.size, step * n // p.copies if p.sharded else step) is not None for p in sliced
        ):
            return first, first + length, sliced
    return None


def strided_pieces(pieces: Sequence[Piece], start: Size, stop: Size, step: int, n: int) -> tuple[Piece, ...] | None:
    """Returns the pieces of every `step`-th element between two global positions.

    None where the ranks would not pick the same positions of their blocks, or the sizes are not known.
    """
    known = all(isinstance(v, int) for v in (start, stop, *(p.length for p in pieces)))
    if (
        not known
        or start >= stop
        or step > sum(int(p.length) for p in pieces)
        or not all(p.in_rank_order and not p.padded for p in pieces)
    ):
        return None
    frame = _stride_frame(pieces, int(start), int(stop), step, n)
    return None if frame is None else pieces_of([replace(p, size=int(p.size) // step) for p in frame[2]])


def local_bounds(pieces: Sequence[Piece], start: int, stop: int, step: int, n: int) -> tuple[int, int]:
    """Returns a slice's bounds in a rank's part, the same on all ranks, for global ones that `slice_pieces` accepts.

    Raises:
        ValueError: a bound lies inside a sharded run, or a stride does not fit the blocks.
    """
    if step == 1:
        return local_position(pieces, start, n), local_position(pieces, stop, n)
    frame = _stride_frame(pieces, start, stop, step, n)
    if frame is None:
        raise ValueError(f"the slice {start}:{stop}:{step} does not pick the same of every rank's part")
    return local_position(pieces, frame[0], n) + start - frame[0], local_position(pieces, frame[1], n)


def slice_pieces(pieces: Sequence[Piece], start: Size, stop: Size) -> tuple[Piece, ...] | None:
    """Returns the pieces between two global positions; None where a position lies inside a sharded run.

    Of symbolic positions also where it is not known on which side of the end of a piece they are.
    """
    result: list[Piece] = []
    offset: Size = 0
    for piece in pieces:
        end = simplify(offset + piece.length)
        low, high = _later(start, offset), _later(end, stop, of_two=min)
        length = None if low is None or high is None else sign(simplify(high - low))
        if low is None or high is None or length is None:
            return None
        if length > 0:
            if (low, high) == (offset, end):
                result.append(piece)
            elif piece.padded:
                return None
            elif piece.sharded:
                first, last = divide(simplify(low - offset), piece.size), divide(simplify(high - offset), piece.size)
                if first is None or last is None:
                    return None
                result.append(replace(piece, outer=simplify(last - first)))
            else:
                result.append(Piece(1, simplify(high - low), False))
        offset = end
    return pieces_of(result)


def _later(a: Size, b: Size, of_two: Callable[[int, int], int] = max) -> Size | None:
    """Returns the later of two positions, or with `min` the earlier one; None where that is not known."""
    difference = sign(simplify(a - b))
    if difference is None:
        return None
    return a if of_two(difference, 0) == difference else b


def local_position(pieces: Sequence[Piece], position: int, n: int) -> int:
    """Returns where a global position between two runs lies in a rank's part."""
    local = offset = 0
    for piece in pieces:
        length, size = int(piece.length), int(piece.size)
        inside = max(0, min(position - offset, length))
        # Of a padded run only the ends lie at one place on all ranks.
        if piece.padded:
            local += piece.padded // n if inside == length else 0
        else:
            local += inside * piece.copies // n if piece.sharded else inside
        if piece.sharded and inside % size:
            raise ValueError(f"position {position} lies inside the sharded run {piece}")
        offset += length
    return local


def block(whole: Tensor, placement: Placement, n: int, rank: int, sizes: Mapping[str, int] | None = None) -> Tensor:
    """Returns what rank `rank` of n holds of `whole`; all where the placement is no shard. Padding is zero.

    Args:
        sizes: values of the symbols that occur in the placement.
    """
    if not placement.is_shard:
        return whole
    parts, start = [], 0
    for piece in placement.pieces:
        outer, run = _concrete(piece, sizes)
        part = whole.narrow(placement.dim, start, outer * run)
        start += outer * run
        if piece.padded:
            part = _padded_block(part, piece, placement.dim, n, rank)
        elif piece.segments:
            part = part.unflatten(placement.dim, (outer, run))
            part = block(part, Placement("S", placement.dim + 1, piece.segments), n, rank, sizes)
            part = part.flatten(placement.dim, placement.dim + 1)
        elif piece.sharded:
            blocks = n // piece.copies
            index = blocks - 1 - rank if piece.reversed else rank // piece.copies
            part = part.unflatten(placement.dim, (outer, blocks, run // blocks))
            part = part.select(placement.dim + 1, index).flatten(placement.dim, placement.dim + 1)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, placement.dim)


def _padded_block(part: Tensor, piece: Piece, dim: int, n: int, rank: int) -> Tensor:
    first, count = real_part(piece, n, rank)
    real, missing = part.narrow(dim, first, count), piece.padded // n - count
    shape = [missing if d == dim else size for d, size in enumerate(real.shape)]
    return torch.cat([real, real.new_zeros(shape)], dim)


def real_part(piece: Piece, n: int, rank: int) -> tuple[int, int]:
    """Returns the first element and number of elements of a padded run that a rank holds besides its padding."""
    size = int(piece.size)
    # Shared out as torch's Shard does it, rounded up. Each rank has its padding after its own share.
    share = -(-size // n)
    first = min(rank * share, size)
    return first, min(share, size - first)


def whole(blocks: Sequence[Tensor], placement: Placement, sizes: Mapping[str, int] | None = None) -> Tensor:
    """Returns the inverse of `block`, from the blocks of all ranks in order."""
    if not placement.is_shard:
        return blocks[0]
    n, dim = len(blocks), placement.dim
    parts, start = [], 0
    for piece in placement.pieces:
        outer, run = _concrete(piece, sizes)
        if piece.padded:
            parts += [b.narrow(dim, 0, real_part(piece, n, rank)[1]) for rank, b in enumerate(blocks)]
            continue
        count = n // piece.copies if piece.sharded else 1
        length = outer * run // count
        shares = [b.narrow(dim, start, length) for b in blocks[:: piece.copies]]
        start += length
        if piece.segments:
            runs = [b.unflatten(dim, (outer, run // n)) for b in shares]
            parts.append(whole(runs, Placement("S", dim + 1, piece.segments), sizes).flatten(dim, dim + 1))
        elif piece.sharded:
            shares = shares[::-1] if piece.reversed else shares
            stacked = torch.stack([b.unflatten(dim, (outer, run // count)) for b in shares], dim + 1)
            parts.append(stacked.flatten(dim, dim + 2))
        else:
            parts.append(shares[0])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def without_padding(part: Tensor, layout: Layout, axes: Mapping[str, int], coordinates: Mapping[str, int]) -> Tensor:
    """Returns what a rank holds, less the padding after it."""
    for axis, placement in layout:
        for piece in placement.pieces:
            if piece.padded:
                part = part.narrow(placement.dim, 0, real_part(piece, axes[axis], coordinates[axis])[1])
    return part


def counted(local: Tensor, placement: Placement, n: int, rank: int) -> list[Tensor]:
    """Returns the parts of a rank's block for which it stands: of what several ranks hold, the first of them."""
    if not placement.is_shared:
        return [local]
    parts, start = [], 0
    for piece in placement.pieces:
        length = int(share_of(piece, n) or 0)
        if _is_first(piece, n, rank):
            parts.append(local.narrow(placement.dim, start, length))
        start += length
    return parts


def _is_first(piece: Piece, n: int, rank: int) -> bool:
    return rank % (piece.copies if piece.sharded else n) == 0


def local_block(
    whole_: Tensor,
    layout: Layout,
    axes: Mapping[str, int],
    coordinates: Mapping[str, int],
    sizes: Mapping[str, int] | None = None,
) -> Tensor:
    """Applies `block` on every axis of a layout."""
    for axis, placement in layout:
        whole_ = block(whole_, placement, axes[axis], coordinates[axis], sizes)
    return whole_


@dataclass(frozen=True)
class Box:
    """Elements that lie side by side in a whole tensor and in a rank's part of it.

    Attributes:
        offsets: of its first element in the whole.
        local: of its first element in the part.
        sizes: in each dimension.
        stands: whether this rank is the first of those that hold it, on the axes that cut the tensor.
    """

    offsets: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]
    stands: bool

    @property
    def slices(self) -> tuple[slice, ...]:
        """Returns where it is in the whole."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def within(self, part: Tensor) -> Tensor:
        """Returns the view of it in the part."""
        for dim, (start, size) in enumerate(zip(self.local, self.sizes, strict=True)):
            part = part.narrow(dim, start, size)
        return part


def boxes(shape: Sequence[int], layout: Layout, axes: Mapping[str, int], coordinates: Mapping[str, int]) -> list[Box]:
    """Returns the boxes of a rank's part, less the padding: those with `stands` of all ranks fill the whole once."""
    dims = [_runs(dim, size, layout, axes, coordinates) for dim, size in enumerate(shape)]
    local_boxes = []
    for runs in itertools.product(*dims):
        columns = list(zip(*runs, strict=True)) or [(), (), (), ()]
        local_boxes.append(Box(columns[0], columns[1], columns[2], all(columns[3])))
    return local_boxes


def _runs(
    dim: int, size: int, layout: Layout, axes: Mapping[str, int], coordinates: Mapping[str, int]
) -> list[tuple[int, int, int, bool]]:
    """Returns the part of a dimension as runs of neighbours: start in the whole and in the part, length, `stands`."""
    cuts = [(axis, placement) for axis, placement in layout if placement.is_shard and placement.dim == dim]
    if not cuts:
        return [(0, 0, size, True)]
    # The positions are cut by the function that cuts values, so the runs cannot contradict it.
    index, stands = torch.arange(1, size + 1), torch.ones(size, dtype=torch.bool)  # 0 is padding
    for axis, placement in cuts:
        flat, n, rank = placement.at(0), axes[axis], coordinates[axis]
        index, stands = block(index, flat, n, rank), block(stands, flat, n, rank).clone()
        start = 0
        for piece in flat.pieces:
            length = int(share_of(piece, n) or 0)
            if not _is_first(piece, n, rank):
                stands[start : start + length] = False
            start += length
    places = index.nonzero().flatten()
    index, stands = index[places] - 1, stands[places]
    breaks = (index.diff() != 1) | (places.diff() != 1) | (stands[1:] != stands[:-1])
    starts = [0, *(breaks.nonzero().flatten() + 1).tolist()] if len(places) else []
    ends = [*starts[1:], len(places)] if starts else []
    return [(int(index[a]), int(places[a]), b - a, bool(stands[a])) for a, b in zip(starts, ends, strict=True)]


def part_shape(shape: Sequence[int], layout: Layout, axes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of what every rank holds of a whole tensor, padding included."""
    return tuple(int(size) for size in local_shape(shape, layout, axes))


def _concrete(piece: Piece, sizes: Mapping[str, int] | None) -> tuple[int, int]:
    return evaluate(piece.outer, sizes or {}), evaluate(piece.size, sizes or {})
