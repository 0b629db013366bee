"""Orders of a rank as arrays of numbers, in the encoding of SPEC section 3, which is that of Transformer Engine.

Enters: a rank's actions, or the arrays of all ranks. Leaves: the other of the two. Needs no torch.

c is the forward of a rank's chunk c - 1, -c its backward; where the backward is in two parts -c is the input part and
-c - 0.5 the weight part. An array names no microbatch: those of a chunk come in ascending order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fxpar.errors import ScheduleError, shown
from fxpar.schedule.actions import Action, Phase
from fxpar.schedule.pipeline_schedule import Schedule, Style, leading_forwards


def order_array(schedule: Schedule, rank: int) -> list[int | float]:
    """The order of a rank as an array.

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
    """The schedule of which these are the orders; unverified.

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
                f"{shown(number)} is no action of a rank with {virtual_stages} chunks",
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
