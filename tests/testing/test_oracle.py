"""What the rules accept is right, what they refuse is wrong, and the oracle that says so can tell."""

from collections.abc import Callable, Sequence

import pytest
import torch

from fxpar.errors import InputError
from fxpar.layout.layout import I, P, Placement, R, shard
from fxpar.rules import OpCall, Refusal, Rule, register_rule, rule_of, rules, unregister_rule
from fxpar.signatures.matmul import formula
from fxpar.signatures.pointwise import pointwise_labels
from fxpar.testing.check import OracleReport, check_operation, report_table, sample
from fxpar.testing.composite import CHECKED
from fxpar.testing.sampled_operations import (
    COMMUNICATING,
    ELSEWHERE,
    EXEMPT,
    LEFT_OUT,
    OCCURRING,
    WITHOUT_OPERANDS,
    operations,
)

aten = torch.ops.aten

# Of how many ranks in every run, of even sizes and of any: of calls that have very many signatures, so that three ranks
# are in the matrix.
FEW: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "fxpar.attention_backward": ((2,), ()),
    "aten.scaled_dot_product_attention.default": ((2,), (2,)),
    "fxpar.attention": ((2,), (2,)),
}


@pytest.mark.matrix
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("name", FEW)
def test_rules_of_many_signatures_agree_on_three_ranks(name: str, even: bool) -> None:
    operation = operations(0, even)[name]
    assert not check_operation(operation.target, operation.samples).false_accepts


# Sizes that 2 and 3 divide, where nothing may be missed but what is known, and any sizes; every time the first sample
# of each operation, else all.
DRAWS = [
    (1, False, (2,), 1),
    *(pytest.param(seed, seed == 0, (2, 3), None, marks=pytest.mark.matrix) for seed in (0, 1, 2, 3)),
]


@pytest.mark.parametrize(("seed", "even", "ranks", "most"), DRAWS)
def test_rules_agree_with_brute_force(seed: int, even: bool, ranks: tuple[int, ...], most: int | None) -> None:
    checked = {
        name: check_operation(operation.target, operation.samples[:most], shards, seed=seed)
        for name, operation in operations(seed, even).items()
        for shards in [tuple(n for n in FEW.get(name, ((2, 3),) * 2)[not even] if n in ranks)]
        if operation.samples and shards
    }
    wrong = [f"{r.operation}: {finding}" for r in checked.values() for finding in r.false_accepts]
    assert not wrong
    for names in (OCCURRING, (*OCCURRING, *ELSEWHERE)):
        found = [checked[name] for name in names if name in checked]
        missed, legal = sum(len(r.missed) for r in found), sum(r.legal for r in found)
        assert missed <= 0.1 * legal
        if even:
            assert {r.operation for r in found if r.missed} <= LEFT_OUT.keys()
            assert [r.operation for r in found if not r.has_shard and r.operation not in EXEMPT] == []
            assert missed <= 0.02 * legal
    if even:  # an entry that nothing needs is none
        assert LEFT_OUT.keys() <= {name for name, report in checked.items() if report.missed}
    print("\n" + report_table(found, {**EXEMPT, **LEFT_OUT}))


def test_every_rule_has_samples() -> None:
    found = operations(0, True)
    assert {*OCCURRING, *ELSEWHERE} <= found.keys()
    assert {name for name, operation in found.items() if not operation.samples} == set(WITHOUT_OPERANDS)
    own = {name for name in rules() if name.startswith(("aten.", "fxpar."))}
    assert own - COMMUNICATING.keys() <= found.keys() - set(WITHOUT_OPERANDS)
    assert COMMUNICATING.keys() <= own - found.keys()


@pytest.mark.parametrize(
    "name", ["aten.linear.default", "aten.view.default", "aten.cat.default", "aten.new_ones.default"]
)
def test_sizes_that_do_not_divide_are_refused(name: str) -> None:
    for seed in range(4, 6):
        operation = operations(seed, even=False)[name]
        report = check_operation(operation.target, operation.samples, shards=(4, 7))
        assert report.false_accepts == []
        assert report.refused > 0


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def split_invariant(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | None:
    """An invariant factor beside a shard: the value is right, but its gradient differs from rank to rank."""
    return (shard(0, 6),) if placements == (shard(0, 6), I) else None


def first_of_all(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal:
    return (R,)


WRONG: dict[str, tuple[Callable[..., object], tuple[object, ...], Rule, str, str]] = {
    "softmax over its dimension": (
        aten.softmax.int,
        (x(6, 12), -1),
        Rule(pointwise_labels),
        "self S(1) → S(1)",
        "values",
    ),
    "a row-split product that adds its bias on every rank": (
        aten.linear.default,
        (x(6, 12), x(18, 12), x(18)),
        Rule(formula("m k, o k, o -> m o", "input", "weight", "bias")),
        "input S(1), weight S(1), bias R → P",
        "values",
    ),
    "a mean whose parts are summed": (
        aten.mean.dim,
        (x(6, 12), [-1]),
        Rule(formula("a b -> a", "self")),
        "self S(1) → P",
        "values",
    ),
    "relu of a partial value": (
        aten.relu.default,
        (x(6, 12),),
        Rule(pointwise_labels, (("self",),)),
        "self P → P",
        "values",
    ),
    "an addition that is partial in one operand": (
        aten.add.Tensor,
        (x(6, 12), x(6, 12)),
        Rule(pointwise_labels, (("self",),)),
        "self P, other R → P",
        "values",
    ),
    "a gradient that is a summand and called invariant": (
        aten.mul.Tensor,
        (x(6, 12), x(12)),
        Rule(pointwise_labels, check=split_invariant),
        "self S(0), other I → S(0)",
        "gradient of operand 1",
    ),
    "a product of shards that do not match": (
        aten.mm.default,
        (x(6, 12), x(12, 18)),
        Rule(formula("m k, j n -> m n", "self", "mat2")),
        "self S(1), mat2 R → P",
        "rank 0 cannot run",
    ),
    "a shard that is taken for the whole": (
        aten.relu.default,
        (x(6, 12),),
        Rule(check=first_of_all),
        "self S(0) → R",
        "values",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_rule_is_caught(case: str) -> None:
    target, args, rule, signature, fault = WRONG[case]
    report = check_operation(target, [sample(*args)], rule=rule)
    found = {finding.signature: finding.reason for finding in report.false_accepts}
    assert found[signature].startswith(fault)


def test_a_rule_whose_proposals_are_not_its_answers_is_caught() -> None:
    def refuses(call: OpCall, placements: Sequence[Placement]) -> Refusal | None:
        return Refusal("never") if placements[0].is_shard else None

    report = check_operation(aten.relu.default, [sample(x(6, 12))], rule=Rule(pointwise_labels, check=refuses))
    assert {f.reason for f in report.false_accepts} == {
        "proposed, but inferred is Refusal(reason='never', structural=False)"
    }
    assert {f.signature for f in report.missed} >= {"self S(0)", "self S(1)"}


def test_what_a_rule_leaves_out_is_missed() -> None:
    report = check_operation(aten.mm.default, [sample(x(6, 12), x(12, 18))], rule=Rule())
    plain = {f.signature for f in report.missed if " x " not in f.signature}
    assert plain == {
        "self R, mat2 P",
        "self P, mat2 R",
        "self R, mat2 S(1)",
        "self S(0), mat2 R",
        "self S(1), mat2 S(0)",
    }
    assert report.legal == len(report.missed)
    assert not report.has_shard


def test_the_rule_of_mm_allows_just_what_is_legal() -> None:
    report = check_operation(aten.mm.default, [sample(x(6, 12), x(12, 18))])
    assert sorted(text for text in report.accepted if " x " not in text and "|" not in text) == [
        "self P, mat2 R → P",
        "self R, mat2 P → P",
        "self R, mat2 S(1) → S(1)",
        "self S(0), mat2 R → S(0)",
        "self S(1), mat2 S(0) → P",
    ]
    assert (report.missed, report.false_accepts, report.has_shard) == ([], [], True)
    assert "aten.mm.default: " in str(report)


def test_a_coincidence_of_values_is_no_miss() -> None:
    ones = torch.ones(6, 12, dtype=torch.float64)
    ones[0, 0] = 2.0
    alike = check_operation(aten.cumsum.default, [sample(ones, 0)])
    assert alike.missed == []
    assert alike.false_accepts == []


def test_a_users_rule_is_checked_in_one_line(gated: torch._ops.OpOverload) -> None:
    register_rule(gated, "... h, h -> ... h", partial=(("scale",),))
    report = check_operation(gated, [sample(x(6, 6, 12), x(12))])
    assert (report.missed, report.false_accepts) == ([], [])
    assert report.accepted.keys() >= {"x S(2), scale S(0) → S(2)", "x S(0), scale R → S(0)", "x R, scale P → P"}
    unregister_rule(gated)
    assert rule_of(gated) is None


def test_a_users_wrong_rule_is_caught(gated: torch._ops.OpOverload) -> None:
    register_rule(gated, "... h, h -> ... h", partial=(("x",),))
    report = check_operation(gated, [sample(x(6, 6, 12), x(12))])
    assert {f.signature for f in report.false_accepts} == {"x P, scale R → P"}


def test_samples_that_say_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="a sample needs a tensor operand"):
        check_operation(aten.arange.default, [sample(4)])
    with pytest.raises(InputError, match="without NaN"):
        check_operation(aten.log.default, [sample(-torch.ones(6, dtype=torch.float64))])


def test_the_table_lists_what_was_found() -> None:
    good = check_operation(aten.neg.default, [sample(x(6))])
    bad = check_operation(aten.relu.default, [sample(x(6))], rule=Rule(pointwise_labels, (("self",),)))
    empty = OracleReport("aten.full.default")
    text = report_table([good, bad, empty], {"aten.full.default": "it has no tensor operand"})
    assert "WRONG   aten.relu.default: self P → P  on 2 ranks, [6]: values" in text
    assert "aten.full.default: it has no tensor operand" in text
    assert text.splitlines()[-1].startswith("3 operations, ")
    assert text.splitlines()[-1].endswith(" 0 missed, 2 wrong")


def test_the_placements_are_those_of_the_type_system() -> None:
    report = check_operation(aten.neg.default, [sample(x(12))], shards=(2,))
    assert {str(P), "S(0)", "S(0: 2 x 6)", "S(0: 3 x 4)"} <= {
        text.removeprefix("self ").partition(" → ")[0] for text in report.accepted
    }


def _shorter(name: str, place: int, draw: Sequence[torch.Tensor | object]) -> list[object]:
    """Returns arguments of which one tensor lacks its last element of the first dimension."""
    assert isinstance(draw[place], torch.Tensor), name
    return [value[:-1] if i == place and isinstance(value, torch.Tensor) else value for i, value in enumerate(draw)]


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("native_batch_norm_backward", (0, 1, 2, 5, 6)),
        ("convolution_backward", (0, 1, 2)),
        ("grid_sampler_2d_backward", (0, 1, 2)),
        ("grid_sampler_3d_backward", (0, 1, 2)),
        ("_cdist_backward", (0, 1, 2, 4)),
    ],
)
def test_kernels_that_check_no_sizes_are_not_called_with_any(name: str, places: tuple[int, ...]) -> None:
    """They would read beyond their operands, and take the process with them now and then."""
    operation = operations(1, False)[f"aten.{name}.default"]
    arguments = operation.samples[0].args
    kernel = CHECKED[operation.target]
    kernel(*arguments)
    for place in places:
        with pytest.raises((ValueError, RuntimeError), match=r"do not match|expected"):
            kernel(*_shorter(name, place, arguments))
