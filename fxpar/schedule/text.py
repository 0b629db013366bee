"""The text form of schedules: a line for each rank, its actions with commas between them.

Enters: a file of a user's, or a schedule. Leaves: the other of the two. Needs no torch.

It is the form in which `torch.distributed.pipelining` writes orders of computation as CSV, so that each reads what the
other wrote. Empty cells, in which a rank idles, say nothing: when an action runs follows from the order. Empty lines
and what stands behind # are skipped.
"""

from __future__ import annotations

from pathlib import Path

from fxpar.errors import ScheduleError
from fxpar.schedule.actions import Action, parse_action
from fxpar.schedule.limits import refuse_many
from fxpar.schedule.pipeline_schedule import Schedule, Style, leading_forwards


def print_schedule(schedule: Schedule) -> str:
    """The text of a schedule; `parse_schedule` reads it."""
    return "".join(f"{','.join(map(str, actions))}\n" for actions in schedule.ranks)


def parse_schedule(
    text: str,
    *,
    where: str = "schedule",
    pp: int | None = None,
    virtual_stages: int | None = None,
    microbatches: int | None = None,
) -> Schedule:
    """The schedule of a text; unverified.

    Args:
        text: a line for each rank.
        where: the file it came from, for errors.
        pp: ranks it must have; any number by default.
        virtual_stages: stages that each rank must have; by default as many as the text names.
        microbatches: of a step; by default as many as the text names.

    Raises:
        ScheduleError: a word is no action, or there are other numbers of ranks, stages or microbatches.
    """
    ranks: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0]
        if words.strip():
            cells = enumerate((cell.strip() for cell in words.split(",")), 1)
            place = f"{where} line {number}"
            ranks.append(tuple(parse_action(cell, f"{place} cell {at}") for at, cell in cells if cell))
    if not any(ranks):
        raise ScheduleError("holds no action", where=where, remedy="write a line for each rank: 0F0,0F1,0B0,0B1")
    _check_number(where, "ranks", len(ranks), pp, "write a line for each rank")
    stages = 1 + max(action.stage for actions in ranks for action in actions)
    per_rank, rest = divmod(stages, len(ranks))
    if rest:
        raise ScheduleError(
            f"its {len(ranks)} ranks cannot share out {stages} stages, 0–{stages - 1}, alike",
            where=where,
            remedy="give every rank the same number of stages",
        )
    _check_number(where, "stages a rank", per_rank, virtual_stages, "name every stage")
    named = 1 + max(action.microbatch for actions in ranks for action in actions)
    _check_number(where, "microbatches", named, microbatches, "name every microbatch")
    refuse_many(len(ranks), per_rank, named, where)
    warmup = tuple(leading_forwards(actions) for actions in ranks)
    return Schedule("custom", tuple(ranks), per_rank, named, warmup, _style(ranks, per_rank))


def read_schedule(
    path: Path, *, pp: int | None = None, virtual_stages: int | None = None, microbatches: int | None = None
) -> Schedule:
    """The schedule of a file; unverified.

    Raises:
        ScheduleError: the file cannot be read, or as `parse_schedule`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScheduleError(reason, where=str(path), remedy="name a file with a line for each rank") from None
    return parse_schedule(text, where=str(path), pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)


def _check_number(where: str, what: str, count: int, requested: int | None, remedy: str) -> None:
    if requested is not None and count != requested:
        reason = f"has {count} {what}, and {requested} were asked for"
        raise ScheduleError(reason, where=where, remedy=f"{remedy}, or ask for {count}")


def _style(ranks: list[tuple[Action, ...]], virtual_stages: int) -> Style:
    """The style that most actions follow: what does not follow it is a fault of the schedule."""
    pp, stages = len(ranks), len(ranks) * virtual_stages

    def followed(style: Style) -> int:
        rank_of = [style.rank(stage, pp) for stage in range(stages)]
        return sum(rank_of[action.stage] == rank for rank, actions in enumerate(ranks) for action in actions)

    return max(Style, key=followed)
