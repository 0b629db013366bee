"""Norms and sums keep what they can of shards and partial values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxpar.testing.check import check_operation, sample

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.linalg_vector_norm.default, (2, [1], True)),
        (aten.linalg_vector_norm.default, (3, [-1])),
        (aten.linalg_vector_norm.default, ()),
        (aten._weight_norm.default, (torch.rand(1, 4, 1).double(), 1)),
        (aten._weight_norm.default, (torch.rand(()).double(), -1)),
    ],
)
def test_norms_keep_shards_of_the_dimensions_that_stay(target: Any, args: tuple[Any, ...]) -> None:
    report = check_operation(target, [sample(torch.randn(6, 4, 12).double(), *args)])
    assert (report.false_accepts, report.missed) == ([], [])
    assert report.has_shard == (len(args) > 0 and args[-1] != -1)


@pytest.mark.parametrize(("target", "args"), [(aten.sum.default, ()), (aten.sum.dim_IntList, ([1],))])
def test_partial_values_are_not_summed_as_integers(target: Any, args: tuple[Any, ...]) -> None:
    fractions = sample(5 * torch.randn(6, 4).double(), *args, dtype=torch.int64, fixed=(0,))
    report = check_operation(target, [fractions])
    assert (report.false_accepts, report.missed) == ([], [])
    assert "self P → P" not in report.accepted
    assert "self P → P" in check_operation(target, [sample(torch.arange(24).view(6, 4), *args)]).accepted
