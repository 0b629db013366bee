"""What ranks are told of a call in which rank 1 fails, and in the calls behind it; its program catches the error."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fxpar
from fxpar.errors import FxparError
from fxpar.runtime.alarm import _LOOKOUT
from fxpar.runtime.steps import FinishedForward
from tests.pipeline.runtime.pipeline_jobs import parts
from tests.runtime import models
from tests.runtime.jobs import Found

ODD = 1


class Broken(Exception):
    """Of no library."""


def made(options: dict[str, Any]) -> fxpar.ParallelModule:
    """A tiny module of all ranks."""
    calls = {"check_inputs": options["check_inputs"], "timeout": 60.0}
    plan = {name: value for name, value in options.items() if name != "check_inputs"}
    if plan.get("communication") == fxpar.Communication("copy"):
        plan["cost"] = fxpar.Cost(least_copy=1.0, copy_latency=1e-12)
    return fxpar.parallelize(models.tiny().double(), fxpar.Plan(**plan), models.batch(), **calls)


def stop_odd() -> None:
    """Ends a step of the odd rank's optimizer."""
    if is_odd():
        raise Broken("no memory for the optimizer")


def is_odd() -> bool:
    """Whether this is the rank that fails."""
    return dist.get_rank() == ODD


def attempt(action: Callable[[], Any]) -> tuple[str, float]:
    """The error of an action, and the seconds until it came."""
    begin = time.monotonic()
    try:
        action()
    except (FxparError, Broken, KeyboardInterrupt, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "", time.monotonic() - begin


@contextmanager
def broken(error: type[BaseException]) -> Iterator[None]:
    """Inside, no backward of the odd rank begins."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise error("between two collectives")

    names = ("backward", "input_backward")
    plain = {name: getattr(FinishedForward, name) for name in names}
    for name in names:
        setattr(FinishedForward, name, fail if is_odd() else plain[name])
    try:
        yield
    finally:
        for name in names:
            setattr(FinishedForward, name, plain[name])


def whole(model: fxpar.ParallelModule) -> Any:
    """A batch, of a pipeline as two microbatches."""
    batch = models.batch()
    return parts(batch) if model.plan.pp > 1 else batch


def before(options: dict[str, Any]) -> Found:
    """Errors in front of all collectives; training goes on as if these calls had not been."""
    model = made(options)
    model.train_step(whole(model))
    batch = models.batch()
    wrong: list[Any] = [{**batch, "mask": batch["ids"]}, {"ids": batch["ids"]}, {**batch, "ids": "text"}]
    wrong += [{**batch, "ids": batch["ids"].double()}, {**batch, "ids": batch["ids"][0]}, 3]
    wrong = [[each, each] if model.plan.pp > 1 else each for each in wrong]
    right = whole(model)
    found: Found = {"told": [attempt(lambda w=w: model.train_step(w if is_odd() else right)) for w in wrong]}  # type: ignore[misc]
    with torch.no_grad():
        found["told"].append(attempt(lambda: model(**batch, more=1) if is_odd() else model(**batch)))
    found["told"].append(attempt(lambda: model.clip_grad_norm_(-1.0 if is_odd() else 1.0)))
    found["calls"] = attempt(lambda: model.train_step(right) if is_odd() else model.clip_grad_norm_(1.0))
    found["loss"] = model.train_step(right)
    model.step -= 1
    found["again"] = model.train_step(right)
    found["step"] = model.step
    return found


def later(options: dict[str, Any], how: str, folder: Path) -> Found:
    """An error behind the first collective, and what every further call says."""
    model = made(options)
    batch = whole(model)
    model.train_step(batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "behind" and is_odd():

        def hook(parameter: Tensor) -> None:
            raise Broken("behind all collectives")

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
    if how == "backward":
        loss = model(**batch)["loss"]
    if how == "optimizer":
        optimizer.register_step_pre_hook(lambda *arguments: stop_odd())
        attempt(optimizer.step)
    kinds = {"interrupted": KeyboardInterrupt, "between": Broken, "backward": Broken}
    action = loss.backward if how == "backward" else lambda: model.train_step(batch)
    if how in kinds:
        with broken(kinds[how]):
            first = attempt(action)
    else:
        first = attempt(action)
    plain = models.batch()
    calls: dict[str, Callable[[], Any]] = {
        "train_step": lambda: model.train_step(batch),
        "forward": lambda: model(**plain),
        "clip": lambda: model.clip_grad_norm_(1.0),
        "state": model.full_state_dict,
        "save": lambda: model.save_training(folder, optimizer),
        "bad": lambda: model.train_step(3),
    }
    if model.plan.tp > 1:  # else it is of this rank alone
        calls["norm"] = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    begin = time.monotonic()
    while how == "behind" and not is_odd() and not first[0] and time.monotonic() - begin < 5.0:
        time.sleep(0.05)
        first = attempt(lambda: model.world.agreement.alarm.check())
    return {"first": first, "behind": {name: attempt(call) for name, call in calls.items()}}


def late(options: dict[str, Any], alone: bool) -> Found:
    """An error of fxpar behind the first collective: of all ranks, or of one."""
    model = made(options)
    batch = whole(model)
    model.train_step(batch)
    found: Found = {}
    plain = FinishedForward.backward

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise fxpar.errors.InputError("no such thing", where="here", remedy="none")

    FinishedForward.backward = plain if alone and not is_odd() else refuse  # type: ignore[method-assign]
    found["refused"] = attempt(lambda: model.train_step(batch))
    FinishedForward.backward = plain  # type: ignore[method-assign]
    found["behind"] = attempt(lambda: model.train_step(batch))
    return found


def dropped() -> list[int]:
    """The modules that the process listens for, after one is dropped of which a parameter is left; counted anew."""
    model = made({"dp": 2, "check_inputs": True})
    parameter = next(model.parameters())
    first = model.world.agreement.module
    del model
    gc.collect()
    assert parameter.requires_grad
    return [alarm.module - first for alarm in _LOOKOUT._alive()[0] if alarm.module >= first]
