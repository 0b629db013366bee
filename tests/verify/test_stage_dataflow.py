"""Mutants of a pipeline's text are rejected statically: of stages, of transfers, of what is received and held."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from fxpar.errors import CheckFailed, FxparError
from fxpar.ir.program import Program
from fxpar.ir.stages import Stage, stages_of
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Pipeline
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import check_neighbours, verify_static
from tests.passes.pipelines import compared, staged
from tests.verify.lines import Line, Source

OPTIONS: dict[str, Any] = {"tied": True, "skip": True, "tables": True}
_STAGE = re.compile(r"stage=([\d+]+)")


@cache
def program() -> Program:
    """Four stages on two tensor ranks: a tied table, a residual that three cuts pass on, masks of each stage's own."""
    return staged(Plan(tp=2, pp=4, pipeline=Pipeline({"layers.1": 1, "layers.2": 2, "layers.3": 3})), **OPTIONS)


@cache
def source() -> Source:
    return Source.of(print_program(program()))


def line(name: str) -> Line:
    """The line of a node."""
    return next(node for node in source().nodes if node.name == name)


def find(pattern: str, stage: int | None = None) -> Line:
    """The first line whose operation has the pattern, of a stage."""
    return next(
        node for node in source().nodes if re.search(pattern, node.head) and stage in (None, *stages_of_line(node))
    )


def stages_of_line(node: Line) -> tuple[int, ...]:
    found = _STAGE.search(node.rest)
    return tuple(map(int, found[1].split("+"))) if found else ()


def on(node: Line, stages: str) -> Line:
    """The line with another note of stages, of none where it is empty."""
    if stages:
        return replace(node, rest=_STAGE.sub(f"stage={stages}", node.rest))
    return replace(node, rest=re.sub(r"(, )?stage=[\d+]+", "", node.rest).replace(" {}", ""))


def rejected(text: Source) -> str:
    """Why the static checks reject a text."""
    with pytest.raises(FxparError) as caught:
        verify_static(parse_program(str(text)))
    return str(caught.value)


def swapped(old: Line, *new: Line) -> Source:
    return source().edited((old, list(new)))


def test_the_text_itself_is_right() -> None:
    assert "stages" in verify_static(parse_program(str(source())))
    assert compared(program(), **OPTIONS).ok


def test_a_parameter_that_a_stage_reads_and_does_not_hold() -> None:
    """Its gradient would not be summed with that of the other stage."""
    table = line("words_weight")
    assert stages_of_line(table) == (0, 3)
    for stages, node in (("0", "linear_8"), ("3", "embedding"), ("0+2", "linear_8")):
        reason = rejected(swapped(table, on(table, stages)))
        assert f"%{node} (" in reason
        assert "does not hold, so that its gradient of it is not summed" in reason
    assert "words.weight: is held by 0+1+3 and read by 0+3" in rejected(swapped(table, on(table, "0+1+3")))
    buffer = line("frequencies")
    assert "which stage 0 does not hold; note stage 0" in rejected(swapped(buffer, on(buffer, "")))


def test_a_value_that_a_stage_never_gets() -> None:
    received = find(r"transfer\(%add_1\)|transfer\(%mul", 1)
    operand = received.head.partition("%")[2].rstrip(")")
    reason = rejected(swapped(received).redirected(received.name, operand))
    assert f"reads %{operand} of stage 0, which stage 1 never gets" in reason
    assert "put fxpar.transfer on each cut between stages 0 and 1" in reason


def passed_on() -> tuple[Line, Line, Line]:
    """The transfers of the long residual."""
    first, second, third = (find(r"transfer\(%add_reduce_from", stage) for stage in (1, 2, 3))
    assert second.head == f"fxpar.transfer(%{first.name})"
    return first, second, third


def test_a_transfer_that_skips_a_stage() -> None:
    first, second, third = passed_on()
    skipping = replace(third, head=f"fxpar.transfer(%{first.name})")
    reason = rejected(swapped(third, skipping))
    assert f"%{third.name} (" in reason
    assert "of stage 1 crosses the cut in front of stage 3: a stage receives of the one before alone" in reason
    assert "of stage 0 crosses the cut in front of stage 2" in rejected(
        swapped(second, replace(second, head=first.head))
    )


def test_a_transfer_that_is_there_twice() -> None:
    for node in passed_on():
        twin = replace(node, name=f"{node.name}_twin")
        reason = rejected(swapped(node, node, twin))
        assert f"%{twin.name} (" in reason
        assert f"crosses the cut in front of stage {stages_of_line(node)[0]} twice, as %{node.name} too" in reason


def test_a_transfer_of_another_stage() -> None:
    for node in passed_on():
        (stage,) = stages_of_line(node)
        for other in {0, 1, 2, 3} - {stage}:
            assert f"%{node.name} (" in rejected(swapped(node, on(node, str(other))))
    assert "is on 7 and not on one of 4 stages" in rejected(swapped(node, on(node, "7")))
    assert "is on none and not on one of 4 stages" in rejected(swapped(node, on(node, "")))
    assert "is on 2+3 and not on one of 4 stages" in rejected(swapped(node, on(node, "2+3")))


def test_a_transfer_of_an_input() -> None:
    received = replace(line("view_1"), name="labels_on_3", head="fxpar.transfer(%labels)", type=line("labels").type)
    reason = rejected(
        source()
        .edited((line("view_1"), [received, line("view_1")]))
        .redirected("labels", "labels_on_3", lambda node: isinstance(node, Line) and node.name == "view_1")
    )
    assert "%labels is no result of a stage, but crosses the cut in front of stage 3" in reason


def test_a_missing_f_behind_a_cut() -> None:
    """The operator whose backward sums the gradient over the tensor ranks; the node is named with its stage."""
    for stage in (1, 2, 3):
        f = find(r"copy_to\[tp\]", stage)
        assert f.coercion
        reason = rejected(swapped(f).redirected(f.name, f.coercion[1]))
        assert re.search(rf"%linear_\d \(.*, stage {stage}\)", reason)


def test_a_node_on_another_stage() -> None:
    layer = find("layer_norm", 2)
    for other in "013":
        assert "never gets" in rejected(swapped(layer, on(layer, other)))


def test_the_loss_on_another_stage_than_the_last() -> None:
    moved = Source(
        tuple(
            on(e, "2") if isinstance(e, Line) and stages_of_line(e) == (3,) and "(" in e.head else e
            for e in source().lines
        )
    )
    assert rejected(moved)


def without_gradient(stage: Stage) -> Stage:
    """The stage's program whose first value received is typed without its gradient."""
    text = print_program(stage.program)
    line = next(line for line in text.splitlines() if 'input["fxpar.received.' in line)
    return replace(stage, program=parse_program(text.replace(line, line.replace("(gradient)", ""))))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_received_value_typed_without_its_gradient(number: int) -> None:
    stages = stages_of(program())
    check_neighbours(stages)
    changed = [without_gradient(stage) if stage.number == number else stage for stage in stages]
    with pytest.raises(CheckFailed) as caught:
        check_neighbours(changed)
    assert str(caught.value).startswith(f"%{next(iter(stages[number].received.values()))} (")
    assert f"stage {number - 1} waits for its gradient, and behind the cut in front of stage {number}" in str(
        caught.value
    )


CHANGES: dict[str, Callable[[Stage], Stage]] = {
    "another layout": lambda stage: _typed(stage, "tp:I", "tp:R"),
    "another type": lambda stage: _typed(stage, "f32[b, s, 8]", "f32[b, s, 16]"),
    "another order": lambda stage: replace(stage, received=dict(reversed([*stage.received.items()]))),
}
REASONS = {
    "another layout": "is another type or layout than was sent, behind the cut in front of stage 1",
    "another type": "is another type or layout than was sent, behind the cut in front of stage 1",
    "another order": "what is sent and what is received differ at the cut in front of stage 1",
}


def _typed(stage: Stage, old: str, new: str) -> Stage:
    text = print_program(stage.program)
    line = next(line for line in text.splitlines() if 'input["fxpar.received.' in line)
    return replace(stage, program=parse_program(text.replace(line, line.replace(old, new))))


@pytest.mark.parametrize("change", CHANGES)
def test_neighbours_that_do_not_fit(change: str) -> None:
    first, second, *rest = stages_of(program())
    with pytest.raises(CheckFailed, match=REASONS[change]):
        check_neighbours([first, CHANGES[change](second), *rest])


def test_a_gradient_that_nobody_takes() -> None:
    first, *rest = stages_of(program())
    with pytest.raises(CheckFailed, match="its gradient goes nowhere, and behind the cut in front of stage 1 it has"):
        check_neighbours([replace(first, tangents=()), *rest])


def edits() -> Iterator[tuple[str, Source]]:
    """Each note of a stage as each other; each transfer of each other value but those that only values tell apart.

    Those are of the same type, on the stage before: the text is then another model's.
    """
    operations = [node for node in source().nodes if stages_of_line(node)]
    for node in operations:
        for other in range(4):
            if (other,) != stages_of_line(node):
                yield f"{node.name} on {other}", swapped(node, on(node, str(other)))
    before: list[Line] = []
    for node in source().nodes:
        if node.head.startswith("fxpar.transfer("):
            (stage,) = stages_of_line(node)
            for value in before:
                alike = value.type == node.type and stages_of_line(value) == (stage - 1,)
                if not alike:
                    changed = replace(node, head=f"fxpar.transfer(%{value.name})")
                    yield f"{node.name} of {value.name}", swapped(node, changed)
        before.append(node)


def _outcomes(chosen: list[tuple[str, Source]]) -> tuple[int, list[str]]:
    """How many are rejected, and which are accepted though values differ."""
    count, escaped = 0, []
    for what, text in chosen:
        try:
            found = parse_program(str(text))
            verify_static(found)
        except FxparError:
            count += 1
            continue
        if not compared(found, **OPTIONS).ok:
            escaped.append(what)
    return count, escaped


def test_mutants_of_stages_and_transfers_are_rejected() -> None:
    chosen = random.Random(0).sample(list(edits()), 60)
    count, escaped = _outcomes(chosen)
    assert not escaped
    assert count == len(chosen)


@pytest.mark.matrix
def test_all_mutants_of_stages_and_transfers_are_rejected() -> None:
    chosen = list(edits())
    count, escaped = _outcomes(chosen)
    print(f"{len(chosen)} mutants, {count} rejected")
    assert not escaped
