"""Replicas of hot experts on other ranks: values are those without them, loads are even, and gradients go home."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpar.capture.capture import capture
from fxpar.compile import compile_program
from fxpar.cost.capturable import capture_regions
from fxpar.cost.communication import collectives
from fxpar.errors import CheckFailed, FxparError, InputError, PlanError
from fxpar.experts.compiler.slot_prices import cheapest, slot_prices
from fxpar.experts.operators.replicas import simulate_replicas
from fxpar.experts.operators.replicated_weights import add_replicas, replicate_experts
from fxpar.ir.program import Program
from fxpar.ir.step import is_forward
from fxpar.manager import PassManager
from fxpar.passes import STEP_PASSES
from fxpar.passes.differentiate import differentiate
from fxpar.passes.mark_regions import mark_regions
from fxpar.plan.cost import Cost
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Experts
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from tests.models.test_experts import model
from tests.passes import limited
from tests.passes.experts import Routed, check_text, compared, dispatched, expert_plan, rolled
from tests.products import few

Mesh = tuple[int, int, int, int]


def spare(**options: Any) -> Experts:
    """The options, with a slot on each rank, and whatever exceeds an even load replicated."""
    slots = options.get("spare_experts", 1)
    return Experts(**{"spare_experts": slots, "min_gain": 0 if slots else None, **options})


def program_of(mesh: Mesh, routing: str = "learned", load: bool = False, **options: Any) -> Program:
    return dispatched(expert_plan(*mesh).replace(experts=spare(**options)), routing, load=load)


# (ep, etp, tp, dp), and options of `Experts`.
RUNS: list[tuple[Mesh, dict[str, Any]]] = [
    ((2, 1, 1, 2), {}),
    ((4, 1, 2, 2), {}),
    ((2, 2, 2, 2), {}),
    ((2, 1, 2, 1), {}),
    ((2, 1, 1, 4), {}),
    ((4, 1, 1, 4), {}),
    ((2, 1, 2, 2), {}),
    ((2, 2, 2, 4), {}),
    ((4, 1, 2, 4), {}),
    ((2, 1, 1, 2), {"spare_experts": 2}),
    ((2, 1, 1, 2), {"dispatch": "alltoall"}),
    ((2, 1, 1, 2), {"recv_capacity_factor": 1.9}),
    ((2, 1, 1, 2), {"dispatch": "alltoall", "recv_capacity_factor": 1.9}),
    ((2, 1, 1, 2), {"dispatch": "dropless"}),
    ((4, 1, 2, 2), {"dispatch": "dropless"}),
    ((2, 2, 2, 2), {"dispatch": "dropless"}),
]
ROUTINGS = ("one", "some", "ties", "learned")
CASES = [(mesh, options, routing) for mesh, options in RUNS for routing in ROUTINGS]
EVERY_TIME = [
    (*RUNS[0], "one"),
    (*RUNS[1], "learned"),
    (*RUNS[2], "some"),
    (*RUNS[9], "one"),
    (*RUNS[14], "one"),
]


@pytest.mark.parametrize(("mesh", "options", "routing"), few(CASES, EVERY_TIME))
def test_every_gradient_is_the_single_device_s(mesh: Mesh, options: dict[str, Any], routing: str) -> None:
    """Odd lengths; a loss with the experts' load in it, which reads the router's choice."""
    program = program_of(mesh, routing, load=True, **options)
    text = print_program(program)
    assert "fxpar.replicate_experts" in text
    assert print_program(parse_program(text)) == text
    report = compared(program, routing, load=True)
    assert report.ok, report
    assert report.gradients == 9


def _routed(spec: str, routing: str) -> Any:
    """A model whose routers are set: they have no bias, and a token's score may be of any sign."""
    built = model(spec)
    for name, weight in built.model.named_parameters():
        if not name.endswith(("gate.weight", "router.weight")) or routing == "balanced":
            continue
        with torch.no_grad():
            if routing == "hot":  # one of both wins, whatever the token is
                weight[:2] = 10 * weight[:1] * torch.tensor([[1.0], [-1.0]])
            elif routing == "all to one":
                weight.zero_()
            else:  # a mean is never among the highest
                weight[2] = weight[[0, 1, 3]].mean(0)
    return built


MODELS = (
    "mixtral,num_hidden_layers=1",
    "qwen3_moe,num_hidden_layers=1,moe_intermediate_size=40",
    # The first layer has no experts.
    "deepseek_v3,num_hidden_layers=2,first_k_dense_replace=1,moe_intermediate_size=40,n_routed_experts=8,n_group=4,"
    "topk_group=2",
    "gpt_oss,num_hidden_layers=1",
)
MODEL_CASES = [
    (spec, mesh, routing)
    for spec in MODELS
    for mesh in ((2, 1, 1, 2), (4, 1, 2, 2), (2, 2, 2, 2))
    for routing in ("hot", "all to one", "balanced", "empty")
]


@pytest.mark.parametrize(
    ("spec", "mesh", "routing"),
    few(MODEL_CASES, [(MODELS[0], (2, 1, 1, 2), "hot")]),
)
def test_models_are_the_single_device_s(spec: str, mesh: Mesh, routing: str) -> None:
    built = _routed(spec, routing)
    example = {name: torch.cat((value, value.roll(1, 0)))[:4] for name, value in built.batch.items()}
    ep, etp, tp, dp = mesh
    expect(verify(built.model, example, Plan(ep=ep, etp=etp, tp=tp, dp=dp, experts=spare()), loss=built.loss))


LIMITS: list[dict[str, Any]] = [
    {"capacity_factor": 0.5},
    {"capacity_factor": 1.25, "drop_policy": "position"},
    {"capacity_factor": 1.25, "pad_to_capacity": True},
    {"capacity_factor": 1.25, "dispatch": "dropless"},
]
LIMITED = [(mesh, limit) for mesh in ({"dp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 4, "etp": 1}) for limit in LIMITS]


@pytest.mark.parametrize(("mesh", "limit"), few(LIMITED, [LIMITED[6]]))
def test_what_a_capacity_drops_stays_dropped(mesh: dict[str, Any], limit: dict[str, Any]) -> None:
    """An expert takes no more rows of a source because it has a replica."""
    plan = Plan(**mesh, experts=spare(**limit))
    _, own = limited.captured("one", 2, 5)
    report, dropped = limited.compared(compile_program(own.program.with_(plan=plan)), "one")
    assert report.ok, report
    assert dropped > 0


def test_it_is_static_and_sends_the_slots_alone() -> None:
    """Of each weight two slots, one a rank; the gradients of as many come back."""
    program = program_of((2, 1, 1, 2), "one")
    sent = [c for c in collectives(program) if c.node.startswith("replicate_experts")]
    sizes = [2 * 24 * 8 * 8, 2 * 24 * 8, 2 * 8 * 12 * 8, 2 * 8 * 8]
    assert [(c.op, c.phase, c.bytes) for c in sent] == [
        entry for size in sizes for entry in (("reduce_scatter", "forward", size), ("all_gather", "backward", size))
    ]
    step = PassManager([differentiate, mark_regions]).run(program)
    back = [(c.op, c.phase, c.bytes) for c in collectives(step) if c.node.startswith("return_replicas")]
    assert sorted(back) == sorted(("all_gather", "backward", size) for size in sizes)
    assert capture_regions(step)[1] == []


def test_the_backward_has_weights_sent_again() -> None:
    """Those that it reads, which are not biases; in no layer they stay until then."""
    step = PassManager(STEP_PASSES).run(program_of((2, 1, 1, 2), "one"))
    again = [(c.op, c.bytes) for c in collectives(step) if c.phase == "recompute"]
    assert again == [("reduce_scatter", 2 * 8 * 12 * 8), ("reduce_scatter", 2 * 24 * 8 * 8)]
    for node in step.graph.nodes:
        if node.target is replicate_experts and not is_forward(node):
            assert not any(is_forward(user) for user in node.users)
        elif node.target is replicate_experts:
            assert all(is_forward(user) for user in node.users)


def test_weights_are_sent_before_rows_travel() -> None:
    """So that they travel meanwhile, and graphs in front of rows alone hold them."""
    names = [node.name for node in program_of((2, 1, 1, 2), "one", dispatch="dropless").graph.nodes]
    sent = [place for place, name in enumerate(names) if name.startswith("replicate_experts")]
    assert len(sent) == 4
    assert max(sent) < names.index("send_rows")


@pytest.mark.parametrize("dispatch", ["allgather", "alltoall"])
def test_buffers_for_an_even_load_are_enough(dispatch: str) -> None:
    """All rows are of the two experts of one rank."""
    assert compared(program_of((2, 1, 1, 2), "one", dispatch=dispatch, recv_capacity_factor=1), "one").ok
    program = program_of((2, 1, 1, 2), "one", spare_experts=0, dispatch=dispatch, recv_capacity_factor=1)
    with pytest.raises(CheckFailed, match="rows more than the plan's recv_capacity_factor has places for"):
        compared(program, "one")


def test_slots_are_no_parameters() -> None:
    """What is saved, clipped and updated are the author's experts."""
    program, without = program_of((2, 1, 1, 2)), dispatched(expert_plan(2, 1, 1, 2))
    kinds = [{(p.fqn, str(program.node(p.node).type)) for p in each.parameters} for each in (program, without)]
    assert kinds[0] == kinds[1]
    assert [each.fqn for each in program.parameters] == [each.fqn for each in without.parameters]


def _without(text: str, name: str) -> str:
    """The text without a node of one operand, which takes its place."""
    (match,) = re.finditer(rf"^%{name} = [^\n(]*\(%(\w+)[^\n]*\n", text, re.MULTILINE)
    return re.sub(rf"%{name}\b", f"%{match[1]}", text[: match.start()] + text[match.end() :])


def test_mutants_are_rejected_statically() -> None:
    """Plans of a rank alone, other axes, weights of another matrix, homes for experts, gradients left in slots."""
    program = program_of((2, 1, 1, 4), "one")
    text, step = print_program(program), print_program(PassManager([differentiate]).run(program))
    ((gathered, home),) = re.findall(r"%replicate_over = \S+\(%(\w+)\)[^$]*?%(\w+) = operator.getitem\(%plan_rep", text)
    first, *_, last = re.findall(r"replicate_experts\[dp_in\]\(%(\w+),", text)
    alone = _without(text, gathered)
    cut = f"%cut = fxpar.r_to_s[dp_in](%{home}) : i64[2, 2] dp_out:S(0) dp_in:R→S(1)\n"
    with_cut = re.sub(rf"^(%{home} = .*\n)", rf"\1{cut}", text, flags=re.MULTILINE)
    mutants = [
        alone,
        _without(alone, "replicate_over"),
        text.replace("replicate_over[dp_in]", "replicate_over[dp_out]"),
        text.replace("fxpar.replicate_experts[dp_in]", "fxpar.replicate_experts[dp_out]"),
        text.replace("fxpar.replicate_experts[dp_in]", "fxpar.return_replicas[dp_in]"),
        text.replace(f"replicate_experts[dp_in](%{last},", f"replicate_experts[dp_in](%{first},"),
        re.sub(rf"(replicate_experts\[dp_in\]\(%\w+, )%{home}", r"\1%expand_over", text),
        re.sub(rf"(replicate_experts\[dp_in\]\(%\w+, )%{home}", r"\1%cut", with_cut),
        re.sub(r"fxpar\.return_replicas\[dp_in\]\((%\w+), %\w+\)", r"aten.slice.Tensor(\1, 2, 0, 2)", step),
    ]
    for mutant in mutants:
        assert mutant not in (text, step, with_cut)
        with pytest.raises(FxparError):
            check_text(mutant)
    for whole in (text, step, with_cut):
        check_text(whole)


@pytest.mark.parametrize("which", [r"replicate_experts(?=\[)", r"replicate_experts_2", r"replicate_experts\w*"])
def test_experts_in_other_slots_are_seen(which: str) -> None:
    """Slots swapped: of the first matrix, of the second alone, and of all weights."""
    text = print_program(program_of((2, 1, 1, 2), "one"))
    home = re.findall(r"replicate_experts\[dp\]\(%\w+, %(\w+)\)", text)[0]
    swapped = re.sub(
        rf"^(%{home} = .*\n)", r"\1%swapped = aten.flip.default(%" + home + r", [0]) : i64[2] dp:R\n", text, flags=re.M
    )
    name = which.replace("(?=\\[)", "")
    mutant = re.sub(
        rf"^(%{name} = fxpar\.replicate_experts\[dp\]\(%\w+), %{home}\)", r"\1, %swapped)", swapped, flags=re.M
    )
    assert mutant != swapped
    assert compared(parse_program(swapped), "one").ok
    assert not compared(parse_program(mutant), "one").ok


def test_gradients_of_slots_are_added_to_their_experts() -> None:
    """Two ranks have replicas of the last expert, one of the first; a slot is empty, one has another rank's expert."""
    local, of_slots = torch.randn(3, 5), torch.randn(3, 2, 5)
    places = torch.tensor([[3, 2], [0, 2], [3, 3]])
    sums = add_replicas(local, of_slots, places)
    expected = local.clone()
    expected[2] += of_slots[0, 1]
    expected[0] += of_slots[1, 0]
    expected[2] += of_slots[1, 1]
    assert torch.equal(sums, expected)


# An expert has 320 elements of 8 bytes, three times on their way: 7,680 seconds a byte a second. A pair takes 6 · 320
# multiply-adds, times two, and where rows travel alone 4 · 64 bytes of them. An even load is of 40 pairs, or 20.
UNIT = Cost(bandwidth=1.0, flops=3.0)


@pytest.mark.parametrize(
    ("mesh", "cost", "options", "gain"),
    [
        ((2, 1, 1, 2), UNIT, {}, 0.3),
        ((2, 1, 1, 2), UNIT, {"dispatch": "dropless"}, 0.214286),
        ((2, 1, 1, 2), replace(UNIT, axes={"dp": {"bandwidth": 2.0}}), {}, 0.15),
        ((2, 1, 1, 4), UNIT, {}, 0.6),
        ((2, 1, 1, 2), Cost(), {}, 2.0),
        ((2, 1, 1, 2), Cost(), {"min_gain": 0.125}, 0.125),
    ],
)
def test_what_does_not_pay_stays(mesh: Mesh, cost: Cost, options: dict[str, Any], gain: float) -> None:
    """The last but one is more than a rank can have beyond an even load."""
    plan = expert_plan(*mesh).replace(experts=spare(**{"min_gain": None, **options}), cost=cost)
    (written,) = re.findall(r"plan_replicas\.default\(%\w+, 1, (\S+)\)", print_program(dispatched(plan)))
    assert float(written) == gain


def test_a_balanced_load_of_many_rows_sends_nothing() -> None:
    """Of 64 experts in bfloat16, 8 a token; and of 20 pairs one goes to the first expert."""
    plan = Plan(dp=2, ep=2, experts=spare(min_gain=None))
    words = {name: value.repeat(2, 205)[:, :1024] for name, value in rolled().items()}
    program = capture(Routed(experts=64, choices=8).bfloat16(), words, plan).program
    (gain,) = re.findall(r"plan_replicas\.default\(%\w+, 1, (\S+)\)", print_program(compile_program(program)))
    assert float(gain) == pytest.approx(1875 / 65536, abs=1e-6)
    even = torch.randint(0, 64, (2, 65536), generator=torch.Generator().manual_seed(1))
    hot = torch.where(torch.arange(65536) % 20 == 0, 0, even)
    slots = []
    for choices, least in ((even, 0.0), (even, float(gain)), (hot, float(gain))):
        counts = torch.stack([torch.bincount(own, minlength=64) for own in choices])
        slots.append(simulate_replicas(counts, 1, least, 1).slots)
    assert slots == [1, 0, 1]


@pytest.mark.parametrize(
    ("loads", "cost", "slots"),
    [
        ([20, 20, 0, 0], Cost(bandwidth=1e30, latency=1e-30, flops=1.0), 1),
        ([20, 20, 0, 0], Cost(), 0),
        ([10, 10, 10, 10], Cost(bandwidth=1e30, latency=1e-30, flops=1.0), 0),
    ],
)
def test_a_number_of_slots_is_left_to_loads(tmp_path: Path, loads: list[int], cost: Cost, slots: int) -> None:
    """Half of the rows of one rank go where there are none; links are free, or dearer than all products."""
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"loads": [{"experts": loads}]}))
    plan = expert_plan(2, 1, 1, 2).replace(experts=Experts(spare_experts="auto", expert_loads=str(file)), cost=cost)
    program = dispatched(plan, "one")
    assert program.plan == plan.replace(experts=Experts(spare_experts=slots))
    assert ("fxpar.replicate_experts" in print_program(program)) == bool(slots)
    assert compared(program, "one").ok


def test_of_few_pairs_no_expert_has_one() -> None:
    """Shares of fewer than half a pair are none: nothing is full then, and slots save nothing."""
    plan = Plan(dp=2, ep=2, experts=spare(min_gain=None))
    words = {name: value[:2] for name, value in rolled().items()}
    prices = slot_prices(capture(Routed(experts=64, choices=1), words, plan).program, 1.0)
    assert {price.fullest for price in prices} == {1.0}
    assert cheapest(prices).slots == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("{", "has no loads of experts"),
        ('{"loads": [{"experts": [0, 0, 0, 0]}]}', "has no loads of experts"),
        ('{"loads": [{"experts": [1, 2]}]}', r"has loads of layers of \[2\] experts, and the model has \[4\]"),
        ('{"loads": []}', r"has loads of layers of \[\] experts, and the model has \[4\]"),
    ],
)
def test_loads_of_another_model_are_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    file = tmp_path / "report.json"
    if text is not None:
        file.write_text(text)
    options = Experts(spare_experts="auto", expert_loads=str(file))
    with pytest.raises(InputError, match=reason) as refused:
        dispatched(expert_plan(2, 1, 1, 2).replace(experts=options))
    assert "model.report().to_dict()" in str(refused.value)


def test_ranks_have_no_more_slots_than_experts() -> None:
    with pytest.raises(PlanError, match=r"spare_experts=3 is more than the 2 experts of a rank.*at most 2"):
        program_of((2, 1, 1, 2), spare_experts=3)


def test_a_model_without_experts_has_no_slots() -> None:
    program = capture(torch.nn.Linear(4, 4), (torch.randn(4, 4),), Plan(dp=2, ep=2, experts=spare())).program
    with pytest.raises(PlanError, match=r"no operation of the model is recognised as that of experts"):
        compile_program(program)
