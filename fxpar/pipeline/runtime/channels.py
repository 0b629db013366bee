"""How the ranks of a pipeline send each other what crosses a cut: through process groups, or by copies.

Enters: messages of a verified schedule, in its order. Leaves: what was sent, on the rank that receives it. A CUDA graph
can hold all of it: nothing asks whether something has arrived.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import InputError
from fxpar.ops.process_group import Group, hold, process_group, refuse_group
from fxpar.peer_memory.compiler.symmetric_buffer import registered_buffer, slot
from fxpar.pipeline.compiler.schedules import Schedule
from fxpar.pipeline.compiler.simulation import Channel, Kind, Message, VerifiedSchedule, channel_of
from fxpar.runtime.graph_modes import opaque
from fxpar.runtime.world import World

# Shape and type of each part of a message.
Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


class Channels(ABC):
    """What one rank sends and receives in one step, or in a forward alone. Making them is a collective call.

    A message belongs to its sender until it is known to be received (`Receipts`): its memory is free only then.

    Args:
        order: of the actions.
        size: bytes of the largest message, each part of it padded.
    """

    def __init__(self, world: World, order: VerifiedSchedule, size: int) -> None:
        self._world, self._order, self._size = world, order, size
        self._sent: defaultdict[Channel, deque[Any]] = defaultdict(deque)

    def at(self, position: int) -> None:
        """Frees what is known to be received when the action at a position of the rank begins."""

        def free(none: list[Any]) -> Sequence[Any]:
            for channel, count in self._order.receipts.released[self._world.place][position].items():
                for sent in [self._sent[channel].popleft() for _ in range(count)]:
                    self._free(sent)
            return ()

        opaque(free)([])

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        """Sends the parts of a message; they may not be written to until they are there."""
        channel = channel_of(self._order.schedule, message)

        def send(values: list[Any]) -> Sequence[Any]:
            self._sent[channel].append(self._start(channel, values))
            return ()

        opaque(send)([value.contiguous() for value in values])

    def receive(self, message: Message, shapes: Shapes) -> list[Tensor]:
        """Returns the parts of a message, of these shapes and types. On a GPU the stream waits for them, not the
        host."""
        channel = channel_of(self._order.schedule, message)

        def receive(none: list[Any]) -> Sequence[Any]:
            tensors = [torch.empty(shape, dtype=dtype, device=self._world.device) for shape, dtype in shapes]
            self._receive(channel, tensors)
            return tensors

        return [*opaque(receive)([])]

    def finish(self) -> None:
        """Frees all that was sent, after a collective that all ranks begin when they have received all."""

        def free(none: list[Any]) -> Sequence[Any]:
            for sent in self._sent.values():
                while sent:
                    self._free(sent.popleft())
            return ()

        opaque(free)([])

    @abstractmethod
    def _start(self, channel: Channel, values: list[Tensor]) -> Any:
        """Sends contiguous tensors; returns what `_free` takes."""

    @abstractmethod
    def _free(self, sent: Any) -> None:
        """Lets what is computed next wait until a message has left."""

    @abstractmethod
    def _receive(self, channel: Channel, tensors: list[Tensor]) -> None:
        """Writes the next message of a channel into tensors."""


# Of the ranks of a pipeline, whether the sender stands before the receiver.
_Way = tuple[Kind, bool]


class WayGroups:
    """The process groups through which the ranks of a pipeline send. Making them is a collective call.

    Args:
        schedule: whose messages travel; others of the same stages have no further ways.
    """

    def __init__(self, world: World, schedule: Schedule) -> None:
        lines = world.mesh.groups("pp")
        self._groups: dict[_Way, Group] = {}
        # Activations and gradients have groups of their own. NCCL knows no tags, and with two ranks and virtual stages
        # both kinds travel between the same pair in other orders.
        for way in _ways(schedule):
            timeout = timedelta(seconds=world.agreement.seconds)
            with world.agreement.alarm.opening():
                subgroup, _ = dist.new_subgroups_by_enumeration([list(line) for line in lines], timeout=timeout)
            assert subgroup is not None
            self._groups[way] = Group(subgroup.group_name, subgroup.size())
            hold(self, [self._groups[way]])
            world.agreement.alarm.on_failure(partial(refuse_group, self._groups[way]))
            self._meet(world, _pairs(schedule, way), process_group(self._groups[way]))

    def _meet(self, world: World, pairs: Sequence[tuple[int, int]], group: dist.ProcessGroup) -> None:
        """Sends a word between all ranks of a way, pair by pair.

        NCCL makes a communicator when two ranks first send each other something, and both wait for that: in the middle
        of a schedule they might wait in a circle, and no graph that is captured can hold it.
        """
        word, line = torch.zeros(1, device=world.device), world.line
        for sender, receiver in pairs:
            work = dist.isend(word, line[receiver], group) if world.place == sender else None
            work = dist.irecv(word, line[sender], group) if world.place == receiver else work
            if work is not None:
                work.wait()

    def of(self, channel: Channel) -> dist.ProcessGroup:
        """Returns the group of a channel's way."""
        assert channel.kind is not None
        return process_group(self._groups[channel.kind, channel.sender < channel.receiver])


class GroupChannels(Channels):
    """Channels through process groups."""

    def __init__(self, world: World, order: VerifiedSchedule, size: int, groups: WayGroups) -> None:
        super().__init__(world, order, size)
        self._groups = groups

    def _start(self, channel: Channel, values: list[Tensor]) -> list[tuple[dist.Work, Tensor]]:
        group, receiver = self._groups.of(channel), self._world.line[channel.receiver]
        works = [(dist.isend(value, receiver, group), value) for value in values]
        return [(work, value) for work, value in works if work is not None]

    def _free(self, sent: list[tuple[dist.Work, Tensor]]) -> None:
        for work, _ in sent:
            work.wait()

    def _receive(self, channel: Channel, tensors: list[Tensor]) -> None:
        group, sender = self._groups.of(channel), self._world.line[channel.sender]
        works = [dist.irecv(value, sender, group) for value in tensors]
        for work in works:
            assert work is not None
            work.wait()


def _pairs(schedule: Schedule, way: _Way) -> list[tuple[int, int]]:
    """Returns the ranks of a pipeline that send each other messages of a kind in a direction, senders first."""
    kind, is_up = way
    neighbours = ((a, b) if kind is Kind.ACTIVATION else (b, a) for a, b in pairwise(schedule.rank_of) if a != b)
    return sorted({(sender, receiver) for sender, receiver in neighbours if (sender < receiver) == is_up})


def _ways(schedule: Schedule) -> list[_Way]:
    """Returns the kinds and directions of the messages between neighbours, in one order on all ranks."""
    pairs = [(a, b) for a, b in pairwise(schedule.rank_of) if a != b]
    return sorted({(Kind.ACTIVATION, a < b) for a, b in pairs} | {(Kind.GRADIENT, b < a) for a, b in pairs})


# Copies into the receiver's memory, which need no multiprocessor while a message waits. A channel has as many places
# there as messages may be under way: who writes to one knows that what was there before is read.


# Bytes in which the parts of a message begin.
ALIGNED = 128
# Places of a channel at most, and numbered buffers that channels of all ways need.
_MOST_PLACES = 256
PIPELINE_BUFFERS = 4 * _MOST_PLACES
# The number of the buffer whose areas have all places.
_AREA = 0


def padded(size: int) -> int:
    """Returns the bytes of a part of a message with what pads it."""
    return -(-size // ALIGNED) * ALIGNED


class CopyChannels(Channels):
    """Channels by copies into symmetric memory.

    Args:
        name: of the symmetric buffer of this rank's pipeline, which has `PIPELINE_BUFFERS`.

    Raises:
        InputError: the schedule has more messages under way than there are flags.
    """

    def __init__(self, world: World, order: VerifiedSchedule, size: int, name: str) -> None:
        super().__init__(world, order, size)
        self._line = registered_buffer(name)
        self._sends, self._receives = Counter[Channel](), Counter[Channel]()
        depths = order.receipts.depths
        self._most = max(depths.values(), default=0)
        if self._most > _MOST_PLACES:
            raise InputError(
                f"has {self._most} messages under way between two ranks, and copies have {_MOST_PLACES} places",
                where=f"schedule {order.schedule.name}",
                remedy="choose a schedule with fewer microbatches in flight, as 1f1b, or set Communication('nccl')",
            )
        incoming = Counter(channel.receiver for channel in depths)
        self._areas = self._line.areas(_AREA, max(incoming.values(), default=0) * self._most * size or 1)

    def _start(self, channel: Channel, values: list[Tensor]) -> tuple[int, list[Tensor]]:
        line, number = self._line, self._sends[channel]
        self._sends[channel] += 1
        buffer, begin = self._place(channel, number)
        line.begin(buffer)
        with line.beside(buffer, values):
            for value in values:
                line.copy(self._areas[channel.receiver], begin, value)
                begin += padded(value.nbytes)
            line.signal(channel.receiver, buffer, 0)
        return buffer, values

    def _free(self, sent: tuple[int, list[Tensor]]) -> None:
        buffer, _ = sent
        self._line.join(buffer)
        self._line.end(buffer)

    def _receive(self, channel: Channel, tensors: list[Tensor]) -> None:
        line, number = self._line, self._receives[channel]
        self._receives[channel] += 1
        buffer, begin = self._place(channel, number)
        line.wait(buffer, 0, [channel.sender])
        for value in tensors:
            came = slot(self._areas[channel.receiver], begin, value)
            value.view(-1).copy_(came)
            if line.poisons:
                came.view(torch.uint8).fill_(0xFF)
            begin += padded(value.nbytes)
        line.ended()

    def _place(self, channel: Channel, number: int) -> tuple[int, int]:
        """Returns the buffer of a message, whose flag tells of it, and the byte of the receiver's area where it is."""
        place = number % self._order.receipts.depths[channel]
        way = 2 * (channel.kind is Kind.GRADIENT) + (channel.sender < channel.receiver)
        into = sorted(c for c in self._order.receipts.depths if c.receiver == channel.receiver)
        return way * _MOST_PLACES + place, (into.index(channel) * self._most + place) * self._size
