"""Where the hosts of all ranks meet: a few words of each, of which all get the largest and the smallest.

Enters: a rank's words. Leaves: those of all ranks at once. One collective of one size, whatever ranks come for, so that
ranks that come for different things meet too and find that out.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import RankError
from fxpar.ops.collectives import Group
from fxpar.ops.groups import limit_of_cpus, process_group

# Of a frame: whether the rank failed, its calls and agreements so far, its step, what it calls and where in it it is;
# the rest is what is compared.
_HEAD, _PAYLOAD = 6, 6


@dataclass(frozen=True)
class Met:
    """What the ranks came with.

    Attributes:
        failed: the first rank that failed, None where none did.
        all_failed: whether no rank did not.
        calls: the most that a rank has begun.
        points: the most agreements in it.
        differs: whether ranks came for different things: other calls, or other places in them.
        steps_differ: whether they are at other steps.
        largest, smallest: of what is compared, i64[6].
    """

    failed: int | None
    all_failed: bool
    calls: int
    points: int
    differs: bool
    steps_differ: bool
    largest: Tensor
    smallest: Tensor

    @property
    def is_equal(self) -> bool:
        """Whether all ranks have the same to compare."""
        return torch.equal(self.largest, self.smallest)


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
        state: tuple[bool, int, int, int],
        place: tuple[str, str],
        compared: Sequence[int] = (),
        seconds: float | None = None,
    ) -> Met | None:
        """Meets the other ranks. A collective call.

        Args:
            state: whether this rank has failed, its calls, its agreements in this one, and its step.
            place: what is called, and where in it the rank is.
            compared: six numbers at most.
            seconds: after which it does not wait any longer, and gives None.
        """
        size, (failed, *counts) = self.group.size, state
        head = [size - self.rank if failed else 0, *counts, *map(_number, place)]
        own = torch.tensor([*head, *compared, *[0] * (_PAYLOAD - len(compared))])
        both = torch.stack([own, own.bitwise_not()])
        group = process_group(self.group)
        if seconds is None:
            dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        elif not _done(dist.all_reduce(both, dist.ReduceOp.MAX, group=group, async_op=True), seconds):
            return None
        largest, smallest = both[0], both[1].bitwise_not()
        (most, calls, points, *_), (least, *_) = largest.tolist(), smallest.tolist()
        same = largest.eq(smallest).tolist()
        return Met(
            size - most if most else None,
            bool(least),
            calls,
            points,
            not (same[4] and same[5]),
            not same[3],
            largest[_HEAD:],
            smallest[_HEAD:],
        )


def hosts(rank: int, size: int, seconds: float) -> Meeting:
    """Where they meet. A collective call.

    Raises:
        RankError: the hosts cannot reach each other.
    """
    limit = limit_of_cpus() or timedelta(seconds=seconds)
    try:
        own = dist.new_group(backend="gloo", timeout=limit)
    except RuntimeError as error:
        raise RankError(
            f"the hosts cannot reach each other by gloo: {str(error).splitlines()[0]}",
            where=f"rank {rank}, start-up",
            remedy="set GLOO_SOCKET_IFNAME to the network's interface",
        ) from error
    return Meeting(Group(own.group_name, size), rank)


@cache
def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def _done(work: dist.Work | None, seconds: float) -> bool:
    assert work is not None
    end = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    work.wait()
    return True
