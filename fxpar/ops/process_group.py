"""The coercions as plain functions of tensors, numbers and a group's name: what a lowered graph calls.

Arguments: the rank's tensor; where there is a cut, its dimension and pieces; the group's name and size; the rank's
index. What communicates is two calls, so that others may stand between them: `start_…` sends, and the other takes what
that gives, when it is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxpar.ops import collectives as c

Pieces = Sequence[tuple[int, c.Run]]


def same(x: Tensor) -> Tensor:
    """What changes nothing but the gradient's way."""
    return x


def start_sum(x: Tensor, group: str, size: int) -> Tensor:
    """P → I, P → R."""
    return c.start_sum(x, c.Group(group, size))


def summed(started: Tensor) -> Tensor:
    """Of `start_sum`."""
    return c.arrived(started)


def start_gather(x: Tensor, group: str, size: int) -> Tensor:
    """S → R, S → I."""
    return c.start_gather(x, c.Group(group, size))


def gathered(started: Tensor, dim: int, pieces: Pieces) -> Tensor:
    """Of `start_gather`."""
    return c.collected(started, (dim, pieces))


def start_scatter(x: Tensor, dim: int, pieces: Pieces, group: str, size: int) -> Tensor:
    """P → S."""
    return c.start_scatter(x, (dim, pieces), c.Group(group, size))


def scattered(started: Tensor) -> Tensor:
    """Of `start_scatter`."""
    return c.arrived(started).squeeze(0)


def take(x: Tensor, dim: int, pieces: Pieces, group: str, size: int, index: Tensor) -> Tensor:
    """I → S, R → S."""
    return c.take_own(x, (dim, pieces), c.Group(group, size), index)


def pad(x: Tensor, dim: int, pieces: Pieces, group: str, size: int, index: Tensor) -> Tensor:
    """S → P."""
    return c.pad_others(x, (dim, pieces), c.Group(group, size), index)


def first_only(x: Tensor, index: Tensor) -> Tensor:
    """I → P, R → P."""
    return c.first_only(x, index)


def start_exchange(x: Tensor, dim: int, pieces: Pieces, group: str, size: int) -> Tensor:
    """S(i) → S(j), by the target's cut."""
    return c.start_exchange(x, (dim, pieces), c.Group(group, size))


def exchanged(started: Tensor, dim: int, pieces: Pieces) -> Tensor:
    """Of `start_exchange`, by the source's cut."""
    return c.collected(started, (dim, pieces))


def recut(
    started: Tensor, source: tuple[int, Pieces], target: tuple[int, Pieces], group: str, size: int, index: Tensor
) -> Tensor:
    """S(i) → S(i) by another factor, of `start_gather`.

    What two ranks exchange differs from pair to pair, so that an all-to-all would need other sizes on every rank.
    """
    return c.take_own(c.collected(started, source), target, c.Group(group, size), index)
