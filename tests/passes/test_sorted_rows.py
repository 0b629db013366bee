"""Rows that a model sorts by expert itself are those of fxpar's operators: on one device, and where they travel."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture.capture import capture
from fxpar.compile import compile_program
from fxpar.errors import PassError, PlanError
from fxpar.ir.program import output_layouts
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Experts
from fxpar.verification import expect, verify
from tests.passes.experts import ROWS, operators, recognized, rolled
from tests.passes.sorted_layer import EXPERTS, INNER, WIDTH, Sorted
from tests.products import few

FORMS: list[dict[str, Any]] = [
    {"layers": 2},
    {"adds": "unsort", "counts": "one_hot", "biased": True},
    {"adds": "index_add", "counts": "marks", "first": True},
    {"adds": "inverse", "counts": "bincount", "dtype": torch.bfloat16, "layers": 2},
    {"adds": "index_add", "choices": 1},
    {"adds": "unsort", "first": True, "choices": EXPERTS},
]
PLANS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 4, "etp": 1, "experts": Experts("dropless")},
    {"tp": 2},
    {"dp": 2, "tp": 2, "ep": 2, "experts": Experts(capacity_factor=0.8, drop_policy="position")},
    {"dp": 2},
]


EVERY_TIME = [*zip(FORMS[:3], PLANS[:3], strict=True)]


@pytest.mark.parametrize(("form", "plan"), few(itertools.product(FORMS, PLANS), EVERY_TIME))
def test_they_are_the_single_device_s(form: dict[str, Any], plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    found = expect(verify(Sorted(**form), rolled(), Plan(**plan)))
    assert found.split_flops > 0.9


def test_what_is_known_of_them_is_written_in_one_way() -> None:
    """Nothing of the author's is left but his router."""
    each = {"fxpar.sort_by_expert": 2, "fxpar.moe_permute": 2, "fxpar.grouped_linear": 6}
    assert operators(recognized(Sorted(layers=2), rolled())) == each | {"fxpar.moe_combine": 2}
    biased = operators(recognized(Sorted(**FORMS[1], layers=2), rolled()))
    assert biased == each | {
        "fxpar.moe_permute": 4,
        "fxpar.expand_by_expert": 2,
        "fxpar.moe_unpermute": 2,
        "aten.gather": 2,
    }


def test_there_is_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sorts of equal experts may differ, so that none is left beside that of the rows."""

    def copied(self: Any, x: Tensor, made: Tensor, order: Tensor, tokens: Tensor, index: Tensor) -> Tensor:
        pairs = torch.zeros_like(made).index_copy(0, order, made)
        return pairs.view(-1, self.k, WIDTH).sum(1)

    model = Sorted()
    monkeypatch.setattr(type(model.layers[0]), "summed", copied)
    found = operators(recognized(model, rolled()))
    assert found["aten.index_copy"] == found["fxpar.sort_by_expert"] == 1
    assert not any(name.startswith(("aten.sort", "aten.argsort")) for name in found)
    program = capture(model, rolled(), Plan(dp=2, ep=2)).program
    with pytest.raises(PassError, match=r"index_copy.*not known to compute each row by itself.*or set ep=1"):
        compile_program(program)


def test_experts_are_on_several_ranks() -> None:
    program = compile_program(capture(Sorted(layers=2), rolled(), Plan(dp=2, ep=2)).program)
    layouts = {p.fqn: str(output_layouts(program.node(p.node))[0]) for p in program.parameters}
    assert {layouts[f"layers.{i}.{name}"] for i in range(2) for name in ("w1", "w2", "w3")} == {"dp:S(0)"}


def test_weights_of_a_router_say_what_is_dropped() -> None:
    torch.manual_seed(0)
    program = compile_program(
        capture(Sorted(layers=2), rolled(), Plan(dp=2, ep=2, experts=Experts(capacity_factor=1))).program
    )
    assert sum("drop_by_probability" in str(node.target) for node in program.graph.nodes) == 2


class Chosen(nn.Module):
    """Experts that choose their tokens, or whose rows stand in no order that anybody knows.

    Args:
        even: whether each expert has as many rows.
    """

    def __init__(self, even: bool) -> None:
        super().__init__()
        self.words, self.gate = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
        self.even = even

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        """Both [b, s]."""
        x = self.words(ids).view(-1, WIDTH)
        scores = self.gate(x).softmax(-1)
        tokens = scores.detach().topk(10, dim=0).indices
        if self.even:
            ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * 10
            places = tokens.t().reshape(-1)
        else:
            chosen = self.gate(x).argmax(-1)
            ends = torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS).cumsum(0).to(torch.int32)
            places = chosen.argsort()
        made = torch._grouped_mm(torch._grouped_mm(x[places], self.w1, offs=ends).relu(), self.w2, offs=ends)
        return torch.zeros_like(x).index_add(0, places, made).square().mean() + scores.sum()


@pytest.mark.parametrize("even", [True, False])
def test_experts_that_are_not_recognised_are_split_and_stay_where_they_are(even: bool) -> None:
    torch.manual_seed(0)
    model = Chosen(even)
    assert "fxpar.sort_by_expert" not in operators(recognized(model, rolled()))
    found = expect(verify(model, rolled(), Plan(tp=2)))
    cuts = {p.fqn: str(output_layouts(found.program.node(p.node))[0]) for p in found.program.parameters}
    assert (cuts["w1"], cuts["w2"]) == ("tp:S(2)", "tp:S(1)")
    program = capture(model, rolled(), Plan(tp=2, ep=2, etp=1)).program
    with pytest.raises(PlanError, match=r"grouped_linear.*in no way that is recognised as that of experts.*set ep=1"):
        compile_program(program)


class Dense(nn.Module):
    """Every expert computes every token, in one batched product; a router weighs what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gate = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Both [b, s]."""
        x = self.words(ids).view(-1, WIDTH)
        top = self.gate(x).softmax(-1).topk(2)
        weights = torch.zeros(x.shape[0], EXPERTS).scatter(1, top.indices, top.values)
        each = (x.expand(EXPERTS, -1, -1) @ self.up).relu() @ self.down
        made: Tensor = (each * weights.t().unsqueeze(-1)).sum(0)
        return made.square().mean()


def test_experts_that_compute_every_token_at_once_are_split_as_other_matrices_are() -> None:
    torch.manual_seed(0)
    model = Dense()
    found = expect(verify(model, rolled(), Plan(tp=2)))
    cuts = {p.fqn: str(output_layouts(found.program.node(p.node))[0]) for p in found.program.parameters}
    assert (cuts["up"], cuts["down"]) == ("tp:S(0)", "tp:S(0)")
    with pytest.raises(
        PlanError, match=r"ep=2: no operation of the model is recognised.*fxpar.ops.experts.*or set ep=1"
    ):
        compile_program(capture(model, rolled(), Plan(dp=2, ep=2)).program)


def test_products_of_torch_are_what_they_were_behind_a_trace() -> None:
    before = torch._grouped_mm, nn.functional.grouped_mm
    capture(Sorted(), rolled(), Plan())
    assert (torch._grouped_mm, nn.functional.grouped_mm) == before
    assert len(rolled()["ids"]) == ROWS
