"""`fxpar timeline`: Perfetto reads the file, seconds are those of the report, nodes have their names."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fxpar.cli.timeline import simulated_events
from fxpar.plan.plan import Plan
from tests.cli.tool import TINY, fxpar
from tests.cost.test_report import report_of
from tests.loop import train_jobs as jobs

MODEL = """
from tests.runtime import models


def build():
    return models.tiny(dropout=0.3), models.batch()
"""


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a file, each as Perfetto reads it."""
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X", "i", "s", "f", "C", "B", "E")
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["pid"], int)
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def lanes_of(events: list[dict[str, Any]], pid: int) -> dict[str, list[dict[str, Any]]]:
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
    lanes: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X" and event["pid"] == pid:
            lanes[names[event["tid"]]].append(event)
    return lanes


PLANS = {
    "tp": Plan(tp=2, sequence_parallel=True),
    "accumulated": Plan(tp=2, dp=3, microbatches=3),
    "shared": Plan(dp=3, shard="parameters"),
    "pipeline": Plan(tp=2, pp=2, microbatches=4),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_seconds_are_those_of_the_report_and_comm(plan: Plan) -> None:
    report = report_of("gpt2", plan)
    verdict = report.verdict
    assert verdict is not None
    assert verdict.seconds is not None
    events = simulated_events(report)
    spans = [event for event in events if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e6 * verdict.seconds, rel=1e-3)
    assert min(event["ts"] for event in spans) >= 0
    sent = [travel for step in report.steps for travel in step.times.travels]
    expected = Counter((t.collective.node, t.collective.bytes, round(1e9 * t.seconds)) for t in sent)
    drawn = [event for event in spans if "bytes" in event["args"]]
    assert Counter((e["name"], e["args"]["bytes"], round(1e3 * e["dur"])) for e in drawn) == expected
    products = [event["dur"] for event in spans if event["args"].get("operator", "").startswith(("aten", "fxpar"))]
    assert sum(products) == pytest.approx(
        1e6 * sum(s for step in report.steps for _, s in step.times.products.values())
    )
    for pid in {event["pid"] for event in spans}:
        for lane in lanes_of(events, pid).values():
            lane.sort(key=lambda event: event["ts"])
            for before, after in itertools.pairwise(lane):  # of a lane one runs after the other
                assert after["ts"] >= before["ts"] + before["dur"] - 1e-3
    if plan.microbatches == 1:
        rest = Counter[str]()
        for event in lanes_of(events, 1)["stored values and optimizer"]:
            rest[event["name"]] += event["dur"]
        assert rest["stored values"] == pytest.approx(1e6 * verdict.stored)
        assert rest["optimizer"] == pytest.approx(1e6 * verdict.optimizer)


def test_the_file_has_nodes_with_their_modules(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "step.json"
    result = fxpar("timeline", TINY, "--tp", "2", "--perfetto", str(path))
    assert result.status == 0, result.err
    assert f"written to {path}" in result.out
    lanes = lanes_of(events_of(path), 1)
    assert list(lanes) == ["microbatches", "products", "collectives over tp", "stored values and optimizer"]
    product = lanes["products"][0]
    assert product["args"]["module"].startswith("transformer.")
    assert product["args"]["operator"].startswith("aten.")


def test_a_measured_step_stands_next_to_it(tmp_path: Path) -> None:
    jobs.training("sampler", 7, trace=tmp_path / "trace")
    file, traced, path = tmp_path / "model.py", tmp_path / "trace" / "rank-00000.json", tmp_path / "step.json"
    file.write_text(MODEL)
    words = ("timeline", f"{file}:build", "--measured", str(traced))
    result = fxpar(*words, "--perfetto", str(path), "--json")
    assert result.status == 0, result.err
    joined = {entry["node"]: entry for entry in result.document["nodes"]}
    assert "linear" in joined
    original = json.loads(traced.read_text())["traceEvents"]
    ranges = [e["dur"] for e in original if e.get("cat") == "user_annotation" and e["name"] == "linear"]
    assert joined["linear"]["measured"] == pytest.approx(sum(ranges) / len(ranges) / 1e6)
    events = events_of(path)
    measured = [event for event in events if event["pid"] >= 1000]
    assert len(measured) == len(original)
    assert min(event["ts"] for event in measured if event["ph"] == "X" and event.get("cat") != "Trace") == 0
    assert sorted(e["dur"] for e in measured if e["ph"] == "X") == sorted(e["dur"] for e in original if e["ph"] == "X")
    assert any(e["args"]["name"].startswith("measured, ") for e in measured if e["name"] == "process_name")
    printed = fxpar(*words)
    assert "are products or collectives of this program" in printed.out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "is no JSON"),
        ("[]", "has no list of traceEvents"),
        ('{"traceEvents": [3]}', "has no list of traceEvents"),
        ('{"traceEvents": [{"ts": "a"}]}', "has an event whose time is no number"),
    ],
)
def test_what_is_no_trace_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_text(text)
    result = fxpar("timeline", TINY, "--measured", str(path))
    assert result.status == 2
    assert message in result.err
    assert "fxpar.train" in result.err


def test_a_pipeline_without_a_schedule_is_refused() -> None:
    result = fxpar("timeline", "hf:gpt2", "--pp", "2", "--virtual-stages", "2")
    assert result.status == 2
    assert "--microbatches" in result.err
