"""The coercions of SPEC section 2.1 on local tensors: value forward, vector-Jacobian product backward.

Enters: a rank's tensor, the cut, a process group by name and the rank's index on the axis as a tensor (so that a
compiled or captured program is the same on every rank). Leaves: the rank's tensor in the other placement.

PyTorch's own differentiable all-reduce has an all-reduce as its backward; used as g it would multiply gradients by n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """The ranks of one axis: process group name and size."""

    name: str
    size: int


# A cut: the dimension and its sharded pieces as (outer, run) in global elements; run is None for "all that is there",
# and (size, padded) where the ranks' blocks of a single run are padded.
Run = int | tuple[int, int] | None
Cut = tuple[int, Sequence[tuple[int, Run]]]


def sum_over(x: Tensor, group: Group) -> Tensor:
    """All-reduce."""
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", group.name))  # type: ignore[no-any-return]


def max_over(x: Tensor, group: Group) -> Tensor:
    """All-reduce of the largest values; it has no derivative."""
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "max", group.name))  # type: ignore[no-any-return]


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


def _spread(x: Tensor, cut: Cut, n: int) -> Tensor:
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


def _collect(stacked: Tensor, cut: Cut) -> Tensor:
    """[n, …] → whole tensor: the inverse of `_spread`."""
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
    flat = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous().unsqueeze(0), group.size, group.name))
    return _collect(flat, cut)


def scatter_sum(x: Tensor, cut: Cut, group: Group) -> Tensor:
    """Reduce-scatter of summands to shards."""
    stacked = _spread(x, cut, group.size).contiguous()
    own = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(stacked, "sum", group.size, group.name))
    return own.squeeze(0)  # type: ignore[no-any-return]


def take_own(x: Tensor, cut: Cut, group: Group, index: Tensor) -> Tensor:
    """A rank's shard of a whole tensor."""
    return _spread(x, cut, group.size).index_select(0, index.reshape(1)).squeeze(0)


def pad_others(x: Tensor, cut: Cut, group: Group, index: Tensor) -> Tensor:
    """A whole tensor with a rank's shard in its place and zeros elsewhere."""
    ranks = torch.arange(group.size, device=x.device).view(-1, *[1] * x.dim())
    return _collect(torch.where(ranks == index, x.unsqueeze(0), x.new_zeros(())), cut)


def first_only(x: Tensor, index: Tensor) -> Tensor:
    """The value on rank 0, zeros on the others."""
    return torch.where(index == 0, x, x.new_zeros(()))


def exchange(x: Tensor, source: Cut, target: Cut, group: Group) -> Tensor:
    """All-to-all from a cut of one dimension to a cut of another."""
    stacked = _spread(x, target, group.size).contiguous()
    counts = [1] * group.size
    got = _c10d.wait_tensor(_c10d.all_to_all_single(stacked, counts, counts, group.name))
    return _collect(got, source)


class CopyTo(torch.autograd.Function):
    """I → R: identity; all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """The same value."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The sum of the ranks' gradients."""
        return sum_over(grad, ctx.group), None


class ReduceFrom(torch.autograd.Function):
    """P → I: all-reduce; identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """The sum of the ranks' values."""
        return sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The same gradient."""
        return grad, None


class AllReduce(torch.autograd.Function):
    """P → R: all-reduce; all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """The sum of the ranks' values."""
        ctx.group = group
        return sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The sum of the ranks' gradients."""
        return sum_over(grad, ctx.group), None


class AllGather(torch.autograd.Function):
    """S → R: all-gather; reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, group: Group) -> Tensor:
        """The whole value."""
        ctx.cut, ctx.group = cut, group
        return gather_whole(x, cut, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The rank's shard of the summed gradient."""
        return scatter_sum(grad, ctx.cut, ctx.group), None, None


class ReduceScatter(torch.autograd.Function):
    """P → S: reduce-scatter; all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, group: Group) -> Tensor:
        """The rank's shard of the sum."""
        ctx.cut, ctx.group = cut, group
        return scatter_sum(x, cut, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The whole gradient."""
        return gather_whole(grad, ctx.cut, ctx.group), None, None


class Split(torch.autograd.Function):
    """I → S: slice; all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, group: Group, index: Tensor) -> Tensor:
        """The rank's shard."""
        ctx.cut, ctx.group = cut, group
        return take_own(x, cut, group, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """The whole gradient."""
        return gather_whole(grad, ctx.cut, ctx.group), None, None, None


class Gather(torch.autograd.Function):
    """S → I: all-gather; slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, group: Group, index: Tensor) -> Tensor:
        """The whole value."""
        ctx.cut, ctx.group = cut, group
        ctx.save_for_backward(index)
        return gather_whole(x, cut, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """The rank's shard of the gradient."""
        return take_own(grad, ctx.cut, ctx.group, *ctx.saved_tensors), None, None, None


class Take(torch.autograd.Function):
    """R → S: slice; padded with zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, group: Group, index: Tensor) -> Tensor:
        """The rank's shard."""
        ctx.cut, ctx.group = cut, group
        ctx.save_for_backward(index)
        return take_own(x, cut, group, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """The rank's summand of the whole gradient."""
        return pad_others(grad, ctx.cut, ctx.group, *ctx.saved_tensors), None, None, None


class Settle(torch.autograd.Function):
    """R → I: identity; kept on rank 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        """The same value."""
        ctx.save_for_backward(index)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient as one summand."""
        return first_only(grad, *ctx.saved_tensors), None


class KeepFirst(torch.autograd.Function):
    """I → P: kept on rank 0; identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        """The value as one summand."""
        return first_only(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The same gradient."""
        return grad, None


class Recut(torch.autograd.Function):
    """S(i) → S(i) by another factor: all-gather and slice, both ways.

    What two ranks exchange differs from pair to pair, so that an all-to-all would need other sizes on every rank.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Cut, target: Cut, group: Group, index: Tensor) -> Tensor:
        """The other shard."""
        ctx.source, ctx.target, ctx.group = source, target, group
        ctx.save_for_backward(index)
        return take_own(gather_whole(x, source, group), target, group, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """The gradient's first shard."""
        whole = gather_whole(grad, ctx.target, ctx.group)
        return take_own(whole, ctx.source, ctx.group, *ctx.saved_tensors), None, None, None, None


class AllToAll(torch.autograd.Function):
    """S(i) → S(j): all-to-all, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Cut, target: Cut, group: Group) -> Tensor:
        """The other shard."""
        ctx.source, ctx.target, ctx.group = source, target, group
        return exchange(x, source, target, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient's first shard."""
        return exchange(grad, ctx.target, ctx.source, ctx.group), None, None, None
