"""A matrix for each pair of token and expert is a row's of its expert: on one device, and where rows travel."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.capture.capture import capture
from fxpar.compile import compile_program
from fxpar.errors import LayoutError, PlanError
from fxpar.ir.program import Program, output_layouts
from fxpar.manager import PassManager
from fxpar.passes import canonicalize, recognize_experts
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Experts
from fxpar.verification import expect, verify
from tests.passes.chosen_layer import CHOICES, EXPERTS, FORMS, MUTANTS, WIDTH, Chosen
from tests.passes.experts import operators, recognized, rolled
from tests.passes.looped_layer import MUTANTS as LOOPED
from tests.passes.looped_layer import Looped
from tests.products import alternate, few

PLANS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"tp": 2},
    {"dp": 2, "tp": 2, "ep": 4, "etp": 1, "experts": Experts("dropless")},
    {"dp": 2, "tp": 2, "ep": 2},
    {"dp": 2},
]
# Every form on one plan.
EVERY_TIME = [*zip(FORMS, itertools.cycle(PLANS[:3]), strict=False)]


def experts_of(program: Program) -> dict[str, str]:
    """Layouts of what belongs to experts, by name."""
    found = {p.fqn: str(output_layouts(program.node(p.node))[0]) for p in program.parameters}
    return {name: layout for name, layout in found.items() if name.startswith(("gate_up", "down"))}


@pytest.mark.parametrize(("form", "plan"), few(itertools.product(FORMS, PLANS), EVERY_TIME))
def test_they_are_the_single_device_s(form: str, plan: dict[str, Any]) -> None:
    """Dropout inside of experts too; rows of an odd length."""
    torch.manual_seed(0)
    found = expect(verify(Chosen(form, drop=0.2).double(), rolled(), Plan(**plan)))
    assert found.split_flops > 0.8


@pytest.mark.parametrize("form", ["batched", "einsum", "by_token"])
def test_all_of_it_is_of_rows(form: str) -> None:
    each = {"fxpar.sort_by_expert": 1, "fxpar.moe_permute": 1, "fxpar.grouped_linear": 2, "fxpar.moe_combine": 1}
    each["fxpar.expand_by_expert"] = 2
    if form == "by_token":  # a scale of each expert
        each["fxpar.expand_by_expert"] = 3
    assert operators(recognized(Chosen(form), rolled())) == each


def test_what_is_not_of_each_pair_reads_them_in_their_order() -> None:
    """Dropout has the bits of pairs, a norm inside of experts what torch makes of them."""
    dropped = operators(recognized(Chosen("einsum", drop=0.2), rolled()))
    assert (dropped["fxpar.moe_unpermute"], dropped["fxpar.moe_permute"]) == (1, 2)
    normed = operators(recognized(Chosen("normed"), rolled()))
    assert (normed["fxpar.moe_unpermute"], normed["fxpar.moe_permute"]) == (2, 2)


# What is no layer of experts, a matrix for each pair or a loop over experts.
RESEMBLING = [*((Chosen, form) for form in sorted(MUTANTS)), *((Looped, form) for form in sorted(LOOPED))]


@pytest.mark.parametrize("which", alternate(range(len(RESEMBLING)), 0))
def test_what_resembles_them_is_what_it_was(which: int) -> None:
    torch.manual_seed(0)
    kind, form = RESEMBLING[which]
    program = capture(kind(form).double(), rolled(), Plan()).program
    result = PassManager([canonicalize, recognize_experts]).run(program)
    assert not any(name.startswith("fxpar") for name in operators(result))
    with pytest.raises(PlanError, match=r"ep=2: no operation of the model is recognised.*fxpar.ops.experts"):
        compile_program(program.with_(plan=Plan(dp=2, ep=2)))


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "form"), RESEMBLING)
def test_and_computes_what_it_did(kind: type[Chosen | Looped], form: str) -> None:
    torch.manual_seed(0)
    expect(verify(kind(form).double(), rolled(), Plan(tp=2)))


class Nearest(Chosen):
    """A top-k over tokens, whose matrices are taken, and marks of one token."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids).view(-1, WIDTH)
        near = (x @ x.mT).topk(CHOICES)
        made = torch.einsum("tkoi,ti->tko", (x[:, :, None] * x[:, None])[near.indices], x).sum(1)
        first = (near.values * (near.indices == 0)).sum(-1, keepdim=True)
        return (x + made + first * x).square().mean()  # type: ignore[no-any-return]


def test_tokens_are_no_experts() -> None:
    torch.manual_seed(0)
    assert not any(name.startswith("fxpar") for name in operators(recognized(Nearest("batched"), rolled())))
    expect(verify(Nearest("batched").double(), rolled(), Plan(tp=2)))


def test_experts_are_on_several_ranks() -> None:
    captured = capture(Chosen("batched"), rolled(), Plan()).program
    program = compile_program(captured.with_(plan=Plan(dp=2, ep=2)))
    assert set(experts_of(program).values()) == {"dp:S(0)"}
    program = compile_program(captured.with_(plan=Plan(tp=2)))
    assert experts_of(program)["down"] == "tp:S(2)"


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_capacity_drops_their_rows(policy: str) -> None:
    torch.manual_seed(0)
    expect(
        verify(
            Chosen("einsum").double(),
            rolled(),
            Plan(dp=2, ep=2, experts=Experts(capacity_factor=0.8, drop_policy=policy)),
        )
    )


class Reused(Chosen):
    """A loss of the experts' matrices beside, of all and of those that are chosen."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        _, chosen, _ = self.routed(self.words(ids))
        return super().forward(ids, labels) + self.gate_up.square().mean() + self.down[chosen].square().mean()


def test_matrices_may_be_read_otherwise_too() -> None:
    torch.manual_seed(0)
    expect(verify(Reused("batched").double(), rolled(), Plan(tp=2)))
    with pytest.raises(LayoutError, match=r"mean.*needs the whole of dimension 0"):
        compile_program(capture(Reused("batched"), rolled(), Plan(dp=2, ep=2)).program)


class Transformers(Chosen):
    """The function of transformers itself, called by an author's module.

    Args:
        transposed: whether matrices stand [E, in, out].
    """

    def __init__(self, transposed: bool) -> None:
        super().__init__("batched")
        self.transposed = transposed

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        moe = pytest.importorskip("transformers.integrations.moe")
        x = self.words(ids)
        tokens, chosen, weights = self.routed(x)
        own = SimpleNamespace(
            num_experts=EXPERTS,
            has_gate=True,
            has_bias=True,
            is_transposed=self.transposed,
            has_post_expert_norm=False,
            _is_expert_parallel=False,
            gate_up_proj=self.gate_up.transpose(1, 2) if self.transposed else self.gate_up,
            gate_up_proj_bias=self.gate_up_bias,
            down_proj=self.down.transpose(1, 2) if self.transposed else self.down,
            down_proj_bias=self.down_bias,
            _apply_gate=self.gated,
        )
        made = moe.batched_mm_experts_forward(own, tokens, chosen, weights)
        return (x + made.view(x.shape)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("transposed", alternate([False, True], 1))
def test_the_function_of_transformers_is_recognised(transposed: bool) -> None:
    torch.manual_seed(0)
    model = Transformers(transposed).double()
    assert operators(recognized(model, rolled()))["fxpar.grouped_linear"] == 2
    expect(verify(model, rolled(), Plan(dp=2, ep=2)))
