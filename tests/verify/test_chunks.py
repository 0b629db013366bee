"""Chunks of tokens are checked statically: what does not compute the rows of the whole is rejected by a named check."""

from __future__ import annotations

import re
from functools import cache

import pytest

from fxpar.errors import CheckFailed, FxparError
from fxpar.ir.program import Program
from fxpar.plan.plan_options import Communication
from fxpar.signatures.check_cache import facts_of
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.phases import check_chunks
from fxpar.verify.static import STATIC
from tests.verify.steps import Attentive, Small, Trial

_BUILDS = {"small": Small, "attentive": Attentive}


@cache
def step(name: str, rows: int) -> str:
    """The step in two chunks, on two ranks."""
    return print_program(Trial(_BUILDS[name], rows, tp=2, communication=Communication(token_chunks=2)).step)


def rejection(program: Program) -> str:
    """Name of the first check that rejects a program, and what it says; empty where none does."""
    facts = facts_of(program)
    for check in STATIC:
        try:
            if check.applies(program):
                check.judge(facts)
        except FxparError as error:
            return f"{check.name}: {error}"
    return ""


@pytest.mark.parametrize("name", _BUILDS)
def test_a_step_in_chunks_is_accepted(name: str) -> None:
    assert rejection(parse_program(step(name, 3))) == ""


_JOIN = "join_chunks([%linear_chunk0, %linear_chunk1], 0)"
_ADD = "add_chunks([%getitem_6_chunk0, %getitem_6_chunk1])"
_TAKE = "take_chunk(%dropout_1, 0, %b, 0, 2)"
_SIZE = "chunk_size(%b, 1, 0, 2)"
_ATTENDED = "join_chunks([%getitem_3_chunk0, %getitem_3_chunk1], 0)"
_TANH, _TANH_BACKWARD = "aten.linear.default(%tanh_chunk", "aten.mm.default(%tanh_backward_chunk"

# Edits of the step: the check that rejects it with three rows, what it says, what stands there, and what is put there.
_SMALL: list[tuple[str, str, str, str]] = [
    ("chunks", "%linear_chunk1 is not chunk 0 of 2", _JOIN, "join_chunks([%linear_chunk1, %linear_chunk0], 0)"),
    ("chunks", "%linear_chunk0 is not chunk 1 of 2", _JOIN, "join_chunks([%linear_chunk0, %linear_chunk0], 0)"),
    ("chunks", "%linear_chunk0 is not chunk 0 of 1", _JOIN, "join_chunks([%linear_chunk0], 0)"),
    ("shapes", "no chunk and whole", _JOIN, "join_chunks([%linear_chunk0, %linear_chunk1], 1)"),
    ("shapes", "no chunk and whole", _JOIN, "add_chunks([%linear_chunk0, %linear_chunk1])"),
    ("chunks", "are in dimension -1", _ADD, "join_chunks([%getitem_6_chunk0, %getitem_6_chunk1], 0)"),
    ("chunks", "%getitem_6_chunk0 is not chunk 1 of 2", _ADD, _ADD.replace("chunk1]", "chunk0]")),
    ("chunks", "is not chunk 1 of 2 of the rows", _TAKE, "take_chunk(%dropout_1, 0, %b, 1, 2)"),
    ("chunks", "there is no chunk 2 of 2", _TAKE, "take_chunk(%dropout_1, 0, %b, 2, 2)"),
    ("chunks", "is not chunk 0 of 3 of the rows", _TAKE, "take_chunk(%dropout_1, 0, %b, 0, 3)"),
    ("chunks", "%s is not the number of rows b", _TAKE, "take_chunk(%dropout_1, 0, %s, 0, 2)"),
    ("shapes", "no chunk and whole", _TAKE, "take_chunk(%dropout_1, 1, %b, 0, 2)"),
    ("shapes", "the note and its layout give", f"{_TAKE} : f64[floor(b/2)", f"{_TAKE} : f64[b - floor(b/2)"),
    ("chunks", "takes a chunk of a chunk", _TAKE, "take_chunk(%dropout_chunk0, 0, %b, 0, 2)"),
    ("chunks", "is computed in another way", _TAKE, "take_chunk(%tanh_1, 0, %b, 0, 2)"),
    (
        *("shapes", "the note and its layout give"),
        *("add.Tensor(%linear_1_reduce_from_chunk0", "add.Tensor(%linear_1_reduce_from_chunk1"),
    ),
    (
        *("shapes", "the note and its layout give"),
        *("add.Tensor(%embedding_reduce_from_chunk0", "add.Tensor(%embedding_reduce_from_chunk1"),
    ),
    (
        *("types", "operands meet P"),
        *("layer_norm.default(%embedding_reduce_from_chunk0", "layer_norm.default(%embedding_chunk0"),
    ),
    ("chunks", "is computed in another way", "(%dropout_chunk1, %down_0_weight", "(%dropout_chunk1, %down_1_weight"),
    ("chunks", "is returned, one chunk alone", "logits=%linear_4,", "logits=%linear_4_chunk1,"),
]
_ATTENTIVE: list[tuple[str, str, str, str]] = [
    ("chunks", "is computed in another way", f"{_TANH}0", f"{_TANH}0".replace("tanh", "linear_4_bias")),
    ("step", "is not the gradient", _TANH, _TANH.replace("tanh", "linear_4_bias")),
    ("chunks", "is computed in another way", f"{_TANH_BACKWARD}1", "aten.mm.default(%mm_3_chunk1"),
    ("step", "is not the gradient", _TANH_BACKWARD, "aten.mm.default(%mm_3_chunk"),
    ("chunks", "reads two chunks", "%transpose_chunk1, %transpose_1_chunk1", "%transpose_chunk1, %transpose_1_chunk0"),
    ("chunks", "is not chunk 0 of 2", _ATTENDED, "join_chunks([%getitem_3_chunk1, %getitem_3_chunk0], 0)"),
    ("shapes", "is 2 on a rank", _SIZE, "chunk_size(%b, 1, 1, 2)"),
    ("shapes", "on a rank", _SIZE, "chunk_size(%b, 1, 0, 3)"),
    ("shapes", "is 0 on a rank", _SIZE, "chunk_size(%b, 2, 0, 2)"),
    ("shapes", "is 3 on a rank", _SIZE, "chunk_size(%s, 1, 0, 2)"),
]


@pytest.mark.parametrize(
    ("name", "edit"),
    [*(("small", edit) for edit in _SMALL), *(("attentive", edit) for edit in _ATTENTIVE)],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_an_edit_is_rejected_by_the_check_that_is_for_it(name: str, edit: tuple[str, str, str, str]) -> None:
    """Of three rows; and of four, whose chunks have equal shapes."""
    check, reason, old, new = edit
    assert old in step(name, 3)
    edited = step(name, 3).replace(old, new)
    assert re.match(rf"{check}: .*{re.escape(reason)}", rejection(parse_program(edited)))
    assert rejection(parse_program(step(name, 4).replace(old, new)))


def test_a_size_is_of_as_many_groups_of_rows_as_it_says() -> None:
    """Where the example's rows are even, shapes are the same."""
    edited = step("attentive", 4).replace(_SIZE, "chunk_size(%b, 2, 0, 2)")
    with pytest.raises(CheckFailed, match=r"%b_chunk0: b is not 2 times the rows b"):
        check_chunks(parse_program(edited))


# ---------------------------------------------------------------------- operations on chunks

_HEAD = """\
fxpar 2
plan {"tp": 2}
properties canonical collectives layouts local
symbol b = x.0 like 4
symbol s = x.1 like 6
%x = input["x"] : f32[b, s, 8] tp:R
%rng = input["fxpar.rng"] : i64[3] tp:R
%b = aten.sym_size.int(%x, 0) : b
%s = aten.sym_size.int(%x, 1) : s
"""
_ROWS = ("floor(b/2)", "b - floor(b/2)")


def on_chunks(operation: str, kind: str, together: str, shape: str = "b, s, 8") -> Program:
    """An operation on each of two chunks of `x`, and what puts them together.

    Args:
        operation: of `X`, a chunk with `N` rows.
        kind: of each result, of `N` rows.
    """
    lines = [f"%n{i} = fxpar.chunk_size(%b, 1, {i}, 2) : {rows}" for i, rows in enumerate(_ROWS)]
    lines += [f"%x{i} = fxpar.take_chunk(%x, 0, %b, {i}, 2) : f32[{n}, s, 8] tp:R" for i, n in enumerate(_ROWS)]
    for i, rows in enumerate(_ROWS):
        called = operation.replace("X", f"%x{i}").replace("N", f"%n{i}")
        lines.append(f"%y{i} = {called} : {kind.replace('N', rows)}")
    lines += [f"%y = fxpar.{together} : f32[{shape}] tp:R", "return y=%y"]
    return parse_program(_HEAD + "\n".join(lines) + "\n")


_WHOLE = "f32[N, s, 8] tp:R"
_JOINED, _ADDED = "join_chunks([%y0, %y1], 0)", "add_chunks([%y0, %y1])"


@pytest.mark.parametrize(
    "program",
    [
        on_chunks("aten.relu.default(X)", _WHOLE, _JOINED),
        on_chunks("aten.cumsum.default(X, 1)", _WHOLE, _JOINED),
        on_chunks("aten._softmax.default(X, 2, False)", _WHOLE, _JOINED),
        on_chunks("aten.transpose.int(X, 0, 1)", "f32[s, N, 8] tp:R", "join_chunks([%y0, %y1], 1)", "s, b, 8"),
        on_chunks("aten.view.default(X, [N, %s, 2, 4])", "f32[N, s, 2, 4] tp:R", _JOINED, "b, s, 2, 4"),
        on_chunks("aten.scaled_dot_product_attention.default(X, X, X)", _WHOLE, _JOINED),
    ],
    ids=["relu", "cumsum", "softmax", "transpose", "view", "attention of rows"],
)
def test_what_treats_rows_apart_is_accepted(program: Program) -> None:
    check_chunks(program)


@pytest.mark.parametrize(
    "program",
    [
        on_chunks("aten.cumsum.default(X, 0)", _WHOLE, _JOINED),
        on_chunks("aten.flip.default(X, [0])", _WHOLE, _JOINED),
        on_chunks("aten.roll.default(X, [1], [0])", _WHOLE, _JOINED),
        on_chunks("aten._softmax.default(X, 0, False)", _WHOLE, _JOINED),
        on_chunks("aten.mul.Tensor(X, N)", _WHOLE, _JOINED),
        on_chunks("aten.repeat.default(X, [2, 1, 1])", "f32[2*(N), s, 8] tp:R", _JOINED, "2*b, s, 8"),
        on_chunks("fxpar.dropout(X, %rng, 0.4, [])", f"{_WHOLE} {{random=7}}", _JOINED),
        on_chunks("aten.mean.dim(X, [0])", "f32[s, 8] tp:R", _ADDED, "s, 8"),
        on_chunks("aten.amax.default(X, [0])", "f32[s, 8] tp:R", _ADDED, "s, 8"),
    ],
    ids=["cumsum", "flip", "roll", "softmax", "number of rows", "repeated rows", "draws", "mean", "maximum"],
)
def test_what_does_not_treat_rows_apart_is_rejected(program: Program) -> None:
    with pytest.raises(CheckFailed, match=r"^%y0: is computed in chunks of rows, which it does not treat apart; join_"):
        check_chunks(program)


def test_attention_in_chunks_of_its_tokens_is_rejected() -> None:
    """The rows of the batch are the tokens of one sequence here."""
    turn = "".join(
        f"%t{i} = aten.unsqueeze.default(%x{i}, 0) : f32[1, {rows}, s, 8] tp:R\n"
        f"%u{i} = aten.transpose.int(%t{i}, 1, 2) : f32[1, s, {rows}, 8] tp:R\n"
        f"%y{i} = aten.scaled_dot_product_attention.default(%u{i}, %u{i}, %u{i}) : f32[1, s, {rows}, 8] tp:R\n"
        for i, rows in enumerate(_ROWS)
    )
    taken = "".join(
        f"%x{i} = fxpar.take_chunk(%x, 0, %b, {i}, 2) : f32[{rows}, s, 8] tp:R\n" for i, rows in enumerate(_ROWS)
    )
    end = "%y = fxpar.join_chunks([%y0, %y1], 2) : f32[1, s, b, 8] tp:R\nreturn y=%y\n"
    with pytest.raises(CheckFailed, match=r"^%y0: is computed in chunks of rows"):
        check_chunks(parse_program(_HEAD + taken + turn + end))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("join_chunks([%y0, %y1], 0)", "join_chunks([%y0, %y1], 1)", "%y: the rows of %y0 are in dimension 0"),
        ("join_chunks([%y0, %y1], 0)", "join_chunks([], 0)", "%y: puts no chunks together; name all chunks"),
        ("relu.default(%x0)", "add.Tensor(%x0, %x1)", "%y0: reads two chunks; read one, or join_chunks of all"),
        ("y=%y", "y=%x0", "%x0: is returned, one chunk alone; join_chunks of all"),
    ],
)
def test_chunks_that_are_not_put_together(old: str, new: str, message: str) -> None:
    text = print_program(on_chunks("aten.relu.default(X)", _WHOLE, _JOINED))
    with pytest.raises(CheckFailed, match=f"^{re.escape(message)}"):
        check_chunks(parse_program(text.replace(old, new)))
