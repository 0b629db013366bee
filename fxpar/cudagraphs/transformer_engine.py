"""Graphs by Transformer Engine's `make_graphed_callables`.

Enters: the calls of a step, of which a graph can hold all. Leaves: the same as a function that Transformer Engine has
captured, forward and backward, as one node of autograd.

It warms functions up by running them, so gradients are placed only while a graph is captured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.cudagraphs.graph_cache import PartialGraphs, refuse_uncaptured
from fxpar.cudagraphs.partial import Noting, copied
from fxpar.cudagraphs.pool import Flight, Pool
from fxpar.errors import InputError
from fxpar.plan.option_groups import CudaGraphs
from fxpar.runtime.calls import GradientSink, LoweredStep, Runnable, StepCalls, Values
from fxpar.runtime.graph_modes import MovingInputs

_WHERE = "CudaGraphs('transformer_engine')"
_FLIGHT, _OUTPUTS = "flight", "outputs"


class _StepFunction(torch.autograd.Function):
    """Forward and backward of a step, whose gradients are no results of autograd's."""

    @staticmethod
    def forward(ctx: Any, owner: EngineStep, handle: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns the outputs; `handle` is what autograd asks a gradient of."""
        outputs, ctx.saved = owner.calls.forward(
            owner.values | dict(zip(owner.inputs, inputs, strict=True)), owner.sizes
        )
        ctx.owner = owner
        return tuple(outputs[name] for name in owner.outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        """Returns zero; the gradients are put aside."""
        owner = ctx.owner
        names = owner.calls.step.tangents
        named = dict(zip(owner.outputs, tangents, strict=True))
        place = owner.placing if torch.cuda.is_current_stream_capturing() else None
        owner.calls.input_backward(ctx.saved, {name: named[name].contiguous() for name in names}, place)
        owner.gradients = owner.calls.weight_backward(ctx.saved)
        return None, torch.zeros((), device=tangents[0].device), *[None for _ in owner.inputs]


class _StepModule(nn.Module):
    """A step as Transformer Engine takes it."""

    def __init__(self, owner: EngineStep) -> None:
        super().__init__()
        self._owner = owner

    def forward(self, handle: Tensor, *inputs: Tensor) -> Any:
        """Returns the outputs."""
        return _StepFunction.apply(self._owner, handle, *inputs)  # type: ignore[no-untyped-call]


class EngineStep:
    """A step as graphs of Transformer Engine's; a `fxpar.runtime.calls.Runnable`.

    Args:
        calls: what it does.
        inputs: names of the values whose addresses change from call to call.
        pool: in which no other flight may be meanwhile.

    Attributes:
        gradients: what the captured backward gives, by name of the value.
        placing: where the captured backward puts gradients.
    """

    def __init__(self, calls: StepCalls, inputs: Collection[str], pool: Pool) -> None:
        self.calls, self.inputs, self.whole = calls, tuple(inputs), calls.whole
        self.outputs = tuple(calls.step.results)
        self.values: Values = {}
        self.sizes: Mapping[str, int] = {}
        self.placing: GradientSink | None = None
        self._placed: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}
        self._pool = pool
        self._graphed: Any = None
        self._handle: Tensor | None = None

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
            tensors = self._graphed(self._handle, *(values[name] for name in self.inputs))
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
        assert self._handle is not None
        # Autograd only carries the call: gradients were placed inside of the graph, and the handle's own is zero.
        torch.autograd.grad([outputs[name] for name in names], [self._handle], [tangents[name] for name in names])
        return {}

    def weight_backward(self, saved: Values) -> dict[str, Tensor]:
        """Implements `Runnable.weight_backward`; returns the places of what is placed, and copies of all else."""
        del saved[_FLIGHT]
        if self._graphed is None:
            gradients = self.calls.weight_backward(saved)
            self._capture()
        else:
            gradients = copied(self.gradients, self._placed)
        self._pool.flight = None
        return gradients

    def _capture(self) -> None:
        engine = _engine()
        device = next(iter(self.values.values())).device
        self._handle = torch.zeros((), device=device, requires_grad=True)
        sample = tuple(self.values[name].clone() for name in self.inputs)

        with torch.enable_grad():
            module = _StepModule(self)
            self._graphed = engine.make_graphed_callables(module, (self._handle, *sample), allow_unused_input=True)

    def reset(self) -> None:
        """Frees the graphs and what they hold."""
        self._graphed, self.values, self.gradients, self.placing, self._placed = None, {}, {}, None, []


class EngineGraphs(PartialGraphs):
    """Forward and backward of a batch are captured by Transformer Engine."""

    def __init__(self, options: CudaGraphs, device: torch.device, enter: Callable[[], None] = lambda: None) -> None:
        check_engine(device)
        super().__init__(options, device, enter)

    def check(self, step: LoweredStep) -> None:
        """Implements `NoGraphs.check`."""
        refuse_uncaptured(step)

    def step(self, calls: StepCalls, values: Mapping[str, Any], inputs: MovingInputs, key: Hashable) -> Runnable:
        """Implements `NoGraphs.step`."""
        self.check(calls.step)
        return super().step(calls, values, inputs, key)

    def _graphed(self, calls: StepCalls, inputs: Collection[str], pool: Pool) -> EngineStep:
        return EngineStep(calls, inputs, pool)


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
