"""Several axes on one value: peeling, and the order in which axes nest.

Enters: layouts over several axes with global shapes. Leaves: shapes as each axis sees them, and the same layout listed
in another order.

A layout lists its axes outermost first, and each placement speaks of what the axes before it leave: of `[8]` under
`dp:S(0) tp:S(0)` dp cuts eight elements and tp the four that are left. *Peeling* an axis off a shape gives what it
leaves; whatever speaks of a rank's part goes through `peel`.

Two axes that cut one dimension either cut *different factors*, as dp the b and tp the s of a flattened b·s: then either
may be listed first, with its pieces counted accordingly (`swapped`). Or one cuts the blocks of the other: then it is
nested in it, and the order has a meaning. `spelled` gives each layout its one spelling: an axis that cuts the blocks of
another stands after it, everything else in the order of the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from fxpar.layout.layout import Layout, Piece, Placement, fits, share_of
from fxpar.layout.symbolic_sizes import Size, divide, product, simplify

# The pieces of a cut in canonical form, and cuts through views.


def pieces_of(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Returns the canonical form: no empty pieces, neighbours of the same run merged, segments only where needed."""
    if all(piece.in_rank_order for piece in pieces):
        return _merged(pieces)
    flat = _flattened(pieces)
    return tuple(pieces) if flat is None else flat


def _merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Returns the pieces without those that are empty, and with neighbours of the same run as one piece."""
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
    """Returns cuts of which some are reversed, as the shortest list that they repeat and how often they do.

    None where runs of segments are repeated a symbolic number of times next to other pieces: no such cut fits.
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


# A text can write a billion runs in one line, and each would be an object here.
_MOST_RUNS = 2**16


def _unsegmented_runs(pieces: Sequence[Piece]) -> list[Piece] | None:
    """Returns the pieces run by run, without segments; those of a symbolic number of runs as they are.

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
    """Returns the shard after a view from shape `source` to shape `target`; None where the view tears it.

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
    """Keeps segments in the dimension of `target` that starts where theirs does, in larger or smaller units."""
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


Entry = tuple[str, Placement]


@lru_cache(maxsize=65536)
def local_size(placement: Placement, n: int) -> Size:
    """Returns how many elements of the sharded dimension a rank of n holds.

    Raises:
        ValueError: n does not divide what the placement cuts.
    """
    total: Size = 0
    for piece in placement.pieces:
        share = share_of(piece, n)
        if share is None:
            raise ValueError(f"{piece} is not divisible by {n}")
        total = total + share
    return simplify(total)


def peel(shape: Sequence[Size], placement: Placement, n: int) -> tuple[Size, ...]:
    """Returns the shape that an axis of n ranks leaves.

    Raises:
        ValueError: n does not divide what the placement cuts.
    """
    if not placement.is_shard:
        return tuple(shape)
    return *shape[: placement.dim], local_size(placement, n), *shape[placement.dim + 1 :]


def peeled(
    shape: Sequence[Size], layout: Layout, axes: Mapping[str, int]
) -> Iterator[tuple[str, Placement, tuple[Size, ...]]]:
    """Yields each axis from the outermost, its placement, and the shape that it sees."""
    seen = tuple(shape)
    for axis, placement in layout:
        yield axis, placement, seen
        seen = peel(seen, placement, axes[axis])


def seen_by(layout: Layout, shape: Sequence[Size], axes: Mapping[str, int]) -> dict[str, tuple[Size, ...]]:
    """Returns the shape that each axis sees; after one that does not divide its dimension nothing changes."""
    seen, shapes = tuple(shape), {}
    for axis, placement in layout:
        shapes[axis] = seen
        if fits(placement, seen, axes[axis]):
            seen = peel(seen, placement, axes[axis])
    return shapes


def misfit(layout: Layout, shape: Sequence[Size], axes: Mapping[str, int]) -> str:
    """Returns the first axis that cannot cut what the axes before it leave of a shape; empty where all can.

    A dimension with padding is cut by one axis alone.
    """
    for axis, placement, seen in peeled(shape, layout, axes):
        others = [other for name, other in layout if name != axis and other.is_shard]
        if not fits(placement, seen, axes[axis]) or (
            placement.is_padded and any(other.dim == placement.dim for other in others)
        ):
            return axis
    return ""


def local_shape(shape: Sequence[Size], layout: Layout, axes: Mapping[str, int]) -> tuple[Size, ...]:
    """Returns the shape of a rank's part, padding included: every axis of the layout peeled off.

    Raises:
        ValueError: an axis does not divide what it cuts.
    """
    seen = tuple(shape)
    for axis, placement in layout:
        seen = peel(seen, placement, axes[axis])
    return seen


# ---------------------------------------------------------------------- two axes


@lru_cache(maxsize=65536)
def swapped(outer: Placement, n: int, inner: Placement, m: int) -> tuple[Placement, Placement] | None:
    """Lists placements of two neighbours of n and m ranks the other way round: first `inner`'s, then `outer`'s.

    None where no placements say the same in that order: where a cut of `inner` runs across blocks of `outer`.
    """
    if not (outer.is_shard and inner.is_shard and outer.dim == inner.dim):
        return inner, outer
    pairs = [_swap(x, n, y, m) for x, y in _aligned(outer, n, inner)]
    if not pairs or any(pair is None for pair in pairs):
        return None
    first, second = zip(*(pair for pair in pairs if pair is not None), strict=True)
    return replace(inner, pieces=pieces_of(first)), replace(outer, pieces=pieces_of(second))


def is_nested(outer: Placement, n: int, inner: Placement) -> bool:
    """Returns whether some cut of `inner` is one of `outer`'s blocks: both cut the same factor."""
    if not (outer.is_shard and inner.is_shard and outer.dim == inner.dim):
        return False
    pairs = [(x, y) for x, y in _aligned(outer, n, inner) if x.sharded and y.sharded]
    return any(share_of(replace(x, outer=1), n) == y.size for x, y in pairs)


def _aligned(outer: Placement, n: int, inner: Placement) -> list[tuple[Piece, Piece]]:
    """Returns both cuts in parts that speak of the same elements; empty where they fall apart otherwise.

    One with blocks that are not in the order of the ranks is taken as a whole, with another of a single piece.
    """
    if not (outer.in_rank_order and inner.in_rank_order):
        x, y = _one_run(outer), _one_run(inner)
        return [(x, y)] if x and y and share_of(x, n) == y.length else []
    pending, others = list(outer.pieces), list(inner.pieces)
    pairs: list[tuple[Piece, Piece]] = []
    while pending and others:
        x, y = pending.pop(0), others.pop(0)
        left, right = share_of(x, n), y.length
        if left is None:
            return []
        if left != right:
            if not isinstance(left, int) or not isinstance(right, int):
                return []
            head = _head(y, left) if left < right else _head(x, right, n)
            if head is None:
                return []
            # What is left of the longer piece meets the next piece of the other cut.
            (others if left < right else pending).insert(0, head[1])
            x, y = (x, head[0]) if left < right else (head[0], y)
        pairs.append((x, y))
    return [] if pending or others else pairs


def _one_run(cut: Placement) -> Piece | None:
    """Returns the cut as one piece: its only one, or runs of segments of which some are reversed."""
    if cut.in_rank_order or len(cut.pieces) == 1:
        return cut.piece
    return Piece(1, simplify(sum(piece.length for piece in cut.pieces)), segments=cut.pieces)


def _head(piece: Piece, length: int, n: int = 0) -> tuple[Piece, Piece] | None:
    """Returns the first elements of a piece, and the others, cut between two runs.

    Args:
        length: of the first part, as a rank of n holds it; of n = 0 the whole's.
    """
    if piece.padded:
        return None
    if not piece.sharded:
        return replace(piece, size=length), replace(piece, size=simplify(piece.size - length))
    run = share_of(replace(piece, outer=1), n) if n else piece.size
    runs = None if run is None else divide(length, run)
    return None if runs is None else (replace(piece, outer=runs), replace(piece, outer=simplify(piece.outer - runs)))


def _swap(x: Piece, n: int, y: Piece, m: int) -> tuple[Piece, Piece] | None:
    """Computes `swapped` for two pieces of the same elements."""
    if x.padded or y.padded:
        return None
    if not x.sharded:
        size = share_of(y, m)
        return None if size is None else (y, replace(x, size=size))
    if not y.sharded:
        return Piece(1, x.length, False), x
    block = share_of(replace(x, outer=1), n)
    if block is None:
        return None
    blocks, parts = n // x.copies, m // y.copies
    if divide(block, y.size) is not None:  # runs of y lie in blocks of x
        if x.segments:  # of several sizes
            return None
        size = divide(x.size, parts)
        return None if size is None else (replace(y, outer=simplify(y.outer * blocks)), replace(x, size=size))
    runs = divide(y.size, block)  # runs of y are several of x
    share = None if runs is None else divide(x.outer, parts)
    if runs is None or share is None or divide(runs, parts) is None or y.segments:
        return None
    return replace(y, size=simplify(y.size * blocks)), replace(x, outer=share)


# ---------------------------------------------------------------------- all axes


def _to_front(entries: Sequence[Entry], index: int, axes: Mapping[str, int]) -> list[Entry] | None:
    """Returns the same layout with one of its axes listed first; None where the order has a meaning."""
    result = list(entries)
    for place in range(index, 0, -1):
        (outer, x), (inner, y) = result[place - 1], result[place]
        pair = swapped(x, axes[outer], y, axes[inner])
        if pair is None:
            return None
        result[place - 1 : place + 1] = [(inner, pair[0]), (outer, pair[1])]
    return result


def listed(layout: Layout, axes: Mapping[str, int], order: Sequence[str]) -> Layout | None:
    """Returns the same layout with its axes in a given order; None where no placements say the same in that order."""
    if all(not placement.is_shard for _, placement in layout):
        return Layout(tuple((axis, layout.on(axis)) for axis in order))
    rest, ordered = list(layout), []
    for axis in order:
        moved = _to_front(rest, [name for name, _ in rest].index(axis), axes)
        if moved is None:
            return None
        ordered.append(moved[0])
        rest = moved[1:]
    return Layout(tuple(ordered))


def spelled(layout: Layout, axes: Mapping[str, int]) -> Layout:
    """Returns the layout as it is written: nested axes after those whose blocks they cut, else in the order of `axes`.

    Args:
        axes: sizes of the mesh axes, the outermost first.
    """
    cuts = [placement.dim for _, placement in layout if placement.is_shard]
    # Axes that cut different dimensions commute. Nearly all layouts end here, without the search below.
    if len(set(cuts)) == len(cuts):
        return Layout(tuple((axis, placement) for axis in axes for name, placement in layout if name == axis))
    rest, ordered = list(layout), []
    while rest:
        names = [name for name, _ in rest]
        ranked = [names.index(axis) for axis in axes if axis in names]
        fronts = [moved for index in ranked if (moved := _front(rest, index, axes)) is not None]
        # Where axes are nested in one another by parts there is no such front: the order of the mesh then.
        moved = next(iter(fronts), None) or next(m for i in ranked if (m := _to_front(rest, i, axes)) is not None)
        ordered.append(moved[0])
        rest = moved[1:]
    return Layout(tuple(ordered))


def _front(entries: Sequence[Entry], index: int, axes: Mapping[str, int]) -> list[Entry] | None:
    """Does as `_to_front`, where the axis is nested in none of the others."""
    moved = _to_front(entries, index, axes)
    if moved is None:
        return None
    (axis, front), rest = moved[0], moved[1:]
    for place in range(len(rest)):
        behind = _to_front(rest, place, axes)
        if behind is None:
            continue
        other, placement = behind[0]
        pair = swapped(front, axes[axis], placement, axes[other])
        within = pair is not None and is_nested(pair[0], axes[other], pair[1])
        if within and not is_nested(front, axes[axis], placement):
            return None
    return moved


def innermost(layout: Layout, axes: Mapping[str, int], names: Sequence[str]) -> Layout | None:
    """Returns the layout with some axes listed last, in that order; None where no placements say the same."""
    return listed(layout, axes, [axis for axis, _ in layout if axis not in names] + list(names))


def common_order(layouts: Sequence[Layout], axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns an order in which all layouts can be listed, the mesh's if possible; None where there is none."""
    orders = [tuple(axes), *(tuple(axis for axis, _ in layout) for layout in layouts)]
    for order in dict.fromkeys(orders):
        if all(listed(layout, axes, order) is not None for layout in layouts):
            return order
    return None


def joined(outer: Placement, n: int, inner: Placement) -> Placement | None:
    """Joins nested cuts over all their ranks: `dp:S(0) tp:S(0)` is `S(0)` over dp·tp; None where they are not one."""
    if not (outer.is_shard and inner.is_shard and outer.dim == inner.dim):
        return None
    pairs = _aligned(outer, n, inner)
    alike = [
        (x.is_plain and y.is_plain and share_of(replace(x, outer=1), n) == y.size) or not (x.sharded or y.sharded)
        for x, y in pairs
    ]
    return replace(outer, pieces=pieces_of([x for x, _ in pairs])) if alike and all(alike) else None


def joined_cut(layout: Layout, axes: Mapping[str, int], names: Sequence[str]) -> Placement | None:
    """Returns the cut of several axes that a layout lists last as one over all their ranks; None where it is none."""
    cut, ranks = layout.on(names[0]), axes[names[0]]
    for axis in names[1:]:
        whole = joined(cut, ranks, layout.on(axis))
        if whole is None:
            return None
        cut, ranks = whole, ranks * axes[axis]
    return cut
