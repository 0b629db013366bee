"""The table of coercions on two axes: what is accepted is right on the ranks of the mesh, what is refused is wrong.

Every coercion between any two layouts of a value, over either axis and over both joined, is asked for and run by the
operators of the runtime; values and gradients are compared with what the layouts mean, counted out by brute force.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.distributed._local_tensor import LocalTensor

from fxpar.errors import LayoutError
from fxpar.ir.operators import axes_of
from fxpar.ir.program import output_layouts
from fxpar.layout.layout import I, Layout, P, Piece, Placement, R, shard
from fxpar.layout.nesting import spelled
from fxpar.mesh.axes import coordinates, joined_names
from fxpar.ops.collectives import COERCION_OF, CONJUGATE, dual_layout
from fxpar.ops.lower import lower
from fxpar.ops.process_group import Group
from fxpar.plan.cost import Cost
from fxpar.rules.conversion import coerced, conversions
from fxpar.testing.trial import fits, holds, holds_gradient, spread, spread_gradient
from fxpar.text.parsing import parse_program
from fxpar.verify.simulate_ranks import RanksMode, simulated_world

SHAPE = (12, 12)
TWO, THREE = {"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}
TEXT = """fxpar 2
plan {{"dp": {dp}, "tp": {tp}}}
properties canonical collectives layouts local masks rng sequence vocabulary
%x = parameter["x"] : f64[12, 12] {source}
%y = fxpar.{operator}[{names}](%x) : f64[12, 12] {target}
return y=%y
"""
# Of a gradient, which the backward converts, and of which nothing is differentiated.
GRADIENT = TEXT.replace('parameter["x"]', 'input["x"]').replace("{target}\n", "{target} {{phase=backward}}\n", 1)
OF_GRADIENTS = ("s_to_p", "pad_shared", "reduce_from_shared")  # no value of the forward goes through them
_SHARED = (
    "copy_to_shared",
    "split_shared",
    "pad_shared",
    "reduce_from_shared",
)  # of blocks that several ranks hold (test_factored)


def layouts(axes: Mapping[str, int]) -> list[Layout]:
    """Whole on an axis, or cut plainly or in runs, the axes nested in either order."""
    found: dict[Layout, None] = {}
    for outer, inner in itertools.permutations(axes):
        for p in (I, R, P, shard(0, 12), shard(1, 12)):
            left = [12 // axes[outer] if p.is_shard and p.dim == dim else 12 for dim in range(2)]
            runs = Placement("S", 0, (Piece(2, left[0] // 2),))
            for q in (I, R, P, shard(0, left[0]), shard(1, left[1]), runs):
                layout = Layout(((outer, p), (inner, q)))
                if fits(layout, SHAPE, axes):
                    found[spelled(layout, axes)] = None
    return list(found)


def cases(axes: Mapping[str, int], known: Sequence[Layout]) -> Iterator[tuple[str, str, Layout, Layout]]:
    """Operators whose row of the table is that of the two layouts on each axis that they name."""
    rows = [row for row in COERCION_OF.values() if row.operator.__name__ not in _SHARED]
    for source, target in itertools.product(known, known):
        for names in joined_names(axes):
            kinds = {(source.on(axis).kind, target.on(axis).kind) for axis in names.split("-")}
            for row in rows:
                if kinds == {(row.source, row.target)} and source != target:
                    yield row.operator.__name__, names, source, target


class Ranks:
    """Runs coercions on all ranks of a mesh, which exist in this process alone."""

    def __init__(self, axes: Mapping[str, int], groups: Mapping[str, Group]) -> None:
        self.axes, self.groups = dict(axes), groups
        self.places = [tuple(coordinates(axes, rank).values()) for rank in range(math.prod(axes.values()))]
        self.generator = torch.Generator().manual_seed(0)
        self.x, self.g = (torch.randn(SHAPE, dtype=torch.float64, generator=self.generator) for _ in range(2))

    def local(self, parts: Mapping[tuple[int, ...], torch.Tensor]) -> LocalTensor:
        return LocalTensor({rank: parts[place].clone() for rank, place in enumerate(self.places)})

    def parts(self, value: torch.Tensor) -> dict[tuple[int, ...], torch.Tensor]:
        assert isinstance(value, LocalTensor)
        return {place: value._local_tensors[rank].detach() for rank, place in enumerate(self.places)}

    def fault(self, text: str, source: Layout, target: Layout, carries: bool = True) -> str:
        """What is wrong with a coercion of the whole `x`; empty where all ranks hold what they should.

        Args:
            carries: whether gradients are compared too.
        """
        given = spread(self.x, source, self.axes, self.generator)
        upstream = spread_gradient(self.g, target, self.axes, self.generator)
        node = parse_program(text).node("y")
        conjugate = CONJUGATE[node.target] if carries else None
        with RanksMode(len(self.places)):
            found, gradient = self._ran(text, self.local(given)), self.local(upstream)
            if found._local_tensors[0].shape != upstream[self.places[0]].shape:
                return "shapes"
            if conjugate is not None:
                words = {"operator": conjugate.__name__, "names": node.kwargs["axis"]}
                before, after = dual_layout(target), dual_layout(source)
                gradient = self._ran(GRADIENT.format(**self.axes, **words, source=before, target=after), gradient)
        if not holds(self.parts(found), target, self.axes, self.x):
            return "values"
        if not carries:
            return ""
        return "" if holds_gradient(self.parts(gradient), source, self.axes, self.g) else "gradient"

    def _ran(self, text: str, x: LocalTensor) -> Any:
        lowered = lower(parse_program(text), self.groups)
        indices = [
            LocalTensor({r: torch.tensor(p[list(self.axes).index(a)]) for r, p in enumerate(self.places)})
            for a in lowered.indices
        ]
        return lowered.module(x, *indices)[0]


@contextlib.contextmanager
def ranks_of(axes: Mapping[str, int]) -> Iterator[Ranks]:
    with simulated_world(axes) as groups:
        yield Ranks(axes, groups)


def judged(axes: Mapping[str, int], every: int, *, gradients: bool) -> tuple[int, list[str], dict[str, str]]:
    """How many are accepted, which of them are wrong, and which of every so many refused ones are right, with why.

    Args:
        gradients: whether it is gradients that are converted, by their own table; else values with a gradient.
    """
    accepted, wrong, missed = 0, list[str](), dict[str, str]()
    known = layouts(axes)
    if gradients:  # nothing carries a gradient, so that I and R are one, written R
        known = [layout for layout in known if all(placement != I for _, placement in layout)]
    with ranks_of(axes) as ranks:
        for index, (operator, names, source, target) in enumerate(cases(axes, known)):
            form = GRADIENT if gradients else TEXT
            text = form.format(**axes, operator=operator, names=names, source=source, target=target)
            node = parse_program(text).node("y")
            assert axes_of(node) == tuple(names.split("-"))
            shown = f"fxpar.{operator}[{names}] {source} to {target}"
            try:
                coerced(node, source, axes)
            except LayoutError as error:
                tried = index % every == 0 and (gradients or operator not in OF_GRADIENTS)
                if tried and not _fault(ranks, text, source, target, not gradients):
                    missed[shown] = str(error)
                continue
            accepted += 1
            fault = ranks.fault(text, source, target, not gradients)
            wrong += [f"{shown}: {fault}"] if fault else []
    return accepted, wrong, missed


def _fault(ranks: Ranks, text: str, source: Layout, target: Layout, carries: bool) -> str:
    """As `Ranks.fault`; what is refused may have no meaning for ranks."""
    try:
        return ranks.fault(text, source, target, carries)
    except (ValueError, RuntimeError, AssertionError) as error:
        return f"cannot run: {error}"


@pytest.mark.parametrize(
    ("axes", "every", "of_gradients"),
    [
        (TWO, 40, False),
        (TWO, 20, True),
        pytest.param(THREE, 40, False, marks=pytest.mark.matrix),
        *(
            pytest.param(axes, 1, of_gradients, marks=pytest.mark.matrix)
            for axes in (TWO, THREE, {"dp": 3, "tp": 2})
            for of_gradients in (False, True)
        ),
    ],
    ids=str,
)
def test_what_is_accepted_is_right_and_what_is_refused_is_wrong(
    axes: Mapping[str, int], every: int, of_gradients: bool
) -> None:
    """Gradients have a table of their own."""
    accepted, wrong, missed = judged(axes, every, gradients=of_gradients)
    assert wrong == []
    assert missed == {}
    assert accepted > (75 if of_gradients else 150)


@pytest.mark.parametrize("operator", OF_GRADIENTS)
def test_what_is_for_gradients_alone_is_refused_in_the_forward(operator: str) -> None:
    source, target = {
        "s_to_p": ("tp:S(0)", "tp:P"),
        "pad_shared": ("tp:S(0)", "tp:S(0: 12 / 2; P)"),
        "reduce_from_shared": ("tp:S(0: 12 / 2; P)", "tp:S(0: 12 / 2)"),
    }[operator]
    for form, is_right in ((TEXT, False), (GRADIENT, True)):
        text = form.format(dp=1, tp=4, operator=operator, names="tp", source=source, target=target)
        node = parse_program(text).node("y")
        (layout,) = output_layouts(node.all_input_nodes[0])
        if is_right:
            assert coerced(node, layout, {"tp": 4}) == output_layouts(node)[0]
            continue
        with pytest.raises(LayoutError):
            coerced(node, layout, {"tp": 4})


def test_a_table_that_lets_nested_cuts_pass_would_be_caught() -> None:
    """Gathering the outer of two nested cuts: the text that the check refuses is wrong on the ranks."""
    source = Layout((("dp", shard(0, 12)), ("tp", shard(0, 6))))
    target = Layout((("dp", R), ("tp", shard(0, 12))))
    text = TEXT.format(**TWO, operator="all_gather", names="dp", source=source, target=target)
    with pytest.raises(LayoutError, match="converting dp leaves it"):
        coerced(parse_program(text).node("y"), source, TWO)
    with ranks_of(TWO) as ranks:
        assert ranks.fault(text, source, target) == "values"


@pytest.mark.parametrize("axes", [TWO, pytest.param(THREE, marks=pytest.mark.matrix)], ids=str)
def test_the_way_from_one_layout_to_another_is_of_accepted_steps(axes: Mapping[str, int]) -> None:
    """And there is one between any two layouts."""
    known = layouts(axes)
    for source, target in itertools.product(known, known):
        way = conversions(source, target, axes, True, Cost())
        assert way is not None, f"{source} to {target}"
        at = source
        for step in way:
            names = "-".join(step.axes)
            operator = step.row.operator.__name__
            text = TEXT.format(**axes, operator=operator, names=names, source=at, target=step.layout)
            assert coerced(parse_program(text).node("y"), at, axes) == step.layout
            at = step.layout
        assert at == target


# The cheapest way from one layout to another, where axes have links of their own.


AXES = {"dp": 2, "tp": 4}


@pytest.mark.parametrize(("slow", "order"), [("dp", ["dp", "tp"]), ("tp", ["tp", "dp"])])
def test_the_slower_axis_sends_while_the_value_is_still_cut_on_the_other(slow: str, order: list[str]) -> None:
    source = Layout.of({"dp": shard(0, 8), "tp": shard(1, 8)})
    cost = Cost(axes={slow: {"bandwidth": 1e9}})
    way = conversions(source, Layout.of({"dp": R, "tp": R}), AXES, False, cost)
    assert way is not None
    assert [axis for step in way for axis in step.axes] == order


def test_with_equal_links_the_axis_that_leaves_less_sends_last() -> None:
    source = Layout.of({"dp": shard(0, 8), "tp": shard(1, 8)})
    for cost in (Cost(), Cost(bandwidth=1e9), Cost(axes={axis: {"bandwidth": 7.0} for axis in AXES})):
        way = conversions(source, Layout.of({"dp": R, "tp": R}), AXES, False, cost)
        assert way is not None
        assert [step.axes for step in way] == [("dp",), ("tp",)]
