"""Products of experts' matrices with the rows that are theirs, and what is added to or summed over those rows.

Enters: rows that stand expert after expert, and how many each has. Leaves: operators of torch whose backward consists
of these same operators.

Terms: M rows, of which the first `counts[0]` are expert 0's, the next `counts[1]` expert 1's, and so on; rows behind
all of them are nobody's: they give zeros, whatever they hold, and their gradient is zero. A *group* is what stands
behind the dimensions before these. Experts' operands may have fewer of those dimensions than the rows, the innermost
ones: groups that share experts sum their gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fxpar.ops.grouped_kernels import outer, product


def _experts_of(values: Tensor, dims: int) -> Tensor:
    """What belongs to experts, its groups in one dimension; `dims` are the dimensions of a group."""
    return values.reshape(math.prod(values.shape[: values.dim() - dims]), *values.shape[values.dim() - dims :])


def _groups(rows: Tensor) -> Tensor:
    """Rows with one dimension for the group."""
    return rows.reshape(math.prod(rows.shape[:-2]), *rows.shape[-2:])


def _summed(parts: Tensor, lead: tuple[int, ...]) -> Tensor:
    """The sums of what groups that share experts give, parts [groups, …]."""
    shape = parts.shape[1:]
    shared = math.prod(lead)
    return parts.reshape(parts.shape[0] // shared if shared else 0, *lead, *shape).sum(0)


def _owners(counts: Tensor, rows: int) -> Tensor:
    """The expert of each row, E where it is nobody's: int64[groups, M] for counts [groups, E]."""
    places = torch.arange(rows, device=counts.device).expand(counts.shape[0], rows).contiguous()
    return torch.searchsorted(counts.cumsum(-1), places, right=True)


@torch.library.custom_op("fxpar::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool, fill: bool = True) -> Tensor:
    """Each row times the matrix of its expert.

    On GPUs in bfloat16 it is one kernel that reads the counts on the device; elsewhere a product for each expert.

    Args:
        x: rows, [..., M, i].
        weight: experts' matrices, [..., E, o, i]; with `transposed` [..., E, i, o].
        counts: int64[..., E].
        transposed: how the matrices stand.
        fill: False where nobody reads rows that are nobody's: they hold anything.

    Returns:
        [..., M, o].
    """
    matrices, groups = _experts_of(weight, 3), _groups(x)
    matrices = matrices if transposed else matrices.mT
    counted = counts.reshape(-1, counts.shape[-1])
    products = [product(rows, matrices[g % len(matrices)], counted[g], fill) for g, rows in enumerate(groups)]
    shape = (*x.shape[:-1], matrices.shape[-1])
    if not products:
        return x.new_zeros(shape)
    # One group's is given as it is: a stack would be a copy of all rows.
    return (products[0] if len(products) == 1 else torch.stack(products)).reshape(shape)


@grouped_linear.register_fake
def _product_shape(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool, fill: bool = True) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[-1 if transposed else -2]))


@torch.library.custom_op("fxpar::grouped_outer", mutates_args=())
def grouped_outer(a: Tensor, b: Tensor, counts: Tensor, leading: int) -> Tensor:
    """For each expert the sum over its rows of the outer products: the gradient of its matrix.

    Args:
        a: [..., M, o].
        b: [..., M, i].
        counts: int64[..., E].
        leading: dimensions that are kept before E, the innermost ones; over the others it is summed.

    Returns:
        [..., E, o, i].
    """
    left, right = _groups(a), _groups(b)
    counted = counts.reshape(-1, counts.shape[-1])
    sums = [outer(x, y, sizes) for x, y, sizes in zip(left, right, counted, strict=True)]
    lead = counts.shape[counts.dim() - 1 - leading :]
    shape = (*lead, a.shape[-1], b.shape[-1])
    if not sums:
        return a.new_zeros(shape)
    # One group's is given as it is: these are as large as all experts' matrices.
    return sums[0].reshape(shape) if len(sums) == 1 else _summed(torch.stack(sums), lead[:-1])


@grouped_outer.register_fake
def _outer_shape(a: Tensor, b: Tensor, counts: Tensor, leading: int) -> Tensor:
    lead = counts.shape[counts.dim() - 1 - leading :]
    return a.new_empty((*lead, a.shape[-1], b.shape[-1]))


@torch.library.custom_op("fxpar::group_sizes", mutates_args=())
def group_sizes(ends: Tensor) -> Tensor:
    """How many rows each group has, int64[..., E], by where it ends, int[..., E]."""
    return ends.to(torch.int64).diff(dim=-1, prepend=ends.new_zeros((*ends.shape[:-1], 1), dtype=torch.int64))


@group_sizes.register_fake
def _sizes_shape(ends: Tensor) -> Tensor:
    return ends.new_empty(ends.shape, dtype=torch.int64)


@torch.library.custom_op("fxpar::expand_by_expert", mutates_args=())
def expand_by_expert(v: Tensor, counts: Tensor, rows: int) -> Tensor:
    """To each row what its expert has: a bias.

    Args:
        v: [..., E, o].
        counts: int64[..., E].
        rows: M.

    Returns:
        [..., M, o].
    """
    biases, counted = _experts_of(v, 2), counts.reshape(-1, counts.shape[-1])
    shape = (*counts.shape[:-1], rows, v.shape[-1])
    if not len(counted) or not counts.shape[-1]:
        return v.new_zeros(shape)
    owners = _owners(counted, rows)
    biases = biases.repeat(len(counted) // len(biases), 1, 1) if len(biases) != len(counted) else biases
    place = owners.clamp_max(counts.shape[-1] - 1).unsqueeze(-1).expand(-1, -1, v.shape[-1])
    spread = torch.where((owners < counts.shape[-1]).unsqueeze(-1), biases.gather(1, place), 0)
    return spread.reshape(shape)


@expand_by_expert.register_fake
def _spread_shape(v: Tensor, counts: Tensor, rows: int) -> Tensor:
    return v.new_empty((*counts.shape[:-1], rows, v.shape[-1]))


@torch.library.custom_op("fxpar::sum_by_expert", mutates_args=())
def sum_by_expert(y: Tensor, counts: Tensor, leading: int) -> Tensor:
    """For each expert the sum of its rows; the adjoint of `expand_by_expert`.

    Args:
        y: rows, [..., M, o].
        counts: int64[..., E].
        leading: as in `grouped_outer`.

    Returns:
        [..., E, o].
    """
    groups, counted = _groups(y), counts.reshape(-1, counts.shape[-1])
    owners = _owners(counted, y.shape[-2])
    # As a product, whose order of additions is fixed; index_add has none on GPUs. What is nobody's may be no number.
    chosen = owners.unsqueeze(1) == torch.arange(counts.shape[-1], device=y.device).unsqueeze(-1)
    rows = torch.where((owners < counts.shape[-1]).unsqueeze(-1), groups, 0)
    lead = counts.shape[counts.dim() - 1 - leading : -1]
    return _summed(chosen.to(y.dtype) @ rows, tuple(lead))


@sum_by_expert.register_fake
def _sum_shape(y: Tensor, counts: Tensor, leading: int) -> Tensor:
    return y.new_empty((*counts.shape[counts.dim() - 1 - leading :], y.shape[-1]))


def _keep_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, counts, ctx.transposed, _ = inputs
    ctx.save_for_backward(x, weight, counts)


def _product_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, counts = ctx.saved_tensors
    for_x = for_weight = None
    if ctx.needs_input_grad[0]:
        for_x = grouped_linear(gradient, weight, counts, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        pair = (x, gradient) if ctx.transposed else (gradient, x)
        for_weight = grouped_outer(*pair, counts, weight.dim() - 3)
    return for_x, for_weight, None, None, None


def _keep_outer(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _outer_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, columns, counts = ctx.saved_tensors
    for_rows = for_columns = None
    if ctx.needs_input_grad[0]:
        for_rows = grouped_linear(columns, gradient, counts, False)
    if ctx.needs_input_grad[1]:
        for_columns = grouped_linear(rows, gradient, counts, True)
    return for_rows, for_columns, None, None


def _keep_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    v, counts, _ = inputs
    ctx.leading = v.dim() - 2
    ctx.save_for_backward(counts)


def _spread_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return sum_by_expert(gradient, *ctx.saved_tensors, ctx.leading), None, None


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, counts, _ = inputs
    ctx.rows = y.shape[-2]
    ctx.save_for_backward(counts)


def _sum_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return expand_by_expert(gradient, *ctx.saved_tensors, ctx.rows), None, None


grouped_linear.register_autograd(_product_backward, setup_context=_keep_product)
grouped_outer.register_autograd(_outer_backward, setup_context=_keep_outer)
expand_by_expert.register_autograd(_spread_backward, setup_context=_keep_spread)
sum_by_expert.register_autograd(_sum_backward, setup_context=_keep_sum)
