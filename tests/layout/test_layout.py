"""The arithmetic of shards against counting: which positions does each rank hold?

The counting (`held`) is the oracle's and uses nothing of `fxpar.layout`.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.errors import TextError
from fxpar.layout.layout import I, Layout, P, Piece, Placement, R, V, fits, parse_placement, shard
from fxpar.layout.nesting import local_shape, local_size, pieces_of, through_view
from fxpar.layout.shards import local_bounds, local_position, slice_pieces, strided_pieces
from fxpar.layout.symbolic_sizes import Size, divide, evaluate, parse_size
from fxpar.testing.ranks import divides, local_positions

counted = settings(max_examples=200, deadline=None, derandomize=True)

RANKS = st.sampled_from([2, 3])


@st.composite
def runs(draw: st.DrawFn, n: int, in_order: bool) -> Piece:
    """Runs that n divides; their blocks may go to the ranks in reverse, and they may consist of segments."""
    run = Piece(draw(st.integers(1, 3)), n * draw(st.integers(1, 4)), reversed=not in_order and draw(st.booleans()))
    if in_order or draw(st.integers(0, 2)):
        return run
    segments = (replace(run, reversed=True), *draw(st.lists(runs(n, True), max_size=2)))
    return Piece(draw(st.integers(1, 3)), length(segments), segments=segments)


@st.composite
def cuts(draw: st.DrawFn, n: int, most: int = 4, in_order: bool = False) -> tuple[Piece, ...]:
    """Pieces of which n divides the sharded runs, in no canonical form; at least one is sharded."""
    found = [
        draw(runs(n, in_order)) if draw(st.booleans()) else Piece(1, draw(st.integers(1, 8)), False)
        for _ in range(draw(st.integers(0, most - 1)))
    ]
    found.insert(draw(st.integers(0, len(found))), draw(runs(n, in_order)))
    return tuple(found)


def length(pieces: Sequence[Piece]) -> int:
    return sum(int(p.outer) * int(p.size) for p in pieces)


def parts(pieces: Sequence[Piece], n: int) -> list[list[int]]:
    """The positions of all ranks."""
    return [local_positions(Placement("S", 0, tuple(pieces)), n, rank) for rank in range(n)]


def inside(pieces: Sequence[Piece], position: int) -> bool:
    """Whether a position lies inside a sharded run, not between two."""
    start = 0
    for piece in pieces:
        end = start + int(piece.length)
        if start < position < end and piece.sharded:
            return (position - start) % int(piece.size) != 0
        start = end
    return False


@counted
@given(st.data(), RANKS)
def test_canonical_pieces_hold_the_same(data: st.DataObject, n: int) -> None:
    pieces = data.draw(cuts(n))
    merged = pieces_of(pieces)
    assert parts(merged, n) == parts(pieces, n)
    assert pieces_of(merged) == merged
    assert pieces_of([*merged, Piece(0, n)]) == merged


@counted
@given(st.data(), RANKS)
def test_local_size_is_the_number_of_held_positions(data: st.DataObject, n: int) -> None:
    pieces = data.draw(cuts(n))
    placement = Placement("S", 0, pieces)
    for mine in parts(pieces, n):
        assert local_size(placement, n) == len(mine)


@counted
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12), st.booleans()), min_size=1, max_size=3), RANKS)
def test_fits_is_divisibility_of_every_run(raw: list[tuple[int, int, bool]], n: int) -> None:
    pieces = tuple(Piece(outer, size, is_cut) for outer, size, is_cut in raw)
    placement = Placement("S", 1, pieces)
    expected = divides(placement, (5, length(pieces)), n) and any(p.sharded for p in pieces)
    assert fits(placement, (5, length(pieces)), n) == expected
    assert not fits(placement, (5, length(pieces) + n), n)
    assert not fits(placement, (length(pieces),), n)


@counted
@given(st.data(), RANKS)
def test_slices_hold_what_lies_between_their_bounds(data: st.DataObject, n: int) -> None:
    pieces = data.draw(cuts(n))
    start, stop = sorted((data.draw(st.integers(0, length(pieces))), data.draw(st.integers(0, length(pieces)))))
    found = slice_pieces(pieces, start, stop)
    if start < stop and (inside(pieces, start) or inside(pieces, stop)):
        assert found is None
        return
    if found is None:
        assert start == stop
        return
    assert length(found) == stop - start
    assert parts(found, n) == [[p - start for p in mine if start <= p < stop] for mine in parts(pieces, n)]
    bounds = local_bounds(pieces, start, stop, 1, n) if start < stop else (0, 0)
    for mine in parts(pieces, n):
        assert mine[slice(*bounds)] == [p for p in mine if start <= p < stop]


@counted
@given(st.data(), RANKS, st.integers(2, 3))
def test_strides_pick_the_same_of_every_part(data: st.DataObject, n: int, step: int) -> None:
    pieces = tuple(
        Piece(p.outer, int(p.size) * data.draw(st.sampled_from([1, step])), p.sharded) for p in data.draw(cuts(n, 2))
    )
    total = length(pieces)
    start, stop = data.draw(st.integers(0, total - 1)), data.draw(st.integers(1, total))
    found = strided_pieces(pieces, start, stop, step, n)
    if found is None:
        return
    wanted = list(range(start, stop, step))
    assert length(found) == len(wanted)
    assert parts(found, n) == [[wanted.index(p) for p in mine if p in wanted] for mine in parts(pieces, n)]
    low, high = local_bounds(pieces, start, stop, step, n)
    for mine in parts(pieces, n):
        assert mine[low:high:step] == [p for p in mine if p in wanted]


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (1, 12), (0, 11), (1, 11)])
def test_interleaved_halves_of_a_plain_shard(start: int, stop: int) -> None:
    whole = start + 2 * len(range(start, stop, 2)) >= 12
    assert strided_pieces((Piece(1, 12),), start, stop, 2, 3) == ((Piece(1, 6),) if whole else None)
    assert strided_pieces((Piece(1, 12),), start, stop, 2, 4) is None


@counted
@given(st.data(), RANKS)
def test_local_positions_count_what_is_held_before(data: st.DataObject, n: int) -> None:
    pieces = data.draw(cuts(n))
    for position in range(length(pieces) + 1):
        if inside(pieces, position):
            with pytest.raises(ValueError, match=f"position {position} lies inside"):
                local_position(pieces, position, n)
        else:
            for mine in parts(pieces, n):
                assert local_position(pieces, position, n) == sum(p < position for p in mine)


@counted
@given(st.data(), RANKS)
def test_text_comes_back(data: st.DataObject, n: int) -> None:
    pieces = pieces_of(data.draw(cuts(n)))
    shape = (5, length(pieces))
    placement = Placement("S", 1, pieces)
    assert parse_placement(str(placement), shape) == placement


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("I", None),
        ("R", ""),
        ("P", "4"),
        ("V", ""),
        ("S(0)", "4*s"),
        ("S(1)", "b 4*s"),
        ("S(0: b x 2*s)", "2*b*s"),
        ("S(2: 3 x 96)", "b s 288"),
        ("S(0: 96 | !48 | 2 x 24)", "192"),
        ("S(0: 2*b + 1 x s**2)", "2*b*s**2+s**2"),
    ],
)
def test_symbolic_text_comes_back(text: str, shape: str | None) -> None:
    sizes = None if shape is None else tuple(parse_size(size) for size in shape.split())
    assert str(parse_placement(text, sizes)) == text


@pytest.mark.parametrize(
    ("text", "shape"),
    [("", (4,)), ("S", (4,)), ("S(0)", None), ("S(1)", (4,)), ("S(-1)", (4,)), ("X(0)", (4,)), ("S(0: a b)", (4,))],
)
def test_text_that_is_no_placement(text: str, shape: tuple[int, ...] | None) -> None:
    with pytest.raises(TextError, match=r"is not a (layout|size)"):
        parse_placement(text, shape)


# Views. A view keeps the flat order of what a rank holds, so a placement after it is right where both number the same
# elements in the same order, on every rank.


def flat(placement: Placement, shape: Sequence[int], n: int) -> list[list[int]]:
    """The global element numbers of every rank, in the order in which it holds them."""
    numbers = torch.arange(math.prod(shape)).view(*shape)
    return [
        numbers.index_select(placement.dim, torch.tensor(mine)).flatten().tolist() for mine in parts_of(placement, n)
    ]


def parts_of(placement: Placement, n: int) -> list[list[int]]:
    return [local_positions(placement, n, rank) for rank in range(n)]


def single_shards(shape: Sequence[int], n: int) -> list[Placement]:
    """Every shard of one piece."""
    return [
        Placement("S", dim, (Piece(outer, size // outer),))
        for dim, size in enumerate(shape)
        for outer in range(1, size + 1)
        if size % outer == 0 and size // outer % n == 0
    ]


@st.composite
def reshapes(draw: st.DrawFn, most: int = 200) -> tuple[list[int], list[int]]:
    """Two shapes of the same elements: the same factors grouped in two ways, or in another order."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=6))
    while math.prod(factors) > most:
        factors.pop()
    other = list(draw(st.permutations(factors))) if draw(st.booleans()) else factors

    def grouped(items: list[int]) -> list[int]:
        edges = sorted(draw(st.lists(st.integers(0, len(items)), max_size=3)))
        return [math.prod(items[a:b]) for a, b in itertools.pairwise([0, *edges, len(items)])]

    return grouped(factors), grouped(other)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(reshapes(), RANKS)
def test_views_of_one_piece(shapes: tuple[list[int], list[int]], n: int) -> None:
    source, target = shapes
    candidates = single_shards(target, n)
    after = [flat(placement, target, n) for placement in candidates]
    for placement in single_shards(source, n):
        before = flat(placement, source, n)
        right = [c for c, numbers in zip(candidates, after, strict=True) if numbers == before]
        found = through_view(placement, source, target, n)
        if found is None:
            assert right == []
        else:
            assert fits(found, target, n)
            assert flat(found, target, n) == before


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data(), st.lists(st.integers(1, 3), max_size=2), st.lists(st.integers(1, 4), max_size=2), RANKS)
def test_views_of_segments(data: st.DataObject, lead: list[int], rest: list[int], n: int) -> None:
    unit = math.prod(rest)
    pieces = pieces_of(data.draw(cuts(n, 3, in_order=True)))
    wide = pieces_of([Piece(p.outer, int(p.size) * unit, p.sharded) for p in pieces])
    leads = data.draw(st.sampled_from([lead, [math.prod(lead)], [1, *lead, 1]]))
    split, merged = [*lead, length(pieces), *rest], [*leads, length(pieces) * unit]
    there = through_view(Placement("S", len(lead), pieces), split, merged, n)
    back = through_view(Placement("S", len(leads), wide), merged, split, n)
    assert there == Placement("S", len(leads), wide)
    assert back == Placement("S", len(lead), pieces)
    assert flat(there, merged, n) == flat(back, split, n)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data(), reshapes(), RANKS)
def test_any_view_of_segments_is_right_or_refused(
    data: st.DataObject, shapes: tuple[list[int], list[int]], n: int
) -> None:
    pieces = pieces_of(data.draw(cuts(n, 3)))
    (source, target), dim = shapes, data.draw(st.integers(0, 9)) % len(shapes[0])
    where = data.draw(st.integers(0, 9)) % len(target)
    if target[where] % source[dim]:
        return
    total = length(pieces)
    source = [*source[:dim], total, *source[dim + 1 :]]
    target = [*target[:where], target[where] // shapes[0][dim] * total, *target[where + 1 :]]
    found = through_view(Placement("S", dim, pieces), source, target, n)
    if found is not None:
        assert fits(found, target, n)
        assert flat(found, target, n) == flat(Placement("S", dim, pieces), source, n)


@st.composite
def symbolic_reshapes(draw: st.DrawFn) -> tuple[list[Size], list[Size]]:
    """Two shapes whose dimensions are products of numbers and of the symbols b and s."""
    factors = draw(st.permutations(["b", "s", "2*s", "6", "3", "2"]))[: draw(st.integers(2, 5))]

    def grouped() -> list[Size]:
        edges = sorted(draw(st.sets(st.integers(1, len(factors) - 1), max_size=3)))
        groups = [factors[a:b] for a, b in itertools.pairwise([0, *edges, len(factors)])]
        return [parse_size("*".join(group)) for group in groups]

    return grouped(), grouped()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(symbolic_reshapes(), RANKS)
def test_symbolic_views_are_right_for_every_value(shapes: tuple[list[Size], list[Size]], n: int) -> None:
    source, target = shapes
    for dim, size in enumerate(source):
        for outer in map(parse_size, ("1", "2", "3", "b", "s", "2*s")):
            run = divide(size, outer)
            if run is None or divide(run, n) is None:
                continue
            placement = Placement("S", dim, (Piece(outer, run),))
            found = through_view(placement, source, target, n)
            numbers = [{"b": 5, "s": 7}, {"b": 1, "s": 1}, {"b": 2, "s": 3}]
            if found is None:  # nor is there one for symbols of which n divides nothing
                values = numbers[0]
                old, new = [evaluate(v, values) for v in source], [evaluate(v, values) for v in target]
                assert through_view(numeric(placement, values), old, new, n) is None
                continue
            for values in numbers:
                before, after = numeric(placement, values), numeric(found, values)
                old, new = [evaluate(v, values) for v in source], [evaluate(v, values) for v in target]
                assert divides(after, new, n)
                assert flat(after, new, n) == flat(before, old, n)


def numeric(placement: Placement, values: dict[str, int]) -> Placement:
    pieces = [Piece(evaluate(p.outer, values), evaluate(p.size, values), p.sharded) for p in placement.pieces]
    return Placement("S", placement.dim, tuple(pieces))


@pytest.mark.parametrize(
    ("source", "before", "target", "after"),
    [
        ("b 2*s 96", "S(1)", "2*b*s 96", "S(0: b x 2*s)"),
        ("2*b*s 96", "S(0: b x 2*s)", "b 2*s 96", "S(1)"),
        ("b 2*s 8 12", "S(2)", "b 2*s 96", "S(2)"),
        ("b s 8 12", "S(2)", "b*s 96", "S(1)"),
        ("b 8 s 12", "S(1)", "8*b s 12", "S(0: b x 8)"),
        ("b s 3 96", "S(3)", "b s 288", "S(2: 3 x 96)"),
        ("b s 288", "S(2: 3 x 96)", "b*s 288", "S(1: 3 x 96)"),
        ("b s 288", "S(2: 192 | !96)", "b*s 288", "S(1: 192 | !96)"),
        ("b s 24 12", "S(2: 16 | !8)", "b s 288", "S(2: 192 | !96)"),
        ("2*b s", "S(0)", "2*b*s", "S(0)"),
        ("b s 96", "S(2)", "b*s*96", "S(0: b*s x 96)"),
        ("b s 96", "S(2)", "s b 96", "S(2)"),
        ("b 2*s 96", "S(1)", "2*s b 96", None),
        ("b s 96", "S(2)", "b s 3 32", None),
        ("b s 288", "S(2: 192 | !96)", "b s 2 144", None),
        ("b s 288", "S(2: 192 | !96)", "b*s*288", None),
    ],
)
def test_views_of_a_transformer(source: str, before: str, target: str, after: str | None) -> None:
    old, new = (tuple(parse_size(size) for size in shape.split()) for shape in (source, target))
    found = through_view(parse_placement(before, old), old, new, 2)
    assert (None if found is None else str(found)) == after


def test_local_shapes_of_several_axes() -> None:
    layout = Layout.of({"dp": shard(0, parse_size("4*b")), "tp": shard(2, 96), "cp": shard(2, 48)})
    shape = (parse_size("4*b"), parse_size("s"), 96)
    assert local_shape(shape, layout, {"dp": 4, "tp": 2, "cp": 3}) == (parse_size("b"), parse_size("s"), 16)
    assert local_shape((12, 6), Layout.of({"tp": Placement("S", 0, (Piece(1, 8), Piece(1, 4, False)))}), {"tp": 2}) == (
        8,
        6,
    )
    with pytest.raises(ValueError, match="96 is not divisible by 5"):
        local_shape(shape, Layout.of({"tp": shard(2, 96)}), {"tp": 5})
    with pytest.raises(ValueError, match="3 is not divisible by 2"):
        local_size(Placement("S", 0, (Piece(1, 3), Piece(1, 4, False))), 2)


def test_layouts_are_values() -> None:
    layout = Layout.of({"tp": I, "dp": R})
    assert str(layout.with_("tp", shard(1, 8))) == "tp:S(1) dp:R"
    assert layout.on("tp") == I
    assert dict(layout.with_("cp", P)) == {"tp": I, "dp": R, "cp": P}
    assert str(V) == "V"
    with pytest.raises(KeyError):
        layout.on("pp")
    assert len({layout, Layout.of({"tp": I, "dp": R})}) == 1
    assert shard(1, 8).at(0) == shard(0, 8)
    assert shard(1, 8).piece == Piece(1, 8)
    assert I.piece is None
