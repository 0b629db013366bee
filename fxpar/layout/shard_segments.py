"""The pieces of a cut in canonical form, and cuts through views.

Enters: the pieces of a dimension in order; a placement and the shapes before and after a view. Leaves: the pieces as
cuts that are equal have them; the placement behind the view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fxpar.layout.layout import Piece, Placement
from fxpar.layout.symbolic_sizes import Size, divide, product, simplify


def pieces_of(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Canonical form: empty pieces dropped, neighbours that repeat the same run merged, segments only where needed."""
    if all(piece.in_rank_order for piece in pieces):
        return _merged(pieces)
    flat = _flattened(pieces)
    return tuple(pieces) if flat is None else flat


def _merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The pieces without those that are empty, and with neighbours of the same run as one piece."""
    merged: list[Piece] = []
    for piece in pieces:
        if piece.length == 0:
            continue
        if not piece.sharded:
            piece = Piece(1, piece.length, False)
        alike = replace(piece, outer=1)
        last = merged[-1] if merged else None
        if last and not last.sharded and not piece.sharded:
            merged[-1] = Piece(1, simplify(last.size + piece.size), False)
        elif last and piece.sharded and not piece.padded and replace(last, outer=1) == alike:
            merged[-1] = replace(piece, outer=simplify(last.outer + piece.outer))
        else:
            merged.append(piece)
    return tuple(merged)


def _flattened(pieces: Sequence[Piece]) -> tuple[Piece, ...] | None:
    """Cuts of which some are reversed, as the shortest list that they repeat and how often they do.

    None where runs of segments are repeated a symbolic number of times beside other pieces: no such cut fits.
    """
    times: Size = 1
    if len(pieces) == 1 and pieces[0].segments:
        times, pieces = pieces[0].outer, pieces[0].segments
    runs = _unsegmented_runs(pieces)
    if not runs:
        return None
    lengths = (n for n in range(1, len(runs) + 1) if len(runs) % n == 0)
    period = next(n for n in lengths if runs == runs[:n] * (len(runs) // n))
    times, merged = simplify(times * (len(runs) // period)), _merged(runs[:period])
    if len(merged) == 1:
        return (replace(merged[0], outer=simplify(times * merged[0].outer)),)
    return merged if times == 1 else (Piece(times, simplify(sum(p.length for p in merged)), segments=merged),)


_MOST_RUNS = 2**16


def _unsegmented_runs(pieces: Sequence[Piece]) -> list[Piece] | None:
    """The pieces run by run, without segments; those of a symbolic number of runs as they are.

    None of a symbolic number of segmented ones, and of more than any rank could take apart.
    """
    runs: list[Piece] = []
    for piece in _merged(pieces):
        if isinstance(piece.outer, int) and piece.outer > _MOST_RUNS:
            return None
        if not isinstance(piece.outer, int):
            if piece.segments:
                return None
            runs.append(piece)
        else:
            run = _unsegmented_runs(piece.segments) if piece.segments else [replace(piece, outer=1)]
            if run is None:
                return None
            runs += run * piece.outer
    return runs


def through_view(placement: Placement, source: Sequence[Size], target: Sequence[Size], n: int) -> Placement | None:
    """The shard after a view from shape `source` to shape `target`; None where the view tears it.

    Row-major flattening turns the cut run into `outer × size` of the whole tensor; the dimension of `target` in
    which that run starts must hold it entirely. Sizes may be symbolic: what does not hold for all values is None.
    """
    if not placement.in_rank_order:
        return None
    before = product(source[: placement.dim])
    piece = placement.piece
    if piece is None:
        return _segments_through_view(placement, before, source[placement.dim], target, n)
    if piece.padded:  # a padded run ends with its dimension
        dims = [d for d, size in enumerate(target) if size == piece.size and product(target[:d]) == before]
        return placement.at(dims[0]) if dims else None
    blocks = n // piece.copies
    outer = simplify(before * piece.outer)
    run = simplify(piece.size * product(source[placement.dim + 1 :]))
    for dim, size in enumerate(target):
        rest = divide(outer, size)
        if rest is not None:
            outer = rest
            continue
        share = divide(size, outer)
        if share is None or divide(share, blocks) is None or divide(run, share) is None:
            return None
        return replace(placement, dim=dim, pieces=(replace(piece, outer=outer, size=share),))
    return None


def _segments_through_view(
    placement: Placement, before: Size, size: Size, target: Sequence[Size], n: int
) -> Placement | None:
    """Segments survive in the dimension of `target` that starts where theirs does, in larger or smaller units."""
    for dim, other in enumerate(target):
        if other == 1 or product(target[:dim]) != before:
            continue
        wider, narrower = divide(other, size), divide(size, other)
        pieces: list[Piece] = []
        for piece in placement.pieces:
            run = None if narrower is None else divide(piece.size, narrower)
            if wider is not None:
                run = simplify(piece.size * wider)
            if run is None or (piece.sharded and divide(run, n // piece.copies) is None):
                return None
            pieces.append(replace(piece, size=run))
        return replace(placement, dim=dim, pieces=pieces_of(pieces))
    return None
