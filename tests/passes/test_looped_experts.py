"""Loops over experts that compute every token are rows of the chosen ones: on one device, and where rows travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxpar.capture import capture
from fxpar.compile import compile_program
from fxpar.errors import PlanError
from fxpar.manager import PassManager
from fxpar.passes.canonicalize import canonicalize
from fxpar.plan.plan import Plan
from fxpar.verification import verify
from tests.passes.looped_layer import EXPERTS, FORMS, MUTANTS, Looped, batch
from tests.passes.test_chosen_matrices import operators

PLANS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"tp": 2},
    {"dp": 2, "tp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 4, "etp": 1, "dispatch": "exact"},
    {"dp": 2, "ep": 2, "capacity_factor": 0.8},
    {"dp": 2},
]


@pytest.mark.parametrize(
    ("form", "plan"),
    [
        pytest.param(form, plan, marks=[] if i == j or j == 0 else [pytest.mark.matrix])
        for i, form in enumerate(FORMS)
        for j, plan in enumerate(PLANS)
        if form != "masked" or "dispatch" not in plan  # ranks of tp hold parts of all experts' own matrices
    ],
)
def test_they_are_the_single_device_s(form: str, plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    found = verify(Looped(form), batch(), Plan(**plan))
    assert found.ok, found.values
    assert found.split_flops == 1


@pytest.mark.parametrize("form", FORMS)
def test_all_of_it_is_of_rows(form: str) -> None:
    found = operators(PassManager([canonicalize]).run(capture(Looped(form), batch(), Plan()).program))
    each = {"fxpar.sort_by_expert": 1, "fxpar.take_rows": 1, "fxpar.grouped_linear": 2, "fxpar.put_weighed": 1}
    biases = {"scattered": 2, "masked": 2, "by_row": 1, "stacked": 0}[form]
    assert found == each | ({"fxpar.spread_rows": biases} if biases else {})


@pytest.mark.parametrize("form", sorted(MUTANTS))
def test_what_resembles_them_is_what_it_was(form: str) -> None:
    torch.manual_seed(0)
    model = Looped(form)
    found = operators(PassManager([canonicalize]).run(capture(model, batch(), Plan()).program))
    assert not any(name.startswith("fxpar") for name in found)
    with pytest.raises(PlanError, match=r"ep=2: no operation of the model is recognised.*fxpar.ops.experts"):
        compile_program(capture(model, batch(), Plan(dp=2, ep=2)).program)
    found_too = verify(model, batch(), Plan(tp=2))
    assert found_too.ok, found_too.values


def test_matrices_of_a_module_each_are_stacked() -> None:
    program = PassManager([canonicalize]).run(capture(Looped("masked"), batch(), Plan()).program)
    stacks = [node for node in program.graph.nodes if "stack" in str(node.target)]
    assert [len(node.args[0]) for node in stacks] == [EXPERTS] * 4
    with pytest.raises(PlanError, match=r"matrices are stacked from 4 parameters.*ranks of tp.*give etp=2"):
        compile_program(capture(Looped("masked"), batch(), Plan(dp=2, tp=2, ep=4, etp=1)).program)
