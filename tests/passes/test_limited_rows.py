"""Experts of a limited capacity: every layout's loss and gradients are those of a loop that drops the same rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.capture.capture import capture
from fxpar.compile import compile_program
from fxpar.cost.capturable import capture_regions
from fxpar.cost.communication import collectives
from fxpar.errors import PlanError
from fxpar.experts.compiler import expert_capacity
from fxpar.experts.operators.permute import drop_by_position, drop_by_probability
from fxpar.ir.program import Program
from fxpar.manager import PassManager
from fxpar.passes import DEFAULT_PASSES
from fxpar.passes.differentiate import differentiate
from fxpar.passes.mark_regions import mark_regions
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Experts
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import bisect, verify
from fxpar.verify.values import TOLERANCE, call_inputs, program_state, reference_run
from tests.passes.experts import EXPERTS, ROWS, WIDTH, ByHand, batch
from tests.passes.limited import captured, compared, looped
from tests.products import few

MESHES: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 4, "etp": 1},
    {"tp": 2},
    {"dp": 2, "tp": 2, "ep": 2},
    {},
    {"dp": 2},
    {"tp": 2, "ep": 2, "etp": 1},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    {"dp": 4, "ep": 2},
    {"dp": 4, "ep": 4},
    {"dp": 4, "tp": 2, "ep": 2, "sequence_parallel": True},
]
# Options of `Experts`.
FORMS: list[dict[str, Any]] = [{}, {"pad_to_capacity": True}, {"dispatch": "dropless"}, {"dispatch": "allgather"}]
LIMITS: list[dict[str, Any]] = [
    {"drop_policy": "probs", "capacity_factor": 0.5},
    {"drop_policy": "position", "capacity_factor": 1.25},
]


def _is_refused(mesh: dict[str, Any]) -> bool:
    """Tokens that each of several tensor parallel ranks would gather."""
    return bool(mesh.get("tp")) and mesh["ep"] * mesh.get("etp", mesh["tp"]) > mesh["tp"]


LAYOUTS = [
    (mesh, form, limit)
    for mesh in MESHES
    for form in FORMS
    if "dispatch" not in form or ("ep" in mesh and not (form == FORMS[3] and _is_refused(mesh)))
    for limit in LIMITS
]
# Of these every time: each form, each limit, tokens that tensor ranks share out, and one device.
LAYOUTS_EVERY_TIME = [
    (MESHES[0], FORMS[2], LIMITS[0]),
    (MESHES[1], FORMS[0], LIMITS[1]),
    (MESHES[3], FORMS[1], LIMITS[0]),
    (MESHES[4], FORMS[0], LIMITS[0]),
]
ROUTINGS = [("one", 2), ("some", 2), ("ties", 2), ("learned", 1), ("learned", EXPERTS), ("one", EXPERTS)]
# All to one expert, one row an expert, no limit at all.
EXTREMES: list[dict[str, Any]] = [
    {"experts": Experts(capacity_factor=1, dispatch="dropless")},
    {"experts": Experts(capacity_factor=0.01, pad_to_capacity=True)},
    {"experts": Experts(capacity_factor=0.01, dispatch="dropless", drop_policy="position")},
    {"experts": Experts(capacity_factor=1.5, drop_policy="position")},
    {"experts": Experts(capacity_factor=100, pad_to_capacity=True)},
]
CASES = [(each, extreme) for each in ROUTINGS for extreme in EXTREMES]
CASES_EVERY_TIME = [(("one", EXPERTS), EXTREMES[1])]


def dispatched(options: dict[str, Any], routing: str = "learned", choices: int = 2, length: int = 5) -> Program:
    """The program of every rank."""
    return compile_program(captured(routing, choices, length)[1].program.with_(plan=Plan(**options)))


@pytest.mark.parametrize(("mesh", "form", "limit"), few(LAYOUTS, LAYOUTS_EVERY_TIME))
def test_every_gradient_is_that_of_a_loop_that_drops_the_same(
    mesh: dict[str, Any], form: dict[str, Any], limit: dict[str, Any]
) -> None:
    """With a loss in which the load of all choices counts."""
    length = 6 if "sequence_parallel" in mesh else 5
    report, dropped = compared(dispatched({**mesh, "experts": Experts(**form, **limit)}, length=length), length=length)
    assert report.ok, report
    assert report.gradients == 9
    assert dropped > 0


@pytest.mark.parametrize(("routing", "extreme"), few(CASES, CASES_EVERY_TIME))
def test_routing_and_capacity_may_be_extreme(routing: tuple[str, int], extreme: dict[str, Any]) -> None:
    """Weights that are equal, and every expert for every token, too."""
    report, _ = compared(dispatched({**MESHES[1], **extreme}, *routing), *routing)
    assert report.ok, report


@pytest.mark.parametrize("form", few([(form,) for form in FORMS[:3]], []))
def test_other_lengths_than_the_example_s(form: dict[str, Any]) -> None:
    """One token in each row too: of the tensor ranks one has padding alone, and places for it."""
    program = dispatched({**MESHES[1], "experts": Experts(**form, capacity_factor=0.8)})
    for length in (1, 2, 7):
        report, _ = compared(program, now=length)
        assert report.ok, report


def test_the_reference_of_a_verification_drops_what_the_loop_drops() -> None:
    model, own = captured("learned", 2, 5)
    state, inputs = program_state(own.program, model), call_inputs(own, model, batch(5))
    for mesh in ({}, MESHES[1]):
        for policy in ("probs", "position"):
            plan = Plan(**mesh, experts=Experts(capacity_factor=0.5, drop_policy=policy))
            found, (wanted, _) = (
                reference_run(own.program.with_(plan=plan), state, inputs),
                looped(plan, "learned", 2, 5),
            )
            torch.testing.assert_close(found.outputs["output"], wanted.outputs["output"], rtol=TOLERANCE, atol=0)
            for name, gradient in wanted.gradients.items():
                torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=TOLERANCE)


def test_a_verification_sees_a_fault_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reference is no work of the pass."""
    plan = Plan(dp=2, ep=2, experts=Experts(capacity_factor=0.5))
    model, inputs = captured("learned", 2, 5)[0], batch(5)
    assert verify(model, inputs, plan).ok
    right = expert_capacity.share
    monkeypatch.setattr(expert_capacity, "share", lambda *region: (right(*region) or 0) * 2)
    report = verify(model, inputs, plan)
    assert not report.ok
    assert report.values is not None
    assert report.values.max_grad_error > 1e-3


def test_another_capacity_and_another_policy_are_other_values() -> None:
    """Which rows are dropped no static check knows."""
    text = print_program(dispatched({**MESHES[0], "experts": Experts(**FORMS[2], **LIMITS[0])}))
    wrong = re.sub(r"(drop_by_probability\.default\(.*), %\w+\)", r"\1, 1)", text)
    first = re.sub(r"drop_by_probability\.default\((%\w+), %\w+,", r"drop_by_position.default(\1,", text)
    for mutant in (wrong, first):
        assert mutant != text
        assert not compared(parse_program(mutant))[0].ok
    assert compared(parse_program(text))[0].ok


@pytest.mark.matrix
def test_no_pass_is_at_fault_for_what_is_dropped() -> None:
    model, own = captured("learned", 2, 5)
    program = own.program.with_(plan=Plan(dp=2, ep=2, experts=Experts(capacity_factor=0.5)))
    found = bisect(program, DEFAULT_PASSES, program_state(own.program, model), call_inputs(own, model, batch(5)))
    assert found.culprit is None
    assert {"dispatch_experts", "localize"} <= set(found.compared)


def unweighed(model: Any, rows: Tensor, counts: Tensor, order: Tensor, top: Any, ids: Tensor) -> Tensor:
    outputs = torch.ops.fxpar.grouped_linear(rows, model.gate_up[:, :WIDTH], counts, False)
    return torch.ops.fxpar.moe_unpermute(outputs, order, len(top.indices), 2)  # type: ignore[no-any-return]


def test_a_router_that_does_not_weigh_drops_by_position_alone() -> None:
    program = capture(ByHand(unweighed), batch(5), Plan(dp=2, ep=2, experts=Experts(capacity_factor=1))).program
    with pytest.raises(PlanError, match=r"0 weights of their pairs, and drop_policy='probs' needs one; .*'position'"):
        compile_program(program)
    compile_program(
        program.with_(plan=program.plan.replace(experts=Experts(capacity_factor=1, drop_policy="position")))
    )


def weighed_late(model: Any, rows: Tensor, counts: Tensor, order: Tensor, top: Any, ids: Tensor) -> Tensor:
    outputs = torch.ops.fxpar.grouped_linear(rows, model.gate_up[:, :WIDTH], counts, False)
    return torch.ops.fxpar.moe_combine(outputs, top.values.sigmoid(), order, rows.dtype)  # type: ignore[no-any-return]


def test_weights_may_come_behind_the_sort() -> None:
    program = capture(ByHand(weighed_late), batch(5), Plan(experts=Experts(capacity_factor=1))).program
    text = print_program(compile_program(program))
    assert re.search(r"%sigmoid = .*\n(.*\n)*%drop_by_probability.*\n(.*\n)*%sort_by_expert", text)


def test_a_model_without_experts_has_no_capacity() -> None:
    class Dense(torch.nn.Linear):
        """Of no experts."""

    program = capture(Dense(4, 4), (torch.randn(4, 4),), Plan(experts=Experts(capacity_factor=1))).program
    with pytest.raises(
        PlanError, match=r"capacity_factor=1: no operation .* recognised as that of experts.*leave it out"
    ):
        compile_program(program)


def _sent(options: dict[str, Any]) -> list[int]:
    found = [c for c in collectives(dispatched(options, length=6)) if c.phase == "forward"]
    return [c.bytes for c in found if c.op == "all_to_all" and c.bytes > 1000]


@pytest.mark.parametrize("form", FORMS[:2])
def test_it_sends_no_more_places_than_are_taken(form: dict[str, Any]) -> None:
    """Half of what tokens may need where the capacity is what each expert gets of a balanced load."""
    base = {"dp": 2, "ep": 2, "experts": Experts("alltoall")}
    whole = ROWS * 6 * 2 * 2 * WIDTH * 8
    assert _sent(base) == [whole] * 2
    assert _sent({**base, "experts": Experts("alltoall", **form, capacity_factor=1)}) == [whole // 2] * 2
    assert _sent({**base, "experts": Experts("alltoall", **form, capacity_factor=1.5)}) == [whole * 3 // 4] * 2
    assert _sent({**base, "experts": Experts("alltoall", **form, capacity_factor=3)}) == [whole] * 2


@pytest.mark.matrix
def test_a_budget_within_the_capacity() -> None:
    program = dispatched({"dp": 2, "ep": 2, "experts": Experts(capacity_factor=1.5, recv_capacity_factor=1.4)})
    text = print_program(program)
    assert "fxpar.excess.experts" in text
    report, _ = compared(program)
    assert report.ok


@pytest.mark.parametrize("form", few([(form,) for form in FORMS[:2]], []))
def test_it_is_static_prints_and_parses(form: dict[str, Any]) -> None:
    program = dispatched({"dp": 2, "tp": 2, "ep": 4, "etp": 1, "experts": Experts(**form, capacity_factor=1.1)})
    text = print_program(program)
    assert print_program(parse_program(text)) == text
    _, boundaries = capture_regions(PassManager([differentiate, mark_regions]).run(program))
    assert {each.node for each in boundaries} == {"one_hot"}  # of the model's own loss
    # Products of rows that are padded read no counts of the router.
    read = {m[1] for m in re.finditer(r"grouped_linear\.default\(%\w+, %\w+, %(\w+),", text)}
    assert all(name.startswith("full_like") for name in read) == bool(form)


@pytest.mark.parametrize("capacity", [0, 1, 2, 5, 6, 50])
def test_who_is_kept(capacity: int) -> None:
    """Of leading dimensions each by itself; numbers of no expert stay nobody's."""
    generator = torch.Generator().manual_seed(capacity)
    indices = torch.stack([torch.rand(6, 5, generator=generator).topk(3).indices for _ in range(4)]).view(2, 2, 6, 3)
    weights = torch.randint(0, 4, (2, 2, 6, 3), generator=generator).double() - 1
    for found, policy in (
        (drop_by_position(indices, 4, capacity), 0),
        (drop_by_probability(indices, weights, 4, capacity), 1),
    ):
        for lead in ((0, 0), (0, 1), (1, 0), (1, 1)):
            for e in range(5):
                pairs = [(t, k) for t in range(6) for k in range(3) if indices[(*lead, t, k)] == e]
                if policy:
                    pairs.sort(key=lambda pair: -weights[(*lead, *pair)].item())
                kept = pairs[:capacity] if e < 4 else []
                assert all(found[(*lead, *pair)] == (e if pair in kept else 4) for pair in pairs)


def test_no_tokens_are_kept_of_none() -> None:
    none = torch.zeros(2, 0, 3, dtype=torch.int64)
    assert drop_by_position(none, 4, 0).shape == none.shape
    assert drop_by_probability(none, torch.zeros(2, 0, 3), 4, 0).shape == none.shape
