"""What the ranks of a test world do with `fxpar.train`, and the same on one process for reference; see `jobs`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.loop.train import Trained
from tests.runtime import models
from tests.runtime.jobs import Found, kept

SAMPLES, BATCH = 22, 4  # five batches an epoch, and two samples that fill none


class Samples(Dataset[dict[str, Tensor]]):
    """Random words; notes which samples were read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.words = torch.randint(0, models.VOCABULARY, (SAMPLES, 2, 5), generator=generator)
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        ids, targets = self.words[index]
        return {"ids": ids, "targets": targets}


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def module(graphs: str = "none", microbatches: int = 1, dropout: float = 0.3, dp: int = 0) -> ParallelModule:
    """Of as many data ranks as there are ranks."""
    dp = dp or ranks()
    plan = fxpar.Plan(dp=dp, tp=ranks() // dp, cuda_graphs=fxpar.CudaGraphs(graphs), microbatches=microbatches, seed=3)
    build = lambda: fxpar.parallelize(models.tiny(dropout=dropout), plan, models.batch())  # noqa: E731
    return kept(("loop", graphs, microbatches, dropout, dp), build)


def loader(kind: str, data: Samples, model: ParallelModule) -> Any:
    """Each kind of loader, over this data rank's samples."""
    if kind == "sampler":
        return DataLoader(data, batch_sampler=fxpar.BatchSampler(SAMPLES, BATCH, model, seed=1))
    place, rows = model.world.coordinates.get("dp", 0), BATCH // model.plan.dp
    if kind == "callable":

        def batches(samples: int) -> Iterator[Any]:
            for first in range(samples, samples + 3 * BATCH, BATCH):
                items = [data[(first + place * rows + i) % SAMPLES] for i in range(rows)]
                yield {key: torch.stack([item[key] for item in items]) for key in items[0]}

        return batches
    share = DistributedSampler(data, model.plan.dp, place, seed=2, drop_last=True)  # type: ignore[var-annotated]
    if kind == "iterable":
        return DataLoader(data, rows, sampler=share, drop_last=True)
    return StatefulDataLoader(data, rows, sampler=share, drop_last=True)


def training(
    kind: str, steps: int, model: ParallelModule | None = None, hurt: Callable[[Any], Any] | None = None, **options: Any
) -> Found:
    """Trains; returns what became of it."""
    model = module() if model is None else model
    data = Samples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    records: list[dict[str, Any]] = []
    batches = loader(kind, data, model)
    options = {"steps": steps, "log": records.append, "log_every": 1, "max_norm": 1.0, **options}
    options = {"scheduler": scheduler, "progress": False, **options}
    trained = fxpar.train(model, optimizer, batches if hurt is None else hurt(batches), **options)
    return {
        "trained": trained,
        "losses": [record["loss"] for record in records if "loss" in record],
        "records": records,
        "weights": model.full_state_dict(),
        "read": data.read,
        "step": model.step,
    }


def stopped(folder: Path, number: int, rank: int) -> tuple[Trained, Any]:
    """Trains until a signal that one rank sends itself in its third batch; returns the handler afterwards too."""

    def sending(batches: Any) -> Any:
        return lambda samples: sent(batches, samples)

    def sent(batches: Any, samples: int) -> Iterator[Any]:
        for batch in batches(samples):
            if samples == 0 and model.world.rank == rank and model.step == 2:
                os.kill(os.getpid(), number)
            yield batch

    model = module()
    before = signal.getsignal(number)
    found = training("callable", 200, model, sending, saves=folder, scheduler=None)
    assert signal.getsignal(number) is before
    trained: Trained = found["trained"]
    return trained, len(found["losses"])


def killed(folder: Path, seconds: float, rank: int) -> None:
    """Trains on, saving beside the steps, until a rank, or every one (-1), is killed so long after its first step."""
    model = module()

    def die(_: torch.optim.Optimizer, *__: Any) -> None:
        hook.remove()
        if rank in (-1, model.world.rank):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    hook = register_optimizer_step_post_hook(die)
    training("sampler", 10**6, model, saves=folder, save_every=2, async_save=True)


def sampled(batch: int, **options: Any) -> list[tuple[list[int], list[int]]]:
    """What `BatchSampler` yields, and what `shard_batch` makes of the global batches of one data rank."""
    model = module(**options)
    rows = [*fxpar.BatchSampler(4 * batch, batch, model, shuffle=False)]
    every = [{"ids": torch.arange(i, i + batch)[:, None]} for i in range(0, 4 * batch, batch)]
    cut = [fxpar.shard_batch(entry, model)["ids"][:, 0].tolist() for entry in every]
    return list(zip(rows, cut, strict=True))


def volumes() -> list[tuple[int, int]]:
    """Samples and tokens of a list of two microbatches, of ranks with other rows, and of longer sequences."""
    model, rank = module(), ranks() > 1 and dist.get_rank()
    steps: list[Any] = [[models.batch(2)] * 2, models.batch(3 + rank), models.batch(5)]
    found = []
    for step in steps:
        model.train_step(step)
        found.append((model.step_flags.volume.samples, model.step_flags.volume.tokens))
    return found


def refused_samplers() -> list[str]:
    """The reasons of samplers whose batches are too small for two data ranks."""
    model, found = module(), []
    for length, batch, drops in ((8, 1, True), (9, 4, False)):
        try:
            fxpar.BatchSampler(length, batch, model, drop_last=drops)
        except fxpar.FxparError as error:
            found.append(str(error))
    return found


class Launched(TorchDispatchMode):
    """Notes the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def kernel(name: str, start: float, end: float) -> Any:
    """An event of a profile of a GPU."""
    span = SimpleNamespace(start=start, end=end)
    kind = SimpleNamespace(name="CUDA")
    return SimpleNamespace(name=name, device_type=kind, is_user_annotation=False, time_range=span)
