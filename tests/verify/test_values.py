"""Comparison by value: it accepts what is right, and names what deviates, is missing or cannot be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.capture.capture import capture
from fxpar.errors import CheckFailed, InputError
from fxpar.ir.program import Program
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.verification import expect, verify
from fxpar.verify.simulate_ranks import SimulationResult
from fxpar.verify.values import check_capture, compare, reference_run, verify_values
from tests.verify.cases import prepared, program, sequence

aten = torch.ops.aten


@pytest.mark.parametrize("step", [0, 7])
def test_a_sequence_parallel_program_has_the_single_device_s_values_at_each_step(step: int) -> None:
    case = prepared("tail")
    report = verify_values(case.captured, sequence(4), case.state, case.inputs, step=step)
    assert report.ok, report
    assert report.gradients == len(case.reference.gradients) == 7
    assert max(report.loss_error, report.output_error, report.max_grad_error) < 1e-13


def test_steps_draw_other_masks() -> None:
    case = prepared("tail")
    other = reference_run(case.captured, case.state, case.inputs, step=7)
    assert not torch.equal(other.outputs["loss"], case.reference.outputs["loss"])


def changed(name: str, change: Callable[[Program], None]) -> Program:
    """A localised program with something wrong in it."""
    edited = program(name, 2).copy()
    change(edited)
    return edited


def target_of(edited: Program, target: object) -> torch.fx.Node:
    """The last node that calls an operator."""
    last: torch.fx.Node = next(node for node in reversed(edited.graph.nodes) if node.target is target)
    return last


def to_relu(edited: Program) -> None:
    target_of(edited, aten.gelu.default).target = aten.relu.default


def test_another_activation_deviates_in_the_loss_and_in_gradients() -> None:
    report = prepared("tail").compare(changed("tail", to_relu))
    assert not report.ok
    assert report.loss_error > 1e-4
    assert report.max_grad_error > 1e-4
    assert report.worst


def detach_bias(edited: Program) -> None:
    biased = edited.node("linear_bias")
    bias = biased.args[1]
    assert isinstance(bias, torch.fx.Node)
    with edited.graph.inserting_before(biased):
        cut = edited.graph.call_function(aten.detach.default, (bias,))
    cut.meta = dict(bias.meta)
    biased.args = (biased.args[0], cut)


def test_a_gradient_that_nothing_makes_is_named() -> None:
    report = prepared("tail").compare(changed("tail", detach_bias))
    assert not report.ok
    assert (report.loss_error, report.max_grad_error) == (0.0, float("inf"))
    assert report.worst == "gradients of up.bias"


def run_of(outputs: dict[str, Tensor], gradients: dict[str, Tensor] | None = None) -> SimulationResult:
    """What a rank of `PLAIN` computed."""
    return SimulationResult(outputs, gradients or {"w": torch.ones(4, 2, dtype=torch.float64)})


PLAIN = parse_program(
    """fxpar 2
plan {"tp": 2}
properties canonical collectives layouts local rng vocabulary
loss loss
%w = parameter["w"] : f32[4, 2] tp:S(0)
%ids = input["ids"] : i64[4] tp:R
%whole = fxpar.s_to_i[tp](%w) : f32[4, 2] tp:I
%loss = aten.sum.default(%whole) : f32[] tp:I
return loss=%loss, ids=%ids
"""
)
RIGHT = {"loss": torch.tensor(3.0, dtype=torch.float64), "ids": torch.tensor([1, 2, 3, 4])}
HALF = torch.ones(2, 2, dtype=torch.float64)


def test_each_rank_is_compared_with_its_own_block() -> None:
    reference = run_of(RIGHT, {"w": torch.tensor([[1.0, 1], [1, 1], [5, 5], [5, 5]], dtype=torch.float64)})
    ranks = [run_of(RIGHT, {"w": HALF}), run_of(RIGHT, {"w": 5 * HALF})]
    assert compare(reference, PLAIN, ranks, {}).ok
    swapped = compare(reference, PLAIN, ranks[::-1], {})
    assert (swapped.ok, swapped.max_grad_error, swapped.worst) == (False, 4.0 / 5.0, "gradient of w")


@pytest.mark.parametrize(
    ("output", "value", "error"),
    [
        ("ids", torch.tensor([1, 2, 3, 5]), float("inf")),
        ("ids", torch.tensor([1, 2, 3]), float("inf")),
        ("ids", torch.tensor([1, 2, 3, 4], dtype=torch.int32), float("inf")),
        ("loss", torch.tensor(float("nan"), dtype=torch.float64), float("inf")),
        ("loss", torch.tensor(3.0 + 6e-10, dtype=torch.float64), 2e-10),
        ("loss", torch.tensor(3.0), float("inf")),
    ],
)
def test_one_wrong_output_on_one_rank_is_named(output: str, value: Tensor, error: float) -> None:
    wrong = run_of({**RIGHT, output: value}, {"w": HALF})
    report = compare(run_of(RIGHT), PLAIN, [run_of(RIGHT, {"w": HALF}), wrong], {})
    assert not report.ok
    assert report.worst == f"output {output}"
    assert report.output_error == pytest.approx(error, rel=1e-3)
    assert report.loss_error == (report.output_error if output == "loss" else 0.0)


def test_infinities_and_nans_of_both_sides_are_equal() -> None:
    odd = {**RIGHT, "loss": torch.tensor(float("nan"), dtype=torch.float64)}
    assert compare(run_of(odd), PLAIN, [run_of(odd, {"w": HALF})] * 2, {}).ok


def test_a_loss_that_is_not_finite_is_refused() -> None:
    case = prepared("tail")
    inputs = {**case.inputs, "target": torch.full_like(case.inputs["target"], float("inf"))}
    with pytest.raises(CheckFailed, match="loss loss: is inf on one device; use other inputs"):
        reference_run(case.captured, case.state, inputs)


class Small(nn.Module):
    """A regression."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """[b, 6]."""
        y = self.down(functional.gelu(self.up(x)))
        return {"loss": (y - x).pow(2).mean(), "y": y}


SPLIT = Plan(tp=2, split={"up": "column", "down": "row"})


def test_a_gradient_that_is_no_number_is_refused() -> None:
    """The root of zero has an infinite derivative, times zero; the loss itself is finite."""

    class Root(Small):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": ((self.down(self.up(x)) * 0.0) ** 2).sum().sqrt()}

    with pytest.raises(CheckFailed, match=r"gradient of up.weight: is NaN everywhere on one device; use other inputs"):
        verify(Root(), torch.randn(4, 6), Plan(tp=2), level="values")


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and a batch."""
    torch.manual_seed(0)
    return Small(), {"x": torch.randn(5, 6)}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda graph: to_relu(graph), "output loss"),
        (lambda graph: scale_bias(graph), "output loss"),
        (lambda graph: cut_gradient(graph), "gradient of up.bias"),
    ],
)
def test_a_capture_that_is_not_the_module_is_refused(change: Callable[[Program], None], where: str) -> None:
    model, batch = small()
    captured = capture(model, batch, SPLIT)
    check_capture(captured, model, batch)
    wrong = captured.program.copy()
    change(wrong)
    wrong.graph_module.recompile()
    with pytest.raises(CheckFailed, match=f"^{where}"):
        check_capture(replace(captured, program=wrong), model, batch)


def scale_bias(edited: Program) -> None:
    """Another literal in the loss."""
    power = target_of(edited, aten.pow.Tensor_Scalar)
    power.args = (power.args[0], 4)


def cut_gradient(edited: Program) -> None:
    """A bias that no gradient reaches."""
    linear = next(node for node in edited.graph.nodes if node.target is aten.linear.default)
    bias = linear.args[2]
    assert isinstance(bias, torch.fx.Node)
    with edited.graph.inserting_before(linear):
        cut = edited.graph.call_function(aten.detach.default, (bias,))
    cut.meta = dict(bias.meta)
    linear.args = (*linear.args[:2], cut)


def test_verify_says_in_one_call_what_was_proved() -> None:
    model, batch = small()
    proof = expect(verify(model, batch, SPLIT))
    document = proof.to_json()
    assert document["ok"] is True
    assert document["split_flops"] == 1.0
    assert document["max_grad_error"] <= 1e-10
    assert document["loss_error"] <= 1e-10
    assert document["gradients"] == 4


def test_level_static_compares_no_values() -> None:
    model, batch = small()
    with torch.device("meta"):
        meta = Small()
    document = verify(meta, batch, SPLIT, level="static").to_json()
    assert document.keys() == {"ok", "level", "split_flops", "uncounted", "checks"}
    with pytest.raises(InputError, match=r"up\.weight: has no values: the model is on the meta device"):
        verify(meta, batch, SPLIT)
    with pytest.raises(InputError, match="level='all': is unknown"):
        verify(model, batch, SPLIT, level="all")


def test_the_model_is_verified_in_the_plan_s_precision_and_left_as_it_was() -> None:
    model, batch = small()
    batch = {"x": batch["x"].bfloat16()}
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    proof = expect(verify(model, batch, SPLIT.replace(precision="bf16")))
    assert {p.type.dtype for p in proof.program.parameters} == {torch.bfloat16}
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


class Headless(Small):
    """The same without a loss."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """[b, 6]."""
        return {"y": super().forward(x)["y"], "rows": x.new_ones(3)}


def test_gradients_of_a_model_without_loss_are_those_of_its_outputs() -> None:
    torch.manual_seed(0)
    model, batch = Headless(), {"x": torch.randn(5, 6)}
    proof = expect(verify(model, batch, SPLIT))
    assert proof.values is not None
    assert proof.values.gradients == 4
    passes = fxpar.passes.DEFAULT_PASSES
    wrong = verify(model, batch, SPLIT, passes=(passes[0], halved_gradient, *passes[1:]))
    assert not wrong.ok
    assert wrong.values is not None
    assert wrong.values.output_error < 1e-10 < wrong.values.max_grad_error


@fxpar.register_pass("halved_gradient", requires={"canonical"})
def halved_gradient(edited: Program) -> Program:
    """Halves a gradient and no value."""
    gelu = target_of(edited, aten.gelu.default)
    with edited.graph.inserting_after(gelu):
        cut = edited.graph.call_function(aten.detach.default, (gelu,))
    with edited.graph.inserting_after(cut):
        mean = edited.graph.call_function(aten.add.Tensor, (gelu, cut))
    with edited.graph.inserting_after(mean):
        half = edited.graph.call_function(aten.mul.Tensor, (mean, 0.5))
    for node in (cut, mean, half):
        node.meta = dict(gelu.meta)
    for user in [user for user in gelu.users if user not in (cut, mean)]:
        user.replace_input_with(gelu, half)
    return edited


@fxpar.register_pass("to_relu", requires={"canonical"})
def to_relu_pass(edited: Program) -> Program:
    """Replaces an activation by another; its contract says that values stay equal."""
    to_relu(edited)
    return edited


def test_a_pass_that_changes_values_makes_the_proof_fail() -> None:
    model, batch = small()
    passes = fxpar.passes.DEFAULT_PASSES
    proof = verify(model, batch, SPLIT, passes=(passes[0], to_relu_pass, *passes[1:]))
    assert not proof.ok
    assert proof.to_json()["ok"] is False
    with pytest.raises(CheckFailed, match=r"deviates by .* of the largest reference value"):
        expect(proof)
