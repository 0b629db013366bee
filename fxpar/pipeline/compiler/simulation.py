"""All ranks of a pipeline at once: when each action runs, or who waits for whom forever.

Enters: a schedule whose ranks are complete by themselves, and costs. Leaves: a timeline. Needs no torch.

A rank runs its actions in order, each as soon as the rank is free and what it needs is there. Sends take no time and
hold nobody up; a receive waits. When an action runs is then a function of the orders alone, whatever order the
simulation takes the ranks in, and so is whether all end (Kahn 1974).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from fxpar.errors import ScheduleError, shown
from fxpar.pipeline.compiler.schedules import MEANING, Action, Phase, Schedule, refuse_many

# What can be said of a schedule without running it: each rank has each action that is its own once, in a legal
# order.

F, B, I, W = Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT  # noqa: E741


# Where each action of a rank stands.
_Positions = dict[tuple[int, Phase, int], int]


def place(rank: int, position: int, action: Action) -> str:
    """Returns where an action stands: positions count from 0, idle time left out."""
    return f"rank {rank}, position {position} ({action})"


def check_structure(schedule: Schedule) -> None:
    """Checks each rank by itself.

    Raises:
        ScheduleError: an action names a stage or microbatch that there is not, or stands on a rank that does not hold
            the stage, or twice, or next to one that says the same; an action is missing; or a rank has an action before
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
    """Returns where each action of a rank stands."""
    stages, microbatches, rank_of = schedule.stages, schedule.microbatches, schedule.rank_of
    positions: _Positions = {}
    for position, action in enumerate(schedule.ranks[rank]):
        stage, phase, microbatch = action
        if not isinstance(phase, Phase):  # a plain "F" is equal to a phase, and none by identity
            reason = f"the phase must be a Phase, got {shown(phase)}"
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
    """Checks that each stage runs each microbatch forward and, in training, backward, whole or in two parts."""
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
    """Checks that what a rank needs of its own actions comes before."""
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


# Messages between the ranks of a pipeline, and the channels on which they travel.


class Kind(StrEnum):
    """What travels: a stage's output forwards, the gradient of its input backwards."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


class ChannelGrouping(StrEnum):
    """How many channels there are: `BY_KIND` for every ordered pair of ranks and kind of message, `MERGED` for every
    ordered pair of ranks."""

    BY_KIND = "by kind"
    MERGED = "merged"


class Channel(NamedTuple):
    """What keeps its order.

    Attributes:
        sender: rank.
        receiver: rank.
        kind: of the messages; None where both kinds travel on it.
    """

    sender: int
    receiver: int
    kind: Kind | None

    def __str__(self) -> str:
        what = "messages" if self.kind is None else f"{self.kind}s"
        return f"{what} from rank {self.sender} to rank {self.receiver}"


class Message(NamedTuple):
    """What a stage sends to a neighbour that another rank holds.

    Attributes:
        kind: activation or gradient.
        sender: stage.
        receiver: stage.
        microbatch: whose.
    """

    kind: Kind
    sender: int
    receiver: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} from stage {self.sender}"


def received(schedule: Schedule, action: Action) -> Message | None:
    """Returns what the action takes from another rank before it runs; None where it needs nothing of one."""
    sender = action.stage - 1 if action.phase is F else action.stage + 1
    return _message(schedule, action, sender, action.stage)


def sent(schedule: Schedule, action: Action) -> Message | None:
    """Returns what the action gives to another rank when it has run; None where nobody waits for it."""
    receiver = action.stage + 1 if action.phase is F else action.stage - 1
    return _message(schedule, action, action.stage, receiver)


def _message(schedule: Schedule, action: Action, sender: int, receiver: int) -> Message | None:
    rank_of = schedule.rank_of
    if action.phase is W or not all(0 <= stage < len(rank_of) for stage in (sender, receiver)):
        return None
    kind = Kind.ACTIVATION if action.phase is F else Kind.GRADIENT
    return None if rank_of[sender] == rank_of[receiver] else Message(kind, sender, receiver, action.microbatch)


def channel_of(schedule: Schedule, message: Message, channels: ChannelGrouping = ChannelGrouping.BY_KIND) -> Channel:
    """Returns the channel on which a message travels."""
    rank_of = schedule.rank_of
    kind = message.kind if channels is ChannelGrouping.BY_KIND else None
    return Channel(rank_of[message.sender], rank_of[message.receiver], kind)


_CIRCLE = 6  # ranks of a circle that an error spells out


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
                    f"must be a positive integer below 2^31, got {shown(value)}",
                    where=f"cost {name}",
                    remedy="choose a finer unit",
                )

    def of(self, phase: Phase) -> int:
        """Returns what a phase takes."""
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
        """Returns when the last action ends."""
        return max(ends[-1] for ends in self.ends)


def simulate(schedule: Schedule, costs: Costs | Sequence[Costs]) -> Timeline:
    """Runs all ranks.

    Args:
        schedule: each rank has all its actions, in an order that is legal by itself (`check_structure`).
        costs: of the actions, the same on all stages or for each.

    Raises:
        ScheduleError: ranks wait for each other in a circle: names the first of them, its position, the message that it
            waits for and the others of the circle.
    """
    stages, count = schedule.stages, schedule.microbatches
    of_stages = [costs] * stages if isinstance(costs, Costs) else costs
    cost = [{phase: one.of(phase) for phase in Phase} for one in of_stages]
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
            now = start + cost[stage][phase]
            own_starts.append(start)
            own_ends.append(now)
            if phase is not W:
                times[at] = now
                # One rank at most waits: an output has one next stage, and a gradient one stage before.
                waiter = waiting[times is gradients].pop(at, None)
                if waiter is not None:
                    runnable.append(waiter)
    if any(len(done) < len(actions) for done, actions in zip(ends, schedule.ranks, strict=True)):
        raise _circle(schedule, [len(done) for done in ends])
    span = max(done[-1] for done in ends)
    busy = sum(cost[action.stage][action.phase] for actions in schedule.ranks for action in actions)
    bubble = 1 - busy / (schedule.pp * span)
    return Timeline(tuple(map(tuple, starts)), tuple(map(tuple, ends)), bubble)


def _circle(schedule: Schedule, positions: list[int]) -> ScheduleError:
    """Returns the error for ranks that wait for each other.

    Args:
        schedule: has all actions, so that what a rank waits for stands on another rank at or after where that waits.
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
    # From the lowest rank on, so that the text does not depend on where the search began.
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
    """Returns the action that sends a message."""
    if message.kind is Kind.ACTIVATION:
        return Action(message.sender, F, message.microbatch)
    whole = Action(message.sender, B, message.microbatch)
    actions = schedule.ranks[schedule.rank_of[message.sender]]
    return whole if whole in actions else Action(message.sender, I, message.microbatch)


# The proof of a schedule: it is complete, all ranks end, and each channel brings what its receiver takes next.


@dataclass(frozen=True)
class VerifiedSchedule:
    """A schedule that runs. Making one verifies it, so that there are no others.

    Attributes:
        schedule: what was verified.
        costs: of the actions, for the timeline.
        channels: those of the runtime.
        timeline: when each action runs.
        peaks: for each rank the most activations of microbatches that it holds at once, over its chunks: each from its
            forward to the end of its backward, or of the weight part. Where there is no backward, the forward is the
            end.
        slots: for each rank and each chunk of it the most microbatches of that chunk that are held at once.
    """

    schedule: Schedule
    costs: Costs = field(default_factory=Costs)
    channels: ChannelGrouping = ChannelGrouping.BY_KIND
    timeline: Timeline = field(init=False)
    peaks: tuple[int, ...] = field(init=False)
    slots: tuple[tuple[int, ...], ...] = field(init=False)

    @cached_property
    def receipts(self) -> Receipts:
        """Returns when each rank knows that what it sent was received."""
        return _receipts(self.schedule, self.timeline, self.channels)

    def __post_init__(self) -> None:
        check_structure(self.schedule)
        object.__setattr__(self, "timeline", simulate(self.schedule, self.costs))
        _check_channels(self.schedule, self.channels)
        maxima = [_held(self.schedule, rank) for rank in range(self.schedule.pp)]
        object.__setattr__(self, "peaks", tuple(peak for peak, _ in maxima))
        object.__setattr__(self, "slots", tuple(slots for _, slots in maxima))


def verified(
    schedule: Schedule, *, costs: Costs | None = None, channels: ChannelGrouping = ChannelGrouping.BY_KIND
) -> VerifiedSchedule:
    """Returns the schedule with its proof.

    Args:
        schedule: any.
        costs: of the actions, for the timeline; each 1 by default, a whole backward 2.
        channels: those of the runtime.

    Raises:
        ScheduleError: names rank, position and action: one is missing, twice, on a rank that does not hold its stage,
            before what it needs; ranks wait for each other; or a channel brings messages in another order than its
            receiver takes them.
    """
    return VerifiedSchedule(schedule, costs or Costs(), channels)


@dataclass
class _Ends:
    """What the two ends of a channel do, in order: messages, each as that of microbatch 0 and the microbatch."""

    sends: list[tuple[Message, int]] = field(default_factory=list)
    receives: list[tuple[Message, int]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # of the receiver's actions


def _check_channels(schedule: Schedule, channels: ChannelGrouping) -> None:
    """Checks that each channel's messages are received in the order in which they are sent (SPEC section 3)."""
    # NCCL matches messages by their order, and knows no tags: another order
    # would hand over the wrong tensor in silence.
    for channel, end in _ends(schedule, channels).items():
        if end.sends == end.receives:
            continue
        pairs = enumerate(zip(end.sends, end.receives, strict=True))
        number, (incoming, expected) = next((k, pair) for k, pair in pairs if pair[0] != pair[1])
        messages = [message._replace(microbatch=mb) for message, mb in (expected, incoming)]
        position = end.positions[number]
        advice = "" if channel.kind else ", or give activations and gradients channels of their own"
        raise ScheduleError(
            f"waits for the {messages[0]}, and message {number} of the {channel} is the {messages[1]}",
            where=place(channel.receiver, position, schedule.ranks[channel.receiver][position]),
            remedy=f"run what sends and what receives in one order on ranks {channel.sender} and "
            f"{channel.receiver}{advice}",
        )


def _ends(schedule: Schedule, channels: ChannelGrouping) -> dict[Channel, _Ends]:
    ends: dict[Channel, _Ends] = defaultdict(_Ends)

    def way(message: Message | None) -> tuple[Message, _Ends] | None:
        return None if message is None else (message, ends[channel_of(schedule, message, channels)])

    for rank, actions in enumerate(schedule.ranks):
        kinds = [Action(stage, phase, 0) for stage in schedule.stages_of(rank) for phase in Phase]
        ways = {(a.stage, a.phase): (way(received(schedule, a)), way(sent(schedule, a))) for a in kinds}
        for position, (stage, phase, microbatch) in enumerate(actions):
            into, out = ways[stage, phase]
            if into is not None:
                message, end = into
                end.receives.append((message, microbatch))
                end.positions.append(position)
            if out is not None:
                message, end = out
                end.sends.append((message, microbatch))
    return ends


def _held(schedule: Schedule, rank: int) -> tuple[int, tuple[int, ...]]:
    """Returns most activations that a rank holds, and most of each of its chunks."""
    if schedule.forward_only:
        return 1, (1,) * schedule.virtual_stages
    stages = schedule.stages_of(rank)
    now, most = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    total = peak = 0
    for stage, phase, _ in schedule.ranks[rank]:
        if phase is Phase.FORWARD:
            now[stage] += 1
            total += 1
            peak, most[stage] = max(peak, total), max(most[stage], now[stage])
        elif phase is not Phase.BACKWARD_INPUT:
            now[stage] -= 1
            total -= 1
    return peak, tuple(most.values())


# Nobody answers a message. That it was received follows from what came later from the receiver, directly or through
# other ranks: so a rank knows when it may free what it sent, and write to the same place of that memory again.


@dataclass(frozen=True)
class Receipts:
    """When each rank knows that what it sent was received.

    Attributes:
        released: for each rank and each of its actions, by channel, how many more messages than before the action
            in front of it are known to be received when the action begins.
        depths: for each channel the most messages that were sent and are not known to be received.
    """

    released: tuple[tuple[Mapping[Channel, int], ...], ...] = field(repr=False)
    depths: Mapping[Channel, int]


def _receipts(schedule: Schedule, timeline: Timeline, channels: ChannelGrouping) -> Receipts:
    """Returns the receipts of a schedule that runs, by vector clocks (Fidge 1988, Mattern 1989)."""
    ends, depths = _ends(schedule, channels), dict[Channel, int]()
    clocks = _clocks(schedule, timeline)
    released: list[tuple[Mapping[Channel, int], ...]] = []
    for rank, actions in enumerate(schedule.ranks):
        outgoing = {channel: end for channel, end in ends.items() if channel.sender == rank}
        known, sends = Counter[Channel](), Counter[Channel]()
        of_rank: list[Mapping[Channel, int]] = []
        for position, action in enumerate(actions):
            # As of the action before: what this one receives is taken only when it has begun.
            clock = clocks[rank][position - 1] if position else (-1,) * schedule.pp
            now = {c: bisect_right(end.positions, clock[c.receiver]) for c, end in outgoing.items()}
            of_rank.append(
                {channel: count - known[channel] for channel, count in now.items() if count > known[channel]}
            )
            known.update(of_rank[-1])
            message = sent(schedule, action)
            if message is not None:
                channel = channel_of(schedule, message, channels)
                sends[channel] += 1
                depths[channel] = max(depths.get(channel, 0), sends[channel] - known[channel])
        released.append(tuple(of_rank))
    return Receipts(tuple(released), depths)


def _clocks(schedule: Schedule, timeline: Timeline) -> list[list[tuple[int, ...]]]:
    """Returns for each action of each rank the last action of every rank that had received its message by then."""
    clocks: list[list[tuple[int, ...]]] = [[] for _ in schedule.ranks]
    travelling: dict[Message, tuple[int, ...]] = {}
    # Each action takes time, so that who sends starts before who receives.
    order = sorted((start, rank, i) for rank, starts in enumerate(timeline.starts) for i, start in enumerate(starts))
    for _, rank, position in order:
        action = schedule.ranks[rank][position]
        clock = clocks[rank][-1] if position else (-1,) * schedule.pp
        message = received(schedule, action)
        if message is not None:
            clock = tuple(map(max, clock, travelling.pop(message)))
        clock = (*clock[:rank], position, *clock[rank + 1 :])
        clocks[rank].append(clock)
        outgoing = sent(schedule, action)
        if outgoing is not None:
            travelling[outgoing] = clock
    return clocks
