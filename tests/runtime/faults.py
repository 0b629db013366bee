"""What the ranks of a test world do when one of them, rank 1, does something else than the others."""

from __future__ import annotations

import atexit
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fxpar
from fxpar.errors import InputError
from fxpar.ops import process_group
from fxpar.runtime.steps import FinishedForward
from tests.captures import captured_each_time
from tests.runtime import models
from tests.runtime.jobs import Found, refusal, tp

ODD = 1
SECONDS, COLLECTIVE_SECONDS = 3.0, 15.0


def is_odd() -> bool:
    """Whether this is the rank that differs."""
    return dist.get_rank() == ODD


def parallel(model: Any = None, **options: Any) -> fxpar.ParallelModule:
    """A tiny model on all ranks, whose batches are compared where the test is about that."""
    options = {"check_inputs": False, **options}
    return fxpar.parallelize(models.tiny() if model is None else model, models.plan(tp()), models.batch(), **options)


class Fails(models.Tiny):
    """Cannot be traced in one mode on the odd rank."""

    def __init__(self, in_training: bool) -> None:
        super().__init__()
        self.in_training = in_training

    def forward(self, ids: Tensor, targets: Tensor | None = None, *, scaled: bool = False) -> dict[str, Tensor]:
        if is_odd() and self.training == self.in_training:
            raise ValueError("no layer of that name")
        return super().forward(ids, targets, scaled=scaled)


class Wider(models.Tiny):
    """Of another configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 18), torch.nn.Linear(18, 6)


@captured_each_time()
def at_start_up() -> Found:
    """What each rank is told when the odd one comes to `parallelize` with something else."""
    plan, wrong = models.plan(tp()), models.plan(tp() + 1)
    tiny, batch = models.tiny(), models.batch()
    actions: dict[str, Callable[[], Any]] = {
        "forward raises": lambda: parallel(models.tiny(Fails, in_training=True)),
        "other world": lambda: fxpar.parallelize(tiny, wrong if is_odd() else plan, batch),
        "no module": lambda: fxpar.parallelize(None if is_odd() else tiny, plan, batch),  # type: ignore[arg-type]
        "other configuration": lambda: parallel(models.tiny(Wider if is_odd() else models.Tiny)),
        "other mode": lambda: parallel(models.tiny().train(not is_odd())),
    }
    return {name: refusal(action) for name, action in actions.items()}


@captured_each_time()
def later(folder: Path) -> Found:
    """What each rank is told when a later call fails or differs on one; and that training goes on.

    Args:
        folder: has a checkpoint, so that rank 0, which writes, is refused.
    """
    model, batch = parallel(models.tiny(Fails, in_training=False)), models.batch()
    first = model.train_step(batch)
    found: Found = {"forward raises": refusal(lambda: model.eval()(**batch))}
    model.train()
    plain = parallel()
    found["other mode"] = refusal(lambda: plain.train(not is_odd())(ids=batch["ids"]))
    found["other sizes"] = refusal(lambda: model.train_step(models.batch(*((1, 5) if is_odd() else (4, 1)))))
    found["no room"] = refusal(lambda: model.save_checkpoint(folder))
    model.step = 0
    assert dist.group.WORLD is not None
    dist.barrier()
    keys = dist.group.WORLD.get_group_store().num_keys()
    dist.barrier()
    found["goes on"] = torch.equal(model.train_step(batch), first)
    found["keys"] = dist.group.WORLD.get_group_store().num_keys() - keys
    return found


def inputs() -> Found:
    """What `check_inputs` says of each difference; equal batches pass."""
    model, batch = parallel(check_inputs=True), models.batch()
    first = model.train_step(batch)
    other = {**batch, "targets": batch["targets"].flip(0)} if is_odd() else batch
    actions: dict[str, Callable[[], Any]] = {
        "values": lambda: model.train_step(other),
        "sizes": lambda: model.train_step(models.batch(3 if is_odd() else 4)),
        "entries": lambda: model(**{"ids": batch["ids"]} if is_odd() else batch),
        "constants": lambda: model(ids=batch["ids"], scaled=is_odd()),
        "calls": lambda: model.train_step(batch) if is_odd() else model(**batch),
        "modes": lambda: model.train(not is_odd())(**batch),
    }
    found: Found = {name: refusal(action) for name, action in actions.items()}
    model.train().step = 0
    found["goes on"] = torch.equal(model.train_step(batch), first)
    return found


def equal_rows() -> list[list[str]]:
    """What the host warns of when all data ranks bring the same rows, or each its own."""
    same, own = models.batch(), models.batch(2 + dist.get_rank())
    told = []
    for batches in ([same, same, same, same], [own, same, same], [same, own, same, same]):
        model = fxpar.parallelize(models.tiny(), fxpar.Plan(dp=2), same)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.eval()(**same)
            model.train()
            for batch in batches:
                model.train_step(batch)
        told.append([str(warning.message) for warning in caught if "the batch: " in str(warning.message)])
    return told


def ends_while_it_compiles() -> None:
    """The odd rank is killed in the middle of its trace."""

    class Ends(models.Tiny):
        def forward(self, ids: Tensor, targets: Tensor | None = None, *, scaled: bool = False) -> dict[str, Tensor]:
            if is_odd():
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(ids, targets, scaled=scaled)

    parallel(models.tiny(Ends))


def ends_in_a_step() -> None:
    """The odd rank is killed in front of its second sum over the ranks."""
    model, batch = parallel(), models.batch()
    model.train_step(batch)
    if is_odd():
        plain, calls = process_group._c10d, list[int]()

        class Dying:
            def __getattr__(self, name: str) -> Any:
                calls.extend([1] * (name == "all_reduce"))
                if len(calls) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                return getattr(plain, name)

        process_group._c10d = Dying()  # type: ignore[assignment]
    model.train_step(batch)


def ends_between_copies() -> None:
    """The odd rank is killed where the other waits for what it writes into its memory, and for no connection."""
    made = models.plan(
        tp(), communication=fxpar.Communication("copy"), cost=fxpar.Cost(least_copy=1.0, copy_latency=1e-12)
    )
    model, batch = fxpar.parallelize(models.tiny(), made, models.batch(), check_inputs=False), models.batch()
    model.train_step(batch)
    if is_odd():
        FinishedForward.backward = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    model.train_step(batch)


def ends_in_front_of_an_agreement() -> None:
    """The odd rank is killed where the other waits for its word, for up to ten minutes."""

    class Scheduler:
        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

        def state_dict(self) -> dict[str, int]:
            if is_odd():
                os.kill(os.getpid(), signal.SIGKILL)
            return {}

    model = parallel()
    model.train_step(models.batch())
    with TemporaryDirectory() as folder:
        model.save_training(folder, torch.optim.SGD(model.parameters()), Scheduler())


def saves_alone() -> None:
    """Rank 0 alone saves, as a script of another library does, and the odd rank's program comes to its end."""
    model = parallel()
    model.train_step(models.batch())
    if is_odd():
        atexit._run_exitfuncs()
        os._exit(0)
    with TemporaryDirectory() as folder:
        model.save_checkpoint(folder)


def stays_away() -> None:
    """The odd rank never calls `parallelize`."""
    if not is_odd():
        parallel(timeout=SECONDS)


def is_busy() -> None:
    """The odd rank does not come to the second step."""
    model, batch = parallel(), models.batch()
    model.train_step(batch)
    if is_odd():
        time.sleep(2 * COLLECTIVE_SECONDS)
    model.train_step(batch)


def is_refused() -> None:
    """The odd rank's batch is refused, and its program ends with the error."""
    model, batch = parallel(), models.batch()
    try:
        model.train_step({**batch, "mask": batch["ids"]} if is_odd() else batch)
    except InputError:
        if is_odd():
            os._exit(1)
        raise


def compiles_alone() -> None:
    """The odd rank's batch needs a program that the others do not need; it is told and ends."""
    model = parallel()
    model.train_step(models.batch())
    if not is_odd():
        model.train_step(models.batch())
    else:
        kind, _, reason, _ = refusal(lambda: model.train_step(models.batch(1)))
        is_told = kind == "InputError" and "rank 1: train_step, compiles a program for " in reason
        os._exit(7 if is_told else 1)
