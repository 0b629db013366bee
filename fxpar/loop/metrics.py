"""What a training reports: records of metrics, where they go, how far it is, and a chrome trace of one step.

Enters: losses and norms, which stay on the device until a record is due. Leaves: dicts of numbers on rank 0, and a
file for each rank in which ranges have the names of the program's nodes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.cost.verdict import PEAK_FLOPS
from fxpar.cost.work import Volume
from fxpar.errors import InputError
from fxpar.ir.program import PRECISION_DTYPES
from fxpar.runtime.calls import node_ranges
from fxpar.runtime.training import StepFlags
from fxpar.runtime.world import World

Record = dict[str, Any]

# Programs are compiled and graphs recorded before; one step warms the profiler up.
_BEFORE = 4
TRACED_STEPS = _BEFORE + 2
# Kernels of NCCL, copies into other GPUs' memory, and kernels that send there themselves.
_COMMUNICATION = ("nccl", "ptop", "push_")


@dataclass(frozen=True)
class _Ended:
    """The steps that a record is about.

    Attributes:
        count: of steps.
        numbers: their losses, then their norms, on the host.
        event: after which the numbers are there; None if they are.
        seconds: when the steps ended, on the clock of `perf_counter`; None if the event is to tell.
        volume: of all of them.
        fields: of the record, that are known on the host.
        exposed: the same of the traced step, if it is one of them.
    """

    count: int
    numbers: Tensor
    event: torch.cuda.Event | None
    seconds: float | None
    volume: Volume
    fields: Record
    exposed: Record


class Meter:
    """Gathers what steps leave, on rank 0; on other ranks it does nothing.

    Args:
        model: that trains.
        optimizer: whose first group's learning rate is reported.
    """

    def __init__(self, model: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._is_first = model.world.rank == 0
        self._peak = peak_flops(model)
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._volume, self._since = Volume(), time.perf_counter()
        self._ended: _Ended | None = None

    def add(self, loss: Tensor, flags: StepFlags) -> None:
        """Takes what a step left. Nothing waits for the device, and no kernel is launched."""
        if self._is_first:
            self._losses.append(loss)
            self._norms += [] if flags.norm is None else [flags.norm]
            self._volume += flags.volume

    def end(self, step: int, samples: int, exposed: float | None = None) -> None:
        """Ends what the next record is about, and has its numbers copied. Nothing waits.

        Args:
            step: the number of the last one.
            samples: of the whole job, over all steps.
            exposed: seconds of communication in the traced step that nothing hid.
        """
        if not self._is_first:
            return
        tensors = [tensor.detach().double() for tensor in (*self._losses, *self._norms)]
        numbers, event, now = torch.stack(tensors), None, time.perf_counter()
        if numbers.is_cuda:
            numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._model.world.device))
        fields = {"step": step, "samples": samples, "lr": float(self._optimizer.param_groups[0]["lr"])}
        exposed_fields = {} if exposed is None else {"exposed_seconds": exposed}
        self._ended = _Ended(
            len(self._losses), numbers, event, None if event else now, self._volume, fields, exposed_fields
        )
        self._losses, self._norms, self._volume = [], [], Volume()

    def record(self) -> Record:
        """Returns the metrics of the steps that have ended, for which it waits; empty where there are none.

        The device has nothing to do meanwhile, unless a further step was queued before.
        """
        if self._ended is None:
            return {}
        ended, self._ended = self._ended, None
        if ended.event is not None:
            ended.event.synchronize()
        numbers, now = ended.numbers.tolist(), ended.seconds or time.perf_counter()
        seconds, self._since = (now - self._since) / ended.count, now
        device, volume, norms = self._model.world.device, ended.volume, numbers[ended.count :]
        rate = volume.flops / (seconds * ended.count * self._model.world.size)
        return {
            "step": ended.fields["step"],
            "samples": ended.fields["samples"],
            "loss": sum(numbers[: ended.count]) / ended.count,
            "norm": sum(norms) / len(norms) if norms else None,
            "lr": ended.fields["lr"],
            "seconds": seconds,
            "tokens_per_second": volume.tokens / (seconds * ended.count),
            "mfu": None if self._peak is None else rate / self._peak,
            "memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            **ended.exposed,
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the seconds of a save or an evaluation out of those of steps."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before


def peak_flops(model: ParallelModule) -> float | None:
    """Returns the most FLOPs a second of one rank's GPU; None of other devices and of types with more bits."""
    dtype = PRECISION_DTYPES[model.plan.precision] or next(model.parameters()).dtype
    if model.world.device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(model.world.device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def writer(log: Any) -> Callable[[Record], None]:
    """Returns what writes records: to TensorBoard's `SummaryWriter`, to a run of WandB, or to a callable.

    Args:
        log: one of these; None writes nowhere.

    Raises:
        InputError: it is none of these.
    """
    if log is None:
        return lambda record: None
    if hasattr(log, "add_scalar"):

        def scalars(record: Record) -> None:
            for name, number in _numbers(record).items():
                log.add_scalar(name, number, record["step"])

        return scalars
    if hasattr(log, "log"):
        return lambda record: log.log(_numbers(record), step=record["step"])
    if callable(log):
        return lambda record: log(record)
    remedy = "pass a callable of a dict, a SummaryWriter of TensorBoard, or a run of WandB"
    raise InputError(f"a {type(log).__name__} takes no metrics", where="log", remedy=remedy)


def evaluation_record(step: int, samples: int, result: Mapping[str, float] | float | None) -> Record:
    """Returns the record of an evaluation; empty of one that returned None.

    Raises:
        InputError: it returned neither numbers by name nor a number.
    """
    if result is None:
        return {}
    if isinstance(result, Mapping):
        return {"step": step, "samples": samples, **result}
    if isinstance(result, int | float | Tensor):
        return {"step": step, "samples": samples, "evaluation": float(result)}
    remedy = "return a number, a dict of numbers, or None"
    raise InputError(f"returned a {type(result).__name__}", where="evaluate", remedy=remedy)


def _numbers(record: Record) -> dict[str, float]:
    return {name: float(number) for name, number in record.items() if name != "step" and number is not None}


class StepDisplay:
    """Shows on stderr how far a training is: a bar in a terminal, else a line for each record.

    Args:
        is_on: whether it shows anything.
        done: steps before the first.
        steps: of the whole training.
    """

    def __init__(self, is_on: bool, done: int, steps: int) -> None:
        self._is_on = is_on
        self._bar = Progress(console=Console(stderr=True)) if is_on and sys.stderr.isatty() else None
        self._task = None if self._bar is None else self._bar.add_task("training", total=steps, completed=done)

    def __enter__(self) -> StepDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, record: Record) -> None:
        """Shows a record."""
        if not self._is_on or not record:
            return
        shown = ", ".join(f"{name} {_short(number)}" for name, number in record.items() if number is not None)
        if self._bar is None or self._task is None:
            print(shown, file=sys.stderr)
        else:
            self._bar.update(self._task, completed=record["step"], description=shown)


def _short(number: Any) -> str:
    return f"{number:.4g}" if isinstance(number, float) else str(number)


# ---------------------------------------------------------------------- the trace of one step


class StepTrace:
    """Traces the sixth step of a training.

    Args:
        folder: for the files `rank-00000.json` and on; None traces nothing.
        world: of the rank.

    Attributes:
        exposed: seconds of communication in that step beside which no other kernel ran; None before it, and without a
            GPU.

    Raises:
        InputError: the folder cannot be written.
    """

    def __init__(self, folder: str | Path | None, world: World) -> None:
        self.exposed: float | None = None
        self._folder = None if folder is None else Path(folder)
        self._world, self._steps, self._stack = world, 0, ExitStack()
        self._profile: profile | None = None
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                remedy = "pass a folder that can be written"
                raise InputError(f"cannot be made: {error.strerror}", where="trace", remedy=remedy) from error

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def stepped(self) -> None:
        """Counts a step; begins and ends the profile."""
        if self._folder is None:
            return
        self._steps += 1
        if self._steps == _BEFORE:
            self._start()
        elif self._profile is not None and self._steps < TRACED_STEPS:
            self._synchronize()
            self._profile.step()  # the warm-up is over
            self._stack.enter_context(node_ranges())
        elif self._profile is not None:
            self._synchronize()
            self._stack.close()
            self._profile.export_chrome_trace(str(self._folder / f"rank-{self._world.rank:05d}.json"))
            self.exposed = exposed_seconds(self._profile.events() or [])
            self._profile = None

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if self._world.device.type == "cuda" else []
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
        self._profile = self._stack.enter_context(profile(activities=activities, schedule=schedule))

    def _synchronize(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)


def exposed_seconds(events: Iterable[Any]) -> float | None:
    """Returns the seconds of communication beside which no other kernel ran; None of events without kernels."""
    kernels = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
    if not kernels:
        return None
    others = [e for e in kernels if not any(word in e.name.lower() for word in _COMMUNICATION)]
    return (_union(kernels) - _union(others)) / 1e6


def _union(events: Iterable[Any]) -> float:
    """Returns the microseconds in which at least one of the events ran."""
    total, end = 0.0, float("-inf")
    for span in sorted((event.time_range for event in events), key=lambda span: float(span.start)):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total
