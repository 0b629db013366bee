"""How the ranks of a pipeline send each other what crosses a cut.

Enters: the processes, and a schedule. Leaves: sends that return at once, and receives in the order of the sends. Each
kind of message and direction has a process group of its own: NCCL knows no tags, and runs what a group sends between
two ranks one after the other, in both directions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.ops.collectives import Group
from fxpar.ops.mesh_process_groups import hold, process_group, refuse_group
from fxpar.pipeline.compiler.schedules import Schedule
from fxpar.pipeline.compiler.simulation import Kind, Message
from fxpar.runtime.world import World

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
            with world.agreement.alarm.opening():
                subgroup, _ = dist.new_subgroups_by_enumeration([list(line) for line in lines], timeout=timeout)
            assert subgroup is not None
            self._groups[way] = Group(subgroup.group_name, subgroup.size())
            hold(self, [self._groups[way]])
            world.agreement.alarm.on_failure(partial(refuse_group, self._groups[way]))
            self._meet(world.place, way)

    def _meet(self, place: int, way: _Way) -> None:
        """Sends a word between all ranks of a way, pair by pair.

        NCCL makes a communicator when two ranks first send each other something, and both wait for that: in the middle
        of a schedule they might wait in a circle.
        """
        word, group = torch.zeros(1, device=self._device), process_group(self._groups[way])
        for sender, receiver in _pairs(self._schedule, way):
            work = dist.isend(word, self._line[receiver], group) if place == sender else None
            work = dist.irecv(word, self._line[sender], group) if place == receiver else work
            if work is not None:
                work.wait()

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
        tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
        works = [dist.irecv(value, self._line[sender], group) for value in tensors]
        for work in works:
            assert work is not None
            work.wait()
        return tensors

    def finish(self) -> None:
        """Waits until all that was sent is there."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def _way(self, message: Message) -> _Way:
        rank_of = self._schedule.rank_of
        return message.kind, rank_of[message.sender] < rank_of[message.receiver]


def _pairs(schedule: Schedule, way: _Way) -> list[tuple[int, int]]:
    """The ranks of a pipeline that send each other messages of a kind in a direction, senders first."""
    kind, is_up = way
    neighbours = ((a, b) if kind is Kind.ACTIVATION else (b, a) for a, b in pairwise(schedule.rank_of) if a != b)
    return sorted({(sender, receiver) for sender, receiver in neighbours if (sender < receiver) == is_up})


def _ways(schedule: Schedule) -> list[_Way]:
    """The kinds and directions of the messages between neighbours, in one order on all ranks."""
    pairs = [(a, b) for a, b in pairwise(schedule.rank_of) if a != b]
    return sorted({(Kind.ACTIVATION, a < b) for a, b in pairs} | {(Kind.GRADIENT, b < a) for a, b in pairs})
