"""All ranks of a pipeline at once: when each action runs, or who waits for whom forever.

Enters: a schedule whose ranks are complete by themselves, and costs. Leaves: a timeline. Needs no torch.

A rank runs its actions in order, each as soon as the rank is free and what it needs is there. Sends take no time and
hold nobody up; a receive waits. When an action runs is then a function of the orders alone, whatever order the
simulation takes the ranks in, and so is whether all end (Kahn 1974).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpar.errors import ScheduleError, shown
from fxpar.schedule.actions import Action, Phase
from fxpar.schedule.messages import Kind, Message, received
from fxpar.schedule.pipeline_schedule import Schedule
from fxpar.schedule.schedule_checks import place

_CIRCLE = 6  # ranks of a circle that an error spells out

F, B, I, W = Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT  # noqa: E741


@dataclass(frozen=True)
class Costs:
    """What an action takes on a stage, in any unit; a whole backward takes both its parts.

    Attributes:
        forward: of a microbatch.
        backward_input: the gradient of the stage's input.
        backward_weight: the gradients of its parameters.
    """

    forward: int = 1
    backward_input: int = 1
    backward_weight: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int or not 0 < value < 2**31:
                raise ScheduleError(
                    f"{shown(value)} is no positive integer below 2^31",
                    where=f"cost {name}",
                    remedy="choose a finer unit",
                )

    def of(self, phase: Phase) -> int:
        """What a phase takes."""
        whole = self.backward_input + self.backward_weight
        return {F: self.forward, B: whole, I: self.backward_input, W: self.backward_weight}[phase]


@dataclass(frozen=True)
class Timeline:
    """When each action runs.

    Attributes:
        starts: for each rank the time at which each of its actions starts.
        ends: for each rank the time at which each of its actions ends.
        bubble: share of time for which ranks idle, of all ranks from 0 to the end of the last action.
    """

    starts: tuple[tuple[int, ...], ...] = field(repr=False)
    ends: tuple[tuple[int, ...], ...] = field(repr=False)
    bubble: float

    @property
    def end(self) -> int:
        """When the last action ends."""
        return max(ends[-1] for ends in self.ends)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Runs all ranks.

    Args:
        schedule: each rank has all its actions, in an order that is legal by itself (`check_structure`).
        costs: of the actions.

    Raises:
        ScheduleError: ranks wait for each other in a circle: names the first of them, its position, the message that it
            waits for and the others of the circle.
    """
    stages, count = schedule.stages, schedule.microbatches
    cost = {phase: costs.of(phase) for phase in Phase}
    # When the output of a stage for a microbatch is there, and the gradient of its input; -1 as long as it is not.
    outputs, gradients = [-1] * (stages * count), [-1] * (stages * count)
    starts: list[list[int]] = [[] for _ in schedule.ranks]
    ends: list[list[int]] = [[] for _ in schedule.ranks]
    # Ranks that wait for an output or a gradient, by its place.
    waiting: tuple[dict[int, int], dict[int, int]] = ({}, {})
    runnable = list(range(schedule.pp))
    while runnable:
        rank = runnable.pop()
        actions, own_starts, own_ends = schedule.ranks[rank], starts[rank], ends[rank]
        now = own_ends[-1] if own_ends else 0
        for position in range(len(own_ends), len(actions)):
            stage, phase, microbatch = actions[position]
            at = stage * count + microbatch
            times, ready = outputs, 0
            if phase is F:
                if stage and (ready := outputs[at - count]) < 0:
                    waiting[0][at - count] = rank
                    break
            elif phase is not W:
                times = gradients
                if stage < stages - 1 and (ready := gradients[at + count]) < 0:
                    waiting[1][at + count] = rank
                    break
            start = max(now, ready)
            now = start + cost[phase]
            own_starts.append(start)
            own_ends.append(now)
            if phase is not W:
                times[at] = now
                waiter = waiting[times is gradients].pop(at, None)
                if waiter is not None:
                    runnable.append(waiter)
    if any(len(done) < len(actions) for done, actions in zip(ends, schedule.ranks, strict=True)):
        raise _circle(schedule, [len(done) for done in ends])
    span = max(done[-1] for done in ends)
    busy = sum(cost[action.phase] for actions in schedule.ranks for action in actions)
    bubble = 1 - busy / (schedule.pp * span)
    return Timeline(tuple(map(tuple, starts)), tuple(map(tuple, ends)), bubble)


def _circle(schedule: Schedule, positions: list[int]) -> ScheduleError:
    """The error for ranks that wait for each other.

    Args:
        schedule: has all actions, so that what a rank waits for stands on another rank at or behind where that waits.
        positions: for each rank how many actions it has run.
    """

    def waited(rank: int) -> tuple[Action, Message]:
        action = schedule.ranks[rank][positions[rank]]
        message = received(schedule, action)
        assert message is not None  # what a rank needs of its own comes before
        return action, message

    blocked = [rank for rank, position in enumerate(positions) if position < len(schedule.ranks[rank])]
    rank, seen = blocked[0], list[int]()
    while rank not in seen:
        seen.append(rank)
        rank = schedule.rank_of[waited(rank)[1].sender]
    circle = seen[seen.index(rank) :]
    least = circle.index(min(circle))
    circle = circle[least:] + circle[:least]
    links = []
    for rank in circle[1:_CIRCLE]:
        action, message = waited(rank)
        sender = schedule.rank_of[message.sender]
        links.append(f"{place(rank, positions[rank], action)}, waits for the {message} on rank {sender}")
    more = [f"… {len(circle) - _CIRCLE} more"] if len(circle) > _CIRCLE else []
    action, message = waited(circle[0])
    sender = schedule.rank_of[message.sender]
    late = _producer(schedule, message)
    return ScheduleError(
        f"waits forever for the {message} on rank {sender}: the ranks wait in a circle: {'; '.join([*links, *more])}",
        where=place(circle[0], positions[circle[0]], action),
        remedy=f"run {action} later on rank {circle[0]}, or {late} earlier on rank {sender}",
    )


def _producer(schedule: Schedule, message: Message) -> Action:
    """The action that sends a message."""
    if message.kind is Kind.ACTIVATION:
        return Action(message.sender, F, message.microbatch)
    whole = Action(message.sender, B, message.microbatch)
    actions = schedule.ranks[schedule.rank_of[message.sender]]
    return whole if whole in actions else Action(message.sender, I, message.microbatch)
