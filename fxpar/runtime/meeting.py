"""Where the hosts of all ranks meet: a few words of each, of which all get the largest and the smallest.

Enters: a rank's words. Leaves: those of all ranks at once. The messages are the same whatever ranks come for, so that
ranks that come for different things meet too and find that out. There are as many rounds as the number of ranks has
binary digits: gloo's all-reduce goes twice round a ring, which takes longer even between two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import RankError
from fxpar.ops.collectives import Group
from fxpar.ops.mesh_process_groups import limit_of_cpus, process_group

# Of a frame: whether the rank failed, its calls and agreements so far, its step, what it calls and where in it it is;
# the rest is what is compared.
_HEAD, _PAYLOAD = 6, 6


class Failed(Enum):
    """Whether a rank failed: in front of its first collective, or behind it."""

    NOT = 0
    EARLY = 1
    LATE = 2

    def __bool__(self) -> bool:
        return self is not Failed.NOT


@dataclass(frozen=True)
class Met:
    """What the ranks came with.

    Attributes:
        failed: the first rank that failed, None where none did; one that was late comes first.
        all_failed: whether no rank did not.
        is_late: whether a rank failed behind its first collective.
        all_late: whether all of them did.
        calls: the most that a rank has begun.
        points: the most agreements in it.
        differs: whether ranks came for different things: other calls, or other places in them.
        steps_differ: whether they are at other steps.
        largest, smallest: of what is compared, six words.
    """

    failed: int | None
    all_failed: bool
    is_late: bool
    all_late: bool
    calls: int
    points: int
    differs: bool
    steps_differ: bool
    largest: list[int]
    smallest: list[int]

    @property
    def is_equal(self) -> bool:
        """Whether all ranks have the same to compare."""
        return self.largest == self.smallest


@dataclass(frozen=True)
class Meeting:
    """The hosts of one module.

    Attributes:
        group: of all ranks, by gloo; programs send nothing over it.
        rank: of this process.
    """

    group: Group
    rank: int

    def meet(
        self,
        state: tuple[Failed, int, int, int],
        place: tuple[str, str],
        compared: Sequence[int] = (),
        seconds: float | None = None,
    ) -> Met:
        """Meets the other ranks. A collective call.

        Args:
            state: whether this rank has failed, its calls, its agreements in this one, and its step.
            place: what is called, and where in it the rank is.
            compared: six numbers at most.
            seconds: for which it waits; as long as the group's collectives by default.
        """
        size, (failed, *counts) = self.group.size, state
        head = [(size - self.rank if failed else 0) + size * (failed is Failed.LATE), *counts, *map(number, place)]
        words = [*head, *compared, *[0] * (_PAYLOAD - len(compared))]
        both = self._largest(torch.tensor([*words, *(~word for word in words)]), seconds).tolist()
        largest, smallest = both[: len(words)], [~word for word in both[len(words) :]]
        return Met(
            -largest[0] % size if largest[0] else None,
            smallest[0] > 0,
            largest[0] > size,
            smallest[0] > size,
            largest[1],
            largest[2],
            largest[4:_HEAD] != smallest[4:_HEAD],
            largest[3] != smallest[3],
            largest[_HEAD:],
            smallest[_HEAD:],
        )

    def _largest(self, words: Tensor, seconds: float | None) -> Tensor:
        """The largest of all ranks' words: each round, a rank has those of twice as many."""
        group, size = process_group(self.group), self.group.size
        limit = () if seconds is None else (timedelta(seconds=seconds),)
        distance = 1
        while distance < size:
            other = torch.empty_like(words)
            sent = group.send([words], (self.rank + distance) % size, distance)
            group.recv([other], (self.rank - distance) % size, distance).wait(*limit)
            sent.wait()
            words = torch.maximum(words, other)
            distance *= 2
        return words


def hosts(rank: int, size: int, seconds: float) -> Meeting:
    """Where they meet. A collective call.

    Raises:
        RankError: the hosts cannot reach each other.
    """
    limit = limit_of_cpus() or timedelta(seconds=seconds)
    try:
        gloo_group = dist.new_group(backend="gloo", timeout=limit)
    except RuntimeError as error:
        raise RankError(
            f"the hosts cannot reach each other by gloo: {str(error).splitlines()[0]}",
            where=f"rank {rank}, start-up",
            remedy="set GLOO_SOCKET_IFNAME to the network's interface",
        ) from error
    return Meeting(Group(gloo_group.group_name, size), rank)


@cache
def number(text: str) -> int:
    """One that stands for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
