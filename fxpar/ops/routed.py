"""Rows of tokens by expert, as operators of torch: sorted, taken, multiplied with their expert's matrix, put back.

Enters: tokens, and the experts that each has chosen. Leaves: what the experts make of them. Every operator takes
leading dimensions, each index of which is computed by itself, and none waits for a number to reach the host on a GPU.
A row's place in a buffer is one of an order; -1 in an order is no row. Rows behind those of the last expert are none.

The derivative of each operator is made of the others.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_NAMESPACE = "fxpar"
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _operator(name: str) -> Any:
    return torch.library.custom_op(f"{_NAMESPACE}::{name}", mutates_args=(), tags=_TAGS)


# ---------------------------------------------------------------------- orders


@_operator("sort_by_expert")
def sort_by_expert(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Which row belongs to which expert.

    Args:
        indices: integers [..., tokens, k], the experts of each token; `experts` or more for none.
        experts: how many there are.

    Returns:
        i64 [..., tokens * k]: rows token * k + choice by expert, ascending, those of none last; and i64 [..., experts]:
        how many each has.
    """
    flat = indices.flatten(-2).to(torch.int64).clamp(max=experts)
    counts = flat.new_zeros((*flat.shape[:-1], experts + 1))
    counts = counts.scatter_add(-1, flat, torch.ones_like(flat))
    return flat.argsort(dim=-1, stable=True), counts[..., :-1].contiguous()


@sort_by_expert.register_fake
def _(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    *leading, tokens, k = indices.shape
    make = indices.new_empty
    return make((*leading, tokens * k), dtype=torch.int64), make((*leading, experts), dtype=torch.int64)


# ---------------------------------------------------------------------- rows


@_operator("take_rows")
def take_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    """[..., tokens, h] → [..., rows, h]: the token of each row, `order // k`; zeros where the order has -1."""
    index = (order.clamp(min=0) // k).unsqueeze(-1).expand(*order.shape, x.shape[-1])
    if not x.shape[-2]:
        return x.new_zeros((*order.shape, x.shape[-1]))
    return x.gather(-2, index).masked_fill((order < 0).unsqueeze(-1), 0)


@take_rows.register_fake
def _(x: Tensor, order: Tensor, k: int) -> Tensor:
    return x.new_empty((*order.shape, x.shape[-1]))


@_operator("put_rows")
def put_rows(y: Tensor, order: Tensor, tokens: int, k: int) -> Tensor:
    """[..., rows, h] → [..., tokens, h]: the sum of each token's rows, in the order of its choices.

    Args:
        order: i64 [..., rows]: the row's token * k + choice, each at most once; -1 for rows that go nowhere.
    """
    size = tokens * k
    target = torch.where(order < 0, size, order).unsqueeze(-1).expand(y.shape)
    rows = y.new_zeros((*y.shape[:-2], size + 1, y.shape[-1])).scatter(-2, target, y)[..., :-1, :]
    if k == 1:
        return rows.contiguous()
    return rows.unflatten(-2, (tokens, k)).sum(-2)


@put_rows.register_fake
def _(y: Tensor, order: Tensor, tokens: int, k: int) -> Tensor:
    return y.new_empty((*y.shape[:-2], tokens, y.shape[-1]))


def _save_take(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, order, ctx.k = inputs
    ctx.tokens = x.shape[-2]
    ctx.save_for_backward(order)


def _save_put(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, _, ctx.k = inputs
    ctx.save_for_backward(order)


take_rows.register_autograd(
    lambda ctx, g: (put_rows(g, ctx.saved_tensors[0], ctx.tokens, ctx.k), None, None), setup_context=_save_take
)
put_rows.register_autograd(
    lambda ctx, g: (take_rows(g, ctx.saved_tensors[0], ctx.k), None, None, None), setup_context=_save_put
)

# ---------------------------------------------------------------------- products


def _flat(value: Tensor, tail: int) -> Tensor:
    """All leading dimensions as one."""
    return value.reshape(-1, *value.shape[value.dim() - tail :])


def _is_grouped(x: Tensor, counts: Tensor) -> bool:
    """Whether torch's grouped product can run it: on a GPU, in half precision, of one index of leading dimensions."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and counts.numel() == counts.shape[-1]


def _behind(x: Tensor, counts: Tensor) -> Tensor:
    """[rows, 1]: which rows are none."""
    return (torch.arange(x.shape[-2], device=x.device) >= counts.sum(-1, keepdim=True)).unsqueeze(-1)


@_operator("grouped_linear")
def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    """Each expert's rows times its matrix.

    Args:
        x: [..., rows, i], by expert.
        weight: [..., experts, o, i], or [..., experts, i, o] where `transposed`; its leading dimensions are the
            innermost of those of `x`.
        counts: i64 [..., experts], the rows of each expert.

    Returns:
        [..., rows, o]; zeros behind the last expert's rows.
    """
    matrix = weight if transposed else weight.transpose(-1, -2)
    if _is_grouped(x, counts):
        offsets = counts.reshape(-1).cumsum(0).to(torch.int32)
        made = functional.grouped_mm(x.reshape(x.shape[-2:]), matrix.reshape(matrix.shape[-3:]), offs=offsets)
        made = made.reshape(*x.shape[:-1], matrix.shape[-1])
        return made.masked_fill(_behind(made, counts), 0)
    rows, matrices = _flat(x, 2), _flat(matrix, 3)
    made = x.new_zeros((rows.shape[0], x.shape[-2], matrix.shape[-1]))
    for index, sizes in enumerate(counts.reshape(-1, counts.shape[-1]).tolist()):
        start = 0
        for expert, size in enumerate(sizes):
            own = slice(start, start + size)
            made[index, own] = rows[index, own] @ matrices[index % matrices.shape[0], expert]
            start += size
    return made.reshape(*x.shape[:-1], matrix.shape[-1])


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[-1 if transposed else -2]))


@_operator("grouped_outer")
def grouped_outer(a: Tensor, b: Tensor, counts: Tensor, leading: int) -> Tensor:
    """Of each expert the sum of its rows' outer products.

    Args:
        a: [..., rows, i].
        b: [..., rows, o].
        counts: i64 [..., experts].
        leading: innermost leading dimensions that the result has; over others it is summed.

    Returns:
        [..., experts, i, o].
    """
    kept = counts.shape[counts.dim() - 1 - leading : -1]
    if _is_grouped(a, counts):
        offsets = counts.reshape(-1).cumsum(0).to(torch.int32)
        left, right = a.reshape(a.shape[-2:]), b.reshape(b.shape[-2:])
        return functional.grouped_mm(left.t(), right, offs=offsets).reshape(*kept, counts.shape[-1], a.shape[-1], -1)
    left, right = _flat(a, 2), _flat(b, 2)
    made = a.new_zeros((prod(kept), counts.shape[-1], a.shape[-1], b.shape[-1]))
    for index, sizes in enumerate(counts.reshape(-1, counts.shape[-1]).tolist()):
        start = 0
        for expert, size in enumerate(sizes):
            own = slice(start, start + size)
            made[index % made.shape[0], expert] += left[index, own].t() @ right[index, own]
            start += size
    return made.reshape(*kept, *made.shape[1:])


@grouped_outer.register_fake
def _(a: Tensor, b: Tensor, counts: Tensor, leading: int) -> Tensor:
    kept = counts.shape[counts.dim() - 1 - leading :]
    return a.new_empty((*kept, a.shape[-1], b.shape[-1]))


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, counts, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, counts)


def _linear_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weight, counts = ctx.saved_tensors
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        of_x = grouped_linear(gradient, weight, counts, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        left, right = (x, gradient) if ctx.transposed else (gradient, x)
        of_weight = grouped_outer(left, right, counts, weight.dim() - 3)
    return of_x, of_weight, None, None


grouped_linear.register_autograd(_linear_backward, setup_context=_save_linear)

# ---------------------------------------------------------------------- an expert's own numbers


def _expert_of(counts: Tensor, rows: int) -> Tensor:
    """[..., rows]: the expert of each row, one more than there are behind them."""
    place = torch.arange(rows, device=counts.device)
    return (place.unsqueeze(-1) >= counts.cumsum(-1).unsqueeze(-2)).sum(-1)


@_operator("spread_rows")
def spread_rows(v: Tensor, counts: Tensor, rows: int) -> Tensor:
    """[..., experts, o] → [..., rows, o]: each row's expert's; zeros behind."""
    expert = _expert_of(counts, rows)
    table = functional.pad(v, (0, 0, 0, 1)).expand(*counts.shape[:-1], v.shape[-2] + 1, v.shape[-1])
    return table.gather(-2, expert.unsqueeze(-1).expand(*expert.shape, v.shape[-1]))


@spread_rows.register_fake
def _(v: Tensor, counts: Tensor, rows: int) -> Tensor:
    return v.new_empty((*counts.shape[:-1], rows, v.shape[-1]))


@_operator("sum_by_expert")
def sum_by_expert(y: Tensor, counts: Tensor, leading: int) -> Tensor:
    """[..., rows, o] → [..., experts, o]: the sum of each expert's rows.

    Args:
        leading: innermost leading dimensions that the result has; over others it is summed.
    """
    expert = _expert_of(counts, y.shape[-2]).unsqueeze(-1).expand(y.shape)
    made = y.new_zeros((*y.shape[:-2], counts.shape[-1] + 1, y.shape[-1])).scatter_add(-2, expert, y)[..., :-1, :]
    return made.sum(list(range(made.dim() - 2 - leading))) if made.dim() - 2 > leading else made.contiguous()


@sum_by_expert.register_fake
def _(y: Tensor, counts: Tensor, leading: int) -> Tensor:
    return y.new_empty((*counts.shape[counts.dim() - 1 - leading :], y.shape[-1]))


def _save_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    v, counts, _ = inputs
    ctx.leading = v.dim() - 2
    ctx.save_for_backward(counts)


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, counts, _ = inputs
    ctx.rows = y.shape[-2]
    ctx.save_for_backward(counts)


spread_rows.register_autograd(
    lambda ctx, g: (sum_by_expert(g, ctx.saved_tensors[0], ctx.leading), None, None), setup_context=_save_spread
)
sum_by_expert.register_autograd(
    lambda ctx, g: (spread_rows(g, ctx.saved_tensors[0], ctx.rows), None, None), setup_context=_save_sum
)
