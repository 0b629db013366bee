"""`fxpar.train`: a training loop that resumes, saves, evaluates and reports.

It is short so that you may copy and change it: all that it calls works without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.loop.data import Source
from fxpar.loop.metrics import Meter, Record, StepDisplay, StepTrace, evaluation_record, writer
from fxpar.loop.stop import Stop
from fxpar.loop.train_options import TrainOptions, check_objects


@dataclass(frozen=True)
class Trained:
    """Says how a training ended.

    Attributes:
        steps: made, those before a resume included.
        samples: that the whole job has trained on.
        loss: of the last step; None if there was none to make.
        is_stopped: whether a signal ended it before all steps.
    """

    steps: int
    samples: int
    loss: float | None
    is_stopped: bool


def train(model: ParallelModule, optimizer: torch.optim.Optimizer, loader: Any, **options: Any) -> Trained:
    """Trains a model for so many steps; all ranks call it. A save in the folder `saves` is continued.

    SIGTERM, and a first SIGINT, end it after a step that all ranks agree on, with a save.

    Example:
        ```python
        trained = fxpar.train(model, optimizer, loader, steps=4, saves="saves", save_every=2, log=print)
        ```

    Args:
        model: what `parallelize` returned, in training mode.
        optimizer: `fxpar.Optimizer` or one of torch's. It steps inside of `train_step`, in graphs of full steps too.
        loader: batches as `train_step` takes them, of this rank: an iterable, such as a `DataLoader`, which begins anew
            when it ends, or a callable that takes the count of samples seen and returns batches from there on.
        options: steps, scheduler, scaler, max_norm, saves, save_every, keep, async_save, resume, log_every, log,
            evaluate, evaluate_every, progress, trace; `help(fxpar.loop.train_options.TrainOptions)` says what each is.

    Raises:
        InputError: an option, the loader or a batch cannot be used, or other data ranks saved the loader's state.
        CheckpointError: the save does not fit, or the folder cannot be written.
    """
    chosen = TrainOptions(**options)
    check_objects(model, optimizer)
    write = writer(chosen.log)
    source = Source(loader, model, (chosen.save_every or chosen.steps) if chosen.saves is not None else 0)
    done = _resume(model, optimizer, source, chosen)
    meter, loss, step, is_stopped = Meter(model, optimizer), None, done, False
    display = StepDisplay(chosen.progress and model.world.rank == 0, done, chosen.steps)
    with (
        Stop(model.world) as stop,
        StepTrace(chosen.trace, model.world) as trace,
        display,
        closing(source.batches()) as batches,
    ):
        for step in range(done + 1, chosen.steps + 1):
            loss = model.train_step(next(batches), chosen.scaler, optimizer, chosen.max_norm)
            if chosen.scheduler is not None:
                chosen.scheduler.step()
            source.stepped(model.step_flags.volume.samples)
            _report(meter.record(), display, write)  # while the device runs the step that was queued
            meter.add(loss, model.step_flags)
            trace.stepped()
            is_stopped = stop.is_agreed() and step < chosen.steps
            is_last = is_stopped or step == chosen.steps
            if is_last or step % chosen.log_every == 0:
                meter.end(step, source.samples, trace.exposed)
            if chosen.evaluate_every and not is_stopped and step % chosen.evaluate_every == 0:
                _report(meter.record(), display, write)
                with meter.paused():
                    _report(_evaluate(model, step, source.samples, chosen), display, write)
            if chosen.saves is not None and (is_last or (chosen.save_every and step % chosen.save_every == 0)):
                _report(meter.record(), display, write)
                with meter.paused():
                    _save(model, optimizer, source, step, chosen)
            if is_stopped:
                break
        _report(meter.record(), display, write)
        model.wait_for_save()
    return Trained(step, source.samples, None if loss is None else float(loss), is_stopped)


def _resume(model: ParallelModule, optimizer: torch.optim.Optimizer, source: Source, chosen: TrainOptions) -> int:
    """Continues the last save, if there is one; returns the steps that were made before it."""
    if chosen.saves is None or not chosen.resume:
        return 0
    objects = (optimizer, chosen.scheduler, chosen.scaler)
    position = model.resume_training(chosen.saves, *objects, missing="start")
    return 0 if position is None else source.resume(position)


def _save(
    model: ParallelModule, optimizer: torch.optim.Optimizer, source: Source, step: int, chosen: TrainOptions
) -> None:
    """Saves; the last save is there when the training ends, others are written while it goes on."""
    assert chosen.saves is not None
    objects = (optimizer, chosen.scheduler, source.position(step), chosen.scaler)
    model.save_training(chosen.saves, *objects, keep=chosen.keep, async_save=chosen.async_save)


def _report(record: Record, display: StepDisplay, write: Callable[[Record], None]) -> None:
    if record:
        display.show(record)
        write(record)


def _evaluate(model: ParallelModule, step: int, samples: int, chosen: TrainOptions) -> Record:
    """Returns what the caller's evaluation says of the model, which trains on afterwards; empty but on rank 0."""
    assert chosen.evaluate is not None
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        record = evaluation_record(step, samples, chosen.evaluate(model))
    for module, mode in modes:  # not train(): some may be in evaluation mode for good
        module.training = mode
    return record if model.world.rank == 0 else {}
