"""A capture leaves nothing behind, whether it succeeds or fails."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from fxpar.capture.capture import capture
from fxpar.capture.recording import NAMESPACE, recording
from fxpar.errors import CaptureError
from tests.capture.functions import Seven
from tests.capture.models import Net, example, net, seeded


class Remembers(Net):
    """Makes attributes, fills containers and replaces modules, and fails on demand."""

    last: Tensor | None = None
    shared: list[Tensor] = []  # noqa: RUF012 (a list of the class is the point)

    def __init__(self, failing: bool) -> None:
        super().__init__()
        self.failing = failing
        self.parts: list[Tensor] = []
        self.nest: dict[str, Any] = {"inner": {"seen": set()}}

    def forward(self, x: Tensor) -> Any:
        self.extra = 3
        self.added = torch.nn.Linear(4, 4)
        self.up = torch.nn.Sequential(self.up)  # type: ignore[assignment]
        self.last = Seven.apply(self.up(x))  # type: ignore[no-untyped-call]
        h = torch.utils.checkpoint.checkpoint(torch.tanh, self.last, use_reentrant=False)
        self.parts.append(h)
        self.shared.append(h)
        self.nest["inner"]["seen"].add("forward")
        if self.failing and x.sum() > 0:
            return h
        total = sum(part.sum() for part in self.parts)
        self.parts = []
        return self.down(h).sum() + total


def state() -> dict[str, Any]:
    functions = torch.autograd.function
    return {
        "apply": [vars(c).get("apply") for c in (functions._SingleLevelFunction, functions.Function)],
        "lookup": vars(functions.FunctionMeta).get("__getattribute__"),
        "generator": torch.utils.checkpoint._checkpoint_without_reentrant_generator,
        "operators": [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)],
        "grad": torch.is_grad_enabled(),
        "mode": torch._C._len_torch_function_stack(),
        "meta": torch.fx.traceback.has_preserved_node_meta(),
        "loggers": [logging.getLogger(f"torch.{n}").disabled for n in ("export", "_dynamo")],
        "python": random.getstate(),
        "numpy": str(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("failing", [False, True])
def test_global_state_is_restored(failing: bool) -> None:
    before = state()
    model = seeded(Remembers, failing)
    before["torch"] = torch.get_rng_state().tolist()
    errors = []  # an error that is kept, as a debugger does, must keep nothing alive
    try:
        capture(model, example())
    except CaptureError as error:
        errors.append(error)
    assert state() == before
    assert bool(errors) == failing


@pytest.mark.parametrize("failing", [False, True])
def test_the_models_attributes_are_restored(failing: bool) -> None:
    model = seeded(Remembers, failing)
    try:
        capture(model, example())
    except CaptureError:
        assert failing
    assert model.last is None
    assert (model.parts, model.shared, model.nest) == ([], [], {"inner": {"seen": set()}})
    assert not hasattr(model, "extra")
    assert [name for name, _ in model.named_children()] == ["up", "down"]
    assert type(model.up) is torch.nn.Linear
    assert all(type(p.data) is Tensor and p.grad is None for p in model.parameters())


def test_lists_are_emptied_in_place() -> None:
    """What a trace has put into a list must not meet the next one."""
    model = seeded(Remembers, False)
    parts = model.parts
    first = capture(model, example())
    assert parts == []
    assert model.parts is parts
    assert str(capture(model, example()).program.graph) == str(first.program.graph)


def test_the_example_is_not_changed() -> None:
    x = example()
    capture(net(lambda m, v: m.down(m.up(v)).sum()), x)
    assert torch.equal(x, example())
    assert not [name for name in vars(x) if "dynamo" in name]


def test_patches_hold_only_inside_the_recording() -> None:
    before = state()
    with recording() as recorder:
        assert state()["apply"] != before["apply"]
        assert recorder.functions == {}
    assert state() == before
    with pytest.raises(ValueError, match="inside"), recording():
        raise ValueError("inside")
    assert state() == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, lambda: torch.device("meta")])
def test_a_capture_is_the_same_in_any_surrounding(mode: Callable[[], Any]) -> None:
    model = net(lambda m, x: m.down(m.up(x) * m.up(x).detach()).sum())
    wanted = str(capture(model, example()).program.graph)
    with mode():
        assert str(capture(model, example()).program.graph) == wanted
