"""fxpar's own operators through the oracle: random bits of shards, and an author's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.layout.layout import R
from fxpar.ops.random import attention, dropout, dropout_labels, own_bits
from fxpar.ops.small_operators import function as kept
from fxpar.rules import OpCall, Rule
from fxpar.signatures.matmul import attention_labels
from fxpar.signatures.pointwise import pointwise_labels
from fxpar.testing.check import OracleReport, check_operation, sample
from fxpar.testing.composite import Gate

STATE, INDEX = torch.tensor([3, 1, 2]), [torch.tensor(0)]
GATE = f"{Gate.__module__}.{Gate.__name__}"


def x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


class Centred(torch.autograd.Function):
    """Rows without their means."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0] - grads[0].mean(-1, keepdim=True)  # type: ignore[no-any-return]


class Cubed(torch.autograd.Function):
    """x³, with a gradient that is not a shard's own: it is divided by the largest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grads[0] / x.abs().max()  # type: ignore[no-any-return]


def path_of(function: type) -> str:
    return f"{function.__module__}.{function.__name__}"


def plain(report: OracleReport) -> list[str]:
    return sorted(text for text in report.accepted if " x " not in text and "|" not in text)


def test_dropout_of_a_shard_takes_an_index_and_of_a_sum_the_bits_of_all() -> None:
    indexed = check_operation(dropout, [sample(x(6, 12), STATE, 0.4, INDEX)])
    assert plain(indexed) == [
        "x P, rng R, indices R → P",
        "x S(0), rng R, indices V → S(0)",
        "x S(1), rng R, indices V → S(1)",
    ]
    bare = check_operation(dropout, [sample(x(6, 12), STATE, 0.4)])
    assert plain(bare) == ["x P, rng R → P"]
    assert indexed.missed == bare.missed == []
    assert indexed.false_accepts == bare.false_accepts == []


def any_bits(call: OpCall, placements: object) -> None:
    """Accepts what `own_bits` refuses."""


QUERY_OF_ALL = (x(1, 6, 2), x(6, 6, 2), x(6, 6, 2), None, STATE, 0.4, False, None, False)

WRONG: dict[str, tuple[Callable[..., object], tuple[object, ...], Rule, str, str]] = {
    "ranks that draw the same bits for their shards": (
        dropout,
        (x(6, 12), STATE, 0.4),
        Rule(dropout_labels, check=any_bits, varying=("indices",)),
        "x S(0), rng R → S(0)",
        "values",
    ),
    "an index for a whole value": (
        dropout,
        (x(6, 12), STATE, 0.4, INDEX),
        Rule(dropout_labels, check=lambda call, placements: (R,), varying=("indices",)),
        "x R, rng R, indices V → R",
        "the index says nothing of a whole value",
    ),
    "ranks that draw bits of their own for a partial sum": (
        dropout,
        (x(6, 12), STATE, 0.4, INDEX),
        Rule(dropout_labels, (("x",),), check=any_bits, varying=("indices",)),
        "x P, rng R, indices V → P",
        "the index says nothing of a whole value",
    ),
    "a partial state": (
        dropout,
        (x(6, 12), STATE, 0.4),
        Rule(dropout_labels, (("rng",),), varying=("indices",)),
        "x R, rng P → P",
        "values",
    ),
    "probabilities of a shard of keys under a whole query": (
        attention,
        QUERY_OF_ALL,
        Rule(attention_labels, check=own_bits, varying=("indices",)),
        "query R, key S(0), value S(0), rng R → S(0)",
        "values",
    ),
    "a function of rows that is called element-wise": (
        kept,
        (x(6, 12),),
        Rule(pointwise_labels),
        "0 S(1) → S(1)",
        "values",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_rule_of_a_composite_is_caught(case: str) -> None:
    target, args, rule, signature, fault = WRONG[case]
    options = {"path": path_of(Centred)} if target is kept else {}
    report = check_operation(target, [sample(*args, **options)], rule=rule)  # type: ignore[arg-type]
    found = {finding.signature: finding.reason for finding in report.false_accepts}
    assert found[signature].startswith(fault)


def test_attention_is_not_cut_where_its_query_is_not() -> None:
    report = check_operation(attention, [sample(*QUERY_OF_ALL)])
    assert report.false_accepts == []
    assert plain(report) == ["query R, key R, value P, rng R → P", "query R, key R, value S(2), rng R → S(2)"]


def test_an_element_wise_function_is_cut_along_any_dimension() -> None:
    report = check_operation(kept, [sample(x(6, 12), x(6, 12), path=GATE)])
    assert plain(report) == ["0 S(0), 1 S(0) → S(0)", "0 S(1), 1 S(1) → S(1)"]
    assert report.false_accepts == []
    assert {f.signature for f in report.missed} == {"0 P, 1 R"}


@pytest.mark.parametrize("function", [Centred, Cubed])
def test_a_function_that_reads_its_neighbours_is_not_cut(function: type) -> None:
    report = check_operation(kept, [sample(x(6, 12), path=path_of(function))])
    assert (report.accepted, report.false_accepts) == ({}, [])
    assert report.refused > 0
