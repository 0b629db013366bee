"""fold_masks: which masks go and which stay, and that what goes changes no value at any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.cli.models import build
from fxpar.errors import PassError
from fxpar.ir.program import Program
from fxpar.passes import annotate, canonicalize, fold_masks
from fxpar.plan.plan import Plan
from fxpar.rules import bind_arguments
from fxpar.text.parsing import parse_program
from fxpar.verify.simulate_ranks import run_single
from tests.passes.masks import (
    GROUPS,
    CrossAttention,
    Given,
    SelfAttention,
    canonical,
    causal,
    heads,
    inputs,
    ones,
    packed,
    program,
    rows,
    window,
)
from tests.passes.modules import only, shown

aten = torch.ops.aten

# The name of an attention's mask ("" for none) and whether it is causal.
FULL, NOTHING, WINDOWS = ("", True), ("", False), ("window", False)

FOLDED = """\
%x = input["x"] : f32[b, s, 8]
%b = aten.sym_size.int(%x, 0) : b
%s = aten.sym_size.int(%x, 1) : s
%view = aten.view.default(%x, [%b, %s, 2, 4]) : f32[b, s, 2, 4]
%transpose = aten.transpose.int(%view, 1, 2) : f32[b, 2, s, 4]
%cos = aten.cos.default(%transpose) : f32[b, 2, s, 4]
%sin = aten.sin.default(%transpose) : f32[b, 2, s, 4]
%scaled_dot_product_attention = aten.scaled_dot_product_attention.default(%transpose, %cos, %sin, None, 0.0, True) : f32[b, 2, s, 4]
return packed=%scaled_dot_product_attention
"""  # noqa: E501

WINDOW = """\
%x = input["x"] : f32[b, s, 8]
%b = aten.sym_size.int(%x, 0) : b
%s = aten.sym_size.int(%x, 1) : s
%window_cols = aten.arange.default(%s) : i64[s]
%window_rows = aten.unsqueeze.default(%window_cols, 1) : i64[s, 1]
%window_distance = aten.sub.Tensor(%window_rows, %window_cols) : i64[s, s]
%window_past = aten.ge.Scalar(%window_distance, 0) : bool[s, s]
%window_near = aten.lt.Scalar(%window_distance, 5) : bool[s, s]
%window = aten.logical_and.default(%window_past, %window_near) : bool[s, s]
%view = aten.view.default(%x, [%b, %s, 2, 4]) : f32[b, s, 2, 4]
%transpose = aten.transpose.int(%view, 1, 2) : f32[b, 2, s, 4]
%cos = aten.cos.default(%transpose) : f32[b, 2, s, 4]
%sin = aten.sin.default(%transpose) : f32[b, 2, s, 4]
%scaled_dot_product_attention = aten.scaled_dot_product_attention.default(%transpose, %cos, %sin, %window) : f32[b, 2, s, 4]
return window=%scaled_dot_product_attention
"""  # noqa: E501


def attentions(program: Program) -> list[tuple[str, bool]]:
    """For each attention its mask and whether it is causal."""
    calls = [n for n in program.graph.nodes if n.target is aten.scaled_dot_product_attention.default]
    given = [bind_arguments(node) for node in calls]
    return [(getattr(g["attn_mask"], "name", ""), g["is_causal"]) for g in given]


def folded(module: nn.Module, **batch: Tensor) -> list[tuple[str, bool]]:
    return attentions(only(canonical(module, **batch), fold_masks))


def test_golden_causal() -> None:
    assert shown(only(canonical(SelfAttention({"packed": packed})), fold_masks)) == FOLDED


def test_golden_window() -> None:
    assert shown(only(canonical(SelfAttention({"window": window})), fold_masks)) == WINDOW


@pytest.mark.parametrize(("group", "kind"), [("none", NOTHING), ("causal", FULL), ("window", WINDOWS)])
def test_a_folded_mask_changes_no_value_at_any_size(group: str, kind: tuple[str, bool]) -> None:
    """The formula is the proof; this would show that it is of another program."""
    after = only(program(group), fold_masks)
    assert dict(zip(GROUPS[group], attentions(after), strict=True)) == dict.fromkeys(GROUPS[group], kind)
    for b, s in ((1, 1), (1, 6), (2, 5), (3, 16), (2, 33)):
        before, now = (run_single(each, {}, inputs(b, s)).outputs for each in (program(group), after))
        for name in GROUPS[group]:
            torch.testing.assert_close(now[name], before[name], atol=1e-5, rtol=0, msg=f"{name} at {b}, {s}")


def test_other_masks_stay() -> None:
    assert shown(only(program("kept"), fold_masks)) == shown(program("kept"))


def test_masks_of_callers_and_buffers_stay() -> None:
    allowed = torch.ones(3, 1, 1, 16, dtype=torch.bool)
    found = canonical(Given(), allowed=allowed)
    assert shown(only(found, fold_masks)) == shown(found)


def test_keys_of_another_length() -> None:
    """`is_causal` aligns the first row with the first column; kernels differ in what they make of other lengths."""
    masks = {"ones": ones, "causal": causal, "window": window}
    y = torch.randn(3, 11, 8)
    found = folded(CrossAttention(masks), y=y)
    assert [bool(name) for name, _ in found] == [False, True, True]
    assert not any(is_causal for _, is_causal in found)


def test_options_stay() -> None:
    module = SelfAttention({"causal": causal, "ones": ones}, dropout_p=0.25, scale=0.5, enable_gqa=True)
    found = only(canonical(module), fold_masks)
    calls = [n for n in found.graph.nodes if n.target is aten.scaled_dot_product_attention.default]
    assert [call.args[3:] for call in calls] == [(None, 0.25, True), (None, 0.25)]
    assert all(dict(call.kwargs) == {"scale": 0.5, "enable_gqa": True} for call in calls)


class Several(nn.Module):
    """Two windows in two layers each, and a causal mask that is returned too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = heads(x)
        mask = causal(q, q)
        for width in (3, 3, 7):
            near = mask & (rows(q) - rows(q).T < width)
            q = functional.scaled_dot_product_attention(q, q, q, near)
        return functional.scaled_dot_product_attention(q, q, q, mask), mask


def test_windows_are_shared_and_masks_used_elsewhere_stay() -> None:
    found = only(canonical(Several()), fold_masks)
    assert attentions(found) == [("window", False), ("window", False), ("window_1", False), ("", True)]
    assert [n.target for n in found.output_nodes().values()][1] is aten.le.Tensor


def written(*lines: str) -> Program:
    """A program over `q: f32[b, 2, s, 4]` whose last line gives `%out`."""
    head = ["fxpar 2", "plan {}", "properties canonical", "symbol b = q.0 like 3", "symbol s = q.2 like 16"]
    return parse_program("\n".join([*head, '%q = input["q"] : f32[b, 2, s, 4]', *lines, "return out=%out", ""]))


def test_a_window_that_no_size_exceeds_is_causal() -> None:
    lines = [
        "%k = aten.slice.Tensor(%q, 2, 0, 4) : f32[b, 2, 4, 4]",
        "%i = aten.arange.default(4) : i64[4]",
        "%j = aten.unsqueeze.default(%i, 1) : i64[4, 1]",
        "%d = aten.sub.Tensor(%j, %i) : i64[4, 4]",
        "%past = aten.ge.Scalar(%d, 0) : bool[4, 4]",
        "%near = aten.lt.Scalar(%d, {}) : bool[4, 4]",
        "%mask = aten.__and__.Tensor(%past, %near) : bool[4, 4]",
        "%out = aten.scaled_dot_product_attention.default(%k, %k, %k, %mask) : f32[b, 2, 4, 4]",
    ]
    found = {w: attentions(only(written(*(line.format(w) for line in lines)), fold_masks)) for w in (3, 4, 9)}
    assert found == {3: [("window", False)], 4: [("", True)], 9: [("", True)]}


def test_a_mask_that_enlarges_the_result_stays() -> None:
    lines = [
        "%b = aten.sym_size.int(%q, 0) : b",
        "%s = aten.sym_size.int(%q, 2) : s",
        "%one = aten.slice.Tensor(%q, 0, 0, 1) : f32[1, 2, s, 4]",
        "%mask = aten.ones.default([%b, 1, %s, %s], dtype=dtype.bool) : bool[b, 1, s, s]",
        "%out = aten.scaled_dot_product_attention.default(%one, %one, %one, %mask) : f32[b, 2, s, 4]",
    ]
    assert attentions(fold_masks(written(*lines))) == [("mask", False)]


def masked_in(kind: str, low: float) -> Program:
    """With a causal mask of 0 and another number, in a type."""
    return written(
        "%s = aten.sym_size.int(%q, 2) : s",
        f"%h = aten._to_copy.default(%q, dtype=dtype.{kind}) : {kind}[b, 2, s, 4]",
        f"%full = aten.full.default([%s, %s], {low}, dtype=dtype.{kind}) : {kind}[s, s]",
        f"%mask = aten.triu.default(%full, 1) : {kind}[s, s]",
        f"%out = aten.scaled_dot_product_attention.default(%h, %h, %h, %mask) : {kind}[b, 2, s, 4]",
    )


@pytest.mark.parametrize(
    ("kind", "low", "goes"),
    [
        ("f16", torch.finfo(torch.float16).min, True),
        ("f32", torch.finfo(torch.float16).min, False),
        ("f32", torch.finfo(torch.bfloat16).min, True),
        ("bf16", torch.finfo(torch.float32).min, True),
        ("bf16", -1e30, False),
    ],
)
def test_the_smallest_number_of_a_type_masks(kind: str, low: float, goes: bool) -> None:
    assert attentions(only(masked_in(kind, low), fold_masks)) == [("", True) if goes else ("mask", False)]


def test_a_mask_whose_sizes_are_another_input_s_stays() -> None:
    """Sizes that a call makes equal, but no name says so."""
    lines = [
        "%k = aten.slice.Tensor(%q, 2, 1, 9223372036854775807) : f32[b, 2, s - 1, 4]",
        "%s = aten.sym_size.int(%q, 2) : s",
        "%mask = aten.ones.default([%s, %s], dtype=dtype.bool) : bool[s, s]",
        "%out = aten.scaled_dot_product_attention.default(%k, %k, %k, %mask) : f32[b, 2, s - 1, 4]",
    ]
    assert attentions(fold_masks(written(*lines))) == [("mask", False)]


def test_programs_with_layouts_are_refused() -> None:
    found = canonical(SelfAttention({"causal": causal})).with_(plan=Plan(tp=2))
    with pytest.raises(PassError, match="fold_masks: layouts are chosen already; run it before annotate"):
        only(found, annotate, fold_masks)


TYPES = {
    "gemma3_text,sliding_window=5,layer_types=[sliding_attention,full_attention]": [WINDOWS, FULL],
}
MORE_TYPES = {
    **dict.fromkeys(("gpt2", "llama", "qwen2", "phi3", "gpt_neox", "falcon", "opt", "mixtral", "biogpt"), [FULL] * 2),
    **dict.fromkeys(("bert", "roberta", "vit", "albert"), [NOTHING] * 2),
    "mistral,sliding_window=5": [WINDOWS] * 2,
    "mistral,sliding_window=null": [FULL] * 2,
    "bart": [NOTHING] * 2 + [FULL, NOTHING] * 2,
    "t5": [("clone", False), ("clone_2", False), ("clone_6", False), NOTHING, ("clone_9", False), NOTHING],
}


def check_type(spec: str, expected: list[tuple[str, bool]]) -> None:
    built = build(spec, None, None, 0)
    program = capture(built.model.train(), built.batch, Plan(), built.loss).program
    assert attentions(only(program, canonicalize, fold_masks)) == expected


@pytest.mark.parametrize("spec", TYPES)
def test_masks_of_transformers(spec: str) -> None:
    check_type(spec, TYPES[spec])


@pytest.mark.matrix
@pytest.mark.parametrize("spec", MORE_TYPES)
def test_masks_of_more_types(spec: str) -> None:
    """T5's are biases that it learns; those of its cross-attention are zeros."""
    check_type(spec, MORE_TYPES[spec])
