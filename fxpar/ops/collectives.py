"""Collectives and cuts of local tensors.

Enters: a rank's tensor, the cut, a process group by name and the rank's index on the axis as a tensor (so that a
compiled or captured program is the same on every rank). Leaves: the rank's tensor in another placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """The ranks of one axis: name and size of their process group, and the mailbox (`fxpar.exchange`), if any."""

    name: str
    size: int
    mailbox: str = ""


# A cut: the dimension and its sharded pieces as (outer, run) in global elements; run is None for "all that is there",
# and (size, padded) where the ranks' blocks of a single run are padded.
Run = int | tuple[int, int] | None
Cut = tuple[int, Sequence[tuple[int, Run]]]


def start_sum(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' tensors, on its way."""
    return _c10d.all_reduce(x.contiguous(), "sum", group.name)  # type: ignore[no-any-return]


def arrived(started: Tensor) -> Tensor:
    """What was sent, when it is there."""
    return _c10d.wait_tensor(started)  # type: ignore[no-any-return]


def sum_over(x: Tensor, group: Group) -> Tensor:
    """All-reduce."""
    return arrived(start_sum(x, group))


def max_over(x: Tensor, group: Group) -> Tensor:
    """All-reduce of the largest values; it has no derivative."""
    return arrived(_c10d.all_reduce(x.contiguous(), "max", group.name))


def _padding(cut: Cut) -> tuple[int, int] | None:
    """Size and padded size of a cut whose blocks are padded."""
    run = cut[1][0][1]
    return run if isinstance(run, tuple) else None


def _segments(x: Tensor, cut: Cut, share: int) -> list[Tensor]:
    """The pieces along the cut dimension; `share` is n for a rank's tensor and 1 for a whole one."""
    dim, pieces = cut
    if len(pieces) == 1:
        return [x]
    return list(x.split([outer * run // share for outer, run in pieces if isinstance(run, int)], dim))


def spread(x: Tensor, cut: Cut, n: int) -> Tensor:
    """Whole tensor → [n, …]: the ranks' parts stacked, padding zero."""
    dim, pieces = cut
    padding = _padding(cut)
    if padding is not None:
        size, padded = padding
        share = -(-size // n)
        x = _lengthened(x, dim, share * n - size).unflatten(dim, (n, share)).movedim(dim, 0)
        return _lengthened(x, dim + 1, padded // n - share)
    parts = []
    for part, (outer, _) in zip(_segments(x, cut, 1), pieces, strict=True):
        blocks = part.unflatten(dim, (outer, n, part.shape[dim] // (outer * n)))
        parts.append(blocks.movedim(dim + 1, 0).flatten(dim + 1, dim + 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim + 1)


def _lengthened(x: Tensor, dim: int, count: int) -> Tensor:
    """With zeros behind the dimension's end."""
    return functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, count]) if count else x


def put_together(stacked: Tensor, cut: Cut) -> Tensor:
    """[n, …] → whole tensor: the inverse of `spread`."""
    dim, pieces = cut
    n = stacked.shape[0]
    padding = _padding(cut)
    if padding is not None:
        size = padding[0]
        return stacked.narrow(dim + 1, 0, -(-size // n)).movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, size)
    parts = []
    moved = (dim + 1, pieces)
    for part, (outer, _) in zip(_segments(stacked, moved, n), pieces, strict=True):
        blocks = part.unflatten(dim + 1, (outer, part.shape[dim + 1] // outer))
        parts.append(blocks.movedim(0, dim + 1).flatten(dim, dim + 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def gather_whole(x: Tensor, cut: Cut, group: Group) -> Tensor:
    """All-gather of a shard."""
    return collected(start_gather(x, group), cut)


def start_gather(x: Tensor, group: Group) -> Tensor:
    """[n, …]: the ranks' tensors stacked, on their way."""
    return _c10d.all_gather_into_tensor(x.contiguous().unsqueeze(0), group.size, group.name)  # type: ignore[no-any-return]


def start_exchange(x: Tensor, target: Cut, group: Group) -> Tensor:
    """[n, …]: of each rank the part that is this one's in the target cut, on its way."""
    counts = [1] * group.size
    stacked = spread(x, target, group.size).contiguous()
    return _c10d.all_to_all_single(stacked, counts, counts, group.name)  # type: ignore[no-any-return]


def collected(started: Tensor, cut: Cut) -> Tensor:
    """The whole of what was stacked, when it is there."""
    return put_together(arrived(started), cut)


def start_scatter(x: Tensor, cut: Cut, group: Group) -> Tensor:
    """[1, …]: the rank's shard of the sum, on its way."""
    stacked = spread(x, cut, group.size).contiguous()
    return _c10d.reduce_scatter_tensor(stacked, "sum", group.size, group.name)  # type: ignore[no-any-return]


def take_own(x: Tensor, cut: Cut, group: Group, index: Tensor) -> Tensor:
    """A rank's shard of a whole tensor."""
    return spread(x, cut, group.size).index_select(0, index.reshape(1)).squeeze(0)


def pad_others(x: Tensor, cut: Cut, group: Group, index: Tensor) -> Tensor:
    """A whole tensor with a rank's shard in its place and zeros elsewhere."""
    ranks = torch.arange(group.size, device=x.device).view(-1, *[1] * x.dim())
    return put_together(torch.where(ranks == index, x.unsqueeze(0), x.new_zeros(())), cut)


def first_only(x: Tensor, index: Tensor) -> Tensor:
    """The value on rank 0, zeros on the others."""
    return torch.where(index == 0, x, x.new_zeros(()))
