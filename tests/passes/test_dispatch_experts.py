"""dispatch_experts: every rank's part of the experts, whatever the routing; what is sent; what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture.capture import capture
from fxpar.compile import compile_program
from fxpar.cost.communication import collectives
from fxpar.errors import CheckFailed, FxparError, PassError, PlanError
from fxpar.experts.operators import sent_rows
from fxpar.ir.program import output_layouts
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Experts
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from tests.passes.experts import (
    CHOICES,
    EXPERTS,
    ROWS,
    WIDTH,
    ByHand,
    batch,
    check_text,
    compared,
    dispatched,
    expert_plan,
)
from tests.products import few, product

# (ep, etp, tp, dp), and whether activations are cut over the sequence.
MESHES = [
    (2, 1, 1, 2, False),
    (2, 1, 2, 1, False),
    (4, 1, 2, 2, False),
    (2, 2, 2, 2, False),
    (2, 1, 1, 4, False),
    (2, 1, 2, 2, True),
    (1, 2, 2, 2, False),
    (4, 1, 1, 4, False),
    (2, 2, 2, 4, True),
    (4, 1, 2, 4, False),
]
# Of these the static dispatch gathers tokens, which it may too where rows are sent in blocks.
GATHERED = [(2, 1, 1, 2, False), (2, 1, 2, 1, False), (2, 1, 1, 4, False), (2, 1, 2, 2, True), (4, 1, 1, 4, False)]
DROPLESS = [
    (2, 1, 1, 2, False),
    (2, 1, 2, 1, False),
    (4, 1, 2, 2, False),
    (2, 2, 2, 2, False),
    *GATHERED[2:],
    MESHES[8],
]
RUNS = [
    *((mesh, "static") for mesh in MESHES),
    *((mesh, "alltoall") for mesh in GATHERED),
    *((mesh, "dropless") for mesh in DROPLESS),
]
EVERY_TIME = [*RUNS[:3:2], *((mesh, "dropless") for mesh in DROPLESS[1:3])]
CHOSEN_BY_COST = Experts()
plan = expert_plan


@pytest.mark.parametrize(("mesh", "dispatch"), few(RUNS, EVERY_TIME))
def test_every_gradient_is_the_single_device_s(mesh: tuple[int, int, int, int, bool], dispatch: str) -> None:
    """Odd lengths, but where tensor ranks share out the sequence; a loss with the experts' load in it."""
    length = 6 if mesh[-1] else 5
    program = dispatched(plan(*mesh, dispatch), load=True, length=length)
    is_gathered = dispatch == "static" and mesh in GATHERED
    assert ("fxpar.expand_over" in print_program(program)) == is_gathered
    report = compared(program, load=True, length=length)
    assert report.ok, report
    assert report.gradients == 9


# Static, these are alltoall and allgather.
WAYS = {
    "alltoall": plan(4, 1, 2, 2),
    "allgather": plan(4, 1, 1, 4),
    "dropless": plan(4, 1, 2, 2, dispatch="dropless"),
    "dropless over dp": plan(2, 1, 1, 2, dispatch="dropless"),
}


@product(way=[*WAYS], routing=["one", "some", "ties"])
def test_routing_may_be_extreme(way: str, routing: str) -> None:
    """All tokens to the experts of one rank, or none to one; of whole rows of a batch alike."""
    report = compared(dispatched(WAYS[way], routing), routing)
    assert report.ok, report


@product(
    plan__routing=[(WAYS["alltoall"], "learned"), (expert_plan(2, 1, 1, 4), "learned"), (WAYS["dropless"], "one")],
    length=[1, 2, 7],
)
def test_other_lengths_than_the_example_s(plan: Plan, routing: str, length: int) -> None:
    """One token in each row too: of the tensor ranks one has none."""
    report = compared(dispatched(plan, routing), routing, now=length)
    assert report.ok, report


def test_weights_are_held_by_expert_and_reduced_over_ranks_of_the_same_experts_alone() -> None:
    program = dispatched(plan(2, 1, 1, 4))
    layouts = {p.fqn: output_layouts(program.node(p.node))[0] for p in program.parameters}
    assert str(layouts["down"]) == "dp_out:I dp_in:S(0)"
    assert str(layouts["router.weight"]) == "dp_out:I dp_in:I"
    sums = {c.axis for c in collectives(program) if c.phase == "parameter"}
    assert sums == {"dp_out", "dp_out-dp_in"}


def test_no_token_travels_twice() -> None:
    """In blocks as many places travel as tokens may need, whoever shares the tokens; gathered, tokens alone.

    Of tensor ranks, which all have a token, it is cheaper to let each pick the rows of its experts than to send those.
    """
    places = ROWS * 6 * min(CHOICES, EXPERTS // 2) * 2
    sent = {}
    for name, mesh in (("tp", (2, 1, 2, 1)), ("dp", (2, 1, 1, 2))):
        found = [c for c in collectives(dispatched(plan(*mesh, dispatch="alltoall"), length=6)) if c.phase == "forward"]
        sent[name] = sorted(c.bytes for c in found if c.op == "all_to_all" and c.bytes > 1000)
    assert sent == {"dp": [places * WIDTH * 8] * 2, "tp": [places * WIDTH * 8]}
    tokens = ROWS * 6 * WIDTH * 8
    found = [
        c for c in collectives(dispatched(plan(2, 1, 1, 2), length=6)) if c.bytes > 1000 and c.phase != "parameter"
    ]
    assert sorted((c.op, c.phase, c.bytes) for c in found if c.phase != "parameter") == [
        ("all_gather", "backward", tokens),
        ("all_gather", "forward", tokens),
        ("reduce_scatter", "backward", tokens),
        ("reduce_scatter", "forward", tokens),
    ]


def test_tokens_are_gathered_where_a_block_has_a_place_for_each() -> None:
    """One of two experts a rank, with half of its tokens' rows; tokens that tensor ranks share are not gathered."""

    def is_gathered(experts: Experts = CHOSEN_BY_COST, **options: Any) -> bool:
        return "fxpar.expand_over" in print_program(dispatched(Plan(etp=1, experts=experts, **options)))

    assert is_gathered(dp=4, ep=4)
    assert is_gathered(Experts(recv_capacity_factor=1), dp=2, ep=2)
    assert not is_gathered(Experts(recv_capacity_factor=1.5), dp=4, ep=4)
    assert is_gathered(Experts("allgather", recv_capacity_factor=1.5), dp=4, ep=4)
    assert is_gathered(tp=2, dp=2, ep=2)
    assert not is_gathered(tp=2, dp=2, ep=4)
    with pytest.raises(PlanError, match=r"each token would be gathered by every tensor parallel rank.*or of tp alone"):
        is_gathered(Experts("allgather"), tp=2, dp=2, ep=4)


def test_no_size_depends_on_the_routing() -> None:
    text = print_program(dispatched(plan(4, 1, 2, 2)))
    assert not re.search(r"aten\.(nonzero|item|_local_scalar_dense|unique|masked_select)|fxpar\.item", text)


@pytest.mark.parametrize(
    ("dispatch", "places"),
    [("alltoall", "[2, 2, floor(3*b*s/2 + 1/2), 8]"), ("allgather", "[2, 3*b*s, 8]")],
)
def test_a_budget_has_fewer_places_and_says_when_rows_lack_one(dispatch: str, places: str) -> None:
    """One and a half of a balanced load is enough here; the load itself is not."""
    ranks = plan(2, 1, 1, 2)
    program = dispatched(ranks.replace(experts=Experts(dispatch, recv_capacity_factor=1.5)))
    text = print_program(program)
    assert places in text
    assert "fxpar.excess.experts=%block_excess" in text
    assert print_program(parse_program(text)) == text
    assert compared(program).ok
    with pytest.raises(CheckFailed, match=r"rows more than the plan's recv_capacity_factor has places for.*larger"):
        compared(dispatched(ranks.replace(experts=Experts(dispatch, recv_capacity_factor=1))))
    assert "excess" not in print_program(
        dispatched(ranks.replace(experts=Experts(dispatch, recv_capacity_factor=2)))
    )  # tokens need no more


def test_rows_without_a_place_are_left_out_and_counted() -> None:
    counts = torch.tensor([[3, 1, 0, 2], [0, 0, 1, 1]])
    order = torch.arange(6).repeat(2, 1)
    assert sent_rows.block_excess(counts, 2, 3).tolist() == [[1], [0]]
    assert sent_rows.dispatch_indices(order, counts, 2, 3).tolist() == [
        [0, 1, 2, 4, 5, -1],
        [-1, -1, -1, 0, 1, -1],
    ]
    found, total = sent_rows.received_order(counts.view(2, 2, 2), 3)
    assert total.tolist() == [[3, 2], [1, 1]]
    assert found.tolist() == [[0, 1, 2, 3, 4, -1], [3, 4, -1, -1, -1, -1]]


def test_it_prints_and_parses() -> None:
    text = print_program(dispatched(plan(2, 1, 2, 1)))
    assert "fxpar.shard_over[tp]" in text
    assert print_program(parse_program(text)) == text


def test_a_model_without_experts_has_no_use_for_ep() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x).sum()  # type: ignore[no-any-return]

    program = capture(Plain(), (torch.randn(4, 4),), Plan(dp=2, ep=2)).program
    with pytest.raises(PlanError, match=r"ep=2: no operation of the model is recognised as that of experts"):
        compile_program(program)


def test_experts_are_shared_out_evenly() -> None:
    with pytest.raises(PlanError, match="4 experts are not shared out evenly by 8 ranks"):
        dispatched(plan(8, 1, 1, 8))


def mixed(model: Any, rows: Tensor, counts: Tensor, order: Tensor, top: Any, ids: Tensor) -> Tensor:
    """Rows of experts are computed with each other."""
    outputs = torch.ops.fxpar.grouped_linear(rows.cumsum(0), model.gate_up, counts, False)
    return torch.ops.fxpar.moe_unpermute(outputs, order, len(top.indices), CHOICES)  # type: ignore[no-any-return]


def test_what_is_not_done_to_each_row_is_refused() -> None:
    program = capture(ByHand(mixed), batch(5), Plan(dp=2, ep=2, etp=1)).program
    with pytest.raises(PassError, match=r"cumsum.*each row by itself.*or set ep=1"):
        compile_program(program)


def scaled(model: Any, rows: Tensor, counts: Tensor, order: Tensor, top: Any, ids: Tensor) -> Tensor:
    """Rows of experts are divided by a size of the batch."""
    outputs = torch.ops.fxpar.grouped_linear(rows, model.gate_up, counts, False) / ids.shape[1]
    return torch.ops.fxpar.moe_combine(outputs, top.values, order, rows.dtype)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dispatch", ["alltoall", "allgather", "dropless"])
def test_a_size_that_scales_rows_is_not_their_number(dispatch: str) -> None:
    expect(verify(ByHand(scaled).double(), batch(5), plan(2, 1, 1, 2, dispatch=dispatch)))


def _without(text: str, pattern: str) -> list[str]:
    """The text without each of the conversions: its operand takes its place."""
    found = []
    for match in re.finditer(rf"^%(\w+) = {pattern}\(%(\w+)\)[^\n]*\n", text, re.MULTILINE):
        rest = text[: match.start()] + text[match.end() :]
        found.append(re.sub(rf"%{match[1]}\b", f"%{match[2]}", rest))
    return found


@pytest.mark.parametrize(("mesh", "least"), [((4, 1, 2, 2), 20), ((2, 1, 2, 2), 12)], ids=["alltoall", "allgather"])
def test_mutants_are_rejected_statically(mesh: tuple[int, int, int, int], least: int) -> None:
    """A conversion that is left out, or on another axis; rows received for rows sent; sums that are none."""
    text = print_program(dispatched(plan(*mesh)))
    mutants = _without(text, r"fxpar\.(?:all_to_all|all_gather|reduce_scatter|reduce_from|slice)\w*\[\w+\]")
    for match in re.finditer(r"fxpar\.(?:all_to_all|shard_over|expand_over|sum_over)\[(dp|tp)\]", text):
        other = "tp" if match[1] == "dp" else "dp"
        mutants.append(text[: match.start(1)] + other + text[match.end(1) :])
    for match in re.finditer(r"fxpar\.(?:expand_over|sum_over)\[\w+\]\(%\w+, (\d)\)", text):
        mutants.append(text[: match.start(1)] + str(int(match[1]) + 1) + text[match.end(1) :])
    assert len(mutants) >= least
    for mutant in mutants:
        with pytest.raises(FxparError):
            check_text(mutant)
    check_text(text)
