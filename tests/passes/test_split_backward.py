"""The backward in two parts: what is sent depends on nothing of the second, and nothing changes its value."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from fxpar.compile import compile_model, compile_step
from fxpar.errors import CheckFailed
from fxpar.ir.program import Program, note, output_node, update
from fxpar.ir.regions import inlined
from fxpar.ir.stages import stages_of
from fxpar.ir.step import BACKWARD, PHASES, WEIGHT, is_input_gradient
from fxpar.manager import PassManager, has_same_dataflow
from fxpar.passes.split_backward import split_backward
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Pipeline
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import verify_static


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@functools.cache
def step(stage: int, splits: bool) -> Program:
    torch.manual_seed(0)
    program = compile_model(Net(), (torch.randn(3, 6),), Plan(pp=2, pipeline=Pipeline({"layers.2": 1}))).program
    own = stages_of(program)[stage]
    trained = [p.fqn for p in own.program.parameters]
    return compile_step(own.program, own.program.outputs, own.tangents, trained, splits=splits)


def phases(program: Program) -> list[str]:
    return [note(node).phase for node in inlined(program).graph.nodes if node.op == "call_function"]


def test_what_is_sent_comes_first_and_reads_nothing_of_what_is_put_off() -> None:
    program = inlined(step(1, True))
    found = phases(program)
    assert found == sorted(found, key=PHASES.index)
    assert {BACKWARD, WEIGHT} <= {*found}
    ends = dict(zip(program.outputs, output_node(program.graph).args[0], strict=True))  # type: ignore[arg-type]
    (returned,) = (node for name, node in ends.items() if is_input_gradient(name))
    assert note(returned).phase == BACKWARD
    products = [note(n).phase for n in program.graph.nodes if "mm" in str(n.target) and note(n).phase]
    assert products.count(BACKWARD) == products.count(WEIGHT) == 2  # of each linear layer the one and the other


def test_a_stage_that_receives_nothing_has_the_second_part_alone() -> None:
    assert BACKWARD not in phases(step(0, True))
    assert WEIGHT in phases(step(0, True))


@pytest.mark.parametrize("stage", [0, 1])
def test_dataflow_stays_and_the_text_comes_back(stage: int) -> None:
    split, whole = step(stage, True), step(stage, False)
    assert WEIGHT not in phases(whole)
    assert has_same_dataflow(inlined(split), inlined(whole))
    text = print_program(split)
    assert print_program(parse_program(text)) == text
    verify_static(parse_program(text))


def test_a_phase_that_is_put_off_too_far_is_refused() -> None:
    program = inlined(step(1, True)).copy()
    first = next(n for n in program.graph.nodes if n.op == "call_function" and note(n).phase == BACKWARD and n.users)
    update(first, phase=WEIGHT)
    with pytest.raises(CheckFailed, match=r"is of the phase backward and reads %.*, which is of the phase weight"):
        verify_static(program)


def test_it_may_run_on_any_step() -> None:
    program = PassManager([split_backward]).run(inlined(step(1, False)))
    assert phases(program) == sorted(phases(program), key=PHASES.index)
