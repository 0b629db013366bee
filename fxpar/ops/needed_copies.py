"""Tokens for those ranks that need them, and sums of what these made, by copies between the ranks' memories.

Enters: a rank's tensor, the experts that all tokens chose, the name of a mailbox and the number of a buffer. Leaves: as
`expand_needed` and `sum_needed` on a rank (`fxpar.ops.selective_dispatch`). Each is one call, which sends, waits and
reads: how much travels is known where it is sent alone, and no copy engine is told which rows.
"""

from __future__ import annotations

from torch import Tensor

from fxpar.exchange.needed import slot_stride
from fxpar.exchange.symmetric_buffer import mailbox
from fxpar.ops.torch_operators import torch_operator


@torch_operator("gather_needed")
def gather_needed(x: Tensor, chosen: Tensor, per_rank: int, name: str, buffer: int) -> Tensor:
    """Of the tokens of n ranks those that this one needs, on the mailbox `name`.

    Args:
        x: [t, f]: its own.
        chosen: i64[n, t, K]: the experts of all.
        per_rank: experts of a rank.

    Returns:
        [n, t, f], zero where it needs nothing.
    """
    line = mailbox(name)
    line.begin(buffer)
    tokens = line.expanded(buffer, x.contiguous(), chosen.contiguous(), per_rank)
    line.poison_area(buffer, slot_stride(x) * line.size)
    line.end(buffer)
    return tokens


@gather_needed.register_fake
def _gathered(x: Tensor, chosen: Tensor, per_rank: int, name: str, buffer: int) -> Tensor:
    return x.new_empty((chosen.shape[0], *x.shape))


@torch_operator("scatter_needed")
def scatter_needed(x: Tensor, chosen: Tensor, per_rank: int, name: str, buffer: int) -> Tensor:
    """The sums of what n ranks made of those tokens of this one that each needed.

    Args:
        x: [n, t, f]: what this rank made of the tokens of all.
        chosen, per_rank: as of `gather_needed`.

    Returns:
        [t, f].
    """
    line = mailbox(name)
    line.begin(buffer)
    sums = line.summed(buffer, x.contiguous(), chosen.contiguous(), per_rank)
    line.poison_area(buffer, slot_stride(sums) * line.size)
    line.end(buffer)
    return sums


@scatter_needed.register_fake
def _scattered(x: Tensor, chosen: Tensor, per_rank: int, name: str, buffer: int) -> Tensor:
    return x.new_empty(x.shape[1:])


def expanded(x: Tensor, chosen: Tensor, per_rank: int, size: int, name: str, buffer: int) -> Tensor:
    """[… t, f] → [… 1, n * t, f] (`expand_needed`)."""
    tokens = gather_needed(x.reshape(-1, x.shape[-1]), _by_rank(chosen, size), per_rank, name, buffer)
    return tokens.view(size, *x.shape).movedim(0, -3).flatten(-3, -2).unsqueeze(-3)


def summed(x: Tensor, chosen: Tensor, per_rank: int, size: int, name: str, buffer: int) -> Tensor:
    """[… 1, n * t, f] → [… t, f] (`sum_needed`)."""
    by_rank = _by_rank(x.squeeze(-3), size)
    sums = scatter_needed(by_rank, _by_rank(chosen, size), per_rank, name, buffer)
    return sums.view(*x.shape[:-3], x.shape[-2] // size, x.shape[-1])


def _by_rank(x: Tensor, size: int) -> Tensor:
    """[… n * t, f] → [n, … * t, f]: what is of the tokens of each rank."""
    apart: Tensor = x.unflatten(-2, (size, x.shape[-2] // size))
    return apart.movedim(-3, 0).flatten(1, -2)
