"""The gate between an expert's two products: SwiGLU of rows.

Enters: rows that stand expert after expert, each with its gate and what that lets through, and how many each expert
has. Leaves: operators of torch. For the terms see `fxpar.ops.grouped`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fxpar.ops.rows import kernels, nobodys, promoted


def halves(x: Tensor) -> Tensor:
    """[..., 2 * n] → [..., 2, n]: the same elements."""
    pair: Tensor = x.unflatten(-1, (2, x.shape[-1] // 2))
    return pair


@torch.library.custom_op("fxpar::swiglu_rows", mutates_args=())
def swiglu_rows(x: Tensor, counts: Tensor, fill: bool = True) -> Tensor:
    """`silu(x[..., 0, :]) * x[..., 1, :]`; zeros in rows that are nobody's, whatever they hold.

    Halves are computed in float32.

    Args:
        x: rows of gates and of what they let through, [..., M, 2, n].
        counts: int64[..., E].
        fill: False where nobody reads rows that are nobody's: they hold anything.

    Returns:
        [..., M, n].
    """
    module = kernels(x)
    if module is not None:
        from fxpar.ops import gate_kernels

        gated = gate_kernels.gate(_groups(x, 3), counts.sum(-1).view(-1), fill)
        return gated.view(*x.shape[:-2], x.shape[-1])
    gate, up = x.to(promoted(x.dtype)).unbind(-2)
    masked: Tensor = torch.where(_are_somebodys(x.shape[-3], counts), functional.silu(gate) * up, nobodys(fill))
    return masked.to(x.dtype)


@swiglu_rows.register_fake
def _gated_shape(x: Tensor, counts: Tensor, fill: bool = True) -> Tensor:
    return x.new_empty((*x.shape[:-2], x.shape[-1]))


@torch.library.custom_op("fxpar::swiglu_gradient", mutates_args=())
def swiglu_gradient(gradient: Tensor, x: Tensor, counts: Tensor, fill: bool = True) -> Tensor:
    """The gradient of what `swiglu_rows` takes; zeros in rows that are nobody's.

    Args:
        gradient: of its result, [..., M, n].
        x: [..., M, 2, n].
        counts: int64[..., E].
        fill: as of `swiglu_rows`.

    Returns:
        [..., M, 2, n].
    """
    module = kernels(x)
    if module is not None:
        from fxpar.ops import gate_kernels

        row_counts = counts.sum(-1).view(-1)
        return gate_kernels.gate_backward(_groups(gradient, 2), _groups(x, 3), row_counts, fill).view(x.shape)
    gate, up = x.to(promoted(x.dtype)).unbind(-2)
    wide, share = gradient.to(gate.dtype), gate.sigmoid()
    stacked = torch.stack([wide * up * share * (1 + gate * (1 - share)), wide * gate * share], dim=-2)
    masked: Tensor = torch.where(_are_somebodys(x.shape[-3], counts).unsqueeze(-1), stacked, nobodys(fill))
    return masked.to(x.dtype)


@swiglu_gradient.register_fake
def _gradient_shape(gradient: Tensor, x: Tensor, counts: Tensor, fill: bool = True) -> Tensor:
    return x.new_empty(x.shape)


def _groups(x: Tensor, dims: int) -> Tensor:
    lead = x.shape[: x.dim() - dims]
    return x.contiguous().view(math.prod(lead), *x.shape[x.dim() - dims :])


def _are_somebodys(rows: int, counts: Tensor) -> Tensor:
    """bool[..., M, 1]."""
    return (torch.arange(rows, device=counts.device) < counts.sum(-1, keepdim=True)).unsqueeze(-1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:-1])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return swiglu_gradient(gradient, *ctx.saved_tensors), None, None


def _gradient_backward(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor, None, None]:
    """Of the second order, which no step has: in torch's operations."""
    gradient, x, counts = ctx.saved_tensors
    (gate, up), (for_gate, for_up) = x.unbind(-2), tangent.unbind(-2)
    share = gate.sigmoid()
    first = share * (1 + gate * (1 - share))
    second = share * (1 - share) * (2 + gate * (1 - 2 * share))
    is_row = _are_somebodys(x.shape[-3], counts)
    for_gradient = for_gate * up * first + for_up * gate * share
    parts = gradient * (for_gate * up * second + for_up * first), gradient * for_gate * first
    for_x = torch.where(is_row.unsqueeze(-1), torch.stack(parts, dim=-2), 0)
    return torch.where(is_row, for_gradient, 0), for_x, None, None


swiglu_rows.register_autograd(_backward, setup_context=_keep)
swiglu_gradient.register_autograd(_gradient_backward, setup_context=_keep)
