"""Which stages of a pipeline a rank holds, and in what order it runs them.

Enters: a plan. Leaves: its schedule, verified. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path

from fxpar.errors import ScheduleError
from fxpar.pipeline.compiler.builtin_schedules import SCHEDULES, build_schedule
from fxpar.pipeline.compiler.schedules import Schedule, read_schedule
from fxpar.pipeline.compiler.simulation import verified
from fxpar.plan.plan import Plan


def schedule_of(plan: Plan, microbatches: int) -> Schedule:
    """The plan's schedule of a step of so many microbatches; one that does not run is refused.

    Raises:
        ScheduleError: there is none for them, or it does not run.
    """
    name = plan.schedule or ("1f1b" if plan.virtual_stages == 1 else "interleaved_1f1b")
    sizes = {"pp": plan.pp, "virtual_stages": plan.virtual_stages, "microbatches": microbatches}
    is_named = name in SCHEDULES
    schedule = (
        build_schedule(name, **sizes, group_size=plan.group_size) if is_named else read_schedule(Path(name), **sizes)
    )
    if schedule.forward_only:
        remedy = "choose one that trains; plain calls run forwards alone under any"
        raise ScheduleError("has no backward, and a step would train nothing", where=f"schedule {name}", remedy=remedy)
    return verified(schedule).schedule


def rank_of(plan: Plan) -> tuple[int, ...]:
    """Of each stage of a pipeline the place of the rank that holds it."""
    return schedule_of(plan, plan.microbatches).rank_of


def own_stages(plan: Plan, place: int) -> tuple[int, ...]:
    """The stages of the rank at a place of the pipeline, in order; none without a pipeline."""
    if plan.pp == 1:
        return ()
    return schedule_of(plan, plan.microbatches).stages_of(place)
