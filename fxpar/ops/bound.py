"""The coercions as plain functions of tensors, numbers and a group's name: what a lowered graph calls.

Arguments: the rank's tensor; where there is a cut, its dimension and pieces; the group's name and size; the rank's
index.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxpar.ops import collectives as c

Pieces = Sequence[tuple[int, c.Run]]


def copy_to(x: Tensor, group: str, size: int) -> Tensor:
    """I → R."""
    return c.CopyTo.apply(x, c.Group(group, size))  # type: ignore[no-any-return, no-untyped-call]


def reduce_from(x: Tensor, group: str, size: int) -> Tensor:
    """P → I."""
    return c.ReduceFrom.apply(x, c.Group(group, size))  # type: ignore[no-any-return, no-untyped-call]


def all_reduce(x: Tensor, group: str, size: int) -> Tensor:
    """P → R."""
    return c.AllReduce.apply(x, c.Group(group, size))  # type: ignore[no-any-return, no-untyped-call]


def all_gather(x: Tensor, dim: int, pieces: Pieces, group: str, size: int) -> Tensor:
    """S → R."""
    return c.AllGather.apply(x, (dim, pieces), c.Group(group, size))  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter(x: Tensor, dim: int, pieces: Pieces, group: str, size: int) -> Tensor:
    """P → S."""
    return c.ReduceScatter.apply(x, (dim, pieces), c.Group(group, size))  # type: ignore[no-any-return, no-untyped-call]


def split(x: Tensor, dim: int, pieces: Pieces, group: str, size: int, index: Tensor) -> Tensor:
    """I → S."""
    return c.Split.apply(x, (dim, pieces), c.Group(group, size), index)  # type: ignore[no-any-return, no-untyped-call]


def gather(x: Tensor, dim: int, pieces: Pieces, group: str, size: int, index: Tensor) -> Tensor:
    """S → I."""
    return c.Gather.apply(x, (dim, pieces), c.Group(group, size), index)  # type: ignore[no-any-return, no-untyped-call]


def take(x: Tensor, dim: int, pieces: Pieces, group: str, size: int, index: Tensor) -> Tensor:
    """R → S."""
    return c.Take.apply(x, (dim, pieces), c.Group(group, size), index)  # type: ignore[no-any-return, no-untyped-call]


def pad(x: Tensor, dim: int, pieces: Pieces, group: str, size: int, index: Tensor) -> Tensor:
    """S → P."""
    return c.pad_others(x, (dim, pieces), c.Group(group, size), index)


def settle(x: Tensor, index: Tensor) -> Tensor:
    """R → I."""
    return c.Settle.apply(x, index)  # type: ignore[no-any-return, no-untyped-call]


def keep_first(x: Tensor, index: Tensor) -> Tensor:
    """I → P."""
    return c.KeepFirst.apply(x, index)  # type: ignore[no-any-return, no-untyped-call]


def mask_first(x: Tensor, index: Tensor) -> Tensor:
    """R → P. Both ways the same, so that PyTorch's own derivative is right."""
    return c.first_only(x, index)


def all_to_all(
    x: Tensor, source_dim: int, source: Pieces, target_dim: int, target: Pieces, group: str, size: int, index: Tensor
) -> Tensor:
    """S(i) → S(j)."""
    cuts = (source_dim, source), (target_dim, target)
    if source_dim == target_dim:
        return c.Recut.apply(x, *cuts, c.Group(group, size), index)  # type: ignore[no-any-return, no-untyped-call]
    return c.AllToAll.apply(x, *cuts, c.Group(group, size))  # type: ignore[no-any-return, no-untyped-call]
