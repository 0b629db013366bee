"""The report of a pipeline: stages and their balance, what crosses each cut, and memory by rank."""

from __future__ import annotations

import re

import pytest

from fxpar.cost import Report
from fxpar.cost.html import as_html
from fxpar.cost.stage_cut_points import in_flight
from fxpar.cost.verdict import stages_in_flight
from fxpar.pipeline.compiler.partition import run_pipeline
from fxpar.plan.plan import Plan
from tests.cost.test_report import report_of


@pytest.mark.parametrize(
    ("ranks", "virtual", "peaks"),
    [(4, 1, (4, 3, 2, 1)), (2, 2, (5, 3)), (4, 2, (11, 9, 7, 5)), (2, 3, (7, 5)), (8, 1, (8, 7, 6, 5, 4, 3, 2, 1))],
)
def test_microbatches_in_flight_are_those_of_the_schedule(ranks: int, virtual: int, peaks: tuple[int, ...]) -> None:
    """SPEC section 3: warmup + 1."""
    assert tuple(sum(in_flight(ranks, virtual, rank)) for rank in range(ranks)) == peaks


@pytest.mark.parametrize(
    ("schedule", "virtual", "expected"),
    [
        ("1f1b", 1, {0: (0, 2), 1: (1, 1)}),
        ("gpipe", 1, {0: (0, 8), 1: (1, 8)}),
        ("zb_h1", 1, {0: (0, 2), 1: (1, 2)}),
        ("interleaved_1f1b", 2, {0: (0, 3), 2: (0, 2), 1: (1, 2), 3: (1, 1)}),
    ],
)
def test_what_stages_keep_follows_from_the_schedule(
    schedule: str, virtual: int, expected: dict[int, tuple[int, int]]
) -> None:
    plan = Plan(pp=2, virtual_stages=virtual, microbatches=8, schedule=schedule)
    assert stages_in_flight(plan, run_pipeline) == expected


def test_stages_are_where_the_schedule_has_them() -> None:
    """A V: the rank of the first stage has the last one."""
    places = stages_in_flight(Plan(pp=2, virtual_stages=2, microbatches=4, schedule="zbv"), run_pipeline)
    assert {stage: rank for stage, (rank, _) in places.items()} == {0: 0, 1: 1, 2: 1, 3: 0}


def test_the_first_stages_of_a_rank_are_in_flight_most() -> None:
    """Behind 1 ×4, 2 ×4, 1 ×3 of rank 0."""
    assert in_flight(4, 2, 0) == (7, 4)


@pytest.fixture(scope="module")
def piped() -> Report:
    return report_of("gpt2", Plan(tp=2, pp=2))


@pytest.fixture(scope="module")
def whole() -> Report:
    return report_of("gpt2", Plan(tp=2))


def test_stages_are_the_model(piped: Report, whole: Report) -> None:
    """What the stages have is what the whole has; the tied table is there twice."""
    first, last = piped.stages
    assert (first.first, last.last) == ("transformer.wte", "lm_head")
    assert (first.rank, last.rank, first.in_flight, last.in_flight) == (0, 1, 2, 1)
    assert first.share + last.share == pytest.approx(1)
    table = next(module for module in whole.modules if module.module == "transformer.wte")
    assert first.parameters + last.parameters == whole.ranks[0].parameters + table.parameters
    assert piped.size.elements == whole.size.elements
    (crossing,) = last.received
    assert (crossing.type, crossing.bytes, crossing.returns) == ("f32[b, s, 96]", 3 * 16 * 96 * 4, True)
    assert not first.received
    assert sum(one.bytes for one in piped.collectives) == sum(one.bytes for one in whole.collectives)


def test_memory_is_that_of_each_rank_with_its_microbatches(piped: Report, whole: Report) -> None:
    assert [rank.rank for rank in piped.ranks] == [0, 1, 2, 3]
    for line in piped.stages:
        for rank in piped.ranks[2 * line.rank : 2 * line.rank + 2]:
            assert rank.parameters == line.parameters
            assert rank.optimizer == line.optimizer
            assert rank.activations == line.in_flight * line.activations
            assert rank.peak >= rank.parameters + rank.gradients + rank.optimizer + rank.activations
    received = sum(each.bytes for line in piped.stages for each in line.received)
    kept = sum(line.activations for line in piped.stages)
    # What is received is kept by the stage that receives it; where it was computed the norm behind the cut kept it.
    assert whole.ranks[0].activations <= kept <= whole.ranks[0].activations + received


def test_a_rank_with_several_stages_holds_all_of_them() -> None:
    found = report_of("gpt2", Plan(pp=2, virtual_stages=2))
    assert [line.rank for line in found.stages] == [0, 1, 0, 1]
    for rank in found.ranks:
        own = [line for line in found.stages if line.rank == rank.rank]
        assert rank.parameters == sum(line.parameters for line in own)
        assert rank.activations == sum(line.in_flight * line.activations for line in own)


def test_printed_and_as_html_it_has_stages_and_cuts(piped: Report, whole: Report) -> None:
    lines = [" ".join(line.split()) for line in str(piped).splitlines()]
    assert "pipeline 2 stages on 2 ranks" in lines
    assert "split 100.0% of the matrix FLOPs over 2 ranks" in lines
    assert any(line.startswith("0 0 transformer.wte transformer.h.0") for line in lines)
    assert any(line.startswith("Matrix FLOPs of a stage: 1.") for line in lines)
    assert any(re.match(r"1 %add_\d f32\[b, s, 96\] 18.0 KiB 18,432 comes back", line) for line in lines)
    assert max(len(line) for line in str(piped).splitlines()) <= 120
    page = as_html(piped)
    assert '<h2 id="stages">stages</h2>' in page
    assert '<h2 id="what-crosses-the-cuts">what crosses the cuts</h2>' in page
    assert '<h2 id="stages">stages</h2>' not in as_html(whole)
