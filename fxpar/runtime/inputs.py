"""Whether the ranks of a module are called with the same batches.

Enters: the batch of each call and what is known of it on the host (entries, types, sizes, mode). Leaves: nothing where
they are equal on all ranks, else an error that names the entry and the ranks.

What the host knows is compared before the program runs, on a group of the hosts: programs of other sizes would wait for
each other forever. Values are compared by a checksum that the device computes. On CPUs that is there at once; on other
devices nobody waits for it: the loss of the call is NaN where values differ, and the next call raises the error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

from fxpar.errors import InputError
from fxpar.mesh.axes import DENSE, PURPOSES, Cuts
from fxpar.mesh.mesh import Mesh
from fxpar.ops.mesh_process_groups import process_group
from fxpar.ops.process_group import Group
from fxpar.runtime import batch as calls
from fxpar.runtime.alarm import Met
from fxpar.runtime.world import World

_REMEDY = "pass the same batch on all ranks"
_SHARED = "pass the same on all ranks: it has no rows that they could share out"
_OWN = "pass the same batch on all ranks of one data rank"
# Odd numbers without structure, as splitmix64 mixes with.
_MIX, _STEP = -0x40A7B892E31B1A47, -0x61C8864680B583EB
# Words that are mixed at a time, so that a batch of images needs no memory to speak of.
_CHUNK = 1 << 20
# Sizes for which the factors of the words' places are kept.
_MOST_KEPT = 8


# By data rank, the shapes of the tensors of its batch in their order.
Shapes = list[list[tuple[int, ...]]]


class Inputs:
    """Compares the calls of one module over the ranks, which are several."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._devices, self._everyone = _alike(world), _all(dist.group.WORLD)
        places = world.coordinates.items()
        self._party = " ".join(f"{axis} {index}" for axis, index in places if PURPOSES[axis].cuts is Cuts.BATCH)
        # By rank, which part of the batch it is given.
        self._parts = [data_part(world.mesh, rank) for rank in range(world.size)]
        self._steps: dict[int, Tensor] = {}
        # What the device has not said yet: when it has, into which memory, and about which batch.
        self._pending: tuple[torch.cuda.Event, Tensor, Any, Any] | None = None

    def compare(
        self, batch: Any, facts: Mapping[str, str], shared: Collection[str] = ()
    ) -> tuple[Any, Tensor | None, Shapes | None]:
        """The batch on the device, whether its values are the same on all ranks, where that is not known yet, and the
        shapes of all data ranks' batches, where they differ.

        Args:
            facts: what the host knows of the call, but the sizes of the batch.
            shared: paths of entries that all data ranks must have alike: they have no rows.

        Raises:
            InputError: this batch differs, or the values of the one before did.
        """
        self._settle()
        device = self._world.device
        batch = pytree.tree_map_only(Tensor, lambda value: value.to(device), batch)
        shapes = [list(value.shape) for _, value in calls.leaves(batch) if isinstance(value, Tensor)]
        known = [_digest(facts), _digest(shapes)]
        values = None if self._devices is None else self.checksum(batch)
        whole = {path: value for path, value in calls.leaves(batch) if path in shared} if self._party else {}
        alike = self.checksum(whole) if whole else None
        is_one = self._devices is not None and self._devices.size == self._world.size
        if device.type == "cpu" and values is not None:
            # Of ranks that are given other batches, all must know where some differ.
            known.append(int(values if is_one else self._odd(values)))
            values = None
        if device.type == "cpu" and alike is not None:
            known.append(int(alike))
            alike = None
        met, others = self._meet("compares the batch", known), None
        if not met.is_equal:
            most, least = met.largest, met.smallest
            if self._party and most[0] == least[0] and most[2:] == least[2:]:
                others = self._shapes(shapes)
            if others is None:
                self._differs(batch, facts, whole)
        words = [] if values is None else [values if is_one else self._odd(values)]
        words += [] if alike is None else [alike]
        if not words:
            return batch, None, others
        extremes = _extremes(torch.cat(words), self._everyone)
        host = torch.empty(extremes.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(extremes, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = (event, host, batch, whole)
        return batch, extremes[0].eq(extremes[1].bitwise_not()).all(), others

    def _shapes(self, shapes: list[list[int]]) -> Shapes | None:
        """By data rank, the shapes of the tensors of its batch; None where ranks of one differ."""
        mine = torch.tensor([size for shape in shapes for size in shape])
        gathered = [torch.empty_like(mine) for _ in range(self._world.size)]
        meeting = self._world.agreement.meeting
        assert meeting is not None, "there are several ranks"
        dist.all_gather(gathered, mine, group=process_group(meeting.group))
        by_part: dict[int, list[int]] = {}
        for part, sizes in zip(self._parts, (sizes.tolist() for sizes in gathered), strict=True):
            if by_part.setdefault(part, sizes) != sizes:
                return None
        split = [[by_part[part].pop(0) for _ in shape] for part in sorted(by_part) for shape in shapes]
        return [[tuple(s) for s in split[i : i + len(shapes)]] for i in range(0, len(split), len(shapes))]

    def _settle(self) -> None:
        """Raises for the call before. Its checksum lies before its program on the device, which has begun by now."""
        if self._pending is None:
            return
        event, host, batch, whole = self._pending
        self._pending = None
        event.synchronize()
        if not _is_equal(host):
            self._differs(batch, {"the call": "the call before this one"}, whole)

    def somewhere(self, is_so: bool) -> bool:
        """Whether something is so on any rank. A collective call of the hosts."""
        return bool(self._meet("compares what padding gives", [int(is_so)]).largest[0])

    def _meet(self, place: str, compared: Sequence[int]) -> Met:
        met = self._world.agreement.meet(place, compared)
        assert met is not None, "there are several ranks"
        return met

    def _differs(self, batch: Any, facts: Mapping[str, str], whole: Any) -> None:
        """Finds out what differs, where ranks can say it in words."""
        agree = self._world.agreement.agree
        if not self._party:
            agree({**facts, **calls.batch_facts(batch, values=True)}, _REMEDY)
        else:
            agree(facts, _REMEDY)
            agree(calls.batch_facts(whole, values=True), _SHARED)
            if self._devices is not None:
                agree(calls.batch_facts(batch, values=True), _OWN, self._party)
        raise InputError("differs between ranks", where="the batch", remedy=_REMEDY)

    def _odd(self, values: Tensor) -> Tensor:
        """Zero where the ranks that are given one batch have the same values, else this rank's number."""
        assert self._devices is not None
        if self._world.device.type == "cpu":  # on other devices the hosts have met
            self._world.agreement.enter("compares the batch of one part")
        extremes = _extremes(values, self._devices)
        is_same = extremes[0].eq(extremes[1].bitwise_not()).all()
        return torch.where(is_same, 0, self._world.rank + 1).reshape(1)

    def checksum(self, batch: Any) -> Tensor:
        """A number that follows from the bits of all tensors of a batch and from their order; i64[1]."""
        total = torch.zeros(1, dtype=torch.int64, device=self._world.device)
        for _, value in calls.leaves(batch):
            if isinstance(value, Tensor):
                for words in _words(value):
                    total = total * _MIX + self._mixed(words)
        return total

    def _mixed(self, words: Tensor) -> Tensor:
        """A sum in which the place of each word counts, and each of its bits for others."""
        steps = self._steps.get(words.numel())
        if steps is None:
            steps = torch.arange(1, words.numel() + 1, device=words.device) * _STEP
            if len(self._steps) >= _MOST_KEPT:
                self._steps.clear()
            self._steps[words.numel()] = steps
        mixed = (words ^ steps) * _MIX
        mixed ^= mixed >> 29
        mixed *= _STEP
        mixed ^= mixed >> 32
        return mixed.sum()


def _digest(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(value).encode()).digest()[:8], signed=True)


def data_part(mesh: Mesh, rank: int) -> int:
    """Which part of the batch a rank is given."""
    places, index = mesh.coordinates(rank), 0
    for axis, n in mesh.nested(DENSE).items():
        if PURPOSES[axis].cuts is Cuts.BATCH:
            index = index * n + places[axis]
    return index


def _words(value: Tensor) -> list[Tensor]:
    """The bits of a tensor as numbers, by pieces; the last bytes one by one."""
    data = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if data.storage_offset() * data.element_size() % 8:
        data = data.clone()
    data = data.view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = list(data[:whole].view(torch.int64).split(_CHUNK)) if whole else []
    return [*words, data[whole:].long()] if whole < data.numel() else words


def _extremes(values: Tensor, group: Group) -> Tensor:
    """The largest value over the ranks, and the largest complement."""
    extremes = torch.stack([values, values.bitwise_not()])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=process_group(group))
    return extremes


def _is_equal(extremes: Tensor) -> bool:
    return torch.equal(extremes[0], extremes[1].bitwise_not())


def _alike(world: World) -> Group | None:
    """The group of the ranks that are given the same batch; None where each has its own."""
    names = [axis for axis in world.coordinates if PURPOSES[axis].cuts is not Cuts.BATCH]
    names += ["pp"] if "pp" in world.groups else []
    return world.groups["-".join(names)] if names else None


def _all(group: Any) -> Group:
    return Group(group.group_name, group.size())
