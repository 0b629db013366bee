"""rematerialise: the backward gathers parameters of which no rank keeps the whole."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from fxpar.compile import compile_model, compile_program
from fxpar.ir.program import Program, note
from fxpar.ir.regions import inlined
from fxpar.ir.step import BACKWARD, RECOMPUTE
from fxpar.manager import PassManager
from fxpar.ops.collectives import all_gather
from fxpar.passes import step_passes
from fxpar.plan.plan import SHARDS, Plan
from fxpar.plan.plan_options import Recompute
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import STATIC, verify_static
from fxpar.verify.values import call_inputs, program_state, verify_values
from tests.passes.modules import changed
from tests.passes.test_recompute import Regions
from tests.passes.test_sharded_parameters import captured, compiled, edited, step, values


def step_until(program: Program, until: str) -> Program:
    trained = [p.fqn for p in program.parameters if p.trainable]
    return PassManager(step_passes(program.outputs, (program.loss,), trained), STATIC).run(program, until=until)


def changes(shard: str) -> str:
    return changed(*(step_until(compiled(shard), name) for name in ("recompute", "rematerialise")))


def test_golden() -> None:
    """The product of a weight's gradient reads no weight; only those of inputs' gradients gather again."""
    lines = [re.sub(r"(%mm|%view)_?\d*", r"\1", line) for line in changes("parameters").splitlines()]
    assert lines == [
        "… 49",
        "%words_weight_all_gather_again = fxpar.all_gather[dp](%words_weight) : f32[15, 6] dp:S(1)→R "
        "{phase=backward, shard=parameters}",
        "%mm = aten.mm.default(%view, %words_weight_all_gather_again) : f32[2*b*s, 6] dp:S(0) {phase=backward}",
        "… 9",
        "%down_weight_all_gather_again = fxpar.all_gather[dp](%down_weight) : f32[6, 6] dp:S(0)→R "
        "{phase=backward, shard=parameters}",
        "%mm = aten.mm.default(%view, %down_weight_all_gather_again) : f32[2*b*s, 6] dp:S(0) {phase=backward}",
        "… 6",
        "%up_weight_all_gather_again = fxpar.all_gather[dp](%up_weight) : f32[6, 6] dp:S(0)→R "
        "{phase=backward, shard=parameters}",
        "%mm = aten.mm.default(%view, %up_weight_all_gather_again) : f32[2*b*s, 6] dp:S(0) {phase=backward}",
        "… 8",
    ]


@pytest.mark.parametrize("shard", [shard for shard in SHARDS if shard != "parameters"])
def test_others_keep_what_the_forward_gathered(shard: str) -> None:
    (line,) = changes(shard).splitlines()
    assert line.startswith("…")


def test_no_node_of_the_backward_reads_what_the_forward_gathered() -> None:
    graph = parse_program(step("parameters", tp=2)).graph
    gathers = [node for node in graph.nodes if node.target is all_gather and note(node).shard]
    assert len(gathers) == 7  # a frozen shift is not read again
    for gather in gathers:
        phases = {note(user).phase for user in gather.users}
        assert phases == {note(gather).phase}


def test_the_backward_may_read_what_the_forward_gathered() -> None:
    """That takes memory and changes no value, so that no check rejects it."""
    text = step("parameters")
    (line,) = (line for line in text.splitlines() if "(" in line and "%up_weight_all_gather_again)" in line)
    mutant = edited(text, line[1:].split(" ")[0], "%up_weight_all_gather_again", "%up_weight_all_gather")
    program = parse_program(mutant)
    verify_static(program)
    assert values(program).ok


def test_what_is_computed_again_reads_what_is_gathered_again() -> None:
    """Regions that the author checkpointed: their products run in the backward, on its gathers."""
    torch.manual_seed(1)
    module, batch = Regions(False).double(), {"x": torch.randn(4, 5, 6, dtype=torch.float64)}
    compilation = compile_model(module, batch, Plan(dp=2, shard="parameters"))
    program = inlined(step_until(compilation.program, "prune"))
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    again = [node for node in calls if note(node).origin == RECOMPUTE]
    assert any("linear" in str(node.target) for node in again)
    for node in again:
        shards = [read for read in node.all_input_nodes if read.op == "call_function" and note(read).shard]
        assert all(note(read).phase == BACKWARD for read in shards)
    single = compilation.captured
    report = verify_values(
        single.program, program, program_state(single.program, module), call_inputs(single, module, batch)
    )
    assert report.ok, report


@cache
def budgeted(shard: str) -> Program:
    plan = Plan(dp=2, shard=shard, recompute=Recompute("selective"))
    return inlined(step_until(compile_program(captured()[1].program.with_(plan=plan)), "prune"))


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_selective_recomputation_sends_no_parameter_more_than_twice(shard: str) -> None:
    """With what is frozen too."""
    program = budgeted(shard)
    text = print_program(program)
    assert text.count("fxpar.all_gather[dp]") == (8 if shard == "parameters" else 3)
    assert values(program).ok
