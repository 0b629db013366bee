"""What the type check allows on two axes is right, in either order of nesting, and the oracle that says so can tell."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import fx

from fxpar.errors import LayoutError
from fxpar.layout.layout import I, Layout, P, Piece, Placement, R, shard
from fxpar.rules import inference, register_rule
from fxpar.signatures.op_call import OpCall
from fxpar.testing.check import OracleReport, sample
from fxpar.testing.sampled_operations import ELSEWHERE, EXEMPT, LEFT_OUT, OCCURRING, operations
from fxpar.testing.several import check_on_mesh
from fxpar.testing.trial import coordinates, fits, holds, holds_gradient, positions, spread, spread_gradient
from fxpar.text.parsing import parse_program
from fxpar.verify.static import verify_static

aten = torch.ops.aten

TWO, THREE, TURNED = {"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}, {"dp": 3, "tp": 2}
FOUR, QUARTERS = {"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}


def checked(
    axes: Mapping[str, int], count: int, seed: int, even: bool, most: int | None = None
) -> dict[str, OracleReport]:
    """Reports by name of the operation, of the first samples alone if there are `most` at most."""
    return {
        name: check_on_mesh(operation.target, operation.samples[:most], axes, count, seed=seed)
        for name, operation in operations(seed, even).items()
        if operation.samples
    }


def assert_right(reports: Mapping[str, OracleReport]) -> None:
    assert [f"{r.operation}: {finding}" for r in reports.values() for finding in r.false_accepts] == []


@pytest.mark.parametrize(
    ("axes", "count", "most"),
    [
        (TWO, 1, 1),
        pytest.param(TWO, 2, None, marks=pytest.mark.matrix),
        pytest.param(THREE, 1, None, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_what_is_allowed_on_two_axes_is_right(axes: Mapping[str, int], count: int, most: int | None) -> None:
    reports = checked(axes, count, 0, even=True, most=most)
    assert_right(reports)
    assert [name for name, r in reports.items() if not r.accepted and name not in EXEMPT] == []
    found = [reports[name] for name in (*OCCURRING, *ELSEWHERE)]
    assert {r.operation for r in found if r.missed} <= LEFT_OUT.keys()
    assert sum(len(r.missed) for r in found) <= 0.01 * sum(r.legal for r in found)
    accepted = " ; ".join(text for r in reports.values() for text in r.accepted)
    for form in ("dp:S(0) tp:S(0)", "tp:S(0) dp:S(0)", "dp:P tp:S(0)", "dp:S(0) tp:P", "dp:P tp:P", "dp:R tp:I"):
        assert form in accepted, form
    for form in (" x ", "!", " ~ "):
        assert form in accepted, form


@pytest.mark.matrix
@pytest.mark.parametrize("axes", [TWO, THREE, TURNED, FOUR, QUARTERS], ids=str)
@pytest.mark.parametrize(("seed", "even"), [(0, True), (1, False), (2, True)])
def test_what_is_allowed_on_two_axes_is_right_in_numbers(axes: Mapping[str, int], seed: int, even: bool) -> None:
    assert_right(checked(axes, 15, seed, even))


# ---------------------------------------------------------------------- faults that it must find


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_judgement_that_does_not_peel_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpeeled(call: OpCall, operands: Sequence[Placement], outputs: Sequence[Placement]) -> OpCall:
        return call

    monkeypatch.setattr(inference, "peeled_call", unpeeled)
    report = check_on_mesh(aten.view.default, [sample(x(12, 12), [144]), sample(x(144), [12, 12])], THREE, 30)
    assert report.false_accepts


def test_an_order_of_nested_axes_that_is_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_mesh_order(layout: Layout, axes: Mapping[str, int]) -> Layout:
        return Layout(tuple((axis, shard(0, 12 if axis == "dp" else 6)) for axis in axes))

    monkeypatch.setattr(inference, "spelled", in_mesh_order)
    report = check_on_mesh(aten.neg.default, [sample(x(12))], TWO, 200)
    found = {f.signature: f.reason for f in report.false_accepts}
    assert found["self tp:S(0) dp:S(0) → dp:S(0) tp:S(0)"] == "values"
    assert "self dp:S(0) tp:S(0) → dp:S(0) tp:S(0)" in report.accepted


def test_a_wrong_rule_is_caught_on_the_axis_inside(gated: torch._ops.OpOverload) -> None:
    register_rule(gated, "... h, h -> ... h", partial=(("x",),))
    report = check_on_mesh(gated, [sample(x(12, 6), x(6))], TWO, 20)
    found = {f.signature: f.reason for f in report.false_accepts}
    assert found["x dp:S(0) tp:P, scale dp:R tp:R → dp:S(0) tp:P"] == "values"
    assert str(report.false_accepts[0]).count("on 2 x 2 ranks")


@pytest.mark.parametrize("index", [0, 1])
def test_a_wrong_layout_of_any_output_is_caught(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    def wrong(node: fx.Node, context: inference.Context) -> tuple[Layout, ...]:
        found = list(inference.infer_node(node, context))
        found[index] = Layout(tuple((axis, P) for axis in context.axes))
        return tuple(found)

    monkeypatch.setattr("fxpar.testing.several.infer_node", wrong)
    report = check_on_mesh(aten.max.dim, [sample(x(12, 6), 1)], TWO, 4)
    assert report.false_accepts
    assert not report.accepted


def test_a_layout_that_fits_by_one_definition_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpar.testing.several.misfit", lambda *given: "tp")
    report = check_on_mesh(aten.neg.default, [sample(x(12))], TWO, 4)
    assert report.false_accepts
    assert all(finding.reason.endswith(" fits") for finding in report.false_accepts)


def test_what_a_rule_leaves_out_is_missed_where_all_cuts_are_plain(gated: torch._ops.OpOverload) -> None:
    register_rule(gated, "h k, k -> h k")
    report = check_on_mesh(gated, [sample(x(12, 6), x(6))], TWO, 60)
    assert report.false_accepts == []
    assert report.missed
    assert all(":P" in f.signature.partition("scale")[2] for f in report.missed), "the rule is linear in the other one"


# ---------------------------------------------------------------------- the ranks themselves


def layouts_of(size: int, axes: Mapping[str, int]) -> list[Layout]:
    found = []
    for outer, inner in itertools.permutations(axes):
        for p in (I, R, P, shard(0, size), Placement("S", 0, (Piece(2, size // 2),))):
            left = size // axes[outer] if p.is_shard else size
            found += [Layout(((outer, p), (inner, q))) for q in (I, R, P, shard(0, left), shard(1, 3))]
    return [layout for layout in found if fits(layout, (size, 3), axes)]


@pytest.mark.parametrize("axes", [TWO, THREE], ids=str)
def test_parts_are_of_what_they_were_made_of_and_of_nothing_else(axes: Mapping[str, int]) -> None:
    generator, value = torch.Generator().manual_seed(0), x(12, 3)
    for layout in layouts_of(12, axes):
        for put, agrees in ((spread, holds), (spread_gradient, holds_gradient)):
            parts = dict(put(value, layout, axes, generator))
            assert agrees(parts, layout, axes, value)
            assert not agrees(parts, layout, axes, value + 1)
            for rank in coordinates(axes):
                assert not agrees({**parts, rank: parts[rank] + 1}, layout, axes, value), f"{layout} {rank}"


def test_positions_of_nested_cuts_by_hand() -> None:
    outer = Layout((("dp", shard(0, 8)), ("tp", shard(0, 4))))
    inner = Layout((("tp", shard(0, 8)), ("dp", shard(0, 4))))
    runs = Layout((("dp", shard(0, 8)), ("tp", Placement("S", 0, (Piece(2, 2),)))))
    assert positions(outer, 0, 8, TWO, (0, 1)) == [2, 3]
    assert positions(inner, 0, 8, TWO, (0, 1)) == [4, 5]
    assert positions(runs, 0, 8, TWO, (1, 0)) == [4, 6]


# ---------------------------------------------------------------------- faults that it found

FOUND = {
    "parts with padding among them": (
        '%a = parameter["a"] : f32[15, 6] dp:I tp:S(0: 15 ~ 16)\n'
        "%y = aten.cat.default([%a, %a]) : f32[30, 6] dp:I tp:S(0: 15 ~ 16 | 15 ~ 16)\n",
        "the padding of S(0: 15 ~ 16) would stand among the parts",
    ),
    "a cut of one axis in a dimension that another pads": (
        '%a = parameter["a"] : f32[15, 2] dp:S(1) tp:S(0: 15 ~ 16)\n'
        "%y = aten.view.default(%a, [30]) : f32[30] dp:S(0: 15 x 2) tp:S(0: 15 ~ 16)\n",
        "is padded in a dimension that another axis cuts too",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_the_oracle_found_is_refused(name: str) -> None:
    lines, reason = FOUND[name]
    head = 'fxpar 2\nplan {"tp": 2, "dp": 2}\nproperties canonical collectives layouts\n'
    with pytest.raises(LayoutError, match=re.escape(reason)):
        verify_static(parse_program(f"{head}{lines}return y=%y\n"))
