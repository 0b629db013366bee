"""What the rules say about the operations a transformer's split depends on, over symbolic shapes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from fxpar.errors import InputError
from fxpar.ir.program import Note, ScalarType, TensorType, set_note
from fxpar.layout.layout import I, P, R, V, parse_placement
from fxpar.layout.symbolic_sizes import parse_size
from fxpar.ops.random import dropout
from fxpar.rules import (
    OpCall,
    Refusal,
    bind_arguments,
    call_of,
    infer,
    partial_signatures,
    register_rule,
    rule_of,
    seed_signature,
    unregister_rule,
)

aten = torch.ops.aten


def t(sizes: str, dtype: torch.dtype = torch.float32) -> TensorType:
    """`t("b s 64")`."""
    return TensorType(dtype, tuple(parse_size(size) for size in sizes.split()))


def ids(sizes: str) -> TensorType:
    return t(sizes, torch.int64)


def call(target: Any, *args: Any, out: TensorType | tuple[TensorType, ...], n: int = 2, **kwargs: Any) -> OpCall:
    """The call of an operator over types, as the rules see it."""
    graph = fx.Graph()

    def value(item: Any) -> Any:
        if isinstance(item, TensorType):
            return set_note(graph.placeholder("x"), Note(item))
        return [value(inner) for inner in item] if isinstance(item, list) else item

    node = graph.call_function(target, tuple(value(a) for a in args), {k: value(v) for k, v in kwargs.items()})
    return call_of(set_note(node, Note(out)), n)


def answer(found: OpCall, placements: str, carries: Sequence[bool] | None = None) -> str:
    """`"S(2), R"` → `"S(2)"`, or the reason of the refusal. Operands that are floats carry a gradient."""
    texts = placements.split(", ")
    given = [parse_placement(text, kind.shape) for text, kind in zip(texts, found.operands, strict=True)]
    flags = carries if carries is not None else [kind.is_float for kind in found.operands]
    outs = infer(rule_of(found.target), found, given, flags)
    return outs.reason if isinstance(outs, Refusal) else ", ".join(str(p) for p in outs)


def linear(n: int = 2) -> OpCall:
    return call(aten.linear.default, t("b s 96"), t("64 96"), out=t("b s 64"), n=n)


def with_bias(n: int = 2) -> OpCall:
    return call(aten.linear.default, t("b s 96"), t("64 96"), t("64"), out=t("b s 64"), n=n)


def attention(heads: int, kv: int, n: int = 2, mask: bool = False, causal: bool = False) -> OpCall:
    few = t(f"b {kv} s 12")
    masks = [t("b 1 s s")] if mask else []
    kwargs = {"enable_gqa": heads != kv, "is_causal": causal}
    target = aten.scaled_dot_product_attention.default
    return call(target, t(f"b {heads} s 12"), few, few, *masks, out=t(f"b {heads} s 12"), n=n, **kwargs)


def view(source: str, target: str, n: int = 2) -> OpCall:
    sizes = [size if isinstance(size, int) else None for size in t(target).shape]
    return call(aten.view.default, t(source), sizes, out=t(target), n=n)


def loss(reduction: int) -> OpCall:
    out = t("") if reduction else t("96")
    return call(aten.cross_entropy_loss.default, t("96 259"), ids("96"), None, reduction, -100, out=out)


WHOLE = "the operation needs the whole of dimension {}"
NOT_LINEAR = "the operation is not linear in its partial (P) operands: reduce them first"
GELU = call(aten.gelu.default, t("b s 64"), out=t("b s 64"))
ADD = call(aten.add.Tensor, t("b s 64"), t("b s 64"), out=t("b s 64"))
WORDS = call(aten.embedding.default, t("258 96"), ids("b s"), out=t("b s 96"))


def layer_norm(sizes: str) -> OpCall:
    return call(aten.layer_norm.default, t(sizes), [96], t("96"), t("96"), out=t(sizes))


def softmax(sizes: str) -> OpCall:
    return call(aten.softmax.int, t(sizes), -1, out=t(sizes))


MEGATRON = [
    # column: the output's features are cut; row: they are summed; a row-split product has no bias of its own
    (linear(), "R, S(0)", "S(2)"),
    (linear(), "S(2), S(1)", "P"),
    (linear(), "R, S(0: 2 x 32)", "S(2: 2 x 32)"),
    (linear(), "P, R", "P"),
    (linear(), "S(2), S(0)", "operand weight is S(0) where S(1) fits S(2) of input"),
    (linear(), "S(2), R", "operand weight is R where S(1) fits S(2) of input"),
    (linear(3), "R, S(0)", "S(0) of f32[64, 96] is not divisible by 3"),
    (with_bias(), "R, S(0), S(0)", "S(2)"),
    (with_bias(), "R, S(0), R", "operand bias is R where S(0) fits S(0) of weight"),
    (with_bias(), "S(2), S(1), R", WHOLE.format(2)),
    (with_bias(), "P, R, R", NOT_LINEAR),
    (with_bias(), "P, R, P", "P"),
    # an element-wise operation passes the cut on, and only linear ones a pending sum
    (GELU, "S(2)", "S(2)"),
    (GELU, "P", NOT_LINEAR),
    (ADD, "P, P", "P"),
    (ADD, "P, R", NOT_LINEAR),
    (call(aten.mul.Tensor, t("b s 64"), t("64"), out=t("b s 64")), "S(2), S(0)", "S(2)"),
    (call(aten.mul.Tensor, t("b s 64"), t("64"), out=t("b s 64")), "P, S(0)", "partial (P) operands meet shards (S)"),
    # norm and softmax need the whole of their dimension
    (layer_norm("b 2*s 96"), "S(1), R, R", "S(1)"),
    (layer_norm("b s 96"), "S(2), R, R", WHOLE.format(2)),
    (softmax("b 8 s s"), "S(1)", "S(1)"),
    (softmax("b 8 s 64"), "S(3)", WHOLE.format(3)),
    # the features of an embedding can be cut, its rows belong to an operator of their own
    (WORDS, "S(1), R", "S(2)"),
    (WORDS, "S(0), R", WHOLE.format(0)),
    # a sum over tokens is partial, a mean is not their average
    (loss(2), "S(0), S(0)", "P"),
    (loss(0), "S(0), S(0)", "S(0)"),
    (loss(1), "S(0), S(0)", WHOLE.format(0)),
    (loss(2), "P, R", "a loss is not linear in partial (P) values: reduce them first"),
    (call(aten.sum.dim_IntList, t("b s 96"), [-1], out=t("b s")), "S(2)", "P"),
    (call(aten.mean.dim, t("b s 96"), [-1], out=t("b s")), "S(2)", WHOLE.format(2)),
]

ATTENTION = [
    (attention(8, 8), "S(1), S(1), S(1)", "S(1)"),
    (attention(8, 8, causal=True), "S(1), S(1), S(1)", "S(1)"),
    (attention(8, 8), "R, R, P", "P"),
    (attention(8, 8), "R, R, S(3)", "S(3)"),
    (attention(8, 8), "S(3), S(3), R", WHOLE.format(3)),
    (attention(8, 8, mask=True), "S(1), S(1), S(1), R", "S(1)"),
    (attention(8, 8, n=3), "S(1), S(1), S(1)", "S(1) of f32[b, 8, s, 12] is not divisible by 3"),
    # grouped: kv heads are cut in proportion; fewer than ranks are shared by those that have their query heads
    (attention(8, 4, n=4), "S(1), S(1), S(1)", "S(1)"),
    (attention(8, 4), "S(1: 2 x 4), S(1: 2 x 2), S(1: 2 x 2)", "S(1: 2 x 4)"),
    (attention(8, 2, n=4), "S(1), R, R", "operand key is R where S(1: 2 / 2) fits S(1) of query"),
    (attention(8, 4), "S(1), R, R", "operand key is R where S(1) fits S(1) of query"),
    # multi-query: one kv head serves the query heads of every rank
    (attention(8, 1, n=4), "S(1), R, R", "S(1)"),
]

VIEWS = [
    # heads split and merged
    (view("b s 96", "b s 8 12", 4), "S(2)", "S(2)"),
    (view("b s 96", "b s 8 12", 3), "S(2)", "the view from f32[b, s, 96] to f32[b, s, 8, 12] tears S(2) over 3 ranks"),
    (view("b s 8 12", "b s 96"), "S(2)", "S(2)"),
    # GPT-2: [q|k|v] are three runs, and the plain shard of the whole is torn
    (view("b s 288", "b s 3 8 12"), "S(2: 3 x 96)", "S(3)"),
    (
        view("b s 288", "b s 3 8 12"),
        "S(2)",
        "the view from f32[b, s, 288] to f32[b, s, 3, 8, 12] tears S(2) over 2 ranks",
    ),
    (view("b s 3 8 12", "b s 288"), "S(3)", "S(2: 3 x 96)"),
    # GPT-NeoX: heads outside, q, k and v inside
    (view("b s 288", "b s 8 36"), "S(2)", "S(2)"),
    # fused segments of unequal size as heads
    (view("b s 192", "b s 16 12"), "S(2: 96 | 2 x 48)", "S(2: 8 | 2 x 4)"),
    (view("b s 192", "b s 16 12"), "S(2: 96 | !96)", "S(2: 8 | !8)"),
    # BLOOM: batch times heads
    (view("b 8 s 12", "8*b s 12"), "S(1)", "S(0: b x 8)"),
    (view("8*b s 12", "b 8 s 12"), "S(0: b x 8)", "S(1)"),
    # tokens of a sequence shard
    (view("b 2*s 96", "2*b*s 96"), "S(1)", "S(0: b x 2*s)"),
    (view("2*b*s 96", "b 2*s 96"), "S(0: b x 2*s)", "S(1)"),
    # a whole symbol may be odd
    (view("b s 96", "b s 8 12"), "S(1)", "S(1) of f32[b, s, 96] is not divisible by 2"),
    (call(aten.transpose.int, t("b s 8 12"), 1, 2, out=t("b 8 s 12")), "S(2)", "S(1)"),
    (call(aten.t.default, t("64 96"), out=t("96 64")), "S(0)", "S(1)"),
    (call(aten.expand.default, t("b 4 1 s 12"), [None] * 5, out=t("b 4 2 s 12")), "S(1)", "S(1)"),
    (call(aten.repeat.default, t("6 12"), [1, 2], out=t("6 24")), "S(1)", "S(1: 2 x 12)"),
    (
        call(aten.squeeze.dim, t("2 6"), 0, out=t("2 6")),
        "S(0)",
        "a rank's part of S(0) may be one element, which it would squeeze",
    ),
]

THREE = (t("b s 96"),) * 3
UNEQUAL = (t("b s 96"), t("b s 48"), t("b s 48"))

PARTS = call(aten.split_with_sizes.default, t("b s 192"), [96, 48, 48], 2, out=UNEQUAL)
THIRDS = call(aten.split.Tensor, t("b s 288"), 96, -1, out=THREE)
JOINED = call(aten.cat.default, [t("b 96"), t("b 48")], -1, out=t("b 144"))
SEGMENTS = [
    (THIRDS, "S(2: 3 x 96)", "S(2), S(2), S(2)"),
    (THIRDS, "S(2)", "the cut at 0:96 tears S(2) over 2 ranks"),
    (THIRDS, "P", "P, P, P"),
    (PARTS, "S(2: 96 | !96)", "S(2), R, R"),
    (PARTS, "S(2: 96 | 2 x 48)", "S(2), S(2), S(2)"),
    (call(aten.slice.Tensor, t("b s 288"), 2, 96, 192, out=t("b s 96")), "S(2: 3 x 96)", "S(2)"),
    # gate and up interleaved element by element
    (call(aten.slice.Tensor, t("b s 96"), -1, 0, 2**63 - 1, 2, out=t("b s 48")), "S(2)", "S(2)"),
    (call(aten.slice.Tensor, t("b s 96"), -1, 1, 2**63 - 1, 2, out=t("b s 48")), "S(2)", "S(2)"),
    (
        call(aten.slice.Tensor, t("b s 6"), -1, 0, 6, 2, out=t("b s 3")),
        "S(2)",
        "the slice 0:6:2 tears S(2) over 2 ranks",
    ),
    (JOINED, "S(1), S(1)", "S(1: 96 | 48)"),
    (JOINED, "S(1), R", "S(1: 96 | !48)"),
    (JOINED, "S(1), P", "a segment of which all ranks hold summands would be one of a value with a gradient"),
    (call(aten.cat.default, [t("6 8"), t("6 4")], 1, out=t("6 12")), "S(0), S(0)", "S(0)"),
    # what every rank holds would be summed n times
    (
        call(aten.sum.dim_IntList, t("b s 144"), [-1], out=t("b s")),
        "S(2: 96 | !48)",
        "what several ranks hold of S(2: 96 | !48) would be summed by each of them",
    ),
]

FILLED = [
    (call(aten.masked_fill.Scalar, t("b 64"), t("64", torch.bool), 0.0, out=t("b 64")), "P, R", "P"),
    (
        call(aten.masked_fill.Scalar, t("b 64"), t("64", torch.bool), 1.0, out=t("b 64")),
        "P, R",
        "a number that fills in a partial (P) value would be added by every rank: reduce it first",
    ),
    (call(aten.pad.default, t("b 64"), [0, 1], out=t("b 65")), "P", "P"),
    (call(aten.roll.default, t("6 8"), [1], out=t("6 8")), "S(0)", WHOLE.format(0)),
    (call(aten.zeros_like.default, t("b 64"), out=t("b 64")), "P", "R"),
    (call(aten.new_ones.default, t("b 64"), [3], out=t("3")), "S(1)", "R"),
    (call(aten._to_copy.default, t("b 64"), dtype=torch.bfloat16, out=t("b 64", torch.bfloat16)), "P", "P"),
    (
        call(aten._to_copy.default, t("b 64"), dtype=torch.int64, out=ids("b 64")),
        "P",
        "a partial (P) value would be cast to integers rank by rank: reduce it first",
    ),
]


@pytest.mark.parametrize(("found", "placements", "expected"), [*MEGATRON, *ATTENTION, *VIEWS, *SEGMENTS, *FILLED])
def test_signature(found: OpCall, placements: str, expected: str) -> None:
    assert answer(found, placements) == expected


@pytest.mark.parametrize(
    ("placements", "carries", "expected"),
    [
        ("I, I", (True, True), "I"),
        ("R, R", (True, True), "R"),
        ("R, R", (False, False), "R"),
        ("I, R", (True, True), "invariant (I) and replicated (R) operands meet: coerce I → R (copy_to)"),
        ("I, R", (True, False), "I"),
        ("I, R", (False, True), "R"),
        ("S(2), I", (True, True), "invariant (I) operands meet S: coerce them first"),
        ("S(2), I", (True, False), "operand other is R where S(0) fits S(2) of self"),
        ("P, I", (True, True), "invariant (I) operands meet P: coerce them first"),
        ("V, R", (False, False), "the operation does not accept varying values (V)"),
    ],
)
def test_kinds_that_mix(placements: str, carries: tuple[bool, ...], expected: str) -> None:
    assert answer(call(aten.mul.Tensor, t("b s 64"), t("64"), out=t("b s 64")), placements, carries) == expected


def test_an_operation_without_a_rule_accepts_only_whole_operands() -> None:
    found = call(aten.geqrf.default, t("6 6"), out=(t("6 6"), t("6")))
    assert rule_of(found.target) is None
    assert answer(found, "I") == "I, I"
    assert answer(found, "R") == "R, R"
    for cut in ("S(0)", "P"):
        assert answer(found, cut).startswith("no rule says how the operation treats shards or partial values")


@pytest.mark.parametrize(
    ("found", "text", "structural"),
    [
        (view("b s 96", "b s 8 12", 3), "S(2)", True),
        (linear(5), "S(2)", True),
        (softmax("6 12"), "S(1)", False),
        (WORDS, "S(0)", False),
    ],
)
def test_refusals_say_whether_shapes_are_the_reason(found: OpCall, text: str, structural: bool) -> None:
    rule = rule_of(found.target)
    assert rule is not None
    refusal = seed_signature(rule, found, 0, parse_placement(text, found.operands[0].shape))
    assert isinstance(refusal, Refusal)
    assert refusal.structural is structural


def test_the_signature_a_shard_asks_for() -> None:
    found, rule = linear(), rule_of(aten.linear.default)
    assert rule is not None
    row = seed_signature(rule, found, 1, parse_placement("S(1)", found.operands[1].shape))
    assert not isinstance(row, Refusal)
    assert [str(p) for p in (*row.operands, *row.outputs)] == ["S(2)", "S(1)", "P"]


def test_partial_signatures_are_those_that_are_accepted() -> None:
    def texts(found: OpCall) -> list[str]:
        rule = rule_of(found.target)
        assert rule is not None
        return [" ".join(map(str, s.operands)) for s in partial_signatures(rule, found)]

    assert texts(linear()) == ["P R", "R P"]
    assert texts(with_bias()) == ["P R P", "R P P"]
    assert texts(call(aten.add.Tensor, t("b 64"), 2.0, out=t("b 64"))) == []
    assert texts(call(aten.mul.Tensor, t("b 64"), 2.0, out=t("b 64"))) == ["P"]
    assert texts(call(aten.mul.Tensor, t("b 64"), t("64", torch.bool), out=t("b 64"))) == ["P R"]
    assert texts(call(aten.masked_fill.Scalar, t("b 64"), t("64", torch.bool), 1.0, out=t("b 64"))) == []


def test_arguments_stand_in_the_order_of_the_operands() -> None:
    found = call(
        aten.scaled_dot_product_attention.default,
        t("b 8 s 12"),
        t("b 8 s 12"),
        t("b 8 s 12"),
        attn_mask=t("s s"),
        out=t("b 8 s 12"),
    )
    assert found.names == ("query", "key", "value", "attn_mask")
    assert found.get("is_causal") is False
    assert found.position("attn_mask") == 3
    assert found.position("dropout_p") is None
    lists = call(aten.index.Tensor, t("6 8"), [None, ids("5")], out=t("6 5"))
    assert lists.names == ("self", "indices")


def test_symbolic_sizes_are_arguments_by_value() -> None:
    graph = fx.Graph()
    x = set_note(graph.placeholder("x"), Note(t("b s 96")))
    size = set_note(graph.placeholder("s"), Note(ScalarType(parse_size("s"))))
    node = graph.call_function(aten.slice.Tensor, (x, 1, 0, size))
    found = call_of(set_note(node, Note(t("b s 96"))), 2)
    assert found.get("end") == parse_size("s")
    assert list(bind_arguments(node)) == ["self", "dim", "start", "end", "step"]
    assert answer(found, "S(2)") == "S(2)"


def test_axis_indices_are_for_shards_alone() -> None:
    def mask(*indices: TensorType) -> OpCall:
        return call(dropout, t("b s 64"), ids("3"), 0.1, list(indices), out=t("b s 64"))

    assert answer(mask(), "R, R") == "R"
    assert answer(mask(ids("")), "S(2), R, V") == "S(2)"
    assert "would draw the same bits" in answer(mask(), "S(2), R")
    assert all("would draw different bits" in answer(mask(ids("")), f"{kind}, R, V") for kind in "RP")
    assert answer(mask(), "P, R") == "P"


def test_a_rule_is_registered_once_and_must_match_the_schema() -> None:
    with pytest.raises(InputError, match=r"aten.linear.default: the operator has a rule already"):
        register_rule(aten.linear.default)
    with pytest.raises(InputError, match=r"does not name 1 tensor arguments \(self\)"):
        register_rule(aten.geqrf.default, "i j, j -> i")
    # Of torch, and of fxpar itself, whose record has no rule.
    for target, rule in ((aten.geqrf.default, "b _ _ -> b _ _, b _"), (torch.ops.fxpar.item.default, "_ -> _")):
        register_rule(target, rule)
        try:
            assert rule_of(target) is not None
        finally:
            unregister_rule(target)
        assert rule_of(target) is None


def test_the_kinds_are_written_as_the_field_writes_them() -> None:
    assert [str(p) for p in (I, R, P, V)] == ["I", "R", "P", "V"]
