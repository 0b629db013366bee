"""How large a pipeline may be before it is a slip of the keyboard. Needs no torch."""

from __future__ import annotations

from fxpar.errors import ScheduleError, shown

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
