"""The words of a schedule: a stage, what is run of it, and a microbatch.

Enters: words as `torch.distributed.pipelining` writes them (`2F0`, `1I3`). Leaves: actions. Needs no torch.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from fxpar.errors import ScheduleError, shown


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
    """The action of a word.

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
            f"{shown(word)} is no action",
            where=where,
            remedy=f"write stage, letter and microbatch as in 2F0; letters are {letters}",
        )
    return Action(int(match[1]), _LETTERS[match[2]], int(match[3]))
