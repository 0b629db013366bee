"""What `annotate` writes is checked before any coercion stands in the graph."""

from __future__ import annotations

import pytest

from fxpar.errors import CheckFailed, LayoutError
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import verify_static
from tests.verify.cases import program

# Wrong layouts and needs, and what the check says of them.
WRONG = (
    ("f32[b, 16, 40] tp:S(2) {needs=tp:R ; tp:S(0)", "f32[b, 16, 40] tp:I {needs=tp:R ; tp:S(0)", "the note says I"),
    ("f32[b, 16, 24] tp:P {needs=tp:S(2) ; tp:S(1)", "f32[b, 16, 24] tp:I {needs=tp:S(2) ; tp:S(1)", "the note says I"),
    ("{needs=tp:S(2) ; tp:S(1)", "{needs=tp:R ; tp:S(1)", "operand input is R where S(2) fits S(1) of weight"),
    ("{needs=tp:R ; tp:S(0), role", "{needs=tp:I ; tp:S(0), role", "invariant (I) operands meet S"),
    ("{needs=tp:S(2), origin", "{needs=tp:P, origin", "): on axis tp: needs %linear_bias as P"),
    ('"norm.weight"] : f32[24] tp:I', '"norm.weight"] : f32[24] tp:R', "a parameter cannot be R"),
    ('"target"] : f32[b, 16, 24] tp:R', '"target"] : f32[b, 16, 24] tp:S(1)', "an input cannot be S(1)"),
)


@pytest.mark.parametrize(("old", "new", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_choice_that_no_rule_allows_is_refused(old: str, new: str, message: str) -> None:
    text = print_program(program("tail", 2, "annotate"))
    assert old in text
    verify_static(parse_program(text))
    with pytest.raises((CheckFailed, LayoutError)) as error:
        verify_static(parse_program(text.replace(old, new)))
    assert message in str(error.value)


def test_needs_are_one_for_each_operand() -> None:
    found = program("tail", 2, "annotate").copy()
    node = found.node("linear_1_bias")
    kept = node.meta["custom"]["fxpar"]
    node.meta["custom"] = {"fxpar": type(kept)(**{**vars(kept), "needs": kept.needs[:1]})}
    with pytest.raises(CheckFailed, match="has 1 needs for 2 operands"):
        verify_static(found)
