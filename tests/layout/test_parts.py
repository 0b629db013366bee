"""The dense and the expert part: a layout in the axes of the other one, against a map from ranks to elements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.errors import LayoutError
from fxpar.layout.layout import I, Layout, P, Piece, Placement, R, V, fits, padded_shard, shard
from fxpar.layout.nesting import peel, spelled
from fxpar.layout.parts import in_part
from fxpar.layout.pieces import pieces_of
from fxpar.layout.symbols import parse_size
from fxpar.mesh.mesh import Mesh
from fxpar.mesh.purpose import DENSE, EXPERT
from fxpar.oracle.ranks import held

MESHES = [
    Mesh(tp=2, dp=4, ep=4, etp=1),
    Mesh(tp=2, dp=4, ep=2),
    Mesh(tp=4, dp=2, ep=2, etp=2),
    Mesh(tp=2, cp=2, dp=2, ep=4, etp=1),
    Mesh(tp=2, cp=2, dp=2, ep=2),
    Mesh(tp=2, cp=2, dp=2, ep=2, order="dp-tp-cp-ep-pp"),
    Mesh(tp=2, cp=3, dp=2, ep=2, etp=3, order="cp-tp-ep-dp-pp"),
    Mesh(tp=4, dp=3, pp=2, ep=2, etp=2),
    Mesh(tp=4, dp=2, kv_heads=2, ep=2),
]
OTHER = {DENSE: EXPERT, EXPERT: DENSE}
EXAMPLES = settings(max_examples=400, deadline=None, derandomize=True)


def elements(layout: Layout, mesh: Mesh, size: int) -> list[tuple[Any, ...]]:
    """What each rank holds of a dimension and how, counted out by the definition of a piece."""
    found = []
    for rank in mesh.ranks:
        index, own = mesh.coordinates(rank), list(range(size))
        for axis, placement in layout:
            if placement.is_shard:
                own = [own[place] for place in held(placement, mesh.sizes[axis], index[axis])]
        found.append(tuple(own))
    return found


def single(size: int, n: int) -> list[Placement]:
    """All cuts of a dimension into runs of one length."""
    outers = [o for o in range(1, size + 1) if size % o == 0]
    found = [Placement("S", 0, (Piece(o, size // o),)) for o in outers]
    return [cut for cut in found if fits(cut, (size,), n)]


@st.composite
def cuts(draw: st.DrawFn, size: int, n: int) -> Placement:
    """Mostly the plain shard; else runs or two segments."""
    kind = draw(st.sampled_from(["plain", "plain", "runs", "segments", "whole"]))
    found = shard(0, size)
    if kind == "runs":
        found = draw(st.sampled_from(single(size, n) or [R]))
    elif kind == "segments":
        first = draw(st.integers(1, max(1, size // n))) * n
        found = Placement("S", 0, pieces_of([Piece(1, first), Piece(1, max(size - first, 0))]))
    return found if kind != "whole" and found.is_shard and fits(found, (size,), n) else R


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mesh, str, int, Layout]:
    mesh, part = draw(st.sampled_from(MESHES)), draw(st.sampled_from([DENSE, EXPERT]))
    axes, size = mesh.nested(OTHER[part]), draw(st.sampled_from([8, 12, 24, 48, 72]))
    seen: tuple[Any, ...] = (size,)
    entries = []
    for axis in draw(st.one_of(st.just(list(axes)), st.permutations(list(axes)))):
        entries.append((axis, draw(cuts(int(seen[0]), axes[axis]))))
        seen = peel(seen, entries[-1][1], axes[axis])
    return mesh, part, size, Layout(tuple(entries))


def candidates(mesh: Mesh, part: str, size: int) -> Iterator[Layout]:
    """Every layout of one dimension on the axes of a part, without segments."""

    def visit(rest: tuple[str, ...], length: int, entries: tuple[tuple[str, Placement], ...]) -> Iterator[Layout]:
        if not rest:
            yield Layout(entries)
            return
        n = mesh.sizes[rest[0]]
        for cut in (R, *single(length, n)):
            yield from visit(rest[1:], length // n if cut.is_shard else length, (*entries, (rest[0], cut)))

    for order in itertools.permutations(mesh.nested(part)):
        yield from visit(order, size, ())


@EXAMPLES
@given(cases())
def test_every_rank_holds_the_same_in_the_axes_of_the_other_part(case: tuple[Mesh, str, int, Layout]) -> None:
    mesh, part, size, layout = case
    try:
        found = in_part(layout, mesh, part)
    except LayoutError:
        return
    axes = mesh.nested(part)
    assert {axis for axis, _ in found} == set(axes)
    assert spelled(found, axes) == found
    assert elements(found, mesh, size) == elements(layout, mesh, size)
    assert in_part(found, mesh, OTHER[part]) == spelled(layout, mesh.nested(OTHER[part]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_exactly_what_a_layout_of_the_other_part_says_is_converted(case: tuple[Mesh, str, int, Layout]) -> None:
    mesh, part, size, layout = case
    if any(len(placement.pieces) > 1 for _, placement in layout):
        return
    wanted = elements(layout, mesh, size)
    if not any(elements(other, mesh, size) == wanted for other in candidates(mesh, part, size)):
        with pytest.raises(LayoutError, match=r"on axis \w+: "):
            in_part(layout, mesh, part)
        return
    assert elements(in_part(layout, mesh, part), mesh, size) == wanted


# ---------------------------------------------------------------------- by hand


def of(**placements: Placement) -> Layout:
    return Layout(tuple(placements.items()))


FOLDED = Mesh(tp=2, dp=4, ep=4, etp=1)  # ep is the inner atom of dp with tp inside


def test_rows_that_data_and_tensor_ranks_share_out_are_those_of_expert_ranks() -> None:
    b = parse_size("b")
    rows = of(dp=shard(0, 8 * b), tp=shard(0, 2 * b))
    assert in_part(rows, FOLDED, EXPERT) == of(edp=shard(0, 8 * b), ep=shard(0, 4 * b))
    assert in_part(in_part(rows, FOLDED, EXPERT), FOLDED, DENSE) == rows
    assert in_part(of(dp=I, tp=I), FOLDED, EXPERT) == of(edp=I, ep=I)
    assert in_part(of(edp=P, ep=P), FOLDED, DENSE) == of(dp=P, tp=P)


def test_an_axis_of_the_same_atoms_is_another_name_whatever_it_holds() -> None:
    mesh = Mesh(tp=2, dp=2)
    padded = padded_shard(0, 7, 2)
    assert in_part(of(dp=I, tp=padded), mesh, EXPERT) == of(edp=I, etp=padded)
    assert in_part(of(dp=R, tp=V), mesh, EXPERT) == of(edp=R, etp=V)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (of(dp=shard(0, 8), tp=I), "on axis ep: its ranks hold differently (dp is S(0), tp is I)"),
        (of(dp=R, tp=P), "on axis ep: its ranks hold differently (dp is R, tp is P)"),
        (of(dp=shard(0, 8), tp=shard(1, 8)), "on axis ep: its ranks hold differently (dp is S(0), tp is S(1))"),
        (
            of(tp=shard(0, 8), dp=shard(0, 4)),
            "on axis ep: its ranks are not one run of blocks (tp is S(0), dp is S(0))",
        ),
        (
            of(dp=Placement("S", 0, (Piece(1, 8), Piece(1, 4, False))), tp=R),
            "on axis dp: S(0: 8 | !4) is no plain cut over its atoms of 2 and 2 ranks",
        ),
        (of(dp=padded_shard(0, 7, 4), tp=R), "on axis dp: S(0: 7 ~ 8) is no plain cut"),
        (of(dp=I), "it does not name the axes of the other part; give a layout on the axes dp tp"),
        (of(edp=I, ep=I), "it does not name the axes of the other part"),
    ],
)
def test_what_the_other_part_cannot_say_is_refused_with_the_reason(layout: Layout, text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        in_part(layout, FOLDED, EXPERT)
    assert str(caught.value).startswith(f"'{layout}' in the expert part: {text}")
