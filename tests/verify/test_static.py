"""The static checks: right programs pass after every pass; each fault is named with the coercion that mends it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from torch import fx

from fxpar.errors import CheckFailed, FxparError, LayoutError
from fxpar.ir.program import Program, note, set_note, update
from fxpar.layout.layout import Layout, Placement
from fxpar.manager import PassManager
from fxpar.passes import DEFAULT_PASSES
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.shapes import check_shapes
from fxpar.verify.static import STATIC, verify_static
from fxpar.verify.structure import check_structure
from fxpar.verify.types import check_types
from tests.verify.cases import prepared, program, sequence, sequence_text
from tests.zoo import CASES

RIGHT = (*CASES, "tail", "columns")
EVERY_TIME = ("bert", "llama", "tail", "columns")


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        *(pytest.param(name, 4, marks=[] if name in EVERY_TIME else [pytest.mark.matrix]) for name in RIGHT),
        ("gpt2", 1),
        ("bloom", 2),
        pytest.param("gpt2", 2, marks=pytest.mark.matrix),
    ],
)
def test_no_right_program_is_rejected_after_any_pass(name: str, tp: int) -> None:
    current = prepared(name).captured.with_(plan=prepared(name).case.plan(tp))
    verify_static(current)
    for item in DEFAULT_PASSES:
        current = PassManager([item]).run(current)
        verify_static(current)
    verify_static(parse_program(print_program(current)))


@pytest.mark.parametrize("tp", [2, 4])
def test_a_sequence_parallel_program_is_right(tp: int) -> None:
    verify_static(sequence(tp))


def edited(*changes: tuple[str, str]) -> Program:
    """The sequence-parallel program with lines changed."""
    text = sequence_text(2)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse_program(text)


def without(name: str, operand: str) -> Program:
    """The sequence-parallel program without a coercion."""
    lines = sequence_text(2).splitlines()
    text = "\n".join(line for line in lines if not line.startswith(f"%{name} = "))
    return parse_program(text.replace(f"%{name},", f"%{operand},").replace(f"%{name})", f"%{operand})"))


# Coercion and its operand, and what the check says of the program without it.
MISSING = (
    (
        ("h_i_to_s", "h"),
        "%norm (norm): on axis tp: invariant (I) and replicated (R) operands meet: coerce I → R (copy_to) "
        "(%h is I, %weight is R, %bias is R); insert fxpar.i_to_s[tp](%h) : tp:I→S(1)",
    ),
    (
        ("weight", "norm_weight"),
        "%norm (norm): on axis tp: invariant (I) operands meet S: coerce them first "
        "(%h_i_to_s is S(1), %norm_weight is I, %bias is R); insert fxpar.copy_to[tp](%norm_weight) : tp:I→R",
    ),
    (
        ("norm_whole", "norm"),
        "%up (up, cases.py:3): on axis tp: operand weight is S(0) where R fits S(1) of input "
        "(%norm is S(1), %up_weight is S(0)); insert fxpar.all_gather[tp](%norm) : tp:S(1)→R",
    ),
    (
        ("down_part", "down"),
        "%down_sum (down, cases.py:6): on axis tp: the operation is not linear in its partial (P) operands: reduce "
        "them first (%down is P, %row is R); insert fxpar.reduce_scatter[tp](%down) : tp:P→S(1)",
    ),
    (
        ("row", "down_bias"),
        "%down_sum (down, cases.py:6): on axis tp: invariant (I) operands meet S: coerce them first "
        "(%down_part is S(1), %down_bias is I); insert fxpar.copy_to[tp](%down_bias) : tp:I→R",
    ),
    (
        ("target_part", "target"),
        "%gap (cases.py:8): on axis tp: operand other is R where S(1) fits S(1) of self "
        "(%y is S(1), %target is R); insert fxpar.r_to_s[tp](%target) : tp:R→S(1)",
    ),
    (
        ("y_whole", "y"),
        "%double (cases.py:9): on axis tp: the note says I, its operands give S(1) (%y is S(1)); "
        "insert fxpar.s_to_i[tp](%y) : tp:S(1)→I",
    ),
)


@pytest.mark.parametrize(("coercion", "message"), MISSING, ids=lambda value: value[0] if len(value) == 2 else "")
def test_a_missing_coercion_is_named(coercion: tuple[str, str], message: str) -> None:
    with pytest.raises((LayoutError, CheckFailed)) as error:
        verify_static(without(*coercion))
    assert str(error.value) == message


# What is advised where no coercion would do.
NO_COERCION = "; correct the pass or the text that gave it this layout"

TYPES: tuple[tuple[tuple[str, str], type[FxparError], str], ...] = (
    (
        ("return loss=%loss", "return loss=%sum"),
        CheckFailed,
        "loss loss = %sum (cases.py:8): on axis tp: is P and must be I: each rank would differentiate something else; "
        "insert fxpar.reduce_from[tp](%sum)",
    ),
    (
        ("y=%double", "y=%norm_whole"),
        CheckFailed,
        "output y = %norm_whole (up, cases.py:3): on axis tp: is R and must be I: each rank would differentiate "
        "something else; insert fxpar.r_to_i[tp](%norm_whole)",
    ),
    (
        ("fxpar.reduce_scatter", "fxpar.copy_to"),
        LayoutError,
        "%down_part (down, cases.py:6): on axis tp: takes I and finds P (%down is P, the note says S(1)); "
        "use fxpar.reduce_scatter[tp]",
    ),
    (
        ("fxpar.reduce_scatter", "fxpar.reduce_from"),
        LayoutError,
        "%down_part (down, cases.py:6): on axis tp: gives I, the note says S(1) (%down is P); "
        "use fxpar.reduce_scatter[tp]",
    ),
    (
        ("aten.gelu.default(%up_sum)", "aten.softmax.int(%up_sum, -1)"),
        LayoutError,
        "%gelu (cases.py:4): on axis tp: the operation needs the whole of dimension 2 (%up_sum is S(2)); "
        "insert fxpar.all_gather[tp](%up_sum) : tp:S(2)→R",
    ),
    (
        ("%sum = aten.sum.default(%small) : f32[] tp:P", "%sum = aten.sum.default(%small) : f32[] tp:I"),
        CheckFailed,
        "%sum (cases.py:8): on axis tp: the note says I, its operands give P (%small is S(1)); "
        "insert fxpar.reduce_from[tp](%sum) : tp:P→I",
    ),
    (
        (", [%tp_index])", ")"),
        LayoutError,
        "%drop (drop, cases.py:5): on axis tp: the ranks hold different elements but would draw the same bits: "
        "pass fxpar.axis_index (%gelu is S(2), %rng is R)" + NO_COERCION,
    ),
    (
        ('"norm.weight"] : f32[24] tp:I', '"norm.weight"] : f32[24] tp:R'),
        LayoutError,
        "%norm_weight (norm): on axis tp: a parameter cannot be R; "
        "write tp:I and insert fxpar.copy_to[tp](%norm_weight)",
    ),
    (
        ('"target"] : f32[b, 16, 24] tp:R', '"target"] : f32[b, 16, 24] tp:S(1)'),
        LayoutError,
        "%target: on axis tp: an input cannot be S(1): every rank gets it whole; "
        "write tp:R and insert fxpar.r_to_s[tp](%target)",
    ),
    (
        ('"up.bias"] : f32[40] tp:S(0)', '"up.bias"] : f32[40] tp:S(0: 8 x 5)'),
        LayoutError,
        "%up_bias (up): on axis tp: S(0: 8 x 5) does not fit f32[40] over 2 ranks" + NO_COERCION,
    ),
    (
        ('"up.bias"] : f32[40] tp:S(0)', '"up.bias"] : f32[40] tp:S(0: 20 | !20)'),
        LayoutError,
        "%up_bias (up): on axis tp: S(0: 20 | !20) has blocks that several ranks hold, whose gradients nothing would "
        "sum; write tp:S(0: 20 | !20; I) and insert fxpar.copy_to_shared[tp](%up_bias)",
    ),
    (
        ("aten.linear.default(%drop, %down_weight)", "aten.linear.default(%gelu, %gelu)"),
        LayoutError,
        "%down (down, cases.py:6): on axis tp: ranks do not match ... k, o k, o -> ... o "
        "(%gelu is S(2), %gelu is S(2))" + NO_COERCION,
    ),
)


@pytest.mark.parametrize(("change", "kind", "message"), TYPES, ids=[str(i) for i in range(len(TYPES))])
def test_a_wrong_layout_is_named(change: tuple[str, str], kind: type[FxparError], message: str) -> None:
    with pytest.raises(kind) as error:
        check_types(edited(change))
    assert str(error.value) == message


def test_the_suggested_coercion_makes_the_program_right() -> None:
    lacking = without("row", "down_bias")
    with pytest.raises(LayoutError) as error:
        verify_static(lacking)
    assert "insert fxpar.copy_to[tp](%down_bias) : tp:I→R" in str(error.value)
    line = "%row = fxpar.copy_to[tp](%down_bias) : f32[24] tp:I→R"
    text = (
        print_program(lacking)
        .replace("%down_sum =", f"{line}\n%down_sum =")
        .replace("%down_bias) : f32[b", "%row) : f32[b")
    )
    verify_static(parse_program(text))


STRUCTURE: tuple[tuple[tuple[str, str], str], ...] = (
    (("fxpar.dropout(%gelu, %rng", "fxpar.dropout(%gelu, %x"), "%drop (drop, cases.py:5): takes its state from x"),
    (("[%tp_index]", "[%tp_index, %tp_index]"), "%drop (drop, cases.py:5): takes the indices %tp_index, %tp_index"),
    (("f32[16, 24] tp:I", "f32[16, 24] -"), "%position: the layout '' does not name the axes (tp)"),
    (("f32[16, 24] tp:I", "f32[16, c] tp:I"), "%position: f32[16, c] names the symbol c, which no input has"),
    (("f32[40] tp:S(0)  # up", "f32[40] tp:S(0: 20 | 20)  # up"), "S(0: 20 | 20) is not in its shortest form"),
    (("aten.gelu.default(%up_sum) : f32[b, 16, 40] tp:S(2)", "aten.gelu.default(%up_sum)"), "has no type, but %drop"),
    (("loss=%loss", "loss=%h"), "loss: the loss is f32[b, 16, 24] and no floating scalar"),
)


@pytest.mark.parametrize(("change", "message"), STRUCTURE, ids=[str(i) for i in range(len(STRUCTURE))])
def test_a_fault_of_structure_is_named(change: tuple[str, str], message: str) -> None:
    with pytest.raises(CheckFailed) as error:
        check_structure(edited(change))
    assert message in str(error.value)


def test_a_random_node_without_an_identity_is_named() -> None:
    text = re.sub(r"random=\d+", "random=0", sequence_text(2))
    with pytest.raises(CheckFailed, match=r"%drop \(drop, cases.py:5\): draws random bits and has the identity 0"):
        check_structure(parse_program(text))


def test_two_random_nodes_with_one_identity_are_named() -> None:
    first = next(node for node in program("vit", 2).graph.nodes if node.op != "output" and note(node).random)
    copy = program("vit", 2).copy()
    second = [node for node in copy.graph.nodes if node.op != "output" and note(node).random][1]
    update(second, random=note(first).random)
    with pytest.raises(CheckFailed) as error:
        check_structure(copy)
    assert f"draws the same random bits as %{first.name}" in str(error.value)
    assert f"%{second.name}" in str(error.value)


def test_a_second_conversion_of_a_value_is_named() -> None:
    """It would leave all values right and double what is sent."""
    again = "%again = fxpar.i_to_s[tp](%h) : f32[b, 16, 24] tp:S(1)  # - cases.py:7"
    program_ = edited(
        ("%y = aten.add.Tensor(%h_i_to_s, %down_sum)", f"{again}\n%y = aten.add.Tensor(%again, %down_sum)")
    )
    with pytest.raises(CheckFailed) as error:
        check_structure(program_)
    assert str(error.value) == "%again (cases.py:7): converts %h to S(1) on axis tp a second time; use %h_i_to_s"


def test_a_value_may_be_converted_to_several_placements() -> None:
    other = "%other = fxpar.copy_to[tp](%h) : f32[b, 16, 24] tp:R"
    verify_static(edited(("%h_i_to_s = fxpar.i_to_s", f"{other}\n%h_i_to_s = fxpar.i_to_s")))


def _forget_note(graph: fx.Graph) -> None:
    node = next(node for node in graph.nodes if node.name == "gelu")
    node.meta["custom"] = {}


def _placeholder_behind(graph: fx.Graph) -> None:
    node = next(node for node in graph.nodes if node.name == "gelu")
    with graph.inserting_after(node):
        set_note(graph.placeholder("late"), note(node))


def _other_axis(graph: fx.Graph) -> None:
    node = next(node for node in graph.nodes if node.name == "row")
    node.kwargs = {"axis": "dp"}


def _item_beyond(graph: fx.Graph) -> None:
    node = next(node for node in graph.nodes if str(node.target) == "<built-in function getitem>")
    node.args = (node.args[0], 7)


GRAPHS: tuple[tuple[str, Callable[[fx.Graph], None], str], ...] = (
    ("sequence", _forget_note, "%gelu: the node has no note"),
    ("sequence", _placeholder_behind, "a placeholder stands behind an operation"),
    ("sequence", _other_axis, "%row (down, cases.py:6): the axis dp is not in the mesh (tp)"),
    ("gpt2", _item_beyond, "takes item 7 of 3 tensors"),
)


@pytest.mark.parametrize(("name", "change", "message"), GRAPHS, ids=[name[1].__name__ for name in GRAPHS])
def test_a_fault_that_a_pass_can_make_is_named(name: str, change: Callable[[fx.Graph], None], message: str) -> None:
    copy = sequence(2) if name == "sequence" else program(name, 2).copy()
    change(copy.graph)
    with pytest.raises(CheckFailed) as error:
        check_structure(copy)
    assert message in str(error.value)


def test_a_random_operator_behind_assign_rng_is_refused() -> None:
    change = ("fxpar.dropout(%gelu, %rng, 0.1, [%tp_index])", "aten.dropout.default(%gelu, 0.1, True)")
    with pytest.raises(CheckFailed, match="draws bits that depend on the rank's generator"):
        check_structure(edited(change))


SHAPES = (
    (
        ("aten.layer_norm.default(%h_i_to_s, [24]", "aten.layer_norm.default(%h_i_to_s, [12]"),
        "%norm (norm): cannot run on a rank's shapes: ",
    ),
    (
        ("aten.gelu.default(%up_sum)", "aten.gt.Scalar(%up_sum, 0)"),
        "%gelu (cases.py:4): gives [3, 16, 20] of torch.bool where the note and its layout give "
        "[3, 16, 20] of torch.float32",
    ),
    (
        ("fxpar.r_to_s[tp](%target) : f32[b, 16, 24]", "fxpar.r_to_s[tp](%target) : f32[b, 16, 48]"),
        "a coercion of f32[b, 16, 24] cannot give f32[b, 16, 48]",
    ),
)


@pytest.mark.parametrize(("change", "message"), SHAPES, ids=["run", "type", "coercion"])
def test_a_wrong_shape_is_named(change: tuple[str, str], message: str) -> None:
    with pytest.raises(CheckFailed) as error:
        check_shapes(edited(change))
    assert message in str(error.value)


WRONG_SIZE = r"where the note and its layout give|cannot run on a rank's shapes"


def test_a_size_of_the_whole_in_a_localised_view_is_refused() -> None:
    text = print_program(program("vit", 2))
    assert "[%b, 17, 4, 12])" in text
    with pytest.raises(CheckFailed, match=WRONG_SIZE):
        verify_static(parse_program(text.replace("[%b, 17, 4, 12])", "[%b, 17, 8, 12])", 1)))


def test_a_size_that_the_example_has_and_others_have_not_is_refused() -> None:
    """A literal 3 for the batch runs at the example's size and at no other."""
    text = print_program(program("vit", 2))
    assert prepared("vit").captured.symbols[0].example == 3
    with pytest.raises(CheckFailed, match=WRONG_SIZE):
        verify_static(parse_program(text.replace("[%b, 17, 4, 12])", "[3, 17, 4, 12])", 1)))


def test_a_slice_of_a_fused_dimension_is_judged_by_global_positions() -> None:
    """On a rank, 12 of 36 elements are the first of three segments; 6 of them are a part of one."""
    text = """fxpar 2
plan {"tp": 2}
properties canonical collectives layouts local rng vocabulary
symbol b = x.0 like 3
%x = input["x"] : f32[b, 24] tp:R
%w = parameter["w"] : f32[72, 24] tp:S(0: 3 x 24)
%y = aten.linear.default(%x, %w) : f32[b, 72] tp:S(1: 3 x 24)
%q = aten.slice.Tensor(%y, 1, 12, 24) : f32[b, 24] tp:S(1)
return q=%q
"""
    verify_static(parse_program(text))
    torn = text.replace("12, 24) : f32[b, 24]", "6, 18) : f32[b, 24]")
    with pytest.raises(LayoutError, match=r"%q: on axis tp: the slice 6:18:1 of a rank's part tears S\(1: 3 x 24\)"):
        verify_static(parse_program(torn))


def test_layouts_of_a_program_without_axes_are_not_judged() -> None:
    check_types(program("tail", 1))


def test_checks_do_not_change_the_program() -> None:
    text = sequence_text(2)
    parsed = parse_program(text)
    before = print_program(parsed)
    verify_static(parsed)
    assert print_program(parsed) == before


def test_a_frozen_model_has_no_invariant_values() -> None:
    """Without gradients a loss is R, and P is summed to R."""
    captured = prepared("tail").captured
    frozen = tuple(dataclasses.replace(p, trainable=False) for p in captured.parameters)
    current = captured.with_(parameters=frozen, plan=prepared("tail").case.plan(2))
    split = PassManager(DEFAULT_PASSES, STATIC).run(current)
    assert note(split.output_nodes()["loss"]).layout == Layout.of({"tp": Placement("R")})
    assert torch.float32 == split.parameters[0].type.dtype
