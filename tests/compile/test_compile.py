"""One sentence for all callers: what is proved and what runs are put together alike."""

from __future__ import annotations

import fxpar
from fxpar.compile import compile_model, compile_program, lower_program
from fxpar.ops.process_group import Group
from fxpar.passes import DEFAULT_PASSES
from fxpar.text.printing import print_program
from fxpar.verification import verify
from tests.runtime import models

PLAN = fxpar.Plan(tp=2)


def test_what_is_proved_is_what_is_compiled() -> None:
    compiled = compile_model(models.tiny(), models.batch(), PLAN)
    proved = verify(models.tiny(), models.batch(), PLAN, level="static").program
    assert print_program(proved) == print_program(compiled.program)


def test_a_review_settles_what_the_passes_see() -> None:
    compiled = compile_model(models.tiny(), models.batch(), PLAN, review=lambda found: found)
    assert compiled.captured.program.history == ()
    wanted = [item.name for item in DEFAULT_PASSES if item.when(compiled.program)]
    assert [record.name for record in compiled.program.history] == wanted


def test_a_compiled_program_is_lowered_without_processes() -> None:
    program = compile_program(compile_model(models.tiny(), models.batch(), PLAN).captured.program)
    lowered = lower_program(program, {axis: Group(axis, n) for axis, n in program.axes.items()})
    assert lowered.outputs == tuple(program.outputs)
