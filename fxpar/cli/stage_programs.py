"""Stages of a pipeline on the command line: which one is asked for, and the programs of one or all.

Enters: a program to start from. Leaves: the training step of each stage, or of the whole where there is no pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fxpar.cli.common_options import number_option
from fxpar.cli.output import Ui
from fxpar.errors import InputError
from fxpar.program.properties import Property

if TYPE_CHECKING:
    from fxpar.cli.files import Start
    from fxpar.manager import Pass
    from fxpar.program.program import Program
    from fxpar.program.stages import Stage

OfStage = Annotated[int | None, number_option("look at this stage of a pipeline alone, counted from 0")]


def is_pipeline(program: Program) -> bool:
    """Whether the program is, or will be, cut into stages: it is neither a step nor one of them."""
    from fxpar.program.stages import is_one_stage

    return program.plan.pipeline_stages > 1 and Property.STEP not in program.properties and not is_one_stage(program)


def check_stage(start: Start, of_stage: int | None, *, needed: bool = False) -> None:
    """Refuses a stage that is not there.

    Args:
        needed: whether the command looks at one stage at a time.

    Raises:
        InputError: there is no such stage, or one is needed and none was given.
    """
    count = start.program.plan.pipeline_stages
    if of_stage is None:
        if needed and is_pipeline(start.program):
            raise InputError(
                "a pipeline has a step for each of its stages",
                where=start.name,
                remedy=f"name one: --of-stage 0 to {count - 1}",
            )
        return
    where = f"--of-stage {of_stage}"
    if not is_pipeline(start.program):
        one = count > 1
        reason = "the text is of one stage already" if one else "the plan has no pipeline"
        raise InputError(reason, where=where, remedy="leave it out" if one else "leave it out, or give --pp N")
    if not 0 <= of_stage < count:
        raise InputError(f"the pipeline has {count} stages", where=where, remedy=f"give one from 0 to {count - 1}")


def step_passes_of(stage: Stage) -> list[Pass]:
    """The passes that make the step of a stage."""
    from fxpar.passes.training_passes import step_passes

    program = stage.program
    return step_passes(program.outputs, stage.tangents, [p.fqn for p in program.parameters if p.trainable])


def steps(ui: Ui, start: Start, of_stage: int | None) -> list[tuple[int | None, Program]]:
    """The training step, or that of each stage of a pipeline behind its number; calls of regions are written out.

    Args:
        of_stage: the only one that is wanted.
    """
    from fxpar.cli.files import run_passes
    from fxpar.passes import DEFAULT_PASSES
    from fxpar.passes.training_passes import STEP_PASSES
    from fxpar.program.regions import inlined
    from fxpar.program.stages import stages_of

    if not is_pipeline(start.program):
        program, _ = run_passes(ui, start, (*DEFAULT_PASSES, *STEP_PASSES))
        return [(None, inlined(program))]
    program, _ = run_passes(ui, start, DEFAULT_PASSES)
    stage_steps: list[tuple[int | None, Program]] = []
    for stage in stages_of(program):
        if of_stage in (None, stage.number):
            stage_start = dataclasses.replace(start, program=stage.program)
            step, _ = run_passes(ui, stage_start, step_passes_of(stage))
            stage_steps.append((stage.number, inlined(step)))
    return stage_steps


def run_stage(
    ui: Ui,
    start: Start,
    passes: Sequence[Pass],
    of_stage: int,
    *,
    step: bool,
    until: str | None,
    folder: Path | None,
    wanted: Sequence[str],
) -> tuple[Program, dict[str, str]]:
    """The program of a stage, or its step, and the texts after the passes in `wanted`.

    Args:
        passes: of the whole.
        step: whether the passes of the step run too, which the stage has of its own.
    """
    from fxpar.cli.files import run_passes
    from fxpar.passes.training_passes import STEP_PASSES
    from fxpar.program.stages import stages_of

    later = [item.name for item in STEP_PASSES]
    whole = [item for item in passes if item.name not in later]
    first = [name for name in wanted if name not in later]
    program, texts = run_passes(ui, start, whole, None if until in later else until, folder, first)
    if Property.STAGES not in program.properties:
        reason = "the program is not yet cut into stages"
        raise InputError(reason, where=f"--until {until}", remedy="leave out --of-stage")
    stage = stages_of(program)[of_stage]
    if not step:
        return stage.program, texts
    stage_start = dataclasses.replace(start, program=stage.program)
    last = len([item for item in whole if item.when(start.program)])
    step_only = [name for name in wanted if name in later]
    end = until if until in later else None
    program, more = run_passes(ui, stage_start, step_passes_of(stage), end, folder, step_only, last)
    return program, texts | more
