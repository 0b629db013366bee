"""Regions that the author checkpointed run again in the backward: same values, fewer activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpar.capture import Captured, capture
from fxpar.manager import PassManager
from fxpar.ops.lower import lower
from fxpar.ops.recompute import apply_recompute
from fxpar.passes.annotate import annotate
from fxpar.passes.assign_rng import RNG_PATH, assign_rng
from fxpar.passes.canonicalize import canonicalize
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.program.program import Program
from fxpar.verify.values import call_inputs, program_state, rng_state
from tests.capture.functions import Counting


class Regions(nn.Module):
    """Two regions with a counted function and dropout in each, and layers between and after them."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.reentrant = reentrant

    def body(self, layer: nn.Module, x: Tensor) -> Tensor:
        h = Counting.apply(layer(x))  # type: ignore[no-untyped-call]
        return nn.functional.dropout(h, 0.5)

    def region(self, layer: nn.Module, x: Tensor) -> Any:
        if self.reentrant is None:
            return self.body(layer, x)
        return checkpoint(self.body, layer, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Any:
        x = self.region(self.layers[1], self.layers[0](x))
        return self.layers[3](self.region(self.layers[2], x.tanh())).square().sum()


def model(reentrant: bool | None) -> Regions:
    torch.manual_seed(1)
    return Regions(reentrant).double()


def batch() -> Tensor:
    return torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def compiled(captured: Captured) -> Program:
    return PassManager([canonicalize, annotate, insert_collectives, assign_rng]).run(captured.program)


def gradients(module: Regions) -> tuple[dict[str, Tensor], tuple[int, int], nn.Module]:
    """Gradients of one step, how often the counted functions ran forward and backward, and what ran."""
    captured = capture(module, batch())
    program = compiled(captured)
    lowered = lower(program, {})
    runnable = apply_recompute(lowered.module)
    weights = {n: t.clone().requires_grad_() for n, t in program_state(program, module).items()}
    values = {p.node: weights[p.fqn] for p in program.parameters}
    inputs = {**call_inputs(captured, module, batch()), RNG_PATH: rng_state(3)}
    values |= {i.node: inputs[i.path] for i in program.inputs}
    Counting.forwards = Counting.backwards = 0
    (loss,) = runnable(*[values[name] for name in lowered.inputs])
    after_forward = Counting.forwards
    loss.backward()
    found = {n: w.grad for n, w in weights.items() if w.grad is not None}
    assert after_forward == 2
    return found, (Counting.forwards, Counting.backwards), runnable


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_region_runs_twice_and_its_gradients_are_the_same(reentrant: bool) -> None:
    wanted, plainly, unchanged = gradients(model(None))
    found, counts, _ = gradients(model(reentrant))
    assert plainly == (2, 2)
    assert counts == (4, 2)
    assert isinstance(unchanged, torch.fx.GraphModule)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def test_evaluation_runs_a_region_once() -> None:
    module = model(False).eval()
    captured = capture(module, batch())
    program = compiled(captured)
    lowered = lower(program, {})
    values = {p.node: program_state(program, module)[p.fqn] for p in program.parameters}
    inputs = {**call_inputs(captured, module, batch()), RNG_PATH: rng_state(3)}
    values |= {i.node: inputs[i.path] for i in program.inputs}
    Counting.forwards = 0
    with torch.no_grad():
        apply_recompute(lowered.module)(*[values[name] for name in lowered.inputs])
    assert Counting.forwards == 2


def kept(reentrant: bool | None) -> int:
    """How many elements autograd keeps from the forward to the backward."""
    sizes: list[int] = []

    def pack(value: Tensor) -> Tensor:
        sizes.append(value.numel())
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        gradients(model(reentrant))
    return sum(sizes)


def test_a_region_keeps_less() -> None:
    assert kept(False) < kept(None)
