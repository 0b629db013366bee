"""Messages between the ranks of a pipeline, and the channels on which they travel.

Enters: a schedule and an action. Leaves: what the action waits for from another rank, and what it sends to one. Needs
no torch.

A channel has one direction and keeps its order: a send returns at once, the k-th receive takes the k-th message. What
stays on a rank (the turn of a V) is no message. Channels are those of the runtime: activations and gradients each have
one for every ordered pair of ranks. NCCL knows no tags, and torch runs all that a NCCL process group sends between two
ranks, in both directions, one after the other: there a channel is a process group of its own.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from fxpar.schedule.actions import Action, Phase
from fxpar.schedule.pipeline_schedule import Schedule


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


_FORWARD, _WEIGHT = Phase.FORWARD, Phase.BACKWARD_WEIGHT
_ACTIVATION, _GRADIENT = Kind.ACTIVATION, Kind.GRADIENT


def received(schedule: Schedule, action: Action) -> Message | None:
    """What the action takes from another rank before it runs; None where it needs nothing of one."""
    stage, phase, microbatch = action
    if phase is _WEIGHT:
        return None
    kind, sender = (_ACTIVATION, stage - 1) if phase is _FORWARD else (_GRADIENT, stage + 1)
    rank_of = schedule.rank_of
    if not 0 <= sender < len(rank_of) or rank_of[sender] == rank_of[stage]:
        return None
    return Message(kind, sender, stage, microbatch)


def sent(schedule: Schedule, action: Action) -> Message | None:
    """What the action gives to another rank when it has run; None where nobody waits for it."""
    stage, phase, microbatch = action
    if phase is _WEIGHT:
        return None
    kind, receiver = (_ACTIVATION, stage + 1) if phase is _FORWARD else (_GRADIENT, stage - 1)
    rank_of = schedule.rank_of
    if not 0 <= receiver < len(rank_of) or rank_of[receiver] == rank_of[stage]:
        return None
    return Message(kind, stage, receiver, microbatch)


def channel_of(schedule: Schedule, message: Message, channels: ChannelGrouping = ChannelGrouping.BY_KIND) -> Channel:
    """The channel on which a message travels."""
    rank_of = schedule.rank_of
    kind = message.kind if channels is ChannelGrouping.BY_KIND else None
    return Channel(rank_of[message.sender], rank_of[message.receiver], kind)
