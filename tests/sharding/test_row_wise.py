"""Operators without a rule where ranks have part of the rows: declared row-wise by the plan, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fxpar.capture.capture import capture
from fxpar.compile import compile_program
from fxpar.cost.reasons import without_rule
from fxpar.errors import LayoutError, PlanError
from fxpar.manager import PassManager
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Operators
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from fxpar.verify.static import verify_static
from tests.products import product
from tests.rowwise import BATCH, Model, Scan, opaque, scan

SCAN = "fxpar_rows.scan.default"


def through(function: Callable[..., Any]) -> Model:
    return Model(lambda h, w: function(h, w))


def layouts(program: Any, start: str) -> str:
    return next(line for line in print_program(program).splitlines() if line.startswith(start)).split("  #")[0]


@pytest.mark.parametrize(("function", "name"), [(scan, SCAN), (Scan.apply, "tests.rowwise.Scan")])
def test_without_a_declaration_the_refusal_says_what_to_write(function: Any, name: str) -> None:
    with pytest.raises(LayoutError, match=rf'on axis dp: .* declare it, Operators\(batchwise_ops=\("{name}",\)\)'):
        verify(through(function), BATCH, Plan(dp=2), level="static")


@product(
    plan=[Plan(dp=2), Plan(tp=2, dp=2), Plan(dp=4)], function__glob=[(scan, "fxpar_rows.*"), (Scan.apply, "*.Scan")]
)
def test_a_declared_operator_computes_its_rank_s_rows(function: Any, glob: str, plan: Plan) -> None:
    found = expect(verify(through(function), BATCH, plan.replace(operators=Operators(batchwise_ops=(glob,)))))
    line = layouts(found.program, "%scan")
    assert "f32[" in line
    assert "dp:S(0)" in line


def test_tokens_are_rows_too() -> None:
    model = Model(lambda h, w: scan(h.flatten(0, 1).unsqueeze(1), w).view(h.shape))
    assert verify(model, BATCH, Plan(tp=2, dp=2, operators=Operators(batchwise_ops=(SCAN,)))).ok


def test_an_operand_without_rows_gets_the_sum_of_all_rows() -> None:
    captured = capture(through(scan), BATCH, Plan(dp=2, operators=Operators(batchwise_ops=(SCAN,))))
    program = PassManager(DEFAULT_PASSES).run(captured.program, until="insert_collectives")
    assert "dp:I→R" in layouts(program, "%w_copy_to")


def test_rows_that_are_not_in_front_are_refused() -> None:
    model = Model(lambda h, w: scan(h.transpose(0, 1), w).transpose(0, 1))
    with pytest.raises(LayoutError, match=r"x is S\(1\), and the rows of a row-wise operator are dimension 0"):
        verify(model, BATCH, Plan(dp=2, operators=Operators(batchwise_ops=(SCAN,))), level="static")


@pytest.mark.parametrize(
    ("glob", "reason"),
    [("fxpar_rows.scam.*", "matches no operator"), ("aten.*", "names operators whose rules say what they do to rows")],
)
def test_a_glob_that_declares_nothing_is_an_error(glob: str, reason: str) -> None:
    plan = Plan(dp=2, operators=Operators(batchwise_ops=(SCAN, glob)))
    with pytest.raises(
        PlanError,
        match=rf"batchwise_ops: '{glob}'.*{reason}; operators without a rule are {SCAN}".replace("*", r"\*", 1),
    ):
        verify(through(scan), BATCH, plan, level="static")


def test_a_glob_says_nothing_of_operators_with_rules() -> None:
    model = Model(lambda h, w: scan(h, w).softmax(0))
    with pytest.raises(LayoutError, match=r"softmax.* on axis dp"):
        verify(model, BATCH, Plan(dp=2, operators=Operators(batchwise_ops=("*",))), level="static")


def test_a_text_is_believed_what_its_plan_says_alone() -> None:
    captured = capture(through(scan), BATCH, Plan(dp=2, operators=Operators(batchwise_ops=(SCAN,))))
    text = print_program(compile_program(captured.program))
    verify_static(parse_program(text))
    declared = f', "operators": {{"batchwise_ops": ["{SCAN}"]}}'
    assert declared in text
    bare = text.replace(declared, "")
    with pytest.raises(LayoutError, match=r"%scan .*on axis dp: no rule says how the operation treats shards"):
        verify_static(parse_program(bare))


def test_the_report_says_that_it_has_part_of_the_rows() -> None:
    program = compile_program(
        capture(through(scan), BATCH, Plan(tp=2, dp=2, operators=Operators(batchwise_ops=(SCAN,)))).program
    )
    assert without_rule(program) == [f"{SCAN} (of its rank's rows, as batchwise_ops says)"]
    apart = compile_program(
        capture(through(scan), BATCH, Plan(dp=2, operators=Operators(batchwise_ops=(SCAN,)))).program
    )
    assert without_rule(apart) == []
    whole = compile_program(capture(through(scan), BATCH, Plan(tp=2)).program)
    assert without_rule(whole) == [SCAN]


def test_what_is_made_of_parameters_alone_needs_no_declaration() -> None:
    """Its backward is not known to be linear, so it gets the gradient of all rows."""
    assert verify(Model(lambda h, w: h * opaque(w)), BATCH, Plan(tp=2, dp=2)).ok
