"""Rows that a router sends to experts: sorting them, taking them from their tokens, and adding them up again.

Enters: for each token the experts that it goes to. Leaves: operators of torch whose backward consists of these same
operators, so that a program's step is made of them too. None reads a value on the host.

Terms: T tokens go to K experts each; the *flat position* of a pair is `t * K + k`. A row is a token's copy for one of
its experts, M of them stand expert after expert. `order` has the flat position of each row, or -1 where there is none.
Dimensions before these are the same in all operands: what stands behind them is apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpar.ops import rows


@torch.library.custom_op("fxpar::sort_by_expert", mutates_args=())
def sort_by_expert(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Flat positions of all pairs, expert after expert, within an expert in ascending order; and how many each has.

    What is no number of an expert goes to nobody: it stands last and is not counted.

    Args:
        indices: the experts of each token, int[..., T, K].
        experts: their number, E.

    Returns:
        The order, int64[..., T * K], and the counts, int64[..., E].
    """
    flat = indices.flatten(-2)
    keys = torch.where((flat >= 0) & (flat < experts), flat, experts).to(torch.int32)
    ranked, order = keys.sort(dim=-1, stable=True)
    # Neither bincount, which reads on the host, nor a sum at indices, which waits for itself where many are equal.
    bounds = torch.arange(experts, device=keys.device, dtype=keys.dtype).expand(*keys.shape[:-1], experts).contiguous()
    return order, torch.searchsorted(ranked, bounds, right=True) - torch.searchsorted(ranked, bounds)


@sort_by_expert.register_fake
def _sorted_shapes(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    *lead, tokens, k = indices.shape
    kind = torch.int64
    return indices.new_empty((*lead, tokens * k), dtype=kind), indices.new_empty((*lead, experts), dtype=kind)


@torch.library.custom_op("fxpar::bin_counts", mutates_args=())
def bin_counts(x: Tensor, count: int) -> Tensor:
    """How often each of the numbers below `count` occurs: `bincount` of a size that does not depend on values.

    Args:
        x: int[M], all from 0 to below `count`.

    Returns:
        int64[count].

    Raises:
        ValueError: a number is larger.
    """
    counts = torch.bincount(x, minlength=count)
    if len(counts) > count:
        raise ValueError(f"{len(counts) - 1} is among what is counted below {count}")
    return counts


@bin_counts.register_fake
def _bins(x: Tensor, count: int) -> Tensor:
    return x.new_empty(count, dtype=torch.int64)


@torch.library.custom_op("fxpar::moe_permute", mutates_args=())
def moe_permute(x: Tensor, order: Tensor, k: int, fill: bool = True) -> Tensor:
    """Each row's token: row `order // k`; zeros where the order is -1.

    Args:
        x: [..., T, h].
        order: int64[..., M].
        k: experts a token, K.
        fill: False where nobody reads rows of order -1: they hold anything.

    Returns:
        [..., M, h].
    """
    return rows.take(x, None, order, k, x.dtype, fill)


@moe_permute.register_fake
def _taken_shape(x: Tensor, order: Tensor, k: int, fill: bool = True) -> Tensor:
    return x.new_empty((*order.shape, x.shape[-1]))


@torch.library.custom_op("fxpar::moe_unpermute", mutates_args=())
def moe_unpermute(y: Tensor, order: Tensor, tokens: int, k: int) -> Tensor:
    """For each token the sum of its rows, added in the order of its experts k = 0, 1, …; the adjoint of `moe_permute`.

    That order does not depend on where other tokens go. Halves are added in float32.

    Args:
        y: [..., M, h].
        order: int64[..., M], each flat position at most once; rows with -1 are left out.
        tokens: T.
        k: K.

    Returns:
        [..., T, h]; zeros for a token without rows.
    """
    return rows.put(y, None, order, tokens, k, y.dtype)


@moe_unpermute.register_fake
def _put_shape(y: Tensor, order: Tensor, tokens: int, k: int) -> Tensor:
    rows.check(y, order)
    return y.new_empty((*order.shape[:-1], tokens, y.shape[-1]))


def _keep_taken(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, order, ctx.k, _ = inputs
    ctx.tokens = x.shape[-2]
    ctx.save_for_backward(order)


def _taken_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return moe_unpermute(gradient, *ctx.saved_tensors, ctx.tokens, ctx.k), None, None, None


def _keep_put(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, _, ctx.k = inputs
    ctx.save_for_backward(order)


def _put_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return moe_permute(gradient, *ctx.saved_tensors, ctx.k), None, None, None


moe_permute.register_autograd(_taken_backward, setup_context=_keep_taken)
moe_unpermute.register_autograd(_put_backward, setup_context=_keep_put)
