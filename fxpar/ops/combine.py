"""Rows of experts added up with the weights of their pairs, and what that differentiates to.

Enters: rows, tokens, and the weights that a router gives them. Leaves: three operators of torch, linear in each of
their first two operands, whose backward consists of these same three. For the terms see `fxpar.ops.permute`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpar.ops import rows


@torch.library.custom_op("fxpar::moe_combine", mutates_args=())
def moe_combine(y: Tensor, weights: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """For each token the weighted sum of its rows, added in the order of its experts k = 0, 1, ….

    Halves are multiplied and added in float32.

    Args:
        y: [..., M, h].
        weights: [..., T, K].
        order: int64[..., M], each flat position at most once; rows with -1 are left out.
        dtype: of the result.

    Returns:
        [..., T, h]; zeros for a token without rows.
    """
    return rows.put(y, weights, order, weights.shape[-2], weights.shape[-1], dtype)


@moe_combine.register_fake
def _put_shape(y: Tensor, weights: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    rows.check(y, order)
    return y.new_empty((*weights.shape[:-1], y.shape[-1]), dtype=dtype)


@torch.library.custom_op("fxpar::take_weighed", mutates_args=())
def take_weighed(x: Tensor, weights: Tensor, order: Tensor, dtype: torch.dtype, fill: bool = True) -> Tensor:
    """Each row's token times the weight of its pair; zeros where the order is -1.

    Args:
        x: [..., T, h].
        weights: [..., T, K].
        order: int64[..., M].
        dtype: of the result.
        fill: False where nobody reads rows of order -1: they hold anything.

    Returns:
        [..., M, h].
    """
    return rows.take(x, weights, order, weights.shape[-1], dtype, fill)


@take_weighed.register_fake
def _taken_shape(x: Tensor, weights: Tensor, order: Tensor, dtype: torch.dtype, fill: bool = True) -> Tensor:
    return x.new_empty((*order.shape, x.shape[-1]), dtype=dtype)


@torch.library.custom_op("fxpar::dot_rows", mutates_args=())
def dot_rows(x: Tensor, y: Tensor, order: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """For each pair the product of its row with its token, summed over h: the gradient of its weight.

    Args:
        x: tokens, [..., T, h].
        y: rows, [..., M, h].
        order: int64[..., M].
        k: experts a token, K.
        dtype: of the result.

    Returns:
        [..., T, K]; zeros for a pair without a row.
    """
    return rows.dots(x, y, order, k, dtype)


@dot_rows.register_fake
def _dots_shape(x: Tensor, y: Tensor, order: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    rows.check(y, order)
    return x.new_empty((*x.shape[:-1], k), dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _put_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    y, weights, order = ctx.saved_tensors
    for_y = take_weighed(gradient, weights, order, y.dtype) if ctx.needs_input_grad[0] else None
    k = weights.shape[-1]
    for_weights = dot_rows(gradient, y, order, k, weights.dtype) if ctx.needs_input_grad[1] else None
    return for_y, for_weights, None, None


def _taken_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weights, order = ctx.saved_tensors
    for_x = moe_combine(gradient, weights, order, x.dtype) if ctx.needs_input_grad[0] else None
    k = weights.shape[-1]
    for_weights = dot_rows(x, gradient, order, k, weights.dtype) if ctx.needs_input_grad[1] else None
    return for_x, for_weights, None, None, None


def _dots_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, y, order = ctx.saved_tensors
    for_x = moe_combine(y, gradient, order, x.dtype) if ctx.needs_input_grad[0] else None
    for_y = take_weighed(x, gradient, order, y.dtype) if ctx.needs_input_grad[1] else None
    return for_x, for_y, None, None, None


moe_combine.register_autograd(_put_backward, setup_context=_keep)
take_weighed.register_autograd(_taken_backward, setup_context=_keep)
dot_rows.register_autograd(_dots_backward, setup_context=_keep)
