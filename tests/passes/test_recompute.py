"""Regions that the author checkpointed are computed again in the backward: same values, less kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpar.compile import compile_model
from fxpar.cost.communication import collectives
from fxpar.cost.measure import measure
from fxpar.ir.program import Program, note
from fxpar.ir.regions import inlined
from fxpar.ir.step import RECOMPUTE
from fxpar.ops.lower import lower
from fxpar.ops.process_group import Group
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Recompute
from fxpar.verify.values import call_inputs, program_state, verify_values
from tests.products import product
from tests.zoo import step_of


class Regions(nn.Module):
    """Two regions with dropout in each, and layers between and after them."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(6, 10) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(10, 6) for _ in range(2))
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.reentrant = reentrant

    def body(self, index: int, x: Tensor) -> Any:
        h = torch.tanh(self.up[index](x)).exp()
        return self.down[index](nn.functional.dropout(h, 0.5))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for index in range(2):
            if self.reentrant is None:
                x = self.body(index, x)
            else:
                x = checkpoint(self.body, index, x, use_reentrant=self.reentrant)
        return {"loss": self.head(x.tanh()).square().sum()}


def steps(reentrant: bool | None, **plan: Any) -> tuple[Program, Any]:
    """The step, and how far its values are from one device's."""
    torch.manual_seed(1)
    model, batch = Regions(reentrant).double(), {"x": torch.randn(3, 5, 6, dtype=torch.float64)}
    compiled = compile_model(model, batch, Plan(**plan))
    program = compiled.program
    step = inlined(step_of(program))
    captured = compiled.captured
    state = program_state(captured.program, model)
    return step, verify_values(captured.program, step, state, call_inputs(captured, model, batch))


@product(reentrant=[True, False], tp=[1, 2])
def test_a_region_runs_twice_and_its_gradients_are_the_same(reentrant: bool, tp: int) -> None:
    plain, report = steps(None, tp=tp)
    assert report.ok
    again, report = steps(reentrant, tp=tp)
    assert report.ok, report
    assert not any(note(node).origin == RECOMPUTE for node in plain.graph.nodes if node.op == "call_function")
    made = [node for node in again.graph.nodes if node.op == "call_function" and note(node).origin == RECOMPUTE]
    names = [str(node.target) for node in made]
    assert names.count("aten.tanh.default") == names.count("fxpar.dropout") == 2


def test_what_is_drawn_again_is_the_same() -> None:
    again, _ = steps(False)
    draws = [note(node).random for node in again.graph.nodes if str(node.target) == "fxpar.dropout"]
    assert sorted(draws) == sorted([*set(draws)] * 3)  # forward, again, and the gradient


def kept(step: Program) -> int:
    """Bytes that a rank keeps for the backward."""
    lowered = lower(step, {axis: Group(axis, n) for axis, n in step.axes.items()})
    found = measure(step, lowered, {s.name: s.example for s in step.symbols}, torch.device("cpu"))
    return sum(entry.bytes for entry in found.saved)


def test_a_region_keeps_less() -> None:
    assert kept(steps(False)[0]) < kept(steps(None)[0])


def again(step: Program) -> list[str]:
    """Names of the operations that are computed again."""
    nodes = (node for node in step.graph.nodes if node.op == "call_function")
    return [str(node.target) for node in nodes if note(node).phase and note(node).origin == RECOMPUTE]


@pytest.mark.parametrize("reentrant", [None, False])
def test_layers_and_the_regions_in_them_are_one(reentrant: bool | None) -> None:
    step, report = steps(reentrant, recompute=Recompute("full"))
    assert report.ok, report
    assert again(step).count("fxpar.dropout") == 2


def test_the_authors_regions_stay_where_the_plan_chooses() -> None:
    step, report = steps(False, tp=2, recompute=Recompute("selective"))
    assert report.ok, report
    assert Counter(again(steps(False, tp=2)[0])) <= Counter(again(step))


def test_collectives_of_a_region_are_sent_again_and_counted() -> None:
    """A region that begins with a gather gathers again; what leaves a region is kept, and not sent again."""
    again, _ = steps(False, tp=2)
    listed = [c.phase for c in collectives(again)]
    assert (listed.count("forward"), listed.count("recompute"), listed.count("backward")) == (3, 1, 2)
