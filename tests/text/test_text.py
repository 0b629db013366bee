"""The text form: a printed program is parsed to the same program, and what has no text form is not printed."""

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.errors import TextError
from fxpar.ir.program import PassRecord, note
from fxpar.layout.layout import I, Layout, Piece, Placement, shard
from fxpar.layout.symbolic_sizes import Size, parse_size, simplify, symbol
from fxpar.text.parsing import parse_program
from fxpar.text.printing import layout_text, print_program, value_text
from fxpar.text.scanning import parse_layout
from tests.text.programs import MLP, PROGRAMS, Builder, aten, b, f32, mlp, s, tp

TEXTS = {name: print_program(build()) for name, build in PROGRAMS.items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and str(a) == str(b)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_printed_program_is_parsed_to_the_same_program(name: str) -> None:
    program = PROGRAMS[name]()
    again = parse_program(print_program(program))
    assert print_program(again) == print_program(program)
    for field in ("parameters", "inputs", "outputs", "symbols", "plan", "properties", "loss", "history"):
        assert getattr(again, field) == getattr(program, field)
    assert list(again.constants) == list(program.constants)
    assert all(same(again.constants[k], value) for k, value in program.constants.items())
    for left, right in zip(again.graph.nodes, program.graph.nodes, strict=True):
        assert (left.name, left.op) == (right.name, right.op)
        assert value_text(list(left.args)) == value_text(list(right.args))
        if left.op != "output":
            assert note(left) == note(right)
            assert left.op == "placeholder" or left.target is right.target
            assert list(left.kwargs) == list(right.kwargs)
    again.graph.lint()
    assert print_program(again.copy()) == print_program(program)


def test_the_text_of_a_program_is_as_documented() -> None:
    assert TEXTS["mlp"] == MLP


def test_a_history_is_not_in_the_text() -> None:
    program = mlp().with_(history=(PassRecord("annotate", 0.1, ("a",), (), ()),))
    assert print_program(program) == MLP
    assert parse_program(MLP).history == ()


def test_shards_are_printed_with_their_runs() -> None:
    lines = {line.split(" = ")[0][1:]: line for line in TEXTS["layouts"].splitlines()}
    assert "tp:S(1) {" in lines["factor"]
    assert "tp:S(1: 3 x 96)" in lines["thirds"]
    assert "tp:S(1: 192 | 48 | !48)" in lines["segments"]
    assert "tp:S(0: b*s x 96)" in lines["flat"]
    assert "tp:S(1: 576)" in lines["global_run"]
    assert "(f32[b, 288] tp:S(1: 3 x 96); f32[2] tp:R)" in lines["split"]
    assert "tp:S(1: 192 | 48 | !48)→S(0)" in lines["all_to_all"]


def test_blank_lines_comments_and_spaces_are_ignored() -> None:
    noisy = MLP.replace("\n", "  \n\n# note\n\t").replace("tp:S(2: 3 x 32)", " tp:S(2:  3 x 32)")
    assert print_program(parse_program("# first\n" + noisy)) == MLP


def test_a_coercion_may_leave_its_source_unsaid() -> None:
    assert print_program(parse_program(MLP.replace("tp:P→I", "tp:I"))) == MLP


def test_new_nodes_get_names_that_are_free() -> None:
    program = parse_program(TEXTS["literals"])
    made = [
        program.graph.create_node("call_function", operator.neg, (1,), name=n.name) for n in list(program.graph.nodes)
    ]
    assert len({node.name for node in program.graph.nodes}) == len(program.graph.nodes)
    assert len(made) > 10


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp", "cp")])
def test_layouts_of_several_axes_are_parsed_in_their_order(axes: Sequence[str]) -> None:
    kinds = [Placement("S", 1, (Piece(3, 96), Piece(sympy.Max(b, s), 2, False))), I, shard(0, s)]
    layout = Layout.of(dict(zip(axes, kinds, strict=False)))
    sizes = dict.fromkeys(axes, 2)
    text = layout_text(layout, (s, 288), sizes)
    assert text.startswith(f"{axes[0]}:S(1: 3 x 96 | !Max(b, s) x 2) {axes[1]}:I")
    assert parse_layout(text, (s, 288), sizes) == layout


SIZES = st.recursive(
    st.integers(0, 99) | st.sampled_from([b, s, symbol("u0")]),
    lambda inner: st.one_of(
        st.builds(operator.add, inner, inner),
        st.builds(operator.sub, inner, inner),
        st.builds(operator.mul, inner, inner),
        st.builds(lambda a, n: sympy.floor(sympy.sympify(a) / n), inner, st.integers(1, 9)),
        st.builds(lambda a, n: sympy.Mod(a, n), inner, st.integers(1, 9)),
        st.builds(sympy.Max, inner, inner),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, database=None)
@given(SIZES)
def test_sizes_are_parsed_to_what_was_printed(size: Size) -> None:
    size = simplify(sympy.sympify(size))
    assert parse_size(str(size)) == size


NO_INTEGER = ["1/2", "b/0", "5 % 0", "Mod(5, b - b)", "2**3", "b**9", "b**s", "b**-1", "(b**3)**3", "True", "1.5"]
TOO_MANY_TERMS = ["*".join(f"({a} + {a}2)" for a in "bcdefghij"), "(b + c + d + e + f + g)**8"]
NO_ARITHMETIC = ["", "Max()", "Max(b, s=3)", "Mod(b)", "b.c", "b[0]", "f(b)", "'b'", "1if", "ß", "(b", "\0", "-" * 401]


@pytest.mark.parametrize("text", [*NO_INTEGER, *NO_ARITHMETIC, *TOO_MANY_TERMS])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(TextError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("value", [torch.float8_e4m3fn, object(), {"a": 1}, slice(1)])
def test_values_without_a_text_form_are_not_printed(value: Any) -> None:
    with pytest.raises(TextError, match="has no text form"):
        value_text(value)


@pytest.mark.parametrize("target", [torch.relu, torch.nn.functional.relu, operator.truth, print])
def test_targets_that_could_not_be_parsed_are_not_printed(target: Any) -> None:
    build = Builder()
    build.node("called", target, 1)
    with pytest.raises(TextError, match=r"%called: the target .* has no text form"):
        print_program(build.program({}))


@pytest.mark.parametrize("kept", [{"type": (f32(), f32()), "layout": (tp(I),)}, {"needs": (tp(I),)}])
def test_a_note_of_the_wrong_arity_is_not_printed(kept: dict[str, Any]) -> None:
    build = Builder()
    build.node("called", aten.neg.default, 1, **kept)
    with pytest.raises(TextError, match=r"%called: \d (outputs|operands) have 1"):
        print_program(build.program({}))
