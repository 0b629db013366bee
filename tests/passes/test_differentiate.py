"""The backward of small programs, written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpar.compile import compile_model, compile_step
from fxpar.errors import FxparError
from fxpar.manager import PassManager
from fxpar.ops.dataflow import has_same_dataflow
from fxpar.passes.differentiate import differentiate, forward_of
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import STATIC

HEADER = """fxpar 2
plan {"tp": 2}
properties canonical collectives layouts local rng vocabulary
symbol b = x.0 like 3
loss loss
"""
PAIR = (
    HEADER
    + """%up = parameter["up"] : f32[16, 8] tp:S(0)
%down = parameter["down"] : f32[8, 16] tp:S(1)
%bias = parameter["bias"] : f32[8] tp:I
%x = input["x"] : f32[b, 8] tp:R
%h = aten.linear.default(%x, %up) : f32[b, 16] tp:S(1)
%t = aten.tanh.default(%h) : f32[b, 16] tp:S(1)
%y = aten.linear.default(%t, %down) : f32[b, 8] tp:P
%y_sum = fxpar.reduce_from[tp](%y) : f32[b, 8] tp:P→I
%z = aten.add.Tensor(%y_sum, %bias) : f32[b, 8] tp:I
%loss = aten.sum.default(%z) : f32[] tp:I
return loss=%loss
"""
)
NORM = (
    HEADER
    + """%w = parameter["w"] : f32[8] tp:I
%up = parameter["up"] : f32[16, 8] tp:S(0)
%x = input["x"] : f32[b, 8] tp:R
%n = aten.layer_norm.default(%x, [8], %w) : f32[b, 8] tp:I
%n_copy = fxpar.copy_to[tp](%n) : f32[b, 8] tp:I→R
%h = aten.linear.default(%n_copy, %up) : f32[b, 16] tp:S(1)
%loss_part = aten.sum.default(%h) : f32[] tp:P
%loss = fxpar.reduce_from[tp](%loss_part) : f32[] tp:P→I
return loss=%loss
"""
)


GOLDEN_PAIR = """\
%loss_tangent = input["fxpar.tangent.loss"] : f32[] tp:R {phase=backward}
%sym_size_int = aten.sym_size.int(%x, 0) : b {phase=backward}
%expand = aten.expand.default(%loss_tangent, [%sym_size_int, 8]) : f32[b, 8] tp:R {phase=backward}
%sum_1 = aten.sum.dim_IntList(%expand, [0], True) : f32[1, 8] tp:R {phase=backward}
%view = aten.view.default(%sum_1, [8]) : f32[8] tp:R {phase=backward}
%t_1 = aten.t.default(%expand) : f32[8, b] tp:R {phase=backward}
%mm = aten.mm.default(%t_1, %t) : f32[8, 16] tp:S(1) {phase=backward}
%mm_1 = aten.mm.default(%expand, %down) : f32[b, 16] tp:S(1) {phase=backward}
%tanh_backward = aten.tanh_backward.default(%mm_1, %t) : f32[b, 16] tp:S(1) {phase=backward}
%t_4 = aten.t.default(%tanh_backward) : f32[16, b] tp:S(0) {phase=backward}
%mm_2 = aten.mm.default(%t_4, %x) : f32[16, 8] tp:S(0) {phase=backward}
return loss=%loss, fxpar.gradient.up=%mm_2, fxpar.gradient.down=%mm, fxpar.gradient.bias=%view
"""
GOLDEN_NORM = """\
%loss_tangent = input["fxpar.tangent.loss"] : f32[] tp:R {phase=backward}
%native_layer_norm = aten.native_layer_norm.default(%x, [8], %w, None, 1e-05) : (f32[b, 8] tp:I; f32[b, 1] tp:I; f32[b, 1] tp:I)
%n = operator.getitem(%native_layer_norm, 0) : f32[b, 8] tp:I
%getitem_1 = operator.getitem(%native_layer_norm, 1) : f32[b, 1] tp:I
%getitem_2 = operator.getitem(%native_layer_norm, 2) : f32[b, 1] tp:I
%sym_size_int = aten.sym_size.int(%x, 0) : b {phase=backward}
%expand = aten.expand.default(%loss_tangent, [%sym_size_int, 16]) : f32[b, 16] tp:R {phase=backward}
%r_to_s = fxpar.r_to_s[tp](%expand) : f32[b, 16] tp:R→S(1) {phase=backward}
%t = aten.t.default(%r_to_s) : f32[16, b] tp:S(0) {phase=backward}
%mm = aten.mm.default(%t, %n_copy) : f32[16, 8] tp:S(0) {phase=backward}
%mm_1 = aten.mm.default(%r_to_s, %up) : f32[b, 8] tp:P {phase=backward}
%mm_1_all_reduce = fxpar.all_reduce[tp](%mm_1) : f32[b, 8] tp:P→R {phase=backward}
%native_layer_norm_backward = aten.native_layer_norm_backward.default(%mm_1_all_reduce, %x, [8], %getitem_1, %getitem_2, %w, None, [False, True, False]) : (f32[0] tp:R; f32[8] tp:R; f32[0] tp:R) {phase=backward}
%getitem_3 = operator.getitem(%native_layer_norm_backward, 1) : f32[8] tp:R {phase=backward}
return loss=%loss, fxpar.gradient.w=%getitem_3, fxpar.gradient.up=%mm
"""  # noqa: E501


def differentiated(text: str) -> list[str]:
    """The lines of the step that the forward's text does not have."""
    step = print_program(PassManager([differentiate], STATIC).run(parse_program(text)))
    return [line for line in step.splitlines() if line not in text.splitlines()]


def test_each_rank_has_its_blocks_of_the_gradients() -> None:
    """No collective: the sum's conjugate is the identity, and the input needs no gradient."""
    assert differentiated(PAIR) == [
        "properties canonical collectives layouts local rng step vocabulary",
        *GOLDEN_PAIR.splitlines(),
    ]


def test_what_the_backward_reads_is_saved_and_a_sum_meets_its_conjugate() -> None:
    """The norm gives its statistics too; the gradient behind f is summed over the ranks."""
    assert differentiated(NORM) == [
        "properties canonical collectives layouts local rng step vocabulary",
        *GOLDEN_NORM.splitlines(),
    ]


def test_the_forward_of_a_step_differentiates_to_that_step() -> None:
    for text in (PAIR, NORM):
        step = PassManager([differentiate], STATIC).run(parse_program(text))
        again = PassManager([differentiate], STATIC).run(forward_of(step))
        assert has_same_dataflow(again, step)


def test_an_input_may_carry_a_gradient() -> None:
    text = PAIR.replace('input["x"] : f32[b, 8] tp:R', 'input["x"](gradient) : f32[b, 8] tp:R').replace(
        "f32[b, 8] tp:I", "f32[b, 8] tp:I"
    )
    step = PassManager([differentiate]).run(parse_program(text))
    assert "fxpar.input_gradient.x" in step.outputs
    assert 'input["x"](gradient)' in print_program(parse_program(print_program(step)))


def test_what_cannot_be_differentiated_is_named() -> None:
    text = PAIR.replace("aten.tanh.default(%h)", "aten.igamma.default(%h, %h)")
    with pytest.raises(FxparError, match="%t"):
        differentiated(text)


class NormOfInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).square().mean()  # type: ignore[no-any-return]


def test_a_norm_of_an_input_has_a_step_over_data_ranks() -> None:
    """The gradient of the input, which nobody asks for, has no elements, and so no rows to share out."""
    torch.manual_seed(0)
    program = compile_model(NormOfInput(), (torch.randn(4, 6),), Plan(dp=2)).program
    step = compile_step(program, program.outputs, (program.loss,), [p.fqn for p in program.parameters])
    assert "f32[0] dp:P" in print_program(step)
