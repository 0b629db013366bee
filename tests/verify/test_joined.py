"""Operators over several axes at once: their names, and what the axes must hold alike."""

from __future__ import annotations

import pytest

from fxpar.errors import CheckFailed, FxparError, LayoutError, TextError
from fxpar.text.parsing import parse_program
from fxpar.verify.static import verify_static

HEAD = """fxpar 2
plan {{"tp": {tp}, "dp": {dp}}}
properties canonical collectives layouts{more}
"""
BUCKET = """%w = parameter["w"] : f32[8, 6] dp:I tp:I
%bk = fxpar.sum_gradients[AXES](%w) : (f32[8, 6] dp:R tp:R)
%a = operator.getitem(%bk, 0) : f32[8, 6] dp:R tp:R
%b = fxpar.r_to_s[dp](%a) : f32[8, 6] dp:S(1) tp:R
%m = fxpar.r_to_s[tp](%b) : f32[8, 6] dp:S(1) tp:S(0)
%e = aten.sum.default(%m) : f32[] dp:P tp:P
%f = fxpar.reduce_from[dp-tp](%e) : f32[] dp:I tp:I
return loss=%f
"""
LOOKUP = """%w = parameter["w"] : f32[16, 6] dp:S(0) tp:S(0)
%ids = input["ids"] : i64[4, 3] dp:R tp:R
%e = fxpar.embedding[AXES](%w, %ids) : f32[4, 3, 6] dp:P tp:P
%s = aten.sum.default(%e) : f32[] dp:P tp:P
%r = fxpar.reduce_from[dp-tp](%s) : f32[] dp:I tp:I
return loss=%r
"""
DROPOUT = """%w = parameter["w"] : f32[8, 16] dp:S(0) tp:S(0)
%rng = input["fxpar.rng"] : i64[3] dp:R tp:R
INDICES
%s = aten.sum.default(%d) : f32[] dp:P tp:P
%l = fxpar.reduce_from[dp-tp](%s) : f32[] dp:I tp:I
return loss=%l
"""
DRAWING = " local masks rng sequence vocabulary"


def check(body: str, *, tp: int = 2, dp: int = 2, more: str = "") -> None:
    head = HEAD.format(tp=tp, dp=dp, more=more)
    verify_static(parse_program(head + ("loss loss\n" if "loss=" in body else "") + body))


@pytest.mark.parametrize(("body", "more"), [(BUCKET, ""), (LOOKUP, " vocabulary")])
@pytest.mark.parametrize("axes", ["tp-dp", "dp-dp-tp"])
def test_axes_are_named_once_and_in_the_order_of_the_mesh(body: str, more: str, axes: str) -> None:
    check(body.replace("AXES", "dp-tp"), more=more)
    with pytest.raises(CheckFailed, match=f"is over {axes}; name the axes as the mesh does: dp-tp"):
        check(body.replace("AXES", axes), more=more)


@pytest.mark.parametrize(
    ("shape", "held"),
    [
        ("8, 6", "dp:I tp:S(0: 8 / 2; I)"),
        ("16, 6", "dp:S(0: 16 / 2; I) tp:S(0: 8 / 2; I)"),
        ("16, 8", "dp:S(0: 16 / 2; I) tp:S(1: 8 / 2; I)"),
    ],
)
def test_a_bucket_over_joined_axes_sums_what_they_hold_alike(shape: str, held: str) -> None:
    after = held.replace("; I", "").replace(":I", ":R")
    text = f"""%w = parameter["w"] : f32[{shape}] {held}
%bk = fxpar.sum_gradients[dp-tp](%w) : (f32[{shape}] {after})
%a = operator.getitem(%bk, 0) : f32[{shape}] {after}
%s = aten.sin.default(%a) : f32[{shape}] {after}
return x=%s
"""
    with pytest.raises(LayoutError, match="is not one run of blocks over dp-tp; take the axes one by one"):
        check(text, tp=4, dp=4)


def test_an_index_is_of_one_axis() -> None:
    nested = "[%i, %j]"
    each = "%i = fxpar.axis_index[dp]() : i64[] dp:V tp:R\n%j = fxpar.axis_index[tp]() : i64[] dp:R tp:V\n"
    drawn = "%d = fxpar.dropout(%w, %rng, 0.5, INDEX) : f32[8, 16] dp:S(0) tp:S(0) {random=5}"
    check(DROPOUT.replace("INDICES", each + drawn.replace("INDEX", nested)), more=DRAWING)
    both = "%i = fxpar.axis_index[dp-tp]() : i64[] dp:V tp:V\n" + drawn.replace("INDEX", "[%i]")
    with pytest.raises(CheckFailed, match="is the index of a rank on 2 axes at once; make one index for each axis"):
        check(DROPOUT.replace("INDICES", both), more=DRAWING)


def test_the_generator_s_state_is_there_only_with_its_property() -> None:
    text = """%w = parameter["w"] : f32[8] dp:I tp:I
%rng = input["fxpar.rng"] : i64[3] dp:R tp:R
%s = aten.sum.default(%w) : f32[] dp:I tp:I
return loss=%s
"""
    with pytest.raises(CheckFailed, match="does not have the property rng"):
        check(text)


def test_runs_beyond_count_are_refused_at_once() -> None:
    text = """%w = parameter["w"] : f32[8] dp:S(0: 10000000000 x 2 reversed) tp:I
return w=%w
"""
    with pytest.raises(FxparError, match="does not fit"):
        check(text)


def test_an_option_is_named_once() -> None:
    with pytest.raises(TextError, match="names 'tp' twice"):
        parse_program('fxpar 2\nplan {"tp": 2, "dp": 2, "tp": 4}\nreturn\n')
