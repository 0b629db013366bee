"""What stands in for Transformer Engine's `make_graphed_callables` where there is no GPU: the same, on tapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.cudagraphs import transformer_engine
from fxpar.cudagraphs.pool import StandInPool
from fxpar.runtime.graph_modes import recorder

_WARM_UPS = 3


def make_graphed_callables(module: nn.Module, sample: tuple[Tensor, ...], allow_unused_input: bool) -> Any:
    """Runs the module some times, then records its forward and its backward; what is called replays them."""
    pool = StandInPool()

    def backward(outputs: tuple[Tensor, ...], tangents: list[Tensor]) -> tuple[Tensor | None, ...]:
        wanted = [value for value in sample if value.requires_grad]
        return torch.autograd.grad(outputs, wanted, tangents, allow_unused=allow_unused_input)

    for _ in range(_WARM_UPS):
        outputs = module(*sample)
        backward(outputs, [torch.ones_like(value) for value in outputs])
    forward, outputs = pool.record(lambda: module(*sample))
    tangents = [torch.zeros_like(value) for value in outputs]
    recorded, found = pool.record(lambda: backward(outputs, tangents))

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                for static, value in zip(sample, inputs, strict=True):
                    static.copy_(value)
            forward.replay()
            return tuple(value.detach() for value in outputs)

        @staticmethod
        def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
            for static, value in zip(tangents, given, strict=True):
                static.copy_(value)
            recorded.replay()
            gradients = iter(found)
            return tuple(next(gradients) if value.requires_grad else None for value in sample)

    return lambda *inputs: Graphed.apply(*inputs)  # type: ignore[no-untyped-call]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has graphs take this for Transformer Engine."""
    engine = SimpleNamespace(make_graphed_callables=make_graphed_callables)
    monkeypatch.setattr(transformer_engine, "_engine", lambda: engine)
    monkeypatch.setattr(transformer_engine, "check_engine", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorder.get() is not None)
