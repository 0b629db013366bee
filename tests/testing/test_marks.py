"""What is said of gradients' marks is right on the ranks: summands of shared blocks, zeros in padding."""

from __future__ import annotations

import pytest
import torch

from fxpar.rules import rule_of
from fxpar.testing.check import check_marks, sample
from fxpar.testing.sampled_operations import operations

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("ranks", "least"), [((4,), 1000), pytest.param((2, 3, 4), 3000, marks=pytest.mark.matrix)], ids=["4", "2, 3, 4"]
)
def test_no_rule_is_wrong_of_marked_operands(ranks: tuple[int, ...], least: int) -> None:
    accepted = 0
    for name, operation in operations(0, True).items():
        if operation.samples and rule_of(operation.target) is not None:
            report = check_marks(operation.target, operation.samples, ranks)
            assert report.false_accepts == [], name
            accepted += len(report.accepted)
    assert accepted > least


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_summands_stay_summands_in_linear_operations_alone() -> None:
    linear = check_marks(aten.mul.Tensor, [sample(x(8), x(8))], (4,)).accepted
    assert {"self S(0: 8 / 2; P), other S(0: 8 / 2) → S(0: 8 / 2; P)"} <= linear.keys()
    assert "self S(0: 8 / 2; P), other S(0: 8 / 2; P) → S(0: 8 / 2; P)" not in linear
    assert check_marks(aten.tanh.default, [sample(x(8))], (4,)).accepted.keys() == {
        f"self S(0: 8 ~ {n}; 0) → S(0: 8 ~ {n})" for n in (12,)
    }


def test_padding_is_contracted_where_one_side_is_zero() -> None:
    found = check_marks(aten.mm.default, [sample(x(3, 6), x(6, 3))], (2,)).accepted.keys()
    assert {
        "self S(1: 6 ~ 8; 0), mat2 S(0: 6 ~ 8) → P",
        "self S(1: 6 ~ 8), mat2 S(0: 6 ~ 8; 0) → P",
        "self S(1: 6 ~ 8; 0), mat2 S(0: 6 ~ 8; 0) → P",
    } <= found
    assert "self S(1: 6 ~ 8), mat2 S(0: 6 ~ 8) → P" not in found


def test_filling_with_a_number_is_no_zero() -> None:
    mask = torch.arange(6) % 2 == 0
    for number, out in ((0.0, "S(0: 6 ~ 8; 0)"), (2.0, "S(0: 6 ~ 8)")):
        found = check_marks(aten.masked_fill.Scalar, [sample(x(6), mask, number)], (2,)).accepted
        assert f"self S(0: 6 ~ 8; 0), mask S(0: 6 ~ 8) → {out}" in found
