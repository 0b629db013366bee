"""A schedule: for each rank of a pipeline its actions in order.

Enters: actions. Leaves: a frozen `Schedule`, which says who holds a stage. That it can run is another matter:
`fxpar.pipeline.compiler.simulation`. Needs no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from fxpar.errors import ScheduleError, shown

# The words of a schedule: a stage, what is run of it, and a microbatch.


class Phase(StrEnum):
    """What is run of a stage, by its letter.

    The whole backward is the input part, which the stage before waits for, and the weight part, which nobody waits for
    (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2).
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


MEANING = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.BACKWARD_INPUT: "input part of the backward",
    Phase.BACKWARD_WEIGHT: "weight part of the backward",
}


class Action(NamedTuple):
    """One thing that a rank does.

    Attributes:
        stage: counted from 0 along the model, over all ranks.
        phase: what is run of it.
        microbatch: counted from 0.
    """

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.microbatch}"


_WORD = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{0,9})")
_LETTERS = {phase.value: phase for phase in Phase}
# Words of torch.distributed.pipelining for what follows from the order of the others.
_DERIVED = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")


def parse_action(word: str, where: str) -> Action:
    """Returns the action of a word.

    Args:
        word: stage, letter and microbatch: `2F0`.
        where: its place, for the error.

    Raises:
        ScheduleError: it is none.
    """
    match = _WORD.fullmatch(word)
    if match and match[2] in _DERIVED:
        raise ScheduleError(
            f"{shown(word)} is communication, which follows from the order of what is computed",
            where=where,
            remedy="leave such words out",
        )
    if not match or match[2] not in _LETTERS or not match[3]:
        letters = ", ".join(f"{phase} ({MEANING[phase]})" for phase in Phase)
        raise ScheduleError(
            f"must be an action, got {shown(word)}",
            where=where,
            remedy=f"write stage, letter and microbatch as in 2F0; letters are {letters}",
        )
    return Action(int(match[1]), _LETTERS[match[2]], int(match[3]))


class Style(StrEnum):
    """Which ranks hold which stages; p is the number of ranks.

    `LOOP`: chunk c of rank r is stage c·p + r (SPEC section 3; Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    `V`: every other chunk runs back, so that the last stage is on rank 0 (Qi et al. 2024, arXiv 2401.10241, section 6).
    """

    LOOP = "loop"
    V = "v"

    def stage(self, rank: int, chunk: int, pp: int) -> int:
        """Returns the stage that is a rank's chunk."""
        back = self is Style.V and chunk % 2 == 1
        return chunk * pp + (pp - 1 - rank if back else rank)

    def rank(self, stage: int, pp: int) -> int:
        """Returns the rank that holds a stage."""
        chunk, place = divmod(stage, pp)
        return pp - 1 - place if self is Style.V and chunk % 2 == 1 else place


@dataclass(frozen=True)
class Schedule:
    """What each rank of a pipeline runs, in which order.

    Attributes:
        name: how it was made; `custom` if it was read from a file.
        ranks: for each rank its actions in order.
        virtual_stages: chunks, that is stages, of each rank.
        microbatches: of a step.
        warmup: for each rank the forwards before the steady state, which starts with a forward.
        style: which ranks hold which stages.
        group_size: microbatches that a rank runs of one chunk before it takes the next; None where that says nothing.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...] = field(repr=False)
    virtual_stages: int
    microbatches: int
    warmup: tuple[int, ...]
    style: Style = Style.LOOP
    group_size: int | None = None

    @property
    def pp(self) -> int:
        """Returns how many ranks the pipeline has."""
        return len(self.ranks)

    @property
    def stages(self) -> int:
        """Returns how many stages all ranks have."""
        return self.pp * self.virtual_stages

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """Returns for each stage the rank that holds it."""
        return tuple(self.style.rank(stage, self.pp) for stage in range(self.stages))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that a rank holds, by chunk."""
        return tuple(self.style.stage(rank, chunk, self.pp) for chunk in range(self.virtual_stages))

    @cached_property
    def split_backward(self) -> bool:
        """Returns whether some backward is run in two parts: its input part and, later, its weight part."""
        return any(action.phase is Phase.BACKWARD_INPUT for actions in self.ranks for action in actions)

    @cached_property
    def forward_only(self) -> bool:
        """Returns whether there is no backward at all, as in evaluation."""
        return all(action.phase is Phase.FORWARD for actions in self.ranks for action in actions)


def leading_forwards(actions: tuple[Action, ...]) -> int:
    """Returns the warmup of a rank, read off its order: the forwards before the one that its first backward follows.

    Where all forwards come before all backwards, these are all of them.
    """
    first = next((place for place, action in enumerate(actions) if action.phase is not Phase.FORWARD), len(actions))
    forwards = sum(action.phase is Phase.FORWARD for action in actions)
    return first if first == forwards else max(first - 1, 0)


# How large a pipeline may be before it is a slip of the keyboard. Needs no torch.

MOST_FORWARDS = 1_000_000  # of all ranks: some seconds and half a gigabyte


def refuse_many(pp: int, virtual_stages: int, microbatches: int, where: str) -> None:
    """Refuses more than anybody runs.

    Raises:
        ScheduleError: there are more forwards in a step than `MOST_FORWARDS`.
    """
    if pp * virtual_stages * microbatches > MOST_FORWARDS:
        raise ScheduleError(
            f"{shown(pp)} ranks × {shown(virtual_stages)} stages × {shown(microbatches)} microbatches are more than "
            f"{MOST_FORWARDS} forwards",
            where=where,
            remedy="check the three numbers",
        )


# The text form of schedules: a line for each rank, its actions with commas between them.


def print_schedule(schedule: Schedule) -> str:
    """Returns the text of a schedule; `parse_schedule` reads it."""
    return "".join(f"{','.join(map(str, actions))}\n" for actions in schedule.ranks)


def parse_schedule(
    text: str,
    *,
    where: str = "schedule",
    pp: int | None = None,
    virtual_stages: int | None = None,
    microbatches: int | None = None,
) -> Schedule:
    """Returns the schedule of a text; unverified.

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
    """Returns the schedule of a file; unverified.

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
    """Returns the style that most actions follow: what does not follow it is a fault of the schedule."""
    pp, stages = len(ranks), len(ranks) * virtual_stages

    def followed(style: Style) -> int:
        rank_of = [style.rank(stage, pp) for stage in range(stages)]
        return sum(rank_of[action.stage] == rank for rank, actions in enumerate(ranks) for action in actions)

    return max(Style, key=followed)


# Orders of a rank as arrays of numbers, in the encoding of SPEC section 3, which is that of Transformer Engine.


def order_array(schedule: Schedule, rank: int) -> list[int | float]:
    """Returns the order of a rank as an array.

    Raises:
        ScheduleError: microbatches of a chunk do not ascend, which an array cannot say.
    """
    order: list[int | float] = []
    numbers = {stage: chunk for chunk, stage in enumerate(schedule.stages_of(rank), 1)}
    seen: Counter[tuple[int, Phase]] = Counter()
    for position, action in enumerate(schedule.ranks[rank]):
        stage, phase, microbatch = action
        if seen[stage, phase] != microbatch:
            raise ScheduleError(
                f"an order array cannot say it: microbatch {seen[stage, phase]} of that stage has not come before",
                where=f"rank {rank}, position {position} ({action})",
                remedy="leave --rank out: the document of all ranks has the actions",
            )
        seen[stage, phase] += 1
        number = numbers[stage]
        order.append({Phase.FORWARD: number, Phase.BACKWARD_WEIGHT: -number - 0.5}.get(phase, -number))
    return order


def from_arrays(
    arrays: Sequence[Sequence[int | float]], *, virtual_stages: int, microbatches: int, style: Style = Style.LOOP
) -> Schedule:
    """Returns the schedule of which these are the orders; unverified.

    Args:
        arrays: for each rank its order.
        virtual_stages: chunks of each rank.
        microbatches: of a step.
        style: which ranks hold which stages.

    Raises:
        ScheduleError: a number is none of the encoding.
    """
    split = any(number % 1 for array in arrays for number in array)
    ranks = tuple(_actions(array, rank, len(arrays), virtual_stages, style, split) for rank, array in enumerate(arrays))
    warmup = tuple(leading_forwards(actions) for actions in ranks)
    return Schedule("custom", ranks, virtual_stages, microbatches, warmup, style)


def _actions(
    array: Sequence[int | float], rank: int, pp: int, virtual_stages: int, style: Style, split: bool
) -> tuple[Action, ...]:
    actions, seen = [], Counter[tuple[int, Phase]]()
    for position, number in enumerate(array):
        chunk = int(abs(number)) if abs(number) <= virtual_stages + 1 else 0
        weight = number == -chunk - 0.5
        if not 1 <= chunk <= virtual_stages or not (weight or abs(number) == chunk):
            raise ScheduleError(
                f"must be an action of a rank with {virtual_stages} chunks, got {shown(number)}",
                where=f"rank {rank}, position {position}",
                remedy="write c for the forward of chunk c - 1, -c for its backward or the input part, -c - 0.5 for "
                "the weight part",
            )
        backward = Phase.BACKWARD_INPUT if split else Phase.BACKWARD
        phase = Phase.FORWARD if number > 0 else Phase.BACKWARD_WEIGHT if weight else backward
        stage = style.stage(rank, chunk - 1, pp)
        actions.append(Action(stage, phase, seen[stage, phase]))
        seen[stage, phase] += 1
    return tuple(actions)
