"""Pipelines by value: loss, outputs and every gradient of the stages against the single device, dropout on."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from torch import nn

from fxpar.capture.capture import Captured, capture
from fxpar.cli.models import load_model
from fxpar.compile import compile_program, compile_step
from fxpar.ir.program import Program, note
from fxpar.ir.regions import inlined
from fxpar.ir.stages import Stage, crossings, holders, stage_of, stages_of
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Pipeline, Recompute
from fxpar.verify import simulate_ranks
from fxpar.verify.values import TOLERANCE, ValueReport, call_inputs, check_capture, program_state, verify_values

LAYERS = {
    "gpt2": "hf:gpt2,n_layer=4",
    "llama": "hf:llama,num_hidden_layers=4",
    "bert": "hf:bert,num_hidden_layers=4",
    "t5": "hf:t5,num_layers=1,num_decoder_layers=2",
    "gpt_neox": "hf:gpt_neox,num_hidden_layers=4",
}
SHAPES = ((2, 1), (4, 1), (2, 2), (4, 2))
# Tied words: on most stages beside the other axes, and on two alone.
_EVERY_TIME = {
    ("gpt2", 4, 2, 2, 2),
    ("gpt2", 2, 1, 1, 1),
}
_ALL = {(name, *shape, tp, dp) for name, shape, tp, dp in product(LAYERS, SHAPES, (1, 2), (1, 2))}


@cache
def loaded(name: str, how: str = "") -> tuple[nn.Module, object, Captured]:
    """A model in training mode, four rows of a batch, and the capture.

    Args:
        how: `outputs` leaves the loss out, `frozen` trains nothing of the first layers.
    """
    found = load_model(LAYERS[name], 4, 16, 0, True)
    model, batch = found.model, found.batch
    if how == "outputs":
        batch = {key: value for key, value in batch.items() if key != "labels"}
    if how == "frozen":
        for fqn, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in fqn for part in ("wte", "wpe", "h.0.", "h.1.")))
    captured = capture(model, batch, Plan(), found.loss if how != "outputs" else None)
    check_capture(captured, model, batch)
    return model, batch, captured


def staged(plan: Plan, name: str, how: str = "") -> Program:
    """The model's program, cut into stages and statically checked after each pass."""
    return compile_program(loaded(name, how)[2].program.with_(plan=plan))


def compared(program: Program, name: str, how: str = "") -> ValueReport:
    model, batch, captured = loaded(name, how)
    inputs = call_inputs(captured, model, batch)
    return verify_values(captured.program, program, program_state(captured.program, model), inputs)


def check(plan: Plan, name: str, how: str = "") -> Program:
    """The program, whose values are the single device's."""
    program = staged(plan, name, how)
    report = compared(program, name, how)
    assert report.ok, report
    assert max(report.loss_error, report.output_error, report.max_grad_error) <= TOLERANCE
    assert report.gradients == sum(p.trainable for p in program.parameters)
    used = {note(node).stages for node in program.graph.nodes if node.op == "call_function"}
    assert used == {(stage,) for stage in range(plan.pipeline_stages)}
    assert {c.receiver for c in crossings(program)} == set(range(1, plan.pipeline_stages))
    return program


def _marked(row: tuple[str, int, int, int, int]) -> object:
    marks = [] if row in _EVERY_TIME else [pytest.mark.matrix]
    return pytest.param(*row, marks=marks, id="{}-pp{}x{}-tp{}-dp{}".format(*row))


@pytest.mark.parametrize(("name", "pp", "virtual", "tp", "dp"), [_marked(row) for row in sorted(_ALL)])
def test_every_gradient_is_the_single_device_s(name: str, pp: int, virtual: int, tp: int, dp: int) -> None:
    check(Plan(tp=tp, dp=dp, pp=pp, virtual_stages=virtual), name)


def test_tied_words_are_of_the_first_and_the_last_stage() -> None:
    program = staged(Plan(pp=4, dp=2), "gpt2")
    assert holders(program)["transformer.wte.weight"] == (0, 3)


def test_without_a_loss_all_outputs_are_differentiated() -> None:
    program = check(Plan(tp=2, pp=2), "gpt2", "outputs")
    assert not program.loss


def test_a_frozen_first_stage_gets_no_gradient() -> None:
    """Nothing before the cut is trained: what crosses carries none, and the first stage has no backward."""
    program = check(Plan(tp=2, pp=2, pipeline=Pipeline({"transformer.h.2": 1})), "gpt2", "frozen")
    assert [c.carries for c in crossings(program)] == [False]
    first, second = stages_of(program)
    assert (first.tangents, second.returned) == ((), {})


def test_a_sequence_cut_over_the_tensor_ranks_stays_cut() -> None:
    """Each rank sends its part of the tokens."""
    program = check(Plan(tp=2, pp=2, virtual_stages=2, sequence_parallel=True), "gpt2")
    streams = [c for c in crossings(program) if str(note(c.node).layout) != "R"]
    assert any("S(1)" in str(note(c.node).layout) for c in streams)


@pytest.mark.parametrize(("name", "tp"), [("gpt2", 2), pytest.param("llama", 1, marks=pytest.mark.matrix)])
def test_layers_are_recomputed_by_their_stage(name: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of all stages after all their passes, each statically checked."""
    plan = Plan(tp=tp, pp=2, recompute=Recompute("full"))
    again = []

    def step_of_stage(stage: Stage) -> Program:
        trained = [p.fqn for p in stage.program.parameters if p.trainable]
        step = compile_step(stage.program, stage.program.outputs, stage.tangents, trained)
        again.append(sum(note(n).origin == "recompute" for n in inlined(step).graph.nodes if n.op != "output"))
        return step

    monkeypatch.setattr(simulate_ranks, "step_of_stage", step_of_stage)
    check(plan, name)
    assert len(again) == 2
    assert all(again)


def test_stages_hold_whole_layers_where_they_are_told_to() -> None:
    program = check(Plan(pp=2, virtual_stages=2, pipeline=Pipeline((1, 1, 1, 1))), "gpt2")
    for layer in range(4):
        own = {
            stage_of(n)
            for n in program.graph.nodes
            if n.op == "call_function" and note(n).fqn.startswith(f"transformer.h.{layer}.")
        }
        assert own == {layer}
