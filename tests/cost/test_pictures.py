"""The pictures of a report: every node of a layer, bytes and seconds as in `comm`, memory and pipelines over time."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from fxpar.cost.communication import layer_of
from fxpar.cost.html import Picture, as_html
from fxpar.cost.layer_picture import (
    MEANINGS,
    LayerRow,
    in_words,
    layer_in_the_middle,
    layer_rows,
    layer_svg,
    picture_of_layer,
)
from fxpar.cost.seconds import travels
from fxpar.cost.time_pictures import memory_over_time, memory_svg, pictures_over_time, pipeline_svg
from fxpar.cost.verdict import CountedStep, PipelineAction, PipelineRun
from fxpar.ir.program import ScalarType, note
from fxpar.plan.plan import Plan
from tests.cost.test_report import Page, report_of

SEQUENCE, PIPELINE = Plan(tp=4, sequence_parallel=True), Plan(tp=2, pp=2, microbatches=4)
SVG = "{http://www.w3.org/2000/svg}"


def rows_of(plan: Plan) -> tuple[CountedStep, str, list[LayerRow]]:
    found = layer_in_the_middle(report_of("llama", plan).steps)
    assert found is not None
    return *found, layer_rows(*found)


@pytest.mark.parametrize("plan", [SEQUENCE, PIPELINE, Plan()], ids=["sequence", "pipeline", "one"])
def test_every_node_of_the_layer_is_in_it_in_order(plan: Plan) -> None:
    step, layer, rows = rows_of(plan)
    nodes = (node for node in step.program.graph.nodes if node.op == "call_function")
    of_layer = [n.name for n in nodes if not isinstance(note(n).type, ScalarType) and layer_of(note(n).fqn) == layer]
    assert [name for row in rows for name in row.nodes] == of_layer
    assert len(of_layer) > 50
    words = in_words(rows, layer)
    assert [cell[2] for cell in words.rows] == [" ".join(f"%{name}" for name in row.nodes) for row in rows]
    root = ElementTree.fromstring(layer_svg(rows, layer, step.program.axes))
    said = " ".join(title.text or "" for title in root.iter(f"{SVG}title"))
    assert all(re.search(rf"%{name}\b", said) for name in of_layer)


@pytest.mark.parametrize("plan", [SEQUENCE, PIPELINE], ids=["sequence", "pipeline"])
def test_bytes_and_seconds_are_those_of_comm(plan: Plan) -> None:
    step, layer, rows = rows_of(plan)
    sizes = report_of("llama", plan).sizes
    expected = [
        t for t in travels(step.program, sizes) if layer_of(note(step.program.node(t.collective.node)).fqn) == layer
    ]
    drawn = [travel for row in rows for travel in row.travels]
    assert drawn == expected
    assert sum(row.bytes for row in rows) == sum(travel.collective.bytes for travel in expected) > 0
    assert sum(row.seconds for row in rows if row.travels) == pytest.approx(sum(t.seconds for t in expected))
    hiding = [row for row in rows if row.beside]
    assert hiding
    assert all(row.exposed < row.seconds for row in hiding)
    root = ElementTree.fromstring(layer_svg(rows, layer, step.program.axes))
    bars = {
        kind: [float(bar.get("width", 0)) for bar in root.iter(f"{SVG}rect") if bar.get("class") == kind]
        for kind in ("hidden", "waits")
    }
    sending = [row for phase in ("forward", "backward") for row in rows if row.travels and row.phase == phase]
    for row, hidden, waits in zip(sending, bars["hidden"], bars["waits"], strict=True):
        assert hidden / (hidden + waits) == pytest.approx(1 - row.exposed / row.seconds, abs=1e-2)


def test_what_ranks_hold_is_said_by_letter_colour_and_pattern() -> None:
    step, layer, rows = rows_of(SEQUENCE)
    text = layer_svg(rows, layer, step.program.axes)
    root = ElementTree.fromstring(text)
    letters = {node.text for node in root.iter(f"{SVG}text") if node.get("class") == "letter"}
    assert {"tp S1", "tp R", "tp P", "tp S1→R", "tp P→S1"} <= letters
    chips = {node.get("class") for node in root.iter(f"{SVG}rect") if (node.get("class") or "").startswith("chip")}
    assert chips <= {f"chip {kind.lower()}" for kind in MEANINGS}
    partial = [row for row in rows if row.placements["tp"].kind == "P"]
    assert text.count("fill='url(#hatch)'") == len(partial) + sum(bool(row.travels) for row in rows)


def test_the_page_has_headings_names_and_nothing_twice() -> None:
    for plan in (SEQUENCE, PIPELINE):
        report = report_of("llama", plan)
        pictures = [*picture_of_layer(report), *pictures_over_time(report)]
        assert [picture.title for picture in pictures][-1] == "memory over time"
        text = as_html(report, [*pictures, Picture("groups", "Who <talks>.", "<p>here</p>")])
        page = Page()
        page.feed(text)
        assert (page.open, page.loads) == ([], [])
        ids = re.findall(r' id="([^"]+)"', text)
        assert len(ids) == len(set(ids))
        assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)
        levels = [int(level) for level in re.findall(r"<h([1-6])", text)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
        assert 'lang="en"' in text
        assert "Who &lt;talks&gt;." in text
        for drawing in re.findall(r"<svg[^>]*>.{0,60}", text, re.DOTALL):
            assert "aria-hidden" in drawing or ("role='img'" in drawing and "<title>" in drawing)


def test_memory_over_time_reaches_the_peak_of_the_report() -> None:
    report = report_of("llama", SEQUENCE)
    (step,) = report.steps
    assert max(size for _, size in step.live) == report.peak.bytes
    of_phase = {moment.phase: moment.bytes for moment in report.phases}
    for phase, most in of_phase.items():
        assert max(size for at, size in step.live if at == phase) >= most
    assert f"peak {max(rank.peak for rank in report.ranks) / 1024:.1f} KiB" in memory_svg(report)


def test_memory_of_a_pipeline_follows_its_microbatches() -> None:
    report = report_of("llama", PIPELINE)
    assert report.run is not None
    for place, line in enumerate(report.stages):
        levels = memory_over_time(report, report.run, place)
        rank = report.ranks[2 * place]
        assert [start for start, *_ in levels][1:] == [stop for _, stop, _ in levels][:-1]
        fixed = rank.parameters + rank.buffers + rank.gradients + rank.optimizer + report.inputs
        most = max(size for *_, size in levels)
        assert fixed + line.in_flight * line.activations <= most <= rank.peak
        assert ElementTree.fromstring(memory_svg(report)) is not None


def test_a_pipeline_is_drawn_action_by_action() -> None:
    run = report_of("llama", PIPELINE).run
    assert run is not None
    root = ElementTree.fromstring(pipeline_svg(run))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")][1:]
    assert len(titles) == 2 * 2 * 4
    assert titles[0].startswith("forward of microbatch 0, stage 0: 0.0 µs to ")
    actions = tuple(PipelineAction(0, "F", i, float(i), i + 1.0) for i in range(3000))
    large = PipelineRun((actions, actions))
    text = pipeline_svg(large)
    assert text.count("<g>") == 4000
    assert "0 to 2,000,000.00 ms, of 3,000,000.00 ms" in text
    many = pipeline_svg(PipelineRun((actions[:2],) * 40))
    assert "the first 32 of 40 ranks" in many


def test_a_report_without_steps_has_no_pictures() -> None:
    report = replace(report_of("llama", SEQUENCE), steps=(), verdict=None)
    assert [*picture_of_layer(report), *pictures_over_time(report)] == []
    assert "<h1>llama</h1>" in as_html(report)
