"""The static checks of buckets: one reduction for the gradients of several parameters."""

from __future__ import annotations

import pytest
import torch

from fxpar.compile import compile_step
from fxpar.errors import CheckFailed
from fxpar.ir.program import Program
from fxpar.ir.step import gradient_name, is_gradient
from fxpar.ops.collectives import all_reduce_coalesced
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import verify_static
from tests.verify.readings import judge

BUCKET = """fxpar 2
plan {"tp": 2}
properties canonical coalesced collectives layouts
symbol b = x.0 like 3
%w = parameter["w"] : f32[24] tp:I
%v = parameter["v"] : f32[24] tp:I
%u = parameter["u"] : f32[24, 24] tp:S(0)
%x = input["x"] : f32[b, 24] tp:R
%sums = fxpar.sum_gradients[tp](%w, %v) : (f32[24] tp:R; f32[24] tp:R)
%w_sum = operator.getitem(%sums, 0) : f32[24] tp:R
%v_sum = operator.getitem(%sums, 1) : f32[24] tp:R
%scaled = aten.mul.Tensor(%x, %w_sum) : f32[b, 24] tp:R
%h = aten.add.Tensor(%scaled, %v_sum) : f32[b, 24] tp:R
%y = aten.linear.default(%h, %u) : f32[b, 24] tp:S(1)
return y=%y
"""


def test_a_bucket_of_parameters_is_right() -> None:
    verify_static(parse_program(BUCKET))


# Keys and values that two tensor parallel ranks share are summed over these, then with the queries over data ranks.
CHAIN = """fxpar 2
plan {"tp": 4, "dp": 2}
properties canonical coalesced collectives layouts local masks rng sequence vocabulary
symbol b = x.0 / 2 like 3
loss loss
%k = parameter["k"] : f32[8, 12] dp:I tp:S(0: 8 / 2; I)
%v = parameter["v"] : f32[8, 12] dp:I tp:S(0: 8 / 2; I)
%q = parameter["q"] : f32[16, 12] dp:I tp:S(0)
%x = input["x"] : f32[2*b, 12] dp:S(0) tp:R
%tp_sums = fxpar.sum_gradients[tp](%k, %v) : (f32[8, 12] dp:I tp:S(0: 8 / 2); f32[8, 12] dp:I tp:S(0: 8 / 2))
%k_share = operator.getitem(%tp_sums, 0) : f32[8, 12] dp:I tp:S(0: 8 / 2)
%v_share = operator.getitem(%tp_sums, 1) : f32[8, 12] dp:I tp:S(0: 8 / 2)
%dp_sums = fxpar.sum_gradients[dp](%q, %v_share, %k_share) : (f32[16, 12] dp:R tp:S(0); f32[8, 12] dp:R tp:S(0: 8 / 2); f32[8, 12] dp:R tp:S(0: 8 / 2))
%k_sum = operator.getitem(%dp_sums, 2) : f32[8, 12] dp:R tp:S(0: 8 / 2)
%v_sum = operator.getitem(%dp_sums, 1) : f32[8, 12] dp:R tp:S(0: 8 / 2)
%q_sum = operator.getitem(%dp_sums, 0) : f32[16, 12] dp:R tp:S(0)
%y = aten.linear.default(%x, %q_sum) : f32[2*b, 16] dp:S(0) tp:S(1)
%keys = aten.linear.default(%x, %k_sum) : f32[2*b, 8] dp:S(0) tp:S(1: 8 / 2)
%own = fxpar.split_shared[tp](%keys) : f32[2*b, 8] dp:S(0) tp:S(1: 8 / 2)→S(1)
%values = aten.linear.default(%x, %v_sum) : f32[2*b, 8] dp:S(0) tp:S(1: 8 / 2)
%aside = fxpar.split_shared[tp](%values) : f32[2*b, 8] dp:S(0) tp:S(1: 8 / 2)→S(1)
%squares = aten.pow.Tensor_Scalar(%own, 2) : f32[2*b, 8] dp:S(0) tp:S(1)
%of_rows = aten.sum.dim_IntList(%squares, [1]) : f32[2*b] dp:S(0) tp:P
%rows = fxpar.reduce_from[tp](%of_rows) : f32[2*b] dp:S(0) tp:P→I
%summand = aten.sum.default(%rows) : f32[] dp:P tp:I
%loss = fxpar.reduce_from[dp](%summand) : f32[] dp:P→I tp:I
return loss=%loss, y=%y, aside=%aside
"""  # noqa: E501


def test_a_parameter_is_summed_over_one_axis_after_the_other() -> None:
    program = parse_program(CHAIN)
    verify_static(program)
    generator = torch.Generator().manual_seed(0)
    state = {p.fqn: torch.randn(*map(int, p.type.shape), generator=generator) for p in program.parameters}
    assert judge(program, state, {"x": torch.randn(6, 12, generator=generator)}).kind == "same"


FAULTS = {
    # The other weight would have no gradient.
    "twice": (
        BUCKET,
        "(%w, %v)",
        "(%w, %w)",
        "%sums: converts %w to R on axis tp a second time; use %sums",
    ),
    # Its reduction runs once a step, when the gradients of all microbatches are there.
    "activation": (
        BUCKET,
        "%y = aten.linear.default(%h, %u)",
        "%again = fxpar.sum_gradients[tp](%h) : (f32[b, 24] tp:R)\n%y = aten.linear.default(%h, %u)",
        "%again: sums gradients of %h, which is no trainable parameter; leave it out of the bucket",
    ),
    "frozen": (
        BUCKET,
        'parameter["v"]',
        'parameter["v"](frozen)',
        "%sums: sums gradients of %v, which is no trainable parameter; leave it out of the bucket",
    ),
    "types": (
        BUCKET,
        "(f32[24] tp:R; f32[24] tp:R)",
        "(f32[24] tp:R; f32[12] tp:R)",
        "%sums: gives 2 tensors that are not its 2 operands",
    ),
    "items of the wrong bucket": (
        CHAIN,
        "(%q, %v_share, %k_share)",
        "(%q, %k_share, %k_share)",
        "%dp_sums: converts %k_share to R on axis dp a second time",
    ),
    "a value between": (
        CHAIN,
        "%dp_sums = fxpar.sum_gradients[dp](%q, %v_share, %k_share)",
        "%twice = aten.mul.Tensor(%k_share, 2) : f32[8, 12] dp:I tp:S(0: 8 / 2)\n"
        "%dp_sums = fxpar.sum_gradients[dp](%q, %v_share, %twice)",
        "%dp_sums: sums gradients of %twice, which is no trainable parameter",
    ),
    "a frozen one": (
        CHAIN,
        'parameter["v"]',
        'parameter["v"](frozen)',
        "%tp_sums: sums gradients of %v, which is no trainable parameter",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_bucket_is_named(name: str) -> None:
    text, old, new, message = FAULTS[name]
    assert old in text
    with pytest.raises(CheckFailed) as error:
        verify_static(parse_program(text.replace(old, new)))
    assert str(error.value).startswith(message)


def summed(step: Program) -> list[int]:
    """How many gradients each reduction sums."""
    return [len(node.args) for node in step.graph.nodes if node.target is all_reduce_coalesced]


def test_what_the_loss_does_not_reach_is_in_no_bucket() -> None:
    """Nothing is computed or sent for it: an optimizer would move the weight."""
    program = parse_program(CHAIN)
    step = compile_step(program, ("loss",), ("loss",), [p.fqn for p in program.parameters])
    assert summed(step) == [1, 1]
    assert [name for name in step.outputs if is_gradient(name)] == [gradient_name("k")]


def test_what_is_left_out_is_in_no_bucket() -> None:
    program = parse_program(BUCKET)
    whole = compile_step(program, ("y",), ("y",), ["w", "v", "u"])
    part = compile_step(program, ("y",), ("y",), ["v", "u"])
    assert (summed(whole), summed(part)) == ([2], [1])
    assert [name for name in part.outputs if is_gradient(name)] == [gradient_name("v"), gradient_name("u")]
    assert "left_out" in print_program(part)
    verify_static(parse_program(print_program(part)))
