"""How the ranks of a pipeline send each other what crosses a cut.

Enters: the processes, and a schedule. Leaves: sends that return at once, and receives in the order of the sends. Each
kind of message and direction has a process group of its own: NCCL knows no tags, and runs what a group sends between
two ranks one after the other, in both directions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.ops.collectives import Group
from fxpar.ops.groups import process_group
from fxpar.runtime.world import World
from fxpar.schedule.messages import Kind, Message
from fxpar.schedule.schedule import Schedule

# Of the ranks of a pipeline, whether the sender stands before the receiver.
_Way = tuple[Kind, bool]


class Channels:
    """The process groups of one module's pipeline. Making one is a collective call.

    Args:
        schedule: whose messages travel; others of the same stages have no further channels.
    """

    def __init__(self, world: World, schedule: Schedule) -> None:
        lines = world.mesh.groups("pp")
        self._line = world.line
        self._schedule = schedule
        self._groups: dict[_Way, Group] = {}
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._device = world.device
        for way in _ways(schedule):
            timeout = timedelta(seconds=world.agreement.seconds)
            own, _ = dist.new_subgroups_by_enumeration([list(line) for line in lines], timeout=timeout)
            assert own is not None
            self._groups[way] = Group(own.group_name, own.size())

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        """Sends the parts of a message; they may not be written to until they are there."""
        if not values:
            return
        receiver = self._schedule.rank_of[message.receiver]
        group = process_group(self._groups[self._way(message)])
        for value in values:
            dense = value.contiguous()
            work = dist.isend(dense, self._line[receiver], group)
            assert work is not None
            self._sends.append((work, dense))
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()

    def receive(self, message: Message, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        """The parts of a message, of these shapes and types. On a GPU the stream waits for them, not the host."""
        if not shapes:
            return []
        sender = self._schedule.rank_of[message.sender]
        group = process_group(self._groups[self._way(message)])
        found = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
        works = [dist.irecv(value, self._line[sender], group) for value in found]
        for work in works:
            assert work is not None
            work.wait()
        return found

    def finish(self) -> None:
        """Waits until all that was sent is there."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def _way(self, message: Message) -> _Way:
        rank_of = self._schedule.rank_of
        return message.kind, rank_of[message.sender] < rank_of[message.receiver]


def _ways(schedule: Schedule) -> list[_Way]:
    """The kinds and directions of the messages between neighbours, in one order on all ranks."""
    pairs = list(zip(schedule.rank_of, schedule.rank_of[1:], strict=False))
    found = {(Kind.ACTIVATION, a < b) for a, b in pairs if a != b} | {
        (Kind.GRADIENT, b < a) for a, b in pairs if a != b
    }
    return sorted(found)
