"""The static checks of buckets: one reduction for the gradients of several parameters."""

from __future__ import annotations

import pytest

from fxpar.errors import CheckFailed
from fxpar.text.parsing import parse_program
from fxpar.verify.static import verify_static

BUCKET = """fxpar 1
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


FAULTS = {
    # The other weight would have no gradient.
    "twice": (
        "(%w, %v)",
        "(%w, %w)",
        "%sums: converts %w to R on axis tp a second time; use %sums",
    ),
    # Its reduction runs once a step, when the gradients of all microbatches are there.
    "activation": (
        "%y = aten.linear.default(%h, %u)",
        "%again = fxpar.sum_gradients[tp](%h) : (f32[b, 24] tp:R)\n%y = aten.linear.default(%h, %u)",
        "%again: sums gradients of %h, which is no trainable parameter; leave it out of the bucket",
    ),
    "frozen": (
        'parameter["v"]',
        'parameter["v"](frozen)',
        "%sums: sums gradients of %v, which is no trainable parameter; leave it out of the bucket",
    ),
    "types": (
        "(f32[24] tp:R; f32[24] tp:R)",
        "(f32[24] tp:R; f32[12] tp:R)",
        "%sums: gives 2 tensors that are not its 2 operands",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_bucket_is_named(name: str) -> None:
    old, new, message = FAULTS[name]
    assert old in BUCKET
    with pytest.raises(CheckFailed) as error:
        verify_static(parse_program(BUCKET.replace(old, new)))
    assert str(error.value).startswith(message)
