"""The proof of a schedule: it is complete, all ranks end, and each channel brings what its receiver takes next.

Enters: a schedule. Leaves: a `VerifiedSchedule`, which is all that a runtime takes. Needs no torch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from fxpar.errors import ScheduleError
from fxpar.schedule.actions import Action, Phase
from fxpar.schedule.messages import Channel, ChannelGrouping, Message, channel_of, received, sent
from fxpar.schedule.pipeline_schedule import Schedule
from fxpar.schedule.schedule_checks import check_structure, place
from fxpar.schedule.simulate import Costs, Timeline, simulate


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
    """The schedule with its proof.

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
    """Most activations that a rank holds, and most of each of its chunks."""
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
