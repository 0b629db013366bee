"""Several axes on one value, against a brute-force map from ranks to the elements that they hold."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.layout.layout import I, Layout, P, Piece, Placement, R, fits, padded_shard, shard
from fxpar.layout.nesting import (
    common_order,
    innermost,
    is_nested,
    joined_cut,
    listed,
    local_shape,
    misfit,
    peel,
    pieces_of,
    seen_by,
    spelled,
    swapped,
)
from fxpar.layout.shards import block, boxes, counted, local_block, whole, without_padding
from fxpar.layout.symbolic_sizes import Size, parse_size
from fxpar.ops.collectives import all_to_all, coercion
from fxpar.testing.ranks import local_positions

AXES = {"dp": 2, "cp": 3, "tp": 2}
Map = Mapping[tuple[int, ...], tuple[int, ...]]


def places(axes: Mapping[str, int]) -> list[dict[str, int]]:
    """The coordinates of all ranks."""
    return [dict(zip(axes, index, strict=True)) for index in itertools.product(*(range(n) for n in axes.values()))]


def elements(layout: Layout, size: int, axes: Mapping[str, int] = AXES) -> Map:
    """What every rank holds of a dimension, counted out by the definition of a piece, axis by axis."""
    found = {}
    for place in places(axes):
        own = list(range(size))
        for axis, placement in layout:
            if placement.is_shard:
                own = [own[position] for position in local_positions(placement, axes[axis], place[axis])]
        found[tuple(place.values())] = tuple(own)
    return found


@st.composite
def runs(draw: st.DrawFn, outer: int, size: int, n: int) -> Piece:
    """Runs of that size; their blocks may go to the ranks in reverse, and they may consist of two segments."""
    kind = draw(st.sampled_from(["plain", "plain", "reversed", "segments"]))
    if kind == "segments" and size > n:
        first = n * draw(st.integers(1, size // n - 1))
        return Piece(outer, size, segments=(Piece(1, first), Piece(1, size - first, reversed=True)))
    return Piece(outer, size, reversed=kind == "reversed")


@st.composite
def cuts(draw: st.DrawFn, size: int, n: int) -> Placement:
    """A cut of a dimension into up to two segments, of which some may be whole or shared; or R."""
    first = draw(st.sampled_from([size, size, size // 2, size // 3])) or size
    pieces = []
    for length in [first, size - first] if first < size else [size]:
        outers = [o for o in range(1, length + 1) if length % o == 0 and (length // o) % n == 0]
        if not outers or draw(st.integers(0, 7)) == 0:
            pieces.append(Piece(1, length, False))
        else:
            outer = draw(st.sampled_from(outers))
            pieces.append(draw(runs(outer, length // outer, n)))
    found = Placement("S", 0, pieces_of(pieces))
    return found if fits(found, (size,), n) else R


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, Layout]:
    """A layout of one dimension, its axes in any order."""
    size = draw(st.sampled_from([8, 12, 24, 36, 48, 72]))
    seen: tuple[Any, ...] = (size,)
    entries: list[tuple[str, Placement]] = []
    for axis in draw(st.permutations(list(AXES))):
        cut = draw(cuts(int(seen[0]), AXES[axis])) if draw(st.booleans()) else R
        entries.append((axis, cut))
        seen = peel(seen, cut, AXES[axis])
    return size, Layout(tuple(entries))


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_blocks_boxes_and_local_shapes_are_the_elements_counted_out(case: tuple[int, Layout]) -> None:
    size, layout = case
    numbers, stands = torch.arange(size), torch.zeros(size, dtype=torch.int64)
    for place in places(AXES):
        mine = elements(layout, size)[tuple(place.values())]
        assert tuple(local_block(numbers, layout, AXES, place).tolist()) == mine
        assert local_shape((size,), layout, AXES) == (len(mine),)
        part = torch.tensor(mine, dtype=torch.int64)
        for box in boxes((size,), layout, AXES, place):
            assert torch.equal(numbers[box.slices], box.within(part))
            if box.stands and not any(place[axis] for axis, cut in layout if not cut.is_shard):
                stands[box.slices] += 1
    assert stands.tolist() == [1] * size, "each element is one rank's to write"


@settings(max_examples=300, deadline=None)
@given(layouts(), st.permutations(list(AXES)))
def test_another_order_says_the_same_and_has_the_same_spelling(case: tuple[int, Layout], order: Sequence[str]) -> None:
    size, layout = case
    one = spelled(layout, AXES)
    assert elements(one, size) == elements(layout, size)
    assert spelled(one, AXES) == one
    other = listed(layout, AXES, order)
    if other is not None:
        assert [axis for axis, _ in other] == list(order)
        assert elements(other, size) == elements(layout, size)
        assert spelled(other, AXES) == one
        assert common_order([layout, other], AXES) is not None


@settings(max_examples=200, deadline=None)
@given(layouts(), st.sampled_from(list(AXES)))
def test_a_gather_of_what_is_listed_last_leaves_the_others_as_they_are(case: tuple[int, Layout], axis: str) -> None:
    """The blocks that the ranks of one axis hold, put together, are what the layout without that axis says."""
    size, layout = case
    last = innermost(layout, AXES, [axis])
    if last is None:
        return
    parts = elements(layout, size)
    without = elements(last.with_(axis, R), size)
    index = list(AXES).index(axis)
    for place, mine in without.items():
        group = [parts[(*place[:index], rank, *place[index + 1 :])] for rank in range(AXES[axis])]
        blocks = [torch.tensor(block, dtype=torch.int64) for block in group]
        assert tuple(whole(blocks, last.on(axis)).tolist()) == mine


def layout_of(**placements: Placement) -> Layout:
    return Layout(tuple(placements.items()))


def cut(*pieces: Piece) -> Placement:
    return Placement("S", 0, pieces)


TWO = {"dp": 2, "tp": 2}


def test_nested_cuts_keep_their_order_and_others_have_the_mesh_s() -> None:
    outer, inner = layout_of(dp=shard(0, 8), tp=shard(0, 4)), layout_of(tp=shard(0, 8), dp=shard(0, 4))
    assert spelled(outer, TWO) == outer
    assert spelled(inner, TWO) == inner
    assert elements(outer, 8, TWO)[0, 1] == (2, 3)
    assert elements(inner, 8, TWO)[0, 1] == (4, 5)
    # The same as the second, told otherwise: dp cuts the blocks of tp.
    assert spelled(layout_of(dp=cut(Piece(2, 4)), tp=shard(0, 4)), TWO) == inner
    assert spelled(layout_of(tp=shard(1, 6), dp=shard(0, 4)), TWO) == layout_of(dp=shard(0, 4), tp=shard(1, 6))


def test_the_batch_and_the_sequence_of_a_flattened_dimension_commute() -> None:
    b, s = parse_size("b"), parse_size("s")
    dp, tp = cut(Piece(1, 4 * b * s)), cut(Piece(b, 2 * s))
    assert swapped(dp, 2, tp, 2) == (cut(Piece(2 * b, 2 * s)), cut(Piece(1, 2 * b * s)))
    assert not is_nested(dp, 2, tp)
    assert seen_by(layout_of(dp=dp, tp=tp), (4 * b * s,), TWO)["tp"] == (2 * b * s,)
    assert innermost(layout_of(dp=dp, tp=tp), TWO, ["dp"]) == layout_of(
        tp=cut(Piece(2 * b, 2 * s)), dp=cut(Piece(1, 2 * b * s))
    )


def test_blocks_that_ranks_share_are_counted_once() -> None:
    shared = cut(Piece(3, 4, copies=2))
    assert swapped(shard(0, 24), 2, shared, 4) == (cut(Piece(6, 4, copies=2)), shard(0, 12))
    assert swapped(cut(Piece(1, 24, copies=2)), 4, cut(Piece(3, 4)), 2) == (
        cut(Piece(6, 4)),
        cut(Piece(1, 12, copies=2)),
    )


def test_a_cut_across_blocks_cannot_be_told_the_other_way_round() -> None:
    assert swapped(cut(Piece(1, 8), Piece(1, 4)), 2, shard(0, 6), 3) is None
    assert swapped(cut(Piece(6, 4)), 2, cut(Piece(2, 6)), 2) is None, "halves of three blocks"
    layout = layout_of(tp=cut(Piece(1, 8), Piece(1, 4)), cp=shard(0, 6))
    assert listed(layout, {"cp": 3, "tp": 2}, ["cp", "tp"]) is None
    assert spelled(layout, {"cp": 3, "tp": 2}) == layout
    assert common_order([layout, layout_of(cp=shard(0, 12), tp=shard(0, 4))], {"cp": 3, "tp": 2}) == ("tp", "cp")


def test_two_nested_cuts_in_the_order_of_the_ranks_are_one() -> None:
    assert joined_cut(layout_of(dp=shard(0, 8), tp=shard(0, 4)), TWO, ["dp", "tp"]) == shard(0, 8)
    assert joined_cut(layout_of(dp=cut(Piece(2, 4)), tp=shard(0, 4)), TWO, ["dp", "tp"]) is None
    assert joined_cut(layout_of(dp=shard(0, 8), tp=shard(1, 4)), TWO, ["dp", "tp"]) is None


def test_a_padded_dimension_is_cut_by_one_axis() -> None:
    padded = padded_shard(0, 7, 2)
    assert misfit(layout_of(dp=I, tp=padded), (7,), TWO) == ""
    assert misfit(layout_of(dp=shard(1, 4), tp=padded), (7, 4), TWO) == ""
    assert misfit(layout_of(dp=shard(0, 8), tp=padded_shard(0, 4, 3)), (8,), {"dp": 2, "tp": 3}) == "tp"
    assert misfit(layout_of(dp=shard(0, 7), tp=P), (7,), TWO) == "dp"


@pytest.mark.parametrize("layout", [layout_of(dp=shard(1, 6), tp=padded_shard(0, 7, 2))], ids=str)
def test_parts_less_their_padding_are_the_whole(layout: Layout) -> None:
    x = torch.arange(42).reshape(7, 6)
    rows = []
    for dp in range(2):
        parts = []
        for tp in range(2):
            place = {"dp": dp, "tp": tp}
            parts.append(without_padding(local_block(x, layout, TWO, place), layout, TWO, place))
        rows.append(torch.cat(parts, 0))
    assert torch.equal(torch.cat(rows, 1), x)
    assert counted(x, R, 2, 0) == [x]


# Rows routed to experts as a layout (DESIGN section 3): from the ranks that have them to those of their experts.


# [source rank, expert, slot, h]; slots are as many as a bound says, or a symbol of which no input is as long.
SOURCES, EXPERTS, WIDTH = 4, 8, 3


@pytest.mark.parametrize("slots", [5, parse_size("slots"), parse_size("2*slots + 1")], ids=str)
def test_dispatch_takes_rows_from_their_sources_to_their_experts(slots: Size) -> None:
    axes = {"ep": SOURCES, "etp": 2}
    shape = (SOURCES, EXPERTS, slots, WIDTH)
    sent, received = (Layout.of({"ep": shard(dim, shape[dim]), "etp": R}) for dim in (0, 1))
    assert misfit(sent, shape, axes) == misfit(received, shape, axes) == ""
    assert local_shape(shape, sent, axes) == (1, EXPERTS, slots, WIDTH)
    assert local_shape(shape, received, axes) == (SOURCES, EXPERTS // SOURCES, slots, WIDTH)
    assert spelled(received, axes) == received
    for source, target in ((sent, received), (received, sent)):  # dispatch and combine
        row = coercion(source.on("ep"), target.on("ep"))
        assert row is not None
        assert row.operator is all_to_all


def test_dispatch_in_numbers() -> None:
    """Every rank sends each other one the rows of its experts, and has the experts' rows by source."""
    rows = torch.arange(SOURCES * EXPERTS * 5 * WIDTH).view(SOURCES, EXPERTS, 5, WIDTH)
    sent = [block(rows, shard(0, SOURCES), SOURCES, rank) for rank in range(SOURCES)]
    exchanged = [torch.cat([part.chunk(SOURCES, 1)[rank] for part in sent]) for rank in range(SOURCES)]
    for rank, own in enumerate(exchanged):
        assert torch.equal(own, block(rows, shard(1, EXPERTS), SOURCES, rank))
    assert torch.equal(whole(exchanged, shard(1, EXPERTS)), rows)
