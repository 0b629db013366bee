"""recognize_experts: one program for each way to write a layer of experts, and none for what resembles it."""

from __future__ import annotations

import re

import pytest

from fxpar.errors import CaptureError
from fxpar.ir.program import Program
from fxpar.manager import PassManager
from fxpar.passes import recognize_experts
from fxpar.text.parsing import parse_program
from tests.passes.modules import only, shown

ROUTER = """\
%router = parameter["router"] : f32[4, 6]
%w = parameter["w"] : f32[4, 8, 6]
%x = input["x"] : f32[b, 6]
%scores = aten.linear.default(%x, %router) : f32[b, 4]
%top = aten.topk.default(%scores, 2) : (f32[b, 2]; i64[b, 2])
%weights = operator.getitem(%top, 0) : f32[b, 2]
%chosen = operator.getitem(%top, 1) : i64[b, 2]
"""
HEAD = f"""\
fxpar 2
plan {{}}
properties canonical
symbol b = x.0 like 6
{ROUTER}"""
# Rows that a model sorts itself.
SORTED = """\
%flat = aten.view.default(%chosen, [-1]) : i64[2*b]
%order = aten.argsort.stable(%flat, stable=True) : i64[2*b]
%tokens = aten.floor_divide.default(%order, 2) : i64[2*b]
%rows = aten.index.Tensor(%x, [%tokens]) : f32[2*b, 6]
%marks = aten.one_hot.default(%flat, 4) : i64[2*b, 4]
%counts = aten.sum.dim_IntList(%marks, [0]) : i64[4]
%ends = aten.cumsum.default(%counts, 0) : i64[4]
%offsets = aten._to_copy.default(%ends, dtype=dtype.i32) : i32[4]
%sizes = fxpar.group_sizes.default(%offsets) : i64[4]
%turned = aten.transpose.int(%w, 1, 2) : f32[4, 6, 8]
%y = fxpar.grouped_linear.default(%rows, %turned, %sizes, True) : f32[2*b, 8]
%pairs = aten.view.default(%weights, [-1]) : f32[2*b]
%taken = aten.index.Tensor(%pairs, [%order]) : f32[2*b]
%column = aten.unsqueeze.default(%taken, 1) : f32[2*b, 1]
%weighed = aten.mul.Tensor(%y, %column) : f32[2*b, 8]
%n = aten.sym_size.int(%x, 0) : b
%zeros = aten.zeros.default([%n, 8]) : f32[b, 8]
%out = aten.index_add.default(%zeros, 0, %tokens, %weighed) : f32[b, 8]
"""
# A matrix for each pair of token and expert.
PAIRS = """\
%bounded = aten.clamp.default(%chosen, 0, 3) : i64[b, 2]
%matrices = aten.index.Tensor(%w, [%bounded]) : f32[b, 2, 8, 6]
%y = aten.einsum.default("tkoi,ti->tko", [%matrices, %x]) : f32[b, 2, 8]
%column = aten.unsqueeze.default(%weights, 2) : f32[b, 2, 1]
%weighed = aten.mul.Tensor(%y, %column) : f32[b, 2, 8]
%out = aten.sum.dim_IntList(%weighed, [1]) : f32[b, 8]
"""


def loop(column: str) -> str:
    """A loop over experts, the last one first, with columns of weights from these lines."""
    text, total = "", "zeros"
    for e in reversed(range(4)):
        text += column.replace("@", str(e))
        text += f"""\
%w_{e} = aten.select.int(%w, 0, {e}) : f32[8, 6]
%t_{e} = aten.t.default(%w_{e}) : f32[6, 8]
%y_{e} = aten.mm.default(%x, %t_{e}) : f32[b, 8]
%term_{e} = aten.mul.Tensor(%column_{e}, %y_{e}) : f32[b, 8]
%sum_{e} = aten.add.Tensor(%{total}, %term_{e}) : f32[b, 8]
"""
        total = f"sum_{e}"
    zeros = "%n = aten.sym_size.int(%x, 0) : b\n%zeros = aten.zeros.default([%n, 8]) : f32[b, 8]\n"
    return (zeros + text).replace("%sum_0", "%out")


COMPARED = """\
%mask_@ = aten.eq.Scalar(%chosen, @) : bool[b, 2]
%some_@ = aten.mul.Tensor(%weights, %mask_@) : f32[b, 2]
%column_@ = aten.sum.dim_IntList(%some_@, [-1], True) : f32[b, 1]
"""
ONE_HOT = """\
%hot_@ = aten.one_hot.default(%chosen, 4) : i64[b, 2, 4]
%first_@ = aten.permute.default(%hot_@, [2, 0, 1]) : i64[4, b, 2]
%mask_@ = aten.select.int(%first_@, 0, @) : i64[b, 2]
%is_@ = aten._to_copy.default(%mask_@, dtype=dtype.bool) : bool[b, 2]
%some_@ = aten.where.ScalarOther(%is_@, %weights, 0.0) : f32[b, 2]
%last_@ = aten.sum.dim_IntList(%some_@, [1]) : f32[b]
%column_@ = aten.unsqueeze.default(%last_@, 1) : f32[b, 1]
"""
SCATTERED = """\
%none_@ = aten.zeros.default([%n, 4]) : f32[b, 4]
%table_@ = aten.scatter.src(%none_@, 1, %chosen, %weights) : f32[b, 4]
%column_@ = aten.slice.Tensor(%table_@, 1, @, @_AND_ONE) : f32[b, 1]
"""
FORMS = {
    "sorted": SORTED,
    "pairs": PAIRS,
    "compared": loop(COMPARED),
    "one_hot": loop(ONE_HOT),
    "scattered": re.sub(r"(\d)_AND_ONE", lambda number: str(int(number[1]) + 1), loop(SCATTERED)),
}
ROUTED = f"""\
{ROUTER}%sort_by_expert_default = fxpar.sort_by_expert.default(%chosen, 4) : (i64[2*b]; i64[4])
%getitem = operator.getitem(%sort_by_expert_default, 0) : i64[2*b]
%getitem_1 = operator.getitem(%sort_by_expert_default, 1) : i64[4]
%moe_permute_default = fxpar.moe_permute.default(%x, %getitem, 2) : f32[2*b, 6]
%y = fxpar.grouped_linear.default(%moe_permute_default, %w, %getitem_1, False) : f32[2*b, 8]
%sum = fxpar.moe_combine.default(%y, %weights, %getitem, dtype.f32) : f32[b, 8]
%out = aten.relu.default(%sum) : f32[b, 8]
return out=%out
"""


# What resembles a layer of experts: the form, and what it has instead of what.
MUTANTS = [
    ("sorted", "stable=True", "stable=True, descending=True"),
    ("sorted", "floor_divide.default(%order, 2)", "floor_divide.default(%order, 3)"),
    ("sorted", "one_hot.default(%flat", "one_hot.default(%order"),
    ("sorted", "cumsum", "cumprod"),
    ("sorted", "dtype=dtype.i32) : i32", "dtype=dtype.f16) : f16"),
    ("pairs", "(%chosen, 0, 3)", "(%chosen, 1, 3)"),
    ("pairs", "(%chosen, 0, 3)", "(%chosen, 0, 2)"),
    ("compared", "eq.Scalar(%chosen, 2)", "eq.Scalar(%chosen, 1)"),
    ("compared", "eq.Scalar(%chosen, 2)", "ge.Scalar(%chosen, 2)"),
    ("compared", "select.int(%w, 0, 2)", "select.int(%w, 0, 1)"),
    ("compared", "%sum_1 = aten.add.Tensor", "%sum_1 = aten.sub.Tensor"),
    ("compared", "(%sum_2, %term_1)", "(%sum_2, %term_1, alpha=2)"),
    ("compared", "%y_3 = aten.mm.default(%x", "%y_3 = aten.mm.default(%other"),
    ("one_hot", "permute.default(%hot_1, [2, 0, 1])", "permute.default(%hot_1, [0, 2, 1])"),
    ("one_hot", "(%is_1, %weights, 0.0)", "(%is_1, %weights, 0.1)"),
    ("scattered", "%none_1 = aten.zeros", "%none_1 = aten.ones"),
    ("scattered", "slice.Tensor(%table_1, 1, 1, 2)", "slice.Tensor(%table_1, 1, 1, 3)"),
    ("scattered", "scatter.src(%none_1, 1", "scatter.src(%none_1, 0"),
]
# A loop that picks the rows of each expert.
PICKED = """\
%mask_@ = aten.eq.Scalar(%chosen, @) : bool[b, 2]
%found_@ = aten.where.default(%mask_@) : (i64[e@]; i64[e@])
%tokens_@ = operator.getitem(%found_@, 0) : i64[e@]
%places_@ = operator.getitem(%found_@, 1) : i64[e@]
%rows_@ = aten.index.Tensor(%x, [%tokens_@]) : f32[e@, 6]
%w_@ = aten.select.int(%w, 0, @) : f32[8, 6]
%y_@ = aten.linear.default(%rows_@, %w_@) : f32[e@, 8]
%taken_@ = aten.index.Tensor(%weights, [%tokens_@, %places_@]) : f32[e@]
%column_@ = aten.view.default(%taken_@, [-1, 1]) : f32[e@, 1]
%term_@ = aten.mul.Tensor(%y_@, %column_@) : f32[e@, 8]
%sum_@ = aten.index_add.default(%total_@, 0, %tokens_@, %term_@) : f32[b, 8]
"""


def program(layer: str) -> Program:
    """A program of a layer and something that reads it."""
    counted = "".join(f"counted e{e} = floor(b/2 + 3/4) like 3\n" for e in range(4) if f"[e{e}]" in layer)
    other = "%other = aten.neg.default(%x) : f32[b, 6]\n"
    end = "%end = aten.relu.default(%out) : f32[b, 8]\nreturn out=%end\n"
    return parse_program(HEAD.replace("%router = p", f"{counted}%router = p") + other + layer + end)


def picked() -> str:
    """The loop that picks rows, of four experts."""
    text = "%n = aten.sym_size.int(%x, 0) : b\n%total_0 = aten.zeros.default([%n, 8]) : f32[b, 8]\n"
    for e in range(4):
        text += PICKED.replace("@", str(e))
        text = text.replace(f"%sum_{e}", f"%total_{e + 1}")
    return text.replace("%total_4", "%out")


def numbered(text: str) -> str:
    """The text with values named by the order in which they occur."""
    names: dict[str, str] = {}
    return re.sub(r"%\w+", lambda name: names.setdefault(name[0], f"%{len(names)}"), text)


@pytest.mark.parametrize("layer", [*FORMS.values(), picked()], ids=[*FORMS, "picked"])
def test_golden(layer: str) -> None:
    result = only(program(layer), recognize_experts)
    assert numbered(shown(result)) == numbered(ROUTED)
    assert result.counted == ()


@pytest.mark.parametrize(("form", "old", "new"), MUTANTS)
def test_what_resembles_experts_stays(form: str, old: str, new: str) -> None:
    layer = FORMS[form].replace(old, new)
    assert layer != FORMS[form]
    assert "fxpar.moe_combine" not in shown(PassManager([recognize_experts]).run(program(layer)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(%weights, [%tokens_1, %places_1])", "(%weights, [%tokens_1, %tokens_1])"),
        ("(%x, [%tokens_1])", "(%x, [%places_1])"),
        ("0, %tokens_1, %term_1", "0, %places_1, %term_1"),
        ("eq.Scalar(%chosen, 1)", "eq.Scalar(%chosen, 0)"),
        ("linear.default(%rows_1, %w_1)", "linear.default(%rows_1, %w_0)"),
    ],
)
def test_rows_that_are_picked_otherwise_are_refused(old: str, new: str) -> None:
    assert old in picked()
    with pytest.raises(CaptureError, match=r"its rows are picked.*fxpar.ops.experts"):
        only(program(picked().replace(old, new)), recognize_experts)


def test_what_reads_a_value_by_pair_besides_reads_it_in_its_order() -> None:
    result = shown(only(program(PAIRS.replace("%out = ", "%sum = ") + BESIDES), recognize_experts))
    assert [line.split(".")[1] for line in result.splitlines() if "= fxpar." in line] == [
        *("sort_by_expert", "moe_permute", "grouped_linear", "moe_combine", "moe_unpermute"),
    ]


BESIDES = """\
%drawn = aten.dropout.default(%y, 0.5, True) : f32[b, 2, 8] {random=1}
%largest = aten.amax.default(%drawn, [1]) : f32[b, 8]
%out = aten.add.Tensor(%sum, %largest) : f32[b, 8]
"""
