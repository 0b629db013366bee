"""Commands on the stages of a pipeline: each says something right of them, or refuses with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxpar.passes import STEP_PASSES
from tests.cli.tool import fxpar

MODEL = ("hf:gpt2,n_layer=2", "--tp", "2", "--pp", "2")
CUT = ("explain", "hf:gpt2,n_layer=2", "cut 1", "--tp", "2", "--pp", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of the step of stage 1."""
    path = tmp_path_factory.mktemp("stages") / "dump"
    result = fxpar("run", *MODEL, "--step", "--of-stage", "1", "--dump", str(path), "--json")
    assert result.status == 0, result.err
    names = [record["name"] for record in result.document["passes"]]
    steps = [item.name for item in STEP_PASSES if not item.condition]
    assert names[-len(steps) - 1 :] == ["partition_stages", *steps]
    return path


def test_the_step_of_a_stage_is_dumped_behind_the_whole(folder: Path) -> None:
    texts = sorted(path.name for path in folder.glob("*.txt"))
    assert texts[12:15] == ["12-localize.txt", "13-partition_stages.txt", "14-differentiate.txt"]
    assert len(texts) == 14 + sum(not item.condition for item in STEP_PASSES)
    assert "fxpar.transfer(" in (folder / texts[13]).read_text()
    assert 'input["fxpar.received.' in (folder / texts[14]).read_text()
    assert fxpar("verify", str(folder / texts[-1])).status == 0
    assert fxpar("verify", str(folder / texts[13]), "--level", "values", "--json").document["ok"]


@pytest.mark.matrix
def test_the_dump_of_a_stage_is_bisected_and_read(folder: Path) -> None:
    assert fxpar("bisect", str(folder), "--json").document["culprit"] is None
    text = str(sorted(folder.glob("*.txt"))[-1])
    for command in ("comm", "regions", "memory"):
        assert fxpar(command, text, "--json").status == 0


def test_a_pass_of_the_step_may_be_the_last_of_a_stage() -> None:
    result = fxpar(
        "run", *MODEL, "--until", "differentiate", "--of-stage", "0", "--print-after", "differentiate", "--json"
    )
    assert result.document["passes"][-1]["name"] == "differentiate"
    assert "fxpar.sent." in result.document["texts"]["differentiate"]
    text = fxpar("run", *MODEL, "--of-stage", "0", "--print").out
    assert "phase=backward" not in text
    assert "fxpar.sent." in text


def test_comm_lists_the_collectives_of_all_stages(folder: Path) -> None:
    text = str(folder / "13-partition_stages.txt")
    found = fxpar("comm", *MODEL, "--json").document
    alone = [fxpar("comm", text, "--of-stage", str(k), "--json").document["collectives"] for k in (0, 1)]
    assert found["collectives"] == [*alone[0], *alone[1]]
    assert {one["stage"] for one in found["collectives"]} == {0, 1}
    assert found["totals"]["all"]["count"] == len(found["collectives"])
    assert "stage 1: collectives over tp" in fxpar("comm", text).out


def test_memory_and_report_show_all_stages(folder: Path) -> None:
    text = str(folder / "13-partition_stages.txt")
    for command in ("report", "memory"):
        stages = fxpar(command, text, "--json").document["stages"]
        assert [line["in_flight"] for line in stages] == [2, 1]
    out = fxpar("memory", text).out
    assert "what crosses the cuts" in out
    only = fxpar("memory", text, "--of-stage", "1", "--json").document
    assert only["name"].endswith(", stage 1")
    assert only["ranks"][0]["parameters"] == stages[1]["parameters"]


def test_regions_are_those_of_a_stage() -> None:
    assert [r["phase"] for r in fxpar("regions", *MODEL, "--of-stage", "0", "--json").document["regions"]] == [
        "forward",
        "backward",
    ]


def test_a_cut_is_explained() -> None:
    found = fxpar(*CUT, "--json").document
    assert found["stage"] == 1
    (received,) = found["received"]
    assert received["bytes"] == 3 * 16 * 96 * 4
    assert found["runner_up"]
    best, other = found["goals"], found["other"]
    assert other["longest"] > best["longest"]
    assert found["reason"] == "with the next best the longest stage takes longer"
    assert found["seconds"] == [seconds for seconds, _ in best["stages"]]
    again = fxpar("explain", "hf:gpt2,n_layer=2", f"%{received['value']}_on_1", "--tp", "2", "--pp", "2", "--json")
    assert again.document == found
    text = fxpar(*CUT).out
    for word in ("behind", "in front of", "crosses", "runner-up"):
        assert word in text


def test_a_cut_that_the_plan_gives_has_no_runner_up() -> None:
    found = fxpar(*CUT, "--stages", "transformer.h.1=1", "--json").document
    assert (found["reason"], found["runner_up"], found["other"]) == ("the plan says so", "", None)
    assert "transformer.h.1.ln_1" in found["before"]


REFUSALS = {
    "run {model} --step": "a pipeline has a step for each of its stages; name one: --of-stage 0 to 1",
    "run {model} --until recompute": "a pipeline has a step for each of its stages",
    "regions {model}": "a pipeline has a step for each of its stages",
    "comm {model} --of-stage 2": "--of-stage 2: the pipeline has 2 stages; give one from 0 to 1",
    "run {model} --until annotate --of-stage 1": "--until annotate: the program is not yet cut into stages",
    "memory hf:gpt2,n_layer=1 --of-stage 1": "--of-stage 1: the plan has no pipeline; leave it out, or give --pp N",
    "memory {folder}/14-differentiate.txt --of-stage 1": "--of-stage 1: the text is of one stage already",
    "verify {folder}/14-differentiate.txt --level values": "is of one stage of a pipeline, which needs the others'",
    "explain {folder}/13-partition_stages.txt cut-1": "its stages are chosen already; name the model",
    "explain {folder}/12-localize.txt cut-2": "no stage but those behind the first has a cut; give 1 to 1",
}


@pytest.mark.parametrize("line", REFUSALS)
def test_refusals_are_one_line_and_status_2(line: str, folder: Path) -> None:
    words = line.format(model=" ".join(MODEL), folder=folder).split()
    result = fxpar(*words)
    assert (result.status, len(result.err.splitlines())) == (2, 1), result.err
    assert REFUSALS[line] in result.err
