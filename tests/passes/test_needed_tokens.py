"""dispatch_experts: tokens for those ranks alone that hold experts they chose, and what these make of them."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from functools import cache, partial
from typing import Any

import pytest
import torch

from fxpar.compile import lower_program
from fxpar.cost import make_report
from fxpar.cost.seconds import travels
from fxpar.errors import CheckFailed, FxparError
from fxpar.experts.compiler import dispatch
from fxpar.experts.operators.selective_dispatch import needed_part
from fxpar.ir.program import Program, note
from fxpar.ir.regions import inlined
from fxpar.manager import PassManager
from fxpar.ops.process_group import Group
from fxpar.passes import counted_steps
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Communication, Experts
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import STATIC, verify_static
from tests.passes.experts import ROWS, WIDTH, compared, dispatched
from tests.products import few
from tests.zoo import step_of

Given = dict[str, Any]
COPIES: Given = {"dp": 4, "ep": 4, "communication": Communication("copy")}


@cache
def copied() -> Program:
    return dispatched(Plan(**COPIES))


@cache
def step() -> Program:
    """Its training step, without calls of regions."""
    program = copied()
    return inlined(step_of(program))


CASES: list[tuple[Given, str, int]] = [
    *((COPIES, routing, 5) for routing in ("learned", "one", "some", "ties")),
    (COPIES, "learned", 1),
    ({"dp": 2, "ep": 2}, "learned", 7),
    ({**COPIES, "ep": 2}, "one", 5),
    ({**COPIES, "experts": Experts(recv_capacity_factor=3, dispatch="allgather")}, "learned", 5),
]


@pytest.mark.parametrize(("plan", "routing", "now"), few(CASES, CASES[:1]), ids=str)
def test_every_gradient_is_the_single_device_s(plan: Given, routing: str, now: int) -> None:
    program = dispatched(Plan(**plan), routing)
    assert "fxpar.expand_needed" in print_program(program)
    report = compared(program, routing, now=now)
    assert report.ok, report


def test_what_the_program_says() -> None:
    """The choice is gathered once, for places and for both ways; what is needed follows from it."""
    text = print_program(copied())
    assert print_program(parse_program(text)) == text
    reason = "a rank needs 50.0% of the tokens, less than 90%: it gets these alone"
    choice = "%view_default_1_all_gather"
    lines = [re.sub(r"  # .*", "", line) for line in text.splitlines() if "needed[" in line or choice + " =" in line]
    assert lines == [
        f'{choice} = fxpar.all_gather[dp](%view_default_1) : i64[4*b*s, 2] dp:S(0)→R {{origin="S(0) to R for '
        '%expand_over"}',
        f"%expand_needed = fxpar.expand_needed[dp](%view_default_4, {choice}, 1) : f64[4, 4*b*s, 8] dp:S(0) "
        f'{{origin="{reason}"}}',
        f"%sum_needed = fxpar.sum_needed[dp](%moe_combine_default, {choice}, 1) : f64[4*b*s, 8] dp:S(0) "
        f'{{origin="{reason}"}}',
    ]


def test_tokens_are_picked_where_copies_can_and_enough_is_left_out() -> None:
    def ways(**plan: Any) -> tuple[bool, bool]:
        text = print_program(dispatched(Plan(**plan)))
        return "expand_needed" in text, "it gets" in text

    assert ways(dp=2, ep=2) == (True, True)
    assert ways(dp=2, ep=2, communication=Communication("nccl")) == (False, False)
    assert ways(dp=4, ep=4) == (False, False)  # NCCL is faster between more than two, and knows no rows
    assert ways(tp=2, ep=2, etp=1, communication=Communication("copy")) == (False, False)  # ranks have all tokens


def test_all_tokens_travel_where_next_to_all_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_NEEDED", Fraction(1, 2))
    text = print_program(dispatched(Plan(**COPIES)))
    assert "expand_needed" not in text
    reason = "a rank needs 50.0% of the tokens, not less than 50%: it gets all"
    assert [line.split(" ")[2][:17] for line in text.splitlines() if reason in line] == [
        "fxpar.expand_over",
        "fxpar.sum_over[dp",
    ]


def test_the_part_that_is_needed() -> None:
    for experts, own, k in [(8, 1, 2), (8, 2, 2), (8, 4, 1), (6, 3, 4), (4, 4, 2)]:
        chosen = list(itertools.combinations(range(experts), k))
        assert needed_part(experts, own, k) == Fraction(sum(min(c) < own for c in chosen), len(chosen))
    parts = {n: round(float(needed_part(64, 64 // n, 8)), 3) for n in (2, 4, 8)}
    assert parts == {2: 0.998, 4: 0.915, 8: 0.679}
    assert float(needed_part(8, 1, 2)) == 0.25


def test_copies_of_them_are_one_shot() -> None:
    """However little they send; the check says so where a text says otherwise."""
    sent = [node for node in step().graph.nodes if "needed[" in f"{node.target}[" and node.op == "call_function"]
    assert [bool(note(node).buffer) and note(node).one_shot for node in sent] == [True] * 4
    text = print_program(step())
    assert "buffers" in verify_static(parse_program(text))
    check = next(each for each in STATIC if each.name == "buffers")
    with pytest.raises(CheckFailed, match="has a buffer and is not one_shot, which its copies are"):
        check.check(parse_program(text.replace(", one_shot=true", "", 1)))


def test_bytes_are_the_most_that_may_travel_and_times_of_what_is_expected() -> None:
    program, tokens = copied(), ROWS * 5 * WIDTH * 8
    found = [each for each in travels(step()) if each.collective.part < 1]
    assert [(each.collective.op, each.collective.phase) for each in found] == [
        ("all_gather", "forward"),
        ("reduce_scatter", "forward"),
        ("all_gather", "backward"),
        ("reduce_scatter", "backward"),
    ]
    cost = program.plan.cost
    for each in found:
        assert (each.collective.bytes, each.collective.part) == (tokens, 0.5)
        assert each.seconds == pytest.approx(cost.latency + 3 / 4 * tokens / 2 / cost.bandwidth)
    report = make_report(
        program,
        counted_steps(program, partial(lower_program, groups={"dp": Group("dp", 4)})),  # nothing is sent
        name="routed",
        device=torch.device("cpu"),
    )
    assert [c.needed for c in report.collectives if c.needed] == [tokens // 2] * 4
    assert "those of tokens for experts are the most that may travel" in str(report)


def test_mutants_are_rejected_statically() -> None:
    """A choice that a rank has alone, or in place of tokens; another axis or operator; no experts."""
    text = print_program(dispatched(Plan(**{**COPIES, "ep": 2})))
    ((given, chosen),) = re.findall(r"expand_needed\[dp_in\]\(%(\w+), %(\w+)", text)
    alone = chosen.removesuffix("_all_gather")
    mutants = [
        text.replace(f"expand_needed[dp_in](%{given}, %{chosen}", f"expand_needed[dp_in](%{given}, %{alone}"),
        text.replace(f"expand_needed[dp_in](%{given}, %{chosen}", f"expand_needed[dp_in](%{chosen}, %{chosen}"),
        text.replace("sum_needed[dp_in]", "sum_over[dp_in]"),
        text.replace("expand_needed[dp_in]", "expand_over[dp_in]"),
        text.replace("expand_needed[dp_in]", "sum_needed[dp_in]"),
        text.replace(f"%{chosen}, 2)", f"%{chosen}, 0)"),
    ]
    for match in re.finditer(r"needed\[(dp_in)\]", text):
        mutants.append(text[: match.start(1)] + "dp_out" + text[match.end(1) :])
    for mutant in mutants:
        assert mutant != text
        with pytest.raises(FxparError):
            PassManager([], STATIC).run(parse_program(mutant))


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["expand", "sum"])
@pytest.mark.parametrize("own", [1, 3, 4])
def test_other_tokens_than_are_needed_change_values(way: str, own: int) -> None:
    """A rank that takes itself for the holder of other experts, one way."""
    text = print_program(dispatched(Plan(dp=2, ep=2)))
    mutant = re.sub(rf"({way}_needed\[dp\]\(%\w+, %\w+, )2\)", rf"\g<1>{own})", text)
    assert mutant != text
    assert not compared(parse_program(mutant)).ok
