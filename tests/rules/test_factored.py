"""Blocks that neighbouring ranks share: which coercions there are, and that operations treat them right."""

from __future__ import annotations

import itertools

import pytest
import torch

from fxpar.errors import LayoutError
from fxpar.ir.operators import as_parameter, held_fraction, pending, shared_fraction
from fxpar.layout.layout import I, Placement, R, parse_placement, shard
from fxpar.ops.collectives import coercion, copy_to_shared, split_shared
from fxpar.rules import OpCall
from fxpar.testing.check import check_operation, sample
from fxpar.testing.ranks import local_positions
from fxpar.testing.sampled_operations import operations
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.types import check_types
from tests.rules.test_rules import answer, attention
from tests.verify.cases import program


def cut(text: str, size: int) -> Placement:
    return parse_placement(f"S(0: {text})", (size,))


# What the ranks hold, so that several hold some of it: 4 ranks.
SHARED = [cut(text, 24) for text in ("24 / 2", "2 x 12 / 2", "16 | 8 / 2", "16 | !8", "!8 | 16", "16 / 2 | !8")]


@pytest.mark.parametrize(("source", "target"), [*itertools.permutations([shard(0, 24), cut("16 | 8", 24), *SHARED], 2)])
def test_a_part_is_taken_just_where_every_rank_has_it(source: Placement, target: Placement) -> None:
    row = coercion(source, target)
    if row is not None and (source.is_shared or target.is_shared):
        assert row.operator is split_shared
        assert all(set(local_positions(target, 4, rank)) <= set(local_positions(source, 4, rank)) for rank in range(4))


def test_what_converts_shared_blocks() -> None:
    rest = as_parameter(SHARED[0])
    assert str(rest) == "S(0: 24 / 2; I)"
    row = coercion(rest, SHARED[0])
    assert row is not None
    assert row.operator is copy_to_shared
    assert coercion(SHARED[0], shard(0, 24)) is not None
    assert coercion(cut("16 | 8 / 2", 24), cut("16 | 8", 24)) is not None
    assert coercion(cut("16 | !8", 24), cut("16 | 8 / 2", 24)) is not None
    for target in (R, I, shard(0, 24), rest, SHARED[1]):  # a parameter's blocks are neither gathered nor parted
        assert coercion(rest, target) is None
        assert target == rest or coercion(target, rest) is None
    assert coercion(shard(0, 24), SHARED[0]) is None
    assert pending(rest) == SHARED[0]
    assert as_parameter(shard(0, 24)) == shard(0, 24)


def test_how_much_of_a_value_a_rank_holds() -> None:
    assert [held_fraction(placement, 4) for placement in (R, shard(0, 24), *SHARED[:4])] == [
        1.0,
        0.25,
        0.5,
        0.5,
        pytest.approx((4 + 4) / 24),
        pytest.approx((4 + 8) / 24),
    ]
    assert [shared_fraction(placement) for placement in SHARED[:4]] == [(24, 24), (24, 24), (8, 24), (8, 24)]
    assert shared_fraction(shard(0, 24)) == (0, 24)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


HEADS = [(8, 2, 4), (12, 4, 4), (8, 8, 4), (6, 3, 2), (8, 2, 8), (8, 4, 8)]


@pytest.mark.parametrize(("heads", "kv", "n"), HEADS)
def test_grouped_attention_with_shared_heads_agrees_with_brute_force(heads: int, kv: int, n: int) -> None:
    target = torch.ops.aten.scaled_dot_product_attention.default
    given = draw(heads, 2, 2), draw(kv, 2, 2), draw(kv, 2, 2)
    report = check_operation(target, [sample(*given, None, 0.0, False, enable_gqa=True)], (n,))
    assert report.false_accepts == []
    if kv < n and n % kv == 0:
        few = f"S(0: {kv} / {n // kv})"
        assert f"query S(0), key {few}, value {few} → S(0)" in report.accepted
    missed = {finding.signature for finding in report.missed}
    # With as many heads as pieces it is seen that ranks could share other blocks too; none of them is ever made.
    assert all("/" in signature or "|" in signature or " x " in signature or "R" in signature for signature in missed)


@pytest.mark.parametrize(
    ("found", "placements", "expected"),
    [
        (attention(8, 2, n=4), "S(1), S(1: 2 / 2), S(1: 2 / 2)", "S(1)"),
        (attention(8, 2, n=4), "S(1: 8 / 2), S(1: 2 / 2), S(1: 2 / 2)", "S(1: 8 / 2)"),
        (attention(8, 4, n=4), "S(1), S(1: 4 / 2), R", "operand key is S(1: 4 / 2) where S(1) fits S(1) of query"),
        (attention(12, 6, n=4), "S(1), R, R", "a dimension of 6 cannot follow the cut S(1) over 4 ranks"),
        (
            attention(8, 2, n=4),
            "S(1), S(1: 2 / 2; I), R",
            "operand key has reduced blocks (I), of which no rank has the whole gradient: share it",
        ),
    ],
)
def test_signatures_of_grouped_attention(found: OpCall, placements: str, expected: str) -> None:
    assert answer(found, placements) == expected


# What weights, their products and views are; the rest is element-wise.
OPERATIONS = (
    *(f"aten.{name}.default" for name in ("linear", "mm", "matmul", "view", "expand", "permute", "cat", "repeat", "t")),
    *(
        "aten.add.Tensor",
        "aten.slice.Tensor",
        "aten.split_with_sizes.default",
        "aten.transpose.int",
        "aten.embedding.default",
    ),
    *("aten.softmax.int", "fxpar.dropout", "aten.sum.dim_IntList", "aten.layer_norm.default", "aten.unsqueeze.default"),
)


@pytest.mark.parametrize("name", OPERATIONS)
def test_rules_agree_with_brute_force_on_shared_blocks(name: str) -> None:
    operation = operations(0, True)[name]
    report = check_operation(operation.target, operation.samples, (4,))
    assert report.false_accepts == []
    assert [str(finding) for finding in report.missed if " / " in finding.signature] == []
    shared = [text for text in report.accepted if " / 2" in text]
    assert shared


def test_shared_blocks_that_nothing_sums_are_refused_with_the_remedy() -> None:
    text = print_program(program("grouped", 4))
    line = next(line for line in text.splitlines() if line.startswith("%k_weight_copy_to_shared = "))
    broken = text.replace(line + "\n", "").replace("%k_weight_copy_to_shared", "%k_weight")
    remedy = r"insert fxpar\.copy_to_shared\[tp\]\(%k_weight\) : tp:S\(0: 8 / 2; I\)→S\(0: 8 / 2\)"
    with pytest.raises(LayoutError, match=remedy):
        check_types(parse_program(broken))
