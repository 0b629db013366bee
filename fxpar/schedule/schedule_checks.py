"""What can be said of a schedule without running it: each rank has each action that is its own once, in a legal order.

Enters: a schedule. Leaves: nothing, or the first fault with rank and position. Needs no torch.
"""

from __future__ import annotations

from fxpar.errors import ScheduleError, shown
from fxpar.schedule.actions import MEANING, Action, Phase
from fxpar.schedule.limits import refuse_many
from fxpar.schedule.pipeline_schedule import Schedule

F, B, I, W = Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT  # noqa: E741


# Where each action of a rank stands.
_Positions = dict[tuple[int, Phase, int], int]


def place(rank: int, position: int, action: Action) -> str:
    """Where an action stands: positions count from 0, idle time left out."""
    return f"rank {rank}, position {position} ({action})"


def check_structure(schedule: Schedule) -> None:
    """Checks each rank by itself.

    Raises:
        ScheduleError: an action names a stage or microbatch that there is not, or stands on a rank that does not hold
            the stage, or twice, or beside one that says the same; an action is missing; or a rank has an action before
            another that it needs and that the rank itself runs.
    """
    if not (schedule.pp and schedule.virtual_stages > 0 and schedule.microbatches > 0):
        raise ScheduleError("holds no action", where="schedule", remedy="give ranks, stages and microbatches")
    refuse_many(schedule.pp, schedule.virtual_stages, schedule.microbatches, "schedule")
    positions = [_positions(schedule, rank) for rank in range(schedule.pp)]
    for rank, of_rank in enumerate(positions):
        _check_complete(schedule, rank, of_rank)
    for rank, of_rank in enumerate(positions):
        _check_order(schedule, rank, of_rank)


def _positions(schedule: Schedule, rank: int) -> _Positions:
    """Where each action of a rank stands."""
    stages, microbatches, rank_of = schedule.stages, schedule.microbatches, schedule.rank_of
    positions: _Positions = {}
    for position, action in enumerate(schedule.ranks[rank]):
        stage, phase, microbatch = action
        if not isinstance(phase, Phase):  # a plain "F" is equal to a phase, and none by identity
            reason = f"{shown(phase)} is no phase"
            raise ScheduleError(reason, where=place(rank, position, action), remedy="make actions with Phase")
        if not (0 <= stage < stages and 0 <= microbatch < microbatches):
            what, number, count = (
                ("microbatch", microbatch, microbatches) if 0 <= stage < stages else ("stage", stage, stages)
            )
            raise ScheduleError(
                f"there is no {what} {number}: there are {count}, from 0 on",
                where=place(rank, position, action),
                remedy=f"take it out, or ask for more {'microbatches' if what == 'microbatch' else 'stages'}",
            )
        if rank_of[stage] != rank:
            rank_stages = ", ".join(map(str, schedule.stages_of(rank)))
            raise ScheduleError(
                f"stage {stage} is on rank {rank_of[stage]}; rank {rank} holds {rank_stages}",
                where=place(rank, position, action),
                remedy=f"move it to rank {rank_of[stage]}, or write another stage",
            )
        if positions.setdefault(action, position) != position:
            raise ScheduleError(
                f"runs a second time, after position {positions[action]}",
                where=place(rank, position, action),
                remedy="take one of the two out",
            )
    return positions


def _check_complete(schedule: Schedule, rank: int, positions: _Positions) -> None:
    """Each stage runs each microbatch forward and, in training, backward, whole or in its two parts."""
    every = [(stage, mb) for stage in schedule.stages_of(rank) for mb in range(schedule.microbatches)]
    for stage, mb in every:
        if (stage, F, mb) not in positions:
            raise _missing(rank, Action(stage, F, mb))
    for stage, mb in () if schedule.forward_only else every:
        whole, parts = Action(stage, B, mb), [Action(stage, phase, mb) for phase in (I, W)]
        there = [part for part in parts if part in positions]
        if whole in positions and there:
            raise ScheduleError(
                f"is the whole backward, and {there[0]} at position {positions[there[0]]} a part of it",
                where=place(rank, positions[whole], whole),
                remedy=f"keep {whole}, or {parts[0]} and {parts[1]}",
            )
        if whole not in positions and len(there) < 2:
            raise _missing(rank, whole if not there else next(p for p in parts if p not in there))


def _missing(rank: int, action: Action) -> ScheduleError:
    return ScheduleError(
        f"lacks {action}, the {MEANING[action.phase]} of microbatch {action.microbatch} on stage {action.stage}",
        where=f"rank {rank}",
        remedy=f"add {action}",
    )


def _check_order(schedule: Schedule, rank: int, positions: _Positions) -> None:
    """What a rank needs of its own comes before."""
    actions, stages = schedule.ranks[rank], set(schedule.stages_of(rank))
    for position, (stage, phase, mb) in enumerate(actions):
        if phase is F:
            needs = [(stage - 1, F, mb)] if stage - 1 in stages else []
        elif phase is W:
            needs = [(stage, I, mb)]
        else:
            needs = [(stage, F, mb)]
            if stage + 1 in stages:
                needs += [(stage + 1, B, mb), (stage + 1, I, mb)]  # there is one of the two
        for need in needs:
            if positions.get(need, -1) > position:
                action, before = actions[position], Action(*need)
                raise ScheduleError(
                    f"needs {before}, which the rank runs later, at position {positions[need]}",
                    where=place(rank, position, action),
                    remedy=f"put {before} before {action}",
                )
