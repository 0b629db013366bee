"""What the ranks of a test world do with trainings that stop and go on, and the same on one process; see `jobs`."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fxpar
from fxpar.checkpoint import safetensors_files
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.errors import FxparError
from fxpar.runtime.sharded import whole_of
from tests.checkpoint import weight_jobs
from tests.runtime import models
from tests.runtime.jobs import Found, kept, tp

ROWS = 4


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Microbatches, all different."""
    generator = torch.Generator().manual_seed(11)
    made = torch.randint(0, models.VOCABULARY, (count, 2, ROWS, 5), generator=generator)
    return [{"ids": ids, "targets": targets} for ids, targets in made]


def module(precision: str = "as_is", dropout: float = 0.3) -> ParallelModule:
    """With dropout, tied words and a parameter that is never used."""
    plan = models.plan(tp(), precision=precision, seed=3)
    build = lambda: fxpar.parallelize(models.tiny(dropout=dropout), plan, models.batch())  # noqa: E731
    return kept(("training", precision, dropout), build)


class Training:
    """A module with AdamW in two groups, a scheduler that falls, and three microbatches a step."""

    MICRO = 3

    def __init__(self, precision: str = "as_is") -> None:
        self.model = module(precision)
        named = dict(self.model.named_parameters())
        still = [p for n, p in named.items() if "norm" in n]
        rest = [p for n, p in named.items() if "norm" not in n]
        groups: list[dict[str, Any]] = [{"params": rest}, {"params": still, "weight_decay": 0.0, "betas": (0.8, 0.99)}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-2, amsgrad=True, foreach=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 12)
        self.position = 0

    def steps(self, count: int) -> list[float]:
        """Losses of some steps."""
        data = batches(12 * self.MICRO)
        losses = []
        for _ in range(count):
            for _ in range(self.MICRO):
                losses.append(self.model.train_step(data[self.position]).item())
                self.position += 1
            self.model.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return losses

    def save(self, folder: Path, async_save: bool = False) -> Path:
        """Saves all of it."""
        position: Any = {"microbatch": self.position, "order": (1, 2), "step": self.position // self.MICRO}
        return self.model.save_training(folder, self.optimizer, self.scheduler, position, async_save=async_save)

    def found(self, losses: list[float]) -> Found:
        """Losses and weights."""
        return {"losses": losses, "weights": self.model.full_state_dict(), "step": self.model.step}


def through(steps: int, precision: str = "as_is") -> Found:
    """Without a stop."""
    training = Training(precision)
    return training.found(training.steps(steps))


def first_half(folder: Path, steps: int, precision: str = "as_is") -> Found:
    """Some steps and a save."""
    training = Training(precision)
    losses = training.steps(steps)
    training.save(folder)
    return training.found(losses)


def second_half(folder: Path, steps: int, precision: str = "as_is") -> Found:
    """In a training that has gone elsewhere, from the save on."""
    training = Training(precision)
    training.steps(1)
    position = training.model.resume_training(folder, training.optimizer, training.scheduler)
    assert position["order"] == (1, 2)
    training.position = position["microbatch"]
    return training.found(training.steps(steps))


def resumed_llama(folder: Path, steps: int, save: bool) -> list[float]:
    """A llama whose key and value heads ranks share and whose vocabulary is padded, first or from a save on."""
    model = kept("resumed llama", lambda: weight_jobs.initial("llama"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    if not save:
        model.resume_training(folder, optimizer)
    losses = []
    for _ in range(steps):
        losses.append(model.train_step(weight_jobs.batch("llama")).item())
        optimizer.step()
        optimizer.zero_grad()
    if save:
        model.save_training(folder, optimizer)
    return losses


# ---------------------------------------------------------------------- asynchronous saves


@contextlib.contextmanager
def writes_wait(until: threading.Event) -> Iterator[None]:
    """Lets no block of a file be written before an event, unless the disk is full: then it is set."""
    write = safetensors_files._write_all

    def waiting(descriptor: int, data: memoryview, offset: int) -> None:
        assert until.wait(60)
        write(descriptor, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_files, "_write_all", waiting)
        yield


def no_space(descriptor: int, data: memoryview, offset: int) -> None:
    """Fails as a write to a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def beside_steps(folder: Path, precision: str) -> dict[str, Any]:
    """What a save holds that is written after two more steps, and one that is written at once."""
    training = Training(precision)
    training.steps(2)
    at_once = load_all(training.save(folder / "at once"))
    may_write = threading.Event()
    with writes_wait(may_write):
        path = training.save(folder / "beside", async_save=True)
        training.steps(2)
        was_there = path.exists()
        may_write.set()
        waited = training.model.wait_for_save()
    return {"at once": at_once, "beside": load_all(path), "early": was_there, "paths": (path, waited)}


def load_all(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a save."""
    return {
        f"{file.name}:{name}": value for file in path.glob("*.safetensors") for name, value in load_file(file).items()
    }


def by_itself(folder: Path) -> list[str]:
    """An asynchronous save that nobody waits for, until it counts, and the next one."""
    training = Training()
    training.steps(1)
    path = training.save(folder, async_save=True)
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    training.save(folder, async_save=True)
    training.save(folder, async_save=True)  # waits for the one before
    names = sorted(name for name in os.listdir(folder) if name.startswith("training"))
    training.model.wait_for_save()
    return names


def on_full_disk(folder: Path, rank: int) -> list[str]:
    """Errors of saves while one rank's disk is full, and what is there after the next save."""
    training = Training()
    training.steps(1)
    training.save(folder)
    errors = []
    for async_save in (False, True):
        training.steps(1)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if training.model.world.rank == rank:
                patch.setattr(safetensors_files, "_write_all", no_space)
            try:
                training.save(folder, async_save=async_save)
                training.model.wait_for_save()
            except FxparError as error:
                errors.append(str(error))
        assert load_all(folder / "training-00000001-step-1")
    return errors


# ---------------------------------------------------------------------- killed saves


def kill_at_call(count: int) -> None:
    """Kills this process at a certain call of a built-in function that it is yet to make, as SIGKILL does."""
    calls = 0

    def watch(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "c_call"
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)


def calls_of_a_save(folder: Path) -> int:
    """How many calls of built-in functions a save makes."""
    training = Training()
    calls = 0

    def watch(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "c_call"

    sys.setprofile(watch)
    training.save(folder)
    sys.setprofile(None)
    return calls


def killed(folder: Path, count: int, rank: int) -> None:
    """A save, another two steps, and a save in which a rank, or every one (-1), is killed."""
    training = Training()
    training.steps(1)
    training.save(folder)
    training.steps(2)
    if rank in (-1, training.model.world.rank):
        kill_at_call(count)
    training.save(folder)


def after_kill(folder: Path) -> Found:
    """What a new training finds, and the folder after its next save."""
    training = Training()
    position = training.model.resume_training(folder, training.optimizer, training.scheduler)
    training.position = position["microbatch"]
    found = training.found(training.steps(1))
    training.save(folder)
    return {**found, "position": training.position, "folders": sorted(path.name for path in folder.iterdir())}


# ---------------------------------------------------------------------- kinds of optimizers

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=torch.tensor(0.1), foreach=False, capturable=False),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "AdamW, amsgrad": partial(torch.optim.AdamW, lr=0.1, amsgrad=True, maximize=False, foreach=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1, foreach=True),
    "Adamax": partial(torch.optim.Adamax, lr=0.1, foreach=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1, centered=True, momentum=0.5, foreach=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.1, foreach=True),
    "RAdam": partial(torch.optim.RAdam, lr=0.1, foreach=True),
    "Rprop": partial(torch.optim.Rprop, lr=0.1, foreach=True),
    "ASGD": partial(torch.optim.ASGD, lr=0.1, t0=1.0, foreach=True),
}


def with_optimizer(name: str, folder: Path) -> tuple[bool, bool]:
    """Whether a step after a resume is the step without one, in weights and in state; its state is new."""
    model, batch = module(dropout=0.0), models.batch()
    make = OPTIMIZERS[name]

    def step(optimizer: torch.optim.Optimizer) -> None:
        model.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()

    def state(optimizer: torch.optim.Optimizer) -> list[Any]:
        return [
            whole_of(value).clone() if isinstance(value, torch.Tensor) else value
            for parameter in model.parameters()
            for _, value in sorted(optimizer.state.get(parameter, {}).items())
        ]

    first = make(model.parameters())
    for _ in range(2):
        step(first)
    model.save_training(folder, first)
    step(first)
    wanted, wanted_state = model.full_state_dict(), state(first)
    second = make(model.parameters())
    step(second)
    model.resume_training(folder, second)
    step(second)
    found, found_state = model.full_state_dict(), state(second)
    same_state = len(found_state) == len(wanted_state) and all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found_state, wanted_state, strict=True)
    )
    return all(torch.equal(found[n], value) for n, value in wanted.items()), same_state


def with_optimizers(folder: Path) -> dict[str, tuple[bool, bool]]:
    """All of them, each in a folder of its own; Rprop indexes by masks, which parts refuse."""
    names = [name for name in OPTIMIZERS if name != "Rprop" or tp() == 1]
    return {name: with_optimizer(name, folder / name) for name in names}
