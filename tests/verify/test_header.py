"""What a text says of itself is checked: a line of its header must not switch a check off."""

from __future__ import annotations

import pytest

from fxpar.errors import CheckFailed, LayoutError
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import STATIC, verify_static
from tests.verify.cases import prepared, program, sequence_text

PROPERTIES = "properties canonical collectives layouts local rng vocabulary"

# Header lines that do not hold of the sequence-parallel program, and what the check says of them.
WRONG = (
    (
        PROPERTIES,
        "properties canonical local",
        "property local: holds without collectives, rng, vocabulary, on which it rests",
    ),
    (
        PROPERTIES,
        "properties canonical collectives local rng vocabulary",
        "property collectives: holds without layouts",
    ),
    (PROPERTIES, "properties canonical collectives layouts local vocabulary", "property local: holds without rng"),
    (PROPERTIES, "properties canonical collectives layouts local rng", "property local: holds without vocabulary"),
    (PROPERTIES, "properties collectives layouts", "property layouts: holds without canonical"),
    (PROPERTIES, "properties canonical layouts", "%tp_index: is there, but the program does not have"),
    (PROPERTIES, "properties canonical collectives layouts", "%tp_index: is there, but the program does not have"),
    (PROPERTIES, "properties canonical", "%position: is there, but the program does not have the property layouts"),
    ("symbol b = x.0 like 3", "symbol b = x.1 like 3", "symbol b: the size x.1 is 16"),
    ("symbol b = x.0 like 3", "symbol b = x.7 like 3", "symbol b: no input has the size x.7"),
    ("symbol b = x.0 like 3", "symbol b = y.0 like 3", "symbol b: no input has the size y.0"),
    ("symbol b = x.0 like 3", "symbol b = x.0 like 3\nsymbol z = x.0 like 5", "symbol z: the size x.0 is b"),
    ("symbol b = x.0 like 3", "symbol b = x.0 like 0", "symbol b: the example has the size 0"),
)


@pytest.mark.parametrize(("old", "new", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_header_that_does_not_hold_is_refused(old: str, new: str, message: str) -> None:
    text = sequence_text(2)
    assert old in text
    with pytest.raises(CheckFailed) as error:
        verify_static(parse_program(text.replace(f"{old}\n", f"{new}\n")))
    assert str(error.value).startswith(message)


def test_each_check_runs_where_it_says_something() -> None:
    names = {item.name for item in STATIC}
    assert verify_static(prepared("tail").captured) == ("header", "structure", "operations", "shapes")
    assert verify_static(program("tail", 2, "annotate")) == ("header", "structure", "operations", "choice", "shapes")
    assert verify_static(program("tail", 2)) == ("header", "structure", "operations", "types", "shapes")
    assert names == {
        "header",
        "structure",
        "operations",
        "choice",
        "types",
        "shapes",
        "stages",
        "chunks",
        "buffers",
        "step",
    }


def test_a_loss_that_carries_no_gradient_is_refused() -> None:
    text = sequence_text(2).replace(
        "return loss=%loss", "%cut = aten.detach.default(%loss) : f32[] tp:R\nreturn loss=%cut"
    )
    with pytest.raises(CheckFailed, match="loss loss = %cut: carries no gradient to any parameter"):
        verify_static(parse_program(text))


def test_an_output_with_a_whole_segment_is_refused() -> None:
    """Its part that every rank holds would get a gradient that nothing sums."""
    text = """fxpar 2
plan {"tp": 2}
properties canonical collectives layouts local rng vocabulary
%w = parameter["w"] : f32[4, 3] tp:S(0)
%v = parameter["v"] : f32[2, 3] tp:I
%v_here = fxpar.copy_to[tp](%v) : f32[2, 3] tp:R
%both = aten.cat.default([%w, %v_here]) : f32[6, 3] tp:S(0: 4 | !2)
return both=%both
"""
    with pytest.raises((CheckFailed, LayoutError), match="elements that several ranks hold: nothing would sum"):
        verify_static(parse_program(text))


def test_a_size_beyond_64_bits_is_one_error() -> None:
    text = print_program(program("tail", 2)).replace(
        "f32[b, 16, 40] tp:S(2)", "f32[b, 16, 99999999999999999999] tp:S(2)"
    )
    with pytest.raises((CheckFailed, LayoutError)) as error:
        verify_static(parse_program(text))
    assert "\n" not in str(error.value)
