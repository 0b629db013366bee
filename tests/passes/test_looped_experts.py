"""Loops over experts, of every token or of those that are theirs, are rows: on one device, and where rows travel."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture.capture import capture
from fxpar.compile import compile_program
from fxpar.errors import CaptureError, CheckFailed, PlanError
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Experts
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from fxpar.verify.faithful import compare
from tests.passes.experts import check_text, operators, recognized, rolled
from tests.passes.looped_layer import EXPERTS, FORMS, PICKED_MUTANTS, WIDTH, Looped
from tests.products import alternate, few

PLANS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"tp": 2},
    {"dp": 2, "tp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 4, "etp": 1, "experts": Experts("dropless")},
    {"dp": 2, "ep": 2, "experts": Experts(capacity_factor=0.8)},
    {"dp": 2},
]


# A module for each expert: ranks of tp hold parts of all matrices.
LISTED = ("masked", "mixtral", "nonzero")
# Forms on one plan each; the others become the same rows, which the next test sees.
EVERY_TIME = [("mixtral", PLANS[0]), ("picked", PLANS[1]), ("scattered", PLANS[3]), ("masked", PLANS[4])]


CASES = [
    (form, plan)
    for form, plan in itertools.product(FORMS, PLANS)
    if form not in LISTED or plan.get("experts", Experts()).dispatch == "static"
]


@pytest.mark.parametrize(("form", "plan"), few(CASES, EVERY_TIME))
def test_they_are_the_single_device_s(form: str, plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    found = expect(verify(Looped(form).double(), rolled(), Plan(**plan)))
    assert found.split_flops > 0.8


@pytest.mark.parametrize("form", FORMS)
def test_all_of_it_is_of_rows(form: str) -> None:
    found = operators(recognized(Looped(form), rolled()))
    each = {"fxpar.sort_by_expert": 1, "fxpar.moe_permute": 1, "fxpar.grouped_linear": 2, "fxpar.moe_combine": 1}
    biases = {"mixtral": 2, "nonzero": 2, "picked": 2, "scattered": 2, "masked": 2, "by_row": 1, "stacked": 0}[form]
    assert found == each | ({"fxpar.expand_by_expert": biases} if biases else {})


@pytest.mark.parametrize("form", alternate(sorted(PICKED_MUTANTS), 0))
def test_rows_that_are_picked_otherwise_are_refused(form: str) -> None:
    captured = capture(Looped(form), rolled(), Plan()).program
    assert parse_program(print_program(captured)).counted == captured.counted
    message = r"looped_layer.py:\d+.*its rows are picked.*fxpar.ops.experts.*expert_modules="
    with pytest.raises(CaptureError, match=message):
        compile_program(captured)


def test_numbers_of_picked_rows_are_each_an_operation_s() -> None:
    text = print_program(capture(Looped("mixtral"), rolled(), Plan()).program)
    check_text(text)
    with pytest.raises(CheckFailed, match=r"picks e0 rows, of one number that no other operation"):
        check_text(re.sub(r"\be1\b(?! =)", "e0", text))
    with pytest.raises(CheckFailed, match=r"picks e0, e1 rows"):
        check_text(text.replace("(i64[e1]; i64[e1])", "(i64[e1]; i64[e0])"))


def test_what_picks_rows_is_compared_with_the_model() -> None:
    """Before anything is computed on real ranks, as is done with every captured program."""
    model = Looped("mixtral").eval()
    captured = capture(model, rolled(), Plan())
    assert captured.unwalked == ""
    assert [str(each.balanced) for each in captured.program.counted] == ["floor(b*s/2 + 3/4)"] * EXPERTS
    assert compare(captured, model, rolled()) == ""


class Layers(nn.Module):
    """Several layers, which a trace may copy."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(16, WIDTH), nn.ModuleList(Layer(form) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()  # type: ignore[no-any-return]


class Layer(Looped):
    """One of them."""

    def forward(self, x: Tensor, labels: None = None) -> Tensor:  # type: ignore[override]
        return (x + self.form(self, x).view(x.shape)).tanh()


@pytest.mark.parametrize("form", ["picked", pytest.param("mixtral", marks=[pytest.mark.matrix])])
def test_several_layers(form: str) -> None:
    torch.manual_seed(0)
    model = Layers(form).double()
    assert operators(recognized(model, rolled()))["fxpar.moe_combine"] == 2
    expect(verify(model, rolled(), Plan(dp=2, ep=2)))


class Twice(Looped):
    """Two loops on one another, the second of which adds to what the first one has made."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids).view(-1, WIDTH)
        for _ in range(2):
            tokens, chosen, weights = self.routed(x)
            for e, expert in enumerate(self.experts):
                x = x + (weights * (chosen == e)).sum(-1, keepdim=True) * expert(tokens)
        return x.square().mean()  # type: ignore[no-any-return]


def test_a_loop_may_add_to_another_one() -> None:
    torch.manual_seed(0)
    model = Twice("masked").double()
    assert operators(recognized(model, rolled()))["fxpar.moe_combine"] == 2
    expect(verify(model, rolled(), Plan(dp=2, ep=2)))


def test_matrices_of_a_module_each_are_stacked() -> None:
    program = recognized(Looped("masked"), rolled())
    stacks = [node for node in program.graph.nodes if "stack" in str(node.target)]
    assert [len(node.args[0]) for node in stacks] == [EXPERTS] * 4
    with pytest.raises(PlanError, match=r"matrices are stacked from 4 parameters.*ranks of tp.*give etp=2"):
        compile_program(capture(Looped("masked"), rolled(), Plan(dp=2, tp=2, ep=4, etp=1)).program)
