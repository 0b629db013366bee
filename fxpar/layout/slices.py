"""The arithmetic of shards through slices.

Enters: the pieces of a cut dimension and positions. Leaves: the pieces between them, and their places in a rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fxpar.layout.layout import Piece
from fxpar.layout.shard_segments import pieces_of
from fxpar.layout.symbolic_sizes import Size, divide, sign, simplify


def _stride_frame(
    pieces: Sequence[Piece], start: int, stop: int, step: int, n: int
) -> tuple[int, int, tuple[Piece, ...]] | None:
    """First and last bound, and pieces, of an interval of whole steps in which the slice picks one of each step."""
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
    """The pieces of every `step`-th element between two global positions.

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
    """Bounds of a slice of a rank's part, the same on all ranks, for global bounds that `slice_pieces` accepts.

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
    """The pieces between two global positions; None where a position lies inside a sharded run.

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
    """The later of two positions, or with `min` the earlier one; None where that is not known."""
    difference = sign(simplify(a - b))
    if difference is None:
        return None
    return a if of_two(difference, 0) == difference else b


def local_position(pieces: Sequence[Piece], position: int, n: int) -> int:
    """Where a global position between two runs lies in a rank's part."""
    local = offset = 0
    for piece in pieces:
        length, size = int(piece.length), int(piece.size)
        inside = max(0, min(position - offset, length))
        if piece.padded:
            local += piece.padded // n if inside == length else 0
        else:
            local += inside * piece.copies // n if piece.sharded else inside
        if piece.sharded and inside % size:
            raise ValueError(f"position {position} lies inside the sharded run {piece}")
        offset += length
    return local
