"""A training by `fxpar.train` is that of a plain loop, and one that stops and goes on is one that never stopped."""

import json
import random
import re
import signal
import threading
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fxpar
from fxpar.cost.flops import matmul_flops
from fxpar.errors import InputError
from fxpar.loop.metrics import Meter, exposed_seconds, writer
from tests.loop import train_jobs as jobs
from tests.loop.train_jobs import BATCH, SAMPLES
from tests.runtime import models
from tests.runtime.jobs import Found
from tests.runtime.world import JOBS, RankFailed, World


def assert_continued(first: Found, second: Found, whole: Found) -> None:
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["step"] == whole["step"]
    assert second["trained"] == whole["trained"]
    for name, tensor in whole["weights"].items():
        assert torch.equal(second["weights"][name], tensor), name


@pytest.mark.parametrize("kind", ["sampler", "callable", "iterable", "stateful"])
@pytest.mark.parametrize("first", [4, 5, 7])
def test_a_resumed_training_is_the_one_that_never_stopped(tmp_path: Path, kind: str, first: int) -> None:
    """In the middle of an epoch, at its end, and in the second one."""
    whole = jobs.training(kind, 12)
    before = jobs.training(kind, first, saves=tmp_path, save_every=3)
    after = jobs.training(kind, 12, saves=tmp_path)
    assert_continued(before, after, whole)
    assert len(set(whole["losses"])) == 12


def test_ranks_resume_with_their_loaders(world2: World, tmp_path: Path) -> None:
    whole = world2.run(jobs.training, "stateful", 8)
    before = world2.run(_saved, "stateful", 3, tmp_path)
    after = world2.run(_saved, "stateful", 8, tmp_path)
    assert before[1]["losses"] == []  # rank 0 alone reports
    for parts in zip(before, after, whole, strict=True):
        assert_continued(*parts)


def _saved(kind: str, steps: int, folder: Path) -> Found:
    return jobs.training(kind, steps, saves=folder, save_every=2)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.matrix)])
def test_a_training_that_is_killed_again_and_again_is_one_that_was_not(
    world2: World, captures: Path, tmp_path: Path, kills: int
) -> None:
    """At any moment, while saves are written beside the steps: one rank of two, or both at once."""
    chance = random.Random(str(tmp_path))
    for _ in range(kills):
        seconds, rank = chance.uniform(0, 0.8), chance.choice((-1, 0, 1))
        world = World(2, JOBS, group_seconds=10.0, captures=captures)
        try:
            with pytest.raises(RankFailed, match="died"):
                world.run(jobs.killed, tmp_path, seconds, rank)
        finally:
            world.stop(kill=True)
        print(f"rank {rank} killed {seconds:.3f} s after its first step:", *sorted(p.name for p in tmp_path.iterdir()))
    saves = sorted(tmp_path.glob("training-*"))
    steps = int(saves[-1].name.rpartition("-")[2]) + 3 if saves else 3
    whole = world2.run(jobs.training, "sampler", steps)
    for rest, wanted in zip(world2.run(_saved, "sampler", steps, tmp_path), whole, strict=True):
        losses = wanted["losses"][len(wanted["losses"]) - len(rest["losses"]) :]
        assert_continued({"losses": wanted["losses"][: -len(losses) or None]}, rest, wanted)


def test_another_number_of_data_ranks_sees_the_samples_that_are_left(
    world2: World, world4: World, tmp_path: Path
) -> None:
    whole = jobs.training("sampler", 8)
    before = world4.run(_saved, "sampler", 3, tmp_path)
    after = world2.run(_saved, "sampler", 8, tmp_path)
    assert before[0]["losses"] + after[0]["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    seen = [_of_ranks(before)[:3], _of_ranks(after)[:5]]
    assert seen[0] + seen[1] == _of_ranks([whole])[:8]
    assert after[0]["trained"].samples == 8 * BATCH
    # The state of a loader is that of a data rank.
    world2.run(_saved, "stateful", 3, tmp_path / "states")
    with pytest.raises(InputError, match=r"2 data ranks saved its states, and there are 1; .*BatchSampler"):
        _saved("stateful", 8, tmp_path / "states")


def _of_ranks(results: list[Found]) -> list[list[int]]:
    """Returns the samples of each global batch."""
    rows = BATCH // len(results)
    reads = [result["read"] for result in results]
    return [sorted(chain.from_iterable(read[i : i + rows] for read in reads)) for i in range(0, len(reads[0]), rows)]


@pytest.mark.parametrize(("ranks", "options"), [(4, {}), (4, {"dp": 2}), (2, {})])
def test_a_sampler_cuts_batches_as_shard_batch_does(
    request: pytest.FixtureRequest, ranks: int, options: dict[str, Any]
) -> None:
    world: World = request.getfixturevalue(f"world{ranks}")
    of_ranks = world.run(_sampled, 11, options)
    for pairs in of_ranks:
        assert all(rows == cut for rows, cut in pairs)
    dp = options.get("dp", ranks)
    assert len({str(pairs) for pairs in of_ranks}) == dp


def _sampled(batch: int, options: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    return jobs.sampled(batch, **options)


def test_a_sampler_shuffles_each_epoch_once_and_keeps_what_is_asked() -> None:
    model = jobs.module()
    sampler = fxpar.BatchSampler(SAMPLES, BATCH, model, seed=4)
    epochs = [[*sampler] for _ in range(3)]
    assert all(len(epoch) == len(sampler) == SAMPLES // BATCH for epoch in epochs)
    assert all(len({i for rows in epoch for i in rows}) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = fxpar.BatchSampler(SAMPLES, BATCH, model, seed=4, start=20 + 2 * BATCH)
    assert len(again) == 3
    assert [*again] == epochs[1][2:]
    assert [*again] == epochs[2]
    assert [*fxpar.BatchSampler(SAMPLES, BATCH, model, seed=5)] != epochs[0]
    every = fxpar.BatchSampler(SAMPLES, BATCH, model, shuffle=False, drop_last=False)
    assert [*chain.from_iterable(every)] == list(range(SAMPLES))
    assert len(every) == 6


def test_it_is_a_plain_loop() -> None:
    result = jobs.training("sampler", 6)
    model, data = jobs.module(), jobs.Samples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    losses, norms, rates = [], [], []
    sampler = fxpar.BatchSampler(SAMPLES, BATCH, model, seed=1)
    for rows in [*sampler, *sampler][:6]:
        items = [data[i] for i in rows]
        losses.append(model.train_step({k: torch.stack([item[k] for item in items]) for k in items[0]}).item())
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    assert result["losses"] == losses
    assert [record["norm"] for record in result["records"]] == pytest.approx(norms)
    assert [record["lr"] for record in result["records"]] == pytest.approx(rates)


@pytest.mark.parametrize("graphs", ["full_iteration", "partial"])
def test_captured_steps_and_microbatches_train_alike(tmp_path: Path, graphs: str) -> None:
    """The batch that is copied ahead of its step is not counted before it, nor is the loader's state that of it."""
    whole = jobs.training("stateful", 8, jobs.module(microbatches=2))
    before = jobs.training("stateful", 4, jobs.module(graphs, 2), saves=tmp_path, save_every=3)
    after = jobs.training("stateful", 8, jobs.module(graphs, 2), saves=tmp_path)
    assert_continued(before, after, whole)


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), (signal.SIGINT, 0)])
def test_a_signal_of_one_rank_ends_all_with_a_save(
    world2: World, tmp_path: Path, number: signal.Signals, rank: int
) -> None:
    trained = world2.run(jobs.stopped, tmp_path, number, rank)
    (ended, count), (other, _) = trained
    assert ended.is_stopped
    assert other.is_stopped
    assert 3 <= ended.steps == other.steps == count < 200
    (path,) = tmp_path.iterdir()
    assert path.name == f"training-00000001-step-{ended.steps}"
    position = json.loads((path / "training.json").read_text())["content"]["position"]
    assert position == {"step": ended.steps, "samples": BATCH * ended.steps}


def test_a_second_interrupt_is_raised_and_threads_set_no_handler() -> None:
    before = signal.getsignal(signal.SIGINT)

    def twice(batches: Any) -> Any:
        def sent(samples: int) -> Any:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            return batches(samples)

        return sent

    with pytest.raises(KeyboardInterrupt):
        jobs.training("callable", 3, hurt=twice)
    assert signal.getsignal(signal.SIGINT) is before
    results: list[Found] = []
    thread = threading.Thread(target=lambda: results.append(jobs.training("callable", 2)))
    thread.start()
    thread.join()
    assert len(results[0]["losses"]) == 2


def test_metrics_are_the_counted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tick = jobs.module(), iter(range(1000))
    monkeypatch.setattr("fxpar.loop.metrics.time", SimpleNamespace(perf_counter=lambda: float(next(tick))))
    every = jobs.training("sampler", 6, model)
    losses = every["losses"]
    result = jobs.training("sampler", 6, jobs.module(), log_every=4)
    first, last = result["records"]
    assert [first["step"], last["step"]] == [4, 6]
    assert [first["samples"], last["samples"]] == [4 * BATCH, 6 * BATCH]
    assert first["loss"] == pytest.approx(sum(losses[:4]) / 4)
    assert last["loss"] == pytest.approx(sum(losses[4:]) / 2)
    assert (first["seconds"], last["seconds"]) == (0.25, 0.5)  # one tick a record
    assert first["tokens_per_second"] == 4 * BATCH * 5
    assert last["tokens_per_second"] == 2 * BATCH * 5
    assert first["mfu"] is None
    assert first["memory"] is None
    # Products of 4 × 5 rows: up, down and the tied head, of which a backward has two each.
    assert model.step_flags.volume.flops == 3 * 2 * 20 * (6 * 12 + 12 * 6 + 6 * models.VOCABULARY)
    assert len(dict(matmul_flops(model._programs.first.captured.program))) == 3
    monkeypatch.setattr("fxpar.loop.metrics.peak_flops", lambda model: 1e6)
    rates = [record["mfu"] for record in jobs.training("sampler", 6, jobs.module(), log_every=4)["records"]]
    assert rates == pytest.approx([4 * 28800 / 1e6, 2 * 28800 / 1e6])


def test_steps_of_several_microbatches_and_data_ranks_count_all_samples(world2: World) -> None:
    for result in world2.run(jobs.volumes):
        assert result == [(8, 40), (7, 35), (10, 50)]


def test_a_step_without_a_record_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number leaves the device: neither `item` nor a copy, and no kernel is launched for metrics."""
    model = jobs.module()
    meter = Meter(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model.train_step(models.batch())
    with jobs.Launched() as launched:
        meter.add(loss, model.step_flags)
    assert launched.names == []
    with jobs.Launched() as launched:
        meter.end(1, 4)
        record = meter.record()
    assert launched.names.count("aten._local_scalar_dense.default") <= 1
    assert record["loss"] == loss.item()


class Board:
    """TensorBoard's writer, as far as it is used."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int | None]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.rows.append((tag, scalar_value, global_step))


class Run:
    """A run of WandB, as far as it is used."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, Any], int | None]] = []

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((data, step))


def test_records_go_to_tensorboard_to_wandb_and_to_callables() -> None:
    board, run, rows = Board(), Run(), list[Any]()
    record = {"step": 3, "samples": 12, "loss": 0.5, "norm": None}
    for log in (board, run, rows.append, None):
        writer(log)(record)
    assert board.rows == [("samples", 12.0, 3), ("loss", 0.5, 3)]
    assert run.rows == [({"samples": 12.0, "loss": 0.5}, 3)]
    assert rows == [record]
    with pytest.raises(InputError, match="a int takes no metrics"):
        writer(3)


def test_evaluations_are_records_and_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    modes = []

    def evaluate(model: Any) -> dict[str, float]:
        modes.append((model.training, torch.is_grad_enabled()))
        return {"held_out": float(model(**models.batch())["loss"])}

    plain = jobs.training("sampler", 4, _partly_still())
    result = jobs.training("sampler", 4, _partly_still(), evaluate=evaluate, evaluate_every=2, progress=True)
    assert result["losses"] == plain["losses"]
    assert modes == [(False, False)] * 2
    assert [(r["step"], r["samples"]) for r in result["records"] if "held_out" in r] == [(2, 8), (4, 16)]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("step 1, samples 4, loss ")


def _partly_still() -> Any:
    """A module of which a part stays in evaluation mode."""
    model = jobs.module()
    model.drop.eval()
    return model


def test_a_trace_has_the_names_of_nodes(tmp_path: Path) -> None:
    plain = jobs.training("sampler", 7)
    traced = jobs.training("sampler", 7, trace=tmp_path / "trace")
    assert traced["losses"] == plain["losses"]
    events = json.loads((tmp_path / "trace" / "rank-00000.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    graph = jobs.module()._programs.first.ready.lowered.module.graph
    nodes = {node.name for node in graph.nodes if node.op == "call_function"}
    assert {"linear", "relu", "embedding"} <= names & nodes


def test_exposed_communication_is_what_nothing_runs_beside() -> None:
    spans = [("nccl_all_reduce", 0, 10), ("gemm", 4, 6), ("push_rows", 8, 14), ("gemm", 20, 30)]
    events = [jobs.kernel(*span) for span in spans]
    assert exposed_seconds(events) == pytest.approx(12e-6)
    assert exposed_seconds([]) is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, "steps: must be a positive integer, got 0"),
    ({"steps": True}, "steps: must be"),
    ({"save_every": 2}, "save_every: there is no folder for saves"),
    ({"evaluate_every": 2}, "evaluate, evaluate_every: belong together"),
    ({"evaluate": len}, "evaluate, evaluate_every: belong together"),
    ({"evaluate": 3, "evaluate_every": 2}, "evaluate: got 3"),
    ({"log_every": 0}, "log_every: must be a positive integer"),
    ({"keep": 0}, "keep: must be a positive integer"),
    ({"scheduler": 3}, "scheduler: got 3"),
    ({"trace": "x"}, "trace: ends before step 6"),
    ({"log": 3}, "log: a int takes no metrics"),
    ({"evaluate": str, "evaluate_every": 1}, "evaluate: returned a str"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], reason: str) -> None:
    model = jobs.module()
    arguments = (model, torch.optim.SGD(model.parameters(), lr=0.1), [models.batch()])
    with pytest.raises(InputError, match=reason):
        fxpar.train(*arguments, **{"steps": 3, "progress": False, **options})


LOADERS = [
    (3, "yields no batches"),
    ([], "yields no batch"),
    (["text"], "yields a str"),
    (lambda samples: [], "yields no batch"),
]


@pytest.mark.parametrize(("batches", "reason"), LOADERS)
def test_loaders_that_cannot_be_are_refused(batches: Any, reason: str) -> None:
    with pytest.raises(InputError, match=f"loader: .*{reason}"):
        jobs.training("sampler", 2, hurt=lambda loader: batches)


def test_objects_that_cannot_train_are_refused(tmp_path: Path) -> None:
    model = jobs.module()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="train: must be a ParallelModule"):
        fxpar.train(torch.nn.Linear(2, 2), sgd, [models.batch()], steps=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="optimizer: must be an optimizer, got a int"):
        fxpar.train(model, 3, [models.batch()], steps=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="LBFGS computes the loss several times"):
        fxpar.train(model, torch.optim.LBFGS(model.parameters()), [models.batch()], steps=1)
    with pytest.raises(TypeError, match="step_count"):
        fxpar.train(model, sgd, [models.batch()], step_count=1)
    model.save_training(tmp_path / "other", sgd, position=4)
    with pytest.raises(InputError, match=r"saves: the position is none of fxpar\.train"):
        fxpar.train(model, sgd, [models.batch()], steps=1, saves=tmp_path / "other")
    generator = (models.batch() for _ in range(2))
    with pytest.raises(InputError, match="a generator ends for good"):
        fxpar.train(model, sgd, generator, steps=3, progress=False)


def test_a_sampler_refuses_sizes_that_cannot_be(world2: World) -> None:
    model = jobs.module()
    for sizes, reason in (((0, 1), "length"), ((8, 0), "batch_size"), ((3, 4), "3 samples fill no batch of 4")):
        with pytest.raises(InputError, match=reason):
            fxpar.BatchSampler(*sizes, model)
    for text in world2.run(jobs.refused_samplers):
        assert text == [
            "batch_size: 1 samples for 2 data ranks; pass a larger batch_size",
            "batch_size: 1 samples for 2 data ranks; pass drop_last=True, or a larger batch_size",
        ]


def test_the_program_of_the_document_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", Path("docs/training-loop.md").read_text(), re.DOTALL)
    scope: dict[str, Any] = {"fxpar": fxpar, "torch": torch, "model": jobs.module(), "dataset": jobs.Samples()}
    monkeypatch.chdir(tmp_path)
    exec(block, scope)
    assert scope["trained"].steps == 6
    assert scope["trained"].samples == 48
    assert len([*(tmp_path / "saves").iterdir()]) == 2
