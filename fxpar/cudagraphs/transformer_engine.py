"""Graphs by Transformer Engine's `make_graphed_callables`.

Enters: the calls of a step, of which a graph can hold all. Leaves: the same as a function that Transformer Engine has
captured, forward and backward, as one node of autograd. Of a pipeline a rank captures all microbatches of its stages,
in the order of its schedule.

It warms functions up by running them, so gradients are put into buffers only while a graph is captured.
"""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpar.cudagraphs.graph_cache import PartialGraphs, StageGraphs, key_of, key_of_batch, refuse_uncaptured
from fxpar.cudagraphs.partial import Noting, copied
from fxpar.cudagraphs.pool import Flight, Pool
from fxpar.errors import InputError
from fxpar.plan.plan_options import CudaGraphs
from fxpar.runtime.bound_batch import BoundBatch
from fxpar.runtime.calls import GradientSink, Runnable, StepCalls, Values
from fxpar.runtime.grad_buffers import Buffers, Waiting
from fxpar.runtime.graph_modes import MovingInputs, NoGraphs, Run
from fxpar.runtime.microbatches import StepOptions, StepResult
from fxpar.runtime.random_state import RandomState

_WHERE = "CudaGraphs('transformer_engine')"
# Of gradients whose memory it gives on.
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLIGHT, _OUTPUTS, _GRADIENTS = "flight", "outputs", "gradients"


class _Captured(ABC):
    """Forward and backward as Transformer Engine captures them.

    Args:
        calls: what they do.
        inputs: names of the values whose addresses change from call to call.

    Attributes:
        values: of the program's inputs, by name.
        sizes: of the call, by symbol.
        handles: tensors of which autograd asks the gradients.
    """

    def __init__(self, calls: StepCalls, inputs: Collection[str]) -> None:
        self.calls, self.inputs = calls, tuple(inputs)
        self.outputs = tuple(calls.step.results)
        self.values: Values = {}
        self.sizes: Mapping[str, int] = {}
        self.handles: tuple[Tensor, ...] = ()

    def outputs_of(self, inputs: Sequence[Tensor]) -> tuple[dict[str, Tensor], Values]:
        """Runs the forward; as `Runnable.forward`."""
        return self.calls.forward(self.values | dict(zip(self.inputs, inputs, strict=True)), self.sizes)

    @abstractmethod
    def gradients_of_handles(self, saved: Values, tangents: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Runs the backward; as for `Runnable.input_backward`."""


class _StepFunction(torch.autograd.Function):
    """Forward and backward of a step, whose gradients are those of its handles."""

    @staticmethod
    def forward(ctx: Any, step: _Captured, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the outputs; the handles come first."""
        outputs, ctx.saved = step.outputs_of(tensors[len(step.handles) :])
        ctx.step = step
        return tuple(outputs[name] for name in step.outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the handles."""
        # Kept by nobody else: what a backward leaves unused, graphs that are captured later take.
        saved, ctx.saved = ctx.saved, None
        step = ctx.step
        named = dict(zip(step.outputs, tangents, strict=True))
        like = {name: named[name].contiguous() for name in step.calls.step.tangents}
        return None, *step.gradients_of_handles(saved, like), *[None for _ in step.inputs]


class _StepModule(nn.Module):
    """A step as Transformer Engine takes it."""

    def __init__(self, step: _Captured) -> None:
        super().__init__()
        self._step = step

    def forward(self, *tensors: Tensor) -> Any:
        """Returns the outputs."""
        return _StepFunction.apply(self._step, *tensors)  # type: ignore[no-untyped-call]


class EngineStep(_Captured):
    """A step as graphs of Transformer Engine's; a `fxpar.runtime.calls.Runnable`.

    Args:
        calls, inputs: as for `_Captured`.
        pool: in which no other flight may be meanwhile.

    Attributes:
        gradients: what the captured backward gives, by name of the value.
        placing: where the captured backward puts gradients.
    """

    def __init__(self, calls: StepCalls, inputs: Collection[str], pool: Pool) -> None:
        super().__init__(calls, inputs)
        self.whole = calls.whole
        self.placing: GradientSink | None = None
        self._placed: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}
        self._pool = pool
        self._graphed: Any = None

    @property
    def graphs(self) -> int:
        """Returns how many graphs there are."""
        return 0 if self._graphed is None else 2

    def forward(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[dict[str, Tensor], Values]:
        """Implements `Runnable.forward`. The first call runs uncaptured: only it shows what the backward places."""
        flight = self._pool.flight = Flight()
        if self._graphed is None:
            self.values, self.sizes = dict(values), sizes
            outputs, saved = self.calls.forward(values, sizes)
            return outputs, {**saved, _FLIGHT: flight}
        with torch.enable_grad():
            tensors = self._graphed(*self.handles, *(values[name] for name in self.inputs))
        outputs = dict(zip(self.outputs, tensors, strict=True))
        return {name: value.detach().clone() for name, value in outputs.items()}, {_OUTPUTS: outputs, _FLIGHT: flight}

    def input_backward(
        self, saved: Values, tangents: Mapping[str, Tensor], place: GradientSink | None = None
    ) -> dict[str, Tensor]:
        """Implements `Runnable.input_backward`."""
        if self._graphed is None:
            self.placing = None if place is None else Noting(place, self._placed)
            return self.calls.input_backward(saved, tangents, place)
        outputs = saved.pop(_OUTPUTS)
        names = list(tangents)
        # Autograd only carries the call: gradients were placed inside of the graph, and that of the handle is zero.
        torch.autograd.grad([outputs[name] for name in names], self.handles, [tangents[name] for name in names])
        return {}

    def weight_backward(self, saved: Values, place: GradientSink | None = None) -> dict[str, Tensor]:
        """Implements `Runnable.weight_backward`; returns the places of what is placed, and copies of all else."""
        del saved[_FLIGHT]
        if self._graphed is None:
            gradients = self.calls.weight_backward(saved, self.placing)
            self._capture()
        else:
            gradients = copied(self.gradients, self._placed)
        self._pool.flight = None
        return gradients

    def gradients_of_handles(self, saved: Values, tangents: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Implements `_Captured.gradients_of_handles`; puts the gradients aside."""
        place = self.placing if torch.cuda.is_current_stream_capturing() else None
        self.calls.input_backward(saved, tangents, place)
        self.gradients = self.calls.weight_backward(saved, place)
        return [torch.zeros_like(handle) for handle in self.handles]

    def _capture(self) -> None:
        device = next(iter(self.values.values())).device
        self.handles = (torch.zeros((), device=device, requires_grad=True),)
        sample = (*self.handles, *(self.values[name].clone() for name in self.inputs))
        self._graphed = _graphed(self._pool, device, _StepModule(self), sample)

    def reset(self) -> None:
        """Frees the graphs and what they hold."""
        self._graphed, self.values, self.gradients, self.placing, self._placed = None, {}, {}, None, []


# Stages of a pipeline.


class _EngineStage(_Captured):
    """A stage of a pipeline, whose gradients leave it as those of its handles.

    Args:
        key: equal for calls of which graphs are the same.
        calls, inputs: as for `_Captured`.

    Attributes:
        gradients: names of those that have handles.
        placing: where the captured backward puts gradients.
        placed: the sums of microbatches to which products add, by name of the value.
    """

    def __init__(self, key: Hashable, calls: StepCalls, inputs: Collection[str]) -> None:
        super().__init__(calls, inputs)
        self.key = key
        self.gradients = tuple(dict.fromkeys((*calls.step.returned.values(), *calls.gives)))
        self.placing: GradientSink | None = None
        self.placed: dict[str, Tensor] = {}

    def shape_handles(self, saved: Values) -> None:
        """Makes a handle for each gradient that lies in no sum of microbatches, of its shape and without memory.

        Autograd then leaves dense gradients where the backward has written them. A sum is nobody's to give on.
        """
        for name in self.calls.gives:
            place = None if self.placing is None else self.placing.destination(name)
            if place is not None and place.tensor is not None and place.has(saved[name]):
                self.placed[name] = place.tensor
        self.gradients = tuple(name for name in self.gradients if name not in self.placed)
        handles = []
        for gradient in (saved[name] for name in self.gradients):
            handle = gradient.new_empty(gradient.shape)
            handle.untyped_storage().resize_(0)
            handles.append(handle.requires_grad_())
        # A backward that leaves all in sums needs one, too, by which autograd runs it.
        more = [value.new_zeros((), requires_grad=True) for value in self.placed.values()] if not handles else []
        self.handles = (*handles, *more[:1])

    def sample(self) -> tuple[Tensor, ...]:
        """Returns what it is captured with."""
        return (*self.handles, *(self.values[name].clone() for name in self.inputs))

    def outputs_of(self, inputs: Sequence[Tensor]) -> tuple[dict[str, Tensor], Values]:
        """Implements `_Captured.outputs_of`."""
        # Dense: of a tensor whose memory it gives on, Transformer Engine keeps address and shape, and no strides.
        # The handles have the same of gradients.
        outputs, saved = super().outputs_of(inputs)
        return {name: value.contiguous() for name, value in outputs.items()}, saved

    def gradients_of_handles(self, saved: Values, tangents: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Implements `_Captured.gradients_of_handles`."""
        # Warm-ups may add to sums: it is after a step, and the next one begins with zeros.
        place = self.placing
        named = {**self.calls.input_backward(saved, tangents, place), **self.calls.weight_backward(saved, place)}
        return [named[name] for name in self.gradients] or [torch.zeros_like(handle) for handle in self.handles]


class _Microbatch:
    """A microbatch of a stage; a `fxpar.runtime.calls.Runnable`.

    Args:
        steps: of which it is a part.
        number: of the stage.
        graphed: forward and backward as Transformer Engine has captured them; None where they run as they are.
    """

    whole = False

    def __init__(self, steps: EngineSchedule, number: int, graphed: Any) -> None:
        self._stage, self._graphed = steps.stages[number], graphed
        self._order, self._number = steps.order, number

    def forward(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[dict[str, Tensor], Values]:
        """Implements `Runnable.forward`."""
        stage = self._stage
        if self._graphed is None:
            self._order.append((self._number, 1))
            stage.values, stage.sizes = dict(values), sizes
            return stage.calls.forward(values, sizes)
        with torch.enable_grad():
            tensors = self._graphed(*stage.handles, *(values[name] for name in stage.inputs))
        outputs = dict(zip(stage.outputs, tensors, strict=True))
        return {name: value.detach().clone() for name, value in outputs.items()}, {_OUTPUTS: outputs}

    def input_backward(
        self, saved: Values, tangents: Mapping[str, Tensor], place: GradientSink | None = None
    ) -> dict[str, Tensor]:
        """Implements `Runnable.input_backward`; returns copies, which are sent while the next graph runs."""
        stage = self._stage
        if self._graphed is None:
            stage.placing = place
            return stage.calls.input_backward(saved, tangents, place)
        outputs, names = saved.pop(_OUTPUTS), list(tangents)
        gradients: Sequence[Tensor] = ()
        if stage.handles:
            ends = [outputs[name] for name in names]
            gradients = torch.autograd.grad(ends, stage.handles, [tangents[name] for name in names])
        saved[_GRADIENTS] = named = dict(zip(stage.gradients, gradients, strict=False))
        return {name: named[name].clone() for name in stage.calls.step.returned.values()}

    def weight_backward(self, saved: Values, place: GradientSink | None = None) -> dict[str, Tensor]:
        """Implements `Runnable.weight_backward`; without copies, as the pipeline adds gradients up at once."""
        stage = self._stage
        if self._graphed is None:
            gradients = stage.calls.weight_backward(saved, place)
            self._order.append((self._number, -1))
            if not stage.handles:
                stage.shape_handles(saved)
            return gradients
        named = {**saved.pop(_GRADIENTS), **stage.placed}
        return {name: named[name] for name in stage.calls.gives}


class EngineSchedule:
    """What a rank runs in a step of a pipeline: forwards and backwards of its stages in order, each with a graph.

    The first step runs as it is, and its order is that of the graphs. Transformer Engine captures them in this order.
    It gives the memory that a backward leaves to graphs after it. So there are as many sets of inputs as microbatches
    are in flight at once.

    Args:
        pool: that counts what graphs cost.
        device: on which they run.

    Attributes:
        stages: those that have run, by number.
        order: for each forward and backward the number of its stage, and 1 or -1.
    """

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self.stages: dict[int, _EngineStage] = {}
        self.order: list[tuple[int, int]] = []
        self._pool, self._device = pool, device
        self._graphed: dict[int, Sequence[Any]] = {}
        self._started: Counter[int] = Counter()

    @property
    def graphs(self) -> int:
        """Returns how many graphs there are."""
        return sum(2 * len(graphed) for graphed in self._graphed.values())

    @property
    def numbers(self) -> list[int]:
        """Returns the order as Transformer Engine takes it: c for a forward of chunk c - 1, -c for its backward."""
        chunks = {number: chunk for chunk, number in enumerate(sorted(self.stages), 1)}
        return [chunks[number] * sign for number, sign in self.order]

    def start(self) -> None:
        """Begins a step."""
        self._started.clear()
        if not self._graphed:  # a step that failed before its end is forgotten
            self.order.clear()
            self.stages.clear()

    def microbatch(self, number: int, key: Hashable, calls: StepCalls, inputs: Collection[str]) -> Runnable:
        """Returns what runs the next microbatch of a stage.

        Raises:
            InputError: it does something else than those before it.
        """
        stage = self.stages.setdefault(number, _EngineStage(key, calls, inputs))
        if stage.key != key:
            raise _differs(f"stage {number}")
        graphed = self._graphed[number][self._started[number]] if self._graphed else None
        self._started[number] += 1
        return _Microbatch(self, number, graphed)

    def capture(self) -> None:
        """Captures what has run as it is, when no microbatch is in flight."""
        if self._graphed:
            return
        stages = [self.stages[number] for number in sorted(self.stages)]
        check_types(h.dtype for stage in stages for h in stage.handles)
        count = len(self.order) // len(stages) // 2
        # A list: Transformer Engine puts into it which inputs several microbatches share.
        samples = [stage.sample() for stage in stages for _ in range(count)]
        graphed = _graphed(
            self._pool,
            self._device,
            tuple(_StepModule(stage) for stage in stages),
            samples,
            _order=self.numbers,
            _num_layers_per_chunk=[1] * len(stages),
            _reuse_graph_input_output_buffers=True,
        )
        self._graphed = {n: graphed[i * count : (i + 1) * count] for i, n in enumerate(sorted(self.stages))}
        static = {id(value): value.untyped_storage().nbytes() for sample in samples for value in sample}
        self._pool.static_bytes += sum(static.values())
        for stage in stages:  # parameters stay: graphs read their addresses
            stage.values = {name: value for name, value in stage.values.items() if name not in stage.inputs}

    def reset(self) -> None:
        """Frees the graphs and what they hold."""
        for graphed in self._graphed.values():
            for function in graphed:
                function.reset()
        self._graphed, self.stages = {}, {}


def check_types(dtypes: Iterable[torch.dtype]) -> None:
    """Refuses types of gradients that Transformer Engine cannot keep the memory of.

    Raises:
        InputError: names the type.
    """
    wrong = next((dtype for dtype in dtypes if dtype not in _TYPES), None)
    if wrong is not None:
        raise InputError(
            f"Transformer Engine captures no pipeline whose gradients are {wrong}",
            where=_WHERE,
            remedy="train in float32, bfloat16 or float16, or set CudaGraphs('partial')",
        )


def _differs(where: str) -> InputError:
    return InputError(
        "differs from another microbatch of the step in shapes or sizes, and Transformer Engine has inputs of one "
        "shape",
        where=where,
        remedy="pass microbatches of equal shapes (pad them), or set CudaGraphs('partial')",
    )


class EngineStageGraphs(StageGraphs):
    """Graphs of a pipeline's stage, whose steps Transformer Engine captures.

    Args:
        options, device: as for `CachedGraphs`.
        number: of the stage.
        schedule: gives the step that runs.
    """

    def __init__(
        self, options: CudaGraphs, device: torch.device, number: int, schedule: Callable[[], EngineSchedule]
    ) -> None:
        super().__init__(options, device)
        self._number, self._schedule = number, schedule

    def step(self, calls: StepCalls, values: Mapping[str, Any], inputs: MovingInputs, key: Hashable) -> Runnable:
        """Implements `NoGraphs.step`."""
        moving = inputs()
        return self._schedule().microbatch(self._number, (id(calls), *key_of(values, moving), key), calls, moving)


class EngineGraphs(PartialGraphs):
    """Forward and backward of a batch are captured by Transformer Engine; of a pipeline those of all microbatches."""

    def __init__(self, options: CudaGraphs, device: torch.device, enter: Callable[[int], int] = int) -> None:
        check_engine(device)
        super().__init__(options, device, enter)
        self._schedule: EngineSchedule | None = None

    def stage(self, number: int) -> NoGraphs:
        """Implements `NoGraphs.stage`."""
        if number not in self._stages:
            self._stages[number] = EngineStageGraphs(self.options, self._device, number, self._running)
        return self._stages[number]

    def _running(self) -> EngineSchedule:
        assert self._schedule is not None, "stages run in a step"
        return self._schedule

    def train(
        self,
        batches: Sequence[BoundBatch],
        run: Run,
        options: StepOptions,
        random: RandomState,
        buffers: Buffers,
        waiting: Waiting,
    ) -> StepResult:
        """Implements `NoGraphs.train`.

        Raises:
            InputError: microbatches of a pipeline differ, or its weights are of a type that cannot be captured.
        """
        if not self._stages:
            return super().train(batches, run, options, random, buffers, waiting)
        # In front of the first message, as any refusal.
        kinds = [key_of_batch(batch) for batch in batches]
        for index, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise _differs(f"microbatch {index}")
        check_types(leaf.dtype for leaf in batches[0].leaves.values())
        key = ("step", len(batches), *kinds[0])
        self.is_known(key)
        self._schedule = self.in_free_pool(key, lambda pool: EngineSchedule(pool, self._device))
        self._schedule.start()
        result = run(batches, random.draw)
        self._schedule.capture()
        return result

    def check(self, node: fx.Node | None) -> None:
        """Implements `NoGraphs.check`."""
        refuse_uncaptured(node)

    def step(self, calls: StepCalls, values: Mapping[str, Any], inputs: MovingInputs, key: Hashable) -> Runnable:
        """Implements `NoGraphs.step`."""
        self.check(calls.step.uncaptured)
        return super().step(calls, values, inputs, key)

    def _graphed(self, calls: StepCalls, inputs: Collection[str], pool: Pool) -> EngineStep:
        return EngineStep(calls, inputs, pool)


def _graphed(pool: Pool, device: torch.device, modules: Any, samples: Any, **order: Any) -> Any:
    """Returns what Transformer Engine has captured of modules, and notes in a pool what that has cost."""
    on_gpu = device.type == "cuda"
    start, before = time.perf_counter(), torch.cuda.memory_reserved(device) if on_gpu else 0
    with torch.enable_grad():
        graphed = _engine().make_graphed_callables(modules, samples, allow_unused_input=True, **order)
    taken = torch.cuda.memory_reserved(device) - before if on_gpu else 0
    pool.cost = pool.cost[0] + time.perf_counter() - start, pool.cost[1] + max(taken, 0)
    return graphed


def _engine() -> Any:
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:  # a library that it needs is not there, or of another version
        raise InputError(
            f"Transformer Engine cannot be imported: {error}",
            where=_WHERE,
            remedy="pip install fxpar[te] beside torch's own cuDNN, or set CudaGraphs('partial')",
        ) from error


def check_engine(device: torch.device) -> None:
    """Refuses where there is no GPU or no Transformer Engine.

    Raises:
        InputError: says which.
    """
    if device.type != "cuda":
        raise InputError(
            f"Transformer Engine captures on GPUs, and the ranks run on {device.type}",
            where=_WHERE,
            remedy="set CudaGraphs('partial'), for which there is a stand-in",
        )
    _engine()
