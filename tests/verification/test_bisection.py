"""Bisection: the pass at fault is named, wherever it stands and whether a static check or only values show it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

import fxpar
from fxpar.errors import CheckFailed, PassError
from fxpar.ir.program import Program, note, set_note
from fxpar.manager import Pass
from fxpar.ops.collectives import reduce_from
from fxpar.passes import DEFAULT_PASSES
from fxpar.verification import Bisection, Culprit, bisect, complete
from fxpar.verify.first_deviation import first_deviation
from tests.verify.cases import prepared, program

aten = torch.ops.aten

# How many passes run until the collectives stand.
INSERTED = [item.name for item in DEFAULT_PASSES].index("insert_collectives") + 1


def made(name: str, change: Callable[[Program], object], preserves: str = "values") -> Pass:
    """A pass that changes the program."""

    @fxpar.register_pass(name, preserves=preserves)
    def run(found: Program) -> Program:
        """Changes the program."""
        change(found)
        return found

    return run


def with_pass(item: Pass, behind: int) -> list[Pass]:
    """The default passes with one more behind the first `behind`."""
    return [*DEFAULT_PASSES[:behind], item, *DEFAULT_PASSES[behind:]]


def calls(found: Program, target: object) -> list[fx.Node]:
    return [node for node in found.graph.nodes if node.target is target]


def to_relu(found: Program) -> None:
    for node in calls(found, aten.gelu.default):
        node.target = aten.relu.default


def scale_loss(found: Program) -> None:
    """Another literal: no layout, shape or structure tells."""
    for node in calls(found, aten.mul.Tensor):
        if 0.001 in node.args:
            node.args = (node.args[0], 0.002)


def add_twice(found: Program) -> None:
    """An addition more."""
    gelu = calls(found, aten.gelu.default)[0]
    with found.graph.inserting_after(gelu):
        twice = found.graph.call_function(aten.add.Tensor, (gelu, gelu))
    set_note(twice, note(gelu))
    gelu.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)


def double_gradient(found: Program) -> None:
    """Adds a value that is zero and has a gradient: y + (y - detach(y))."""
    gelu = calls(found, aten.gelu.default)[0]
    users = list(gelu.users)
    with found.graph.inserting_before(gelu.next):
        apart = set_note(found.graph.call_function(aten.detach.default, (gelu,)), note(gelu))
        zero = set_note(found.graph.call_function(aten.sub.Tensor, (gelu, apart)), note(gelu))
        added = set_note(found.graph.call_function(aten.add.Tensor, (gelu, zero)), note(gelu))
    for user in users:
        user.replace_input_with(gelu, added)


def drop_reduction(found: Program) -> None:
    """What a bug in insert_collectives would do."""
    reduction = calls(found, reduce_from)[0]
    reduction.replace_all_uses_with(reduction.args[0])  # type: ignore[arg-type]
    found.graph.erase_node(reduction)


def refuse(found: Program) -> None:
    raise PassError("refuses", where="here")


def search(*passes: Pass) -> Bisection:
    """What bisection finds on the small model."""
    case = prepared("tail")
    return bisect(case.captured.with_(plan=case.case.plan(2)), passes, case.state, case.inputs)


def find(*passes: Pass) -> Culprit | None:
    """The first pass at fault on the small model."""
    return search(*passes).culprit


def test_right_passes_have_no_culprit_and_are_all_compared() -> None:
    found = search(*DEFAULT_PASSES)
    assert found.culprit is None
    assert (found.compared, found.untested) == (tuple(item.name for item in DEFAULT_PASSES), ())


@pytest.mark.parametrize(
    ("change", "behind"),
    [
        pytest.param(change, behind, marks=[] if behind % 4 == first else [pytest.mark.matrix])
        for first, change in enumerate((to_relu, scale_loss))
        for behind in range(len(DEFAULT_PASSES) + 1)
    ],
)
def test_values_find_the_pass_wherever_it_stands(change: Callable[[Program], None], behind: int) -> None:
    found = search(*with_pass(made("wrong", change), behind))
    culprit = found.culprit
    assert culprit is not None
    assert (culprit.name, culprit.error, found.untested) == ("wrong", None, ())
    assert culprit.report is not None
    assert not culprit.report.ok
    assert culprit.report.loss_error > 1e-6
    # The node that was changed, whatever was completed behind it; behind stages no node is looked for.
    wrong = calls(prepared("tail").captured, aten.gelu.default if change is to_relu else aten.mul.Tensor)
    assert culprit.first is not None
    assert culprit.first.node in {node.name for node in wrong}
    assert culprit.first.phase == "forward"
    assert culprit.first.deviation > 1e-6
    assert culprit.first.text.startswith(f"%{culprit.first.node} (")


@pytest.mark.parametrize("behind", [1, INSERTED])
def test_a_fault_of_the_backward_is_found_in_it(behind: int) -> None:
    culprit = find(*with_pass(made("wrong", double_gradient), behind))
    assert culprit is not None
    assert culprit.report is not None
    assert culprit.report.loss_error < 1e-10
    assert culprit.first is not None
    assert culprit.first.phase == "backward"
    gelu = calls(prepared("tail").captured, aten.gelu.default)[0]
    assert culprit.first.module == note(gelu).fqn


def test_programs_that_compute_the_same_have_no_first_node() -> None:
    case = prepared("tail")
    one = complete(program("tail", 2, "annotate"))
    assert one is not None
    assert first_deviation(one, program("tail", 2), case.state, case.inputs) is None


def test_the_first_of_two_wrong_passes_is_named() -> None:
    passes = with_pass(made("second", to_relu), 3)
    culprit = find(passes[0], made("first", add_twice), *passes[1:])
    assert culprit is not None
    assert culprit.name == "first"


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param(behind, marks=[] if behind in (INSERTED, len(DEFAULT_PASSES)) else [pytest.mark.matrix])
        for behind in range(INSERTED, len(DEFAULT_PASSES) + 1)
    ],
)
def test_what_a_static_check_sees_needs_no_values(behind: int) -> None:
    culprit = find(*with_pass(made("wrong", drop_reduction), behind))
    assert culprit is not None
    assert (culprit.name, culprit.report) == ("wrong", None)
    assert isinstance(culprit.error, CheckFailed | fxpar.errors.LayoutError)
    assert "insert fxpar.reduce_from[tp]" in str(culprit.error)


def test_a_pass_that_raises_is_the_culprit() -> None:
    culprit = find(*with_pass(made("raises", refuse), 1))
    assert culprit is not None
    assert culprit.name == "raises"
    assert isinstance(culprit.error, PassError)


def test_a_program_that_is_wrong_at_the_start_is_the_capture_s() -> None:
    case = prepared("tail")
    wrong = case.captured.copy()
    gelu = calls(wrong, aten.gelu.default)[0]
    gelu.replace_all_uses_with(calls(wrong, aten.layer_norm.default)[0])
    wrong.graph.erase_node(gelu)
    culprit = bisect(wrong, DEFAULT_PASSES, case.state, case.inputs).culprit
    assert culprit is not None
    assert culprit.name == "capture"
    assert isinstance(culprit.error, CheckFailed)


def test_a_pass_that_declares_to_change_values_is_no_culprit_and_what_follows_is_judged() -> None:
    free = made("free", to_relu, preserves="nothing")
    assert find(*with_pass(free, 1)) is None
    passes = with_pass(free, 1)
    culprit = find(*passes[:3], made("wrong", scale_loss), *passes[3:])
    assert culprit is not None
    assert culprit.name == "wrong"


def test_behind_a_pass_that_changes_a_split_program_static_checks_go_on() -> None:
    """Such a pass leaves nothing to compare with, which the result says; it is no proof that what follows is right."""
    free = made("free", to_relu, preserves="nothing")
    passes = with_pass(free, INSERTED)
    found = search(*passes)
    assert found.culprit is None
    assert found.compared == tuple(item.name for item in passes[:INSERTED])
    assert found.untested == tuple(item.name for item in passes[INSERTED + 1 :])
    wrong = made("wrong", drop_reduction)
    culprit = find(*passes[: INSERTED + 1], wrong, *passes[INSERTED + 1 :])
    assert culprit is not None
    assert culprit.name == "wrong"


def test_complete_runs_the_default_passes_that_are_missing() -> None:
    for until in (item.name for item in DEFAULT_PASSES):
        finished = complete(program("tail", 2, until))
        assert finished is not None
        assert finished.properties == program("tail", 2).properties
        assert prepared("tail").compare(finished).ok
    unplanned = prepared("tail").captured.with_(plan=fxpar.Plan(tp=2, split={"no_such_module": "row"}))
    assert complete(unplanned) is None
