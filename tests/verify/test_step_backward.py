"""The backward of a step is checked statically: edits that change a gradient are rejected, others accepted."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from fxpar.errors import CheckFailed, FxparError, PassError
from fxpar.ir.program import Program
from fxpar.manager import Pass, PassManager, has_same_dataflow, register_pass
from fxpar.plan.plan_options import Communication
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import STATIC, verify_static
from tests.verify.steps import Trial, harmless, mutants

PLANS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "two axes": {"dp": 2, "tp": 2, "sequence_parallel": True},
    "chunks": {"rows": 3, "tp": 2, "communication": Communication(token_chunks=2)},
}
# All chunks are to be computed alike: an edit of one of them alone is refused, though it changes no value.
WHOLE = [name for name in PLANS if name != "chunks"]


@cache
def trial(name: str) -> Trial:
    return Trial(**PLANS[name])


def refused(program: Program) -> str:
    """Which check refuses a program; empty where none does."""
    try:
        program.graph.lint()
        verify_static(program)
    except (FxparError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_accepted_and_its_text_is_it(name: str) -> None:
    step = trial(name).step
    verify_static(step)
    assert trial(name).is_right(step)
    assert print_program(parse_program(print_program(step))) == print_program(step)
    assert has_same_dataflow(parse_program(print_program(step)), step)


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *((name, 41) for name in PLANS),
        *(pytest.param(name, 1, marks=pytest.mark.matrix) for name in PLANS),
    ],
)
def test_no_edit_of_the_backward_that_changes_a_gradient_passes(name: str, every: int) -> None:
    found, tried, passed = [], 0, 0
    for index, (label, program) in enumerate(mutants(trial(name).step)):
        if index % every:
            continue
        tried += 1
        if not refused(program):
            passed += 1
            found += [] if trial(name).is_right(program) else [label]
    assert found == []
    # Equal values read for one another, and when a gradient of a weight is computed.
    assert passed <= 3 + tried / 9, "what passes is right: it must be rare"


@pytest.mark.parametrize(
    ("name", "count"),
    [*((name, 2) for name in WHOLE), *(pytest.param(name, 170, marks=pytest.mark.matrix) for name in WHOLE)],
)
def test_other_orders_and_names_are_accepted(name: str, count: int) -> None:
    for seed in range(count):
        verify_static(harmless(trial(name).step, random.Random(seed)))


def test_an_edited_saved_value_is_named() -> None:
    step = trial("tp").step
    edits = {label: program for label, program in mutants(step) if label.startswith("bits")}
    label, program = next(iter(edits.items()))
    with pytest.raises(CheckFailed, match=r"output fxpar\.gradient\.\S+: is not the gradient of the forward") as caught:
        verify_static(program)
    assert label.split("%")[1] in str(caught.value)


def _negating(preserves: str) -> Pass:
    @register_pass("negate", preserves=preserves)
    def negate(program: Program) -> Program:
        """Changes the sign of a product."""
        node = next(node for node in program.graph.nodes if node.target is torch.ops.aten.tanh.default)
        node.target = torch.ops.aten.sin.default
        return program

    return negate


def test_a_pass_that_changes_dataflow_is_named() -> None:
    step = trial("tp").step
    with pytest.raises(PassError, match=r"negate: preserves dataflow, and changed the output loss, from %tanh"):
        PassManager([_negating("dataflow")], STATIC).run(step)
    with pytest.raises(PassError, match="is unknown; write one of dataflow, values, nothing"):
        _negating("all")
