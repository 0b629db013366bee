"""Every command on a model."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fxpar.passes import DEFAULT_PASSES, STEP_PASSES
from tests.cli.tool import SPLIT, TINY, Result, fxpar

NAMES = [item.name for item in DEFAULT_PASSES]
# Of a plan without a pipeline.
RUN = [name for name in NAMES if name != "partition_stages"]


@pytest.fixture(scope="module")
def verified() -> Result:
    return fxpar("verify", TINY, *SPLIT, "--json")


@pytest.fixture(scope="module")
def communicated() -> Any:
    return fxpar("comm", TINY, *SPLIT, "--json").document["collectives"]


def test_trace_prints_a_program_that_can_be_read_back(tmp_path: Path) -> None:
    result = fxpar("trace", TINY)
    assert result.status == 0
    assert result.out.startswith("fxpar 2\n")
    assert result.err == ""
    (tmp_path / "a.txt").write_text(result.out)
    assert fxpar("trace", str(tmp_path / "a.txt")).out == result.out


def test_trace_json_says_what_was_captured() -> None:
    document = fxpar("trace", TINY, "--json").document
    assert set(document) == {
        *("how", "nodes", "parameters", "inputs", "outputs", "symbols", "loss"),
        *("operators", "without_rule", "recompute_regions"),
    }
    assert document["how"] == "export"
    assert document["inputs"] == ["input_ids", "labels"]
    assert document["outputs"] == ["loss", "logits"]
    assert document["loss"] == "loss"
    assert document["parameters"] == 16
    assert document["symbols"]["s"] == {"input": "input_ids", "dim": 1, "example": 16}
    assert document["operators"]["aten.addmm.default"] == 4
    assert document["recompute_regions"] == 0
    calls = sum(document["operators"].values())
    assert calls + document["parameters"] + len(document["inputs"]) + 1 == document["nodes"]


def test_trace_out_writes_the_text_and_prints_a_summary(small: str, tmp_path: Path) -> None:
    result = fxpar("trace", f"{small}:build", "--out", str(tmp_path / "new" / "a.txt"))
    assert (tmp_path / "new" / "a.txt").read_text().startswith("fxpar 2\n")
    assert "x, target" in result.out
    assert "aten.linear.default" in result.out


def test_trace_follows_mode_sizes_and_plan() -> None:
    text = fxpar("trace", TINY, "--eval", "--batch", "5", "--seq", "7", "--tp", "4", "--seed", "9").out
    assert "aten.native_dropout" not in text
    assert "symbol b = input_ids.0 like 5" in text
    assert "symbol s = input_ids.1 like 7" in text
    assert 'plan {"tp": 4, "seed": 9}' in text


def test_passes_lists_contracts() -> None:
    document = fxpar("passes", "--json").document
    assert [entry["name"] for entry in document] == [*NAMES, *(item.name for item in STEP_PASSES)]
    assert set(document[0]) == {"name", "requires", "provides", "invalidates", "preserves", "summary", "when"}
    assert document[1]["requires"] == ["canonical"]
    assert [document[i]["provides"] for i in (2, 4, 6)] == [["masks"], ["sequence"], ["layouts"]]
    by_name = {entry["name"]: entry for entry in document}
    assert by_name["localize"]["requires"] == ["collectives", "rng", "vocabulary"]
    assert {name: entry["when"] for name, entry in by_name.items() if entry["when"]} == {
        "partition_stages": "the plan has a pipeline",
        "chunk_tokens": "communication.token_chunks is not 1",
    }
    assert all(entry["summary"] for entry in document)
    assert {entry["preserves"] for entry in document[: len(NAMES)]} == {"values"}
    listing = fxpar("passes").out
    assert "requires canonical" in listing
    assert "where the plan has a pipeline" in listing


def test_run_reports_each_pass() -> None:
    document = fxpar("run", TINY, *SPLIT, "--json", "--print").document
    assert [record["name"] for record in document["passes"]] == RUN
    inserted = document["passes"][RUN.index("insert_collectives")]
    assert inserted["added"]
    assert not inserted["erased"]
    assert inserted["seconds"] >= 0
    assert {"local", "vocabulary"} <= set(document["properties"])
    assert document["split_flops"] == 1
    assert document["text"].startswith("fxpar 2\n")


def test_run_stops_and_prints_where_it_is_told(small: str) -> None:
    result = fxpar("run", f"{small}:build", "--until", "annotate", "--print-after", "canonicalize")
    assert result.status == 0
    assert "# after canonicalize\nfxpar 2\n" in result.out
    assert "annotate" in result.out
    assert "insert_collectives" not in result.out


def test_run_dumps_all_texts_and_the_values(dump: Path) -> None:
    names = sorted(path.name for path in dump.iterdir())
    texts = [f"{i:02d}-{name}.txt" for i, name in enumerate(["capture", *RUN])]
    assert names == [*texts, "values.safetensors"]


def test_a_second_dump_replaces_the_first(small: str, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    for until in ("annotate", "canonicalize"):
        assert fxpar("run", f"{small}:build", "--until", until, "--dump", str(folder)).status == 0
    assert sorted(p.name for p in folder.glob("*.txt")) == ["00-capture.txt", "01-canonicalize.txt"]


def test_verify_json_has_the_errors(verified: Result) -> None:
    assert verified.status == 0
    document = verified.document
    assert document["ok"] is True
    assert document["level"] == "values"
    assert document["max_grad_error"] < 1e-12
    assert document["loss_error"] < 1e-12
    assert document["split_flops"] == 1
    assert document["gradients"] == 16


def test_verify_prints_a_table(small: str) -> None:
    result = fxpar("verify", f"{small}:build", "--tp", "4", "--split", "fc=column", "--split", "proj=row")
    assert result.status == 0
    assert "ok at level values" in result.out
    assert "4 gradients" in result.out
    assert "100.0% over 4 ranks" in result.out


def test_verify_in_evaluation_on_one_rank() -> None:
    document = fxpar("verify", TINY, "--json", "--eval").document
    assert document["ok"] is True
    assert document["max_grad_error"] == 0


def test_bisect_of_right_passes_finds_no_culprit(small: str) -> None:
    result = fxpar("bisect", f"{small}:build", "--tp", "2", "--split", "fc=column", "--split", "proj=row", "--json")
    assert result.status == 0
    assert set(result.document) == {"culprit", "reason", "first"}
    assert result.document["culprit"] is result.document["first"] is None


def test_comm_lists_megatrons_collectives(communicated: Any) -> None:
    keys = {"op", "axis", "phase", "node", "bytes", "bytes_formula", "part", "seconds", "beside", "exposed"}
    assert all(set(c) == keys for c in communicated)
    assert {c["op"] for c in communicated} == {"all_reduce"}
    counted = Counter((c["phase"], c["bytes"], c["bytes_formula"]) for c in communicated)
    # In each direction two of the layer and one of the vocabulary: behind the lookup, in front of the head.
    values = (3 * 16 * 96 * 4, "384*b*s")
    statistics = {("forward", 3 * 16 * 4, "4*b*s"): 1, ("forward", 2 * 3 * 16 * 4, "8*b*s"): 1}
    assert counted == {("forward", *values): 3, ("backward", *values): 3, **statistics}
    assert [c["node"] for c in communicated if c["bytes"] < 1000] == ["cross_entropy_forward"] * 2


def test_regions_are_what_graphs_hold_of_a_step() -> None:
    document = fxpar("regions", TINY, *SPLIT, "--json").document
    assert [region["phase"] for region in document["regions"]] == ["forward", "backward"]
    assert document["boundaries"] == []
    assert all(sum(region["inputs"].values()) > 0 for region in document["regions"])
    text = fxpar("regions", TINY, *SPLIT).out
    assert "nothing ends a graph" in text


def test_comm_says_what_travels_beside_what(communicated: Any) -> None:
    """In the backward each sum of the layer travels beside gradients of weights, in the forward beside nothing."""
    for c in (c for c in communicated if c["phase"] == "forward"):
        assert not c["beside"]
        assert c["exposed"] == pytest.approx(c["seconds"])
    backward = [c for c in communicated if c["phase"] == "backward"]
    assert [len(c["beside"]) for c in backward] == [1, 2, 2]
    for c in backward:
        assert c["exposed"] == pytest.approx(c["seconds"] - sum(one["seconds"] for one in c["beside"]))


def test_comm_takes_sizes_of_symbols(dump: Path) -> None:
    document = fxpar("comm", str(dump / "12-localize.txt"), "--size", "b=8", "--size", "s=1024", "--json").document
    sizes = Counter(c["bytes"] for c in document["collectives"])
    assert sizes == {8 * 1024 * 96 * 4: 6, 8 * 1024 * 4: 1, 2 * 8 * 1024 * 4: 1}
    totals = document["totals"]
    assert list(totals) == ["forward", "backward", "all"]
    for key in ("bytes", "seconds", "exposed"):
        assert totals["all"][key] == pytest.approx(sum(c[key] for c in document["collectives"]))
    assert totals["backward"]["exposed"] < totals["backward"]["seconds"]


def test_comm_prints_totals_by_phase(dump: Path) -> None:
    result = fxpar("comm", str(dump / "12-localize.txt"))
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert "forward, transformer.h.0" in lines
    assert any(line.startswith("forward 5 54.6 KiB 50") for line in lines)
    assert any(line.startswith("all 8 108.6 KiB 80") for line in lines)
    assert lines[-1].endswith("without compile=True each is waited for at once.")


def test_comm_of_one_rank_is_empty(small: str) -> None:
    result = fxpar("comm", f"{small}:build", "--json")
    assert result.document == {"collectives": [], "sends": [], "totals": {}, "microbatches": 1}
    assert result.err == ""


@pytest.mark.parametrize("command", ["run", "verify", "comm"])
def test_a_plan_that_splits_nothing_is_warned_of(small: str, command: str) -> None:
    level = ["--level", "static"] if command == "verify" else []
    whole = ("--split", "fc=replicate", "--split", "proj=replicate")
    result = fxpar(command, f"{small}:build", "--tp", "2", *whole, *level, "--json")
    assert result.status == 0
    assert result.err.startswith("warning: no matrix product is split: each of the 2 ranks computes everything")
    assert len(result.err.splitlines()) == 1
    assert result.document is not None


def test_flags_win_over_the_plan_file(small: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("tp: 2\nseed: 4\nsplit: {fc: column, proj: row}\n")
    words = ("trace", f"{small}:build", "--plan", str(plan))
    assert 'plan {"tp": 2, "split": {"fc": "column", "proj": "row"}, "seed": 4}' in fxpar(*words).out
    text = fxpar(*words, "--tp", "4", "--split", "fc=replicate").out
    assert 'plan {"tp": 4, "split": {"fc": "replicate", "proj": "row"}, "seed": 4}' in text


def test_recomputation_stands_in_the_text(small: str) -> None:
    words = ("trace", f"{small}:build", "--tp", "2", "--recompute", "selective", "--activation-memory-budget", "0.5")
    assert 'plan {"tp": 2, "recompute": {"mode": "selective", "activation_memory_budget": 0.5}}' in fxpar(*words).out


def test_precision_casts_the_model(small: str) -> None:
    text = fxpar("trace", f"{small}:half_precision", "--precision", "bf16").out
    assert '%fc_weight = parameter["fc.weight"] : bf16[20, 12]' in text


def test_the_step_is_dumped_and_verified(tmp_path: Path) -> None:
    folder = str(tmp_path / "dump")
    document = fxpar("run", TINY, *SPLIT, "--step", "--dump", folder, "--json").document
    names = [entry["name"] for entry in document["passes"]]
    assert names[len(RUN) :] == [item.name for item in STEP_PASSES if not item.condition]
    assert document["without_rule"] == []
    last = f"{folder}/{len(names)}-{names[-1]}.txt"
    assert fxpar("verify", last, "--level", "values", "--json").document["ok"]
    assert {entry["phase"] for entry in fxpar("comm", last, "--json").document["collectives"]} >= {
        "forward",
        "backward",
    }
    assert fxpar("run", last, "--json").document["passes"] == []
    assert fxpar("report", last).status == 0
    entries = fxpar("diff", folder, "localize", "differentiate", "--json").document["added"]
    assert any("phase=backward" in entry["line"] for entry in entries)
    assert "its layouts are chosen already" in fxpar("explain", last, "transformer.wte.weight").err


def test_a_pass_of_the_step_may_be_the_last() -> None:
    passes = fxpar("run", TINY, *SPLIT, "--until", "differentiate", "--json").document["passes"]
    assert passes[-1]["name"] == "differentiate"


def test_layers_are_a_region_in_the_text() -> None:
    text = fxpar("run", "hf:gpt2,n_layer=2", "--tp", "2", "--step", "--print").out
    assert text.count("\nregion layer ") == 1
    assert text.count(" = region.layer(") == 2
