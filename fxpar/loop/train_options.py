"""What a training is called with besides model, optimizer and loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxpar.api import check_parallel
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.errors import InputError, shown
from fxpar.loop.metrics import TRACED_STEPS


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Says how long `fxpar.train` trains, and what it does between steps.

    Attributes:
        steps: of the whole training, those before a resume included.
        scheduler: of the learning rates; it steps after each step.
        scaler: of the loss, for float16 gradients.
        max_norm: to which all gradients together are clipped.
        saves: folder of the saves; None saves nothing. The last step is saved in any case.
        save_every: steps between two saves.
        keep: how many saves stay.
        async_save: whether a save is written while the training goes on; it takes memory of the host.
        resume: whether a save in `saves` is continued.
        log_every: steps between two records of metrics.
        log: takes the records on rank 0: a callable of a dict, a `SummaryWriter` of TensorBoard, or a run of WandB.
        evaluate: called with the model, in evaluation mode and without gradients, on all ranks. What it returns, a
            number or a dict of numbers, is a record.
        evaluate_every: steps between two evaluations.
        progress: whether rank 0 shows how far it is, on stderr: a bar in a terminal, else a line for each record.
        trace: folder for a chrome trace of the sixth step, one file for each rank.

    Raises:
        InputError: a number is not positive, or an option lacks the one that it belongs to.
    """

    steps: int
    scheduler: Any = None
    scaler: torch.amp.GradScaler | None = None
    max_norm: float | None = None
    saves: str | Path | None = None
    save_every: int | None = None
    keep: int = 2
    async_save: bool = True
    resume: bool = True
    log_every: int = 10
    log: Any = None
    evaluate: Callable[[ParallelModule], Mapping[str, float] | float | None] | None = None
    evaluate_every: int | None = None
    progress: bool = True
    trace: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "save_every", "keep", "log_every", "evaluate_every"):
            number = getattr(self, name)
            if number is None and name in ("save_every", "evaluate_every"):
                continue
            if type(number) is not int or number < 1:
                raise InputError(f"must be a positive integer, got {shown(number)}", where=name, remedy="pass one")
        if self.save_every is not None and self.saves is None:
            raise InputError("there is no folder for saves", where="save_every", remedy="pass saves=… too")
        if (self.evaluate is None) != (self.evaluate_every is None):
            remedy = "pass evaluate=… and evaluate_every=…, or neither"
            raise InputError("belong together", where="evaluate, evaluate_every", remedy=remedy)
        if self.evaluate is not None and not callable(self.evaluate):
            raise InputError(f"got {shown(self.evaluate)}", where="evaluate", remedy="pass a callable of the model")
        if self.scheduler is not None and not hasattr(self.scheduler, "step"):
            raise InputError(f"got {shown(self.scheduler)}", where="scheduler", remedy="pass one of torch's schedulers")
        if self.trace is not None and self.steps < TRACED_STEPS:
            remedy = f"train at least {TRACED_STEPS} steps, or leave it out"
            raise InputError(f"ends before step {TRACED_STEPS}, which is traced", where="trace", remedy=remedy)


def check_objects(model: Any, optimizer: Any) -> None:
    """Refuses what no step takes.

    Raises:
        InputError: `parallelize` did not return the model, or the optimizer is none, or needs the loss several times.
    """
    check_parallel(model, "train")
    if not isinstance(optimizer, torch.optim.Optimizer):
        remedy = "pass fxpar.Optimizer(model, …), or one of torch.optim"
        raise InputError(f"must be an optimizer, got a {type(optimizer).__name__}", where="optimizer", remedy=remedy)
    if isinstance(optimizer, torch.optim.LBFGS):
        remedy = "pass an optimizer that steps once on one gradient, such as fxpar.Optimizer(model)"
        raise InputError("LBFGS computes the loss several times in a step", where="optimizer", remedy=remedy)
