"""Rows that a router sends to experts: sorting them, taking them from their tokens, and adding them up again.

Enters: for each token the experts that it goes to. Leaves: operators of torch whose backward consists of these same
operators, so that a program's step is made of them too. None reads a value on the host.

Terms: T tokens go to K experts each; the *flat position* of a pair is `t * K + k`. A row is a token's copy for one of
its experts, M of them stand expert after expert. `order` has the flat position of each row, or -1 where there is none.
Dimensions before these are the same in all operands: what stands after them is apart.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fxpar.ops.operator import Autograd, PaddingRows, torch_operator
from fxpar.signatures.engine import Rule
from fxpar.signatures.matmul import formula


def _sorted_shapes(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    *lead, tokens, k = indices.shape
    kind = torch.int64
    return indices.new_empty((*lead, tokens * k), dtype=kind), indices.new_empty((*lead, experts), dtype=kind)


@torch_operator("sort_by_expert", fake=_sorted_shapes, rule=Rule(formula("... _ _ -> ... _, ... _", "indices")))
def sort_by_expert(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sorts flat positions of all pairs by expert, within one in ascending order; and counts how many each has.

    A value that is not an expert's number goes to nobody: it stands last and is not counted.

    Args:
        indices: the experts of each token, int[..., T, K].
        experts: their number, E.

    Returns:
        The order, int64[..., T * K], and the counts, int64[..., E].
    """
    keys = _keys(indices.flatten(-2), experts)
    ranked, order = keys.sort(dim=-1, stable=True)
    # Neither bincount, which reads on the host, nor a sum at indices, which waits for itself where many are equal.
    bounds = torch.arange(experts, device=keys.device, dtype=keys.dtype).expand(*keys.shape[:-1], experts).contiguous()
    return order, torch.searchsorted(ranked, bounds, right=True) - torch.searchsorted(ranked, bounds)


def _keys(flat: Tensor, experts: int) -> Tensor:
    """Returns the experts of pairs, E for a value that is not an expert's number.

    A radix sort of 32 bits takes half as many passes as one of 64.
    """
    return torch.where((flat >= 0) & (flat < experts), flat, experts).to(torch.int32)


def _bins(x: Tensor, count: int) -> Tensor:
    return x.new_empty(count, dtype=torch.int64)


@torch_operator("bin_counts", fake=_bins)
def bin_counts(x: Tensor, count: int) -> Tensor:
    """Counts how often each number below `count` occurs: `bincount` of a size that does not depend on values.

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


def _taken_shape(x: Tensor, order: Tensor, k: int, fill: bool = True) -> Tensor:
    return x.new_empty((*order.shape, x.shape[-1]))


def _keep_taken(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, order, ctx.k, _ = inputs
    ctx.tokens = x.shape[-2]
    ctx.save_for_backward(order)


def _taken_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    (order,) = ctx.saved_tensors
    return moe_unpermute(gradient, order, ctx.tokens, ctx.k), None, None, None


@torch_operator(
    "moe_permute",
    fake=_taken_shape,
    autograd=Autograd(_keep_taken, _taken_backward),
    rule=Rule(formula("... _ h, ... m -> ... m h", "x", "order"), (("x",),)),
    padding=PaddingRows(1, writes=True),
)
def moe_permute(x: Tensor, order: Tensor, k: int, fill: bool = True) -> Tensor:
    """Copies each row's token: row `order // k`; zeros where the order is -1.

    Args:
        x: [..., T, h].
        order: int64[..., M].
        k: experts a token, K.
        fill: False where nobody reads rows of order -1: they hold anything.

    Returns:
        [..., M, h].
    """
    return _take(x, None, order, k, x.dtype, fill)


def _put_shape(y: Tensor, order: Tensor, tokens: int, k: int) -> Tensor:
    check_rows(y, order)
    return y.new_empty((*order.shape[:-1], tokens, y.shape[-1]))


def _keep_put(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, _, ctx.k = inputs
    ctx.save_for_backward(order)


def _put_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    (order,) = ctx.saved_tensors
    return moe_permute(gradient, order, ctx.k), None, None, None


@torch_operator(
    "moe_unpermute",
    fake=_put_shape,
    autograd=Autograd(_keep_put, _put_backward),
    rule=Rule(formula("... m h, ... m -> ... _ h", "y", "order"), (("y",),)),
    padding=PaddingRows(1, ignores=(0,)),
)
def moe_unpermute(y: Tensor, order: Tensor, tokens: int, k: int) -> Tensor:
    """Sums the rows of each token in the order of its experts k = 0, 1, …; the adjoint of `moe_permute`.

    That order does not depend on where other tokens go. Halves are added in float32.

    Args:
        y: [..., M, h].
        order: int64[..., M], each flat position at most once; rows with -1 are left out.
        tokens: T.
        k: K.

    Returns:
        [..., T, h]; zeros for a token without rows.
    """
    return _put(y, None, order, tokens, k, y.dtype)


# The next three operators are linear in their first two operands; the backward of each consists of the same three.


def _combined_shape(y: Tensor, weights: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    check_rows(y, order)
    return y.new_empty((*weights.shape[:-1], y.shape[-1]), dtype=dtype)


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _combine_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    y, weights, order = ctx.saved_tensors
    for_y = take_weighed(gradient, weights, order, y.dtype) if ctx.needs_input_grad[0] else None
    k = weights.shape[-1]
    for_weights = dot_rows(gradient, y, order, k, weights.dtype) if ctx.needs_input_grad[1] else None
    return for_y, for_weights, None, None


@torch_operator(
    "moe_combine",
    fake=_combined_shape,
    autograd=Autograd(_keep_operands, _combine_backward),
    rule=Rule(formula("... _ h, ... _ _, ... _ -> ... _ h", "y", "weights", "order"), (("y",), ("weights",))),
    padding=PaddingRows(2, ignores=(0,)),
)
def moe_combine(y: Tensor, weights: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums the weighted rows of each token, in the order of its experts k = 0, 1, ….

    Halves are multiplied and added in float32.

    Args:
        y: [..., M, h].
        weights: [..., T, K].
        order: int64[..., M], each flat position at most once; rows with -1 are left out.
        dtype: of the result.

    Returns:
        [..., T, h]; zeros for a token without rows.
    """
    return _put(y, weights, order, weights.shape[-2], weights.shape[-1], dtype)


def _weighed_shape(x: Tensor, weights: Tensor, order: Tensor, dtype: torch.dtype, fill: bool = True) -> Tensor:
    return x.new_empty((*order.shape, x.shape[-1]), dtype=dtype)


def _weighed_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weights, order = ctx.saved_tensors
    for_x = moe_combine(gradient, weights, order, x.dtype) if ctx.needs_input_grad[0] else None
    k = weights.shape[-1]
    for_weights = dot_rows(x, gradient, order, k, weights.dtype) if ctx.needs_input_grad[1] else None
    return for_x, for_weights, None, None, None


@torch_operator(
    "take_weighed",
    fake=_weighed_shape,
    autograd=Autograd(_keep_operands, _weighed_backward),
    rule=Rule(formula("... _ h, ... _ _, ... m -> ... m h", "x", "weights", "order"), (("x",), ("weights",))),
    padding=PaddingRows(2, writes=True),
)
def take_weighed(x: Tensor, weights: Tensor, order: Tensor, dtype: torch.dtype, fill: bool = True) -> Tensor:
    """Multiplies each row's token by the weight of its pair; zeros where the order is -1.

    Args:
        x: [..., T, h].
        weights: [..., T, K].
        order: int64[..., M].
        dtype: of the result.
        fill: False where nobody reads rows of order -1: they hold anything.

    Returns:
        [..., M, h].
    """
    return _take(x, weights, order, weights.shape[-1], dtype, fill)


def _dots_shape(x: Tensor, y: Tensor, order: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    check_rows(y, order)
    return x.new_empty((*x.shape[:-1], k), dtype=dtype)


def _dots_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, y, order = ctx.saved_tensors
    for_x = moe_combine(y, gradient, order, x.dtype) if ctx.needs_input_grad[0] else None
    for_y = take_weighed(x, gradient, order, y.dtype) if ctx.needs_input_grad[1] else None
    return for_x, for_y, None, None, None


@torch_operator(
    "dot_rows",
    fake=_dots_shape,
    autograd=Autograd(_keep_operands, _dots_backward),
    rule=Rule(formula("... _ h, ... _ h, ... _ -> ... _ _", "x", "y", "order"), (("x",), ("y",))),
    padding=PaddingRows(2, ignores=(1,)),
)
def dot_rows(x: Tensor, y: Tensor, order: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Multiplies the row of each pair with its token, summed over h: the gradient of its weight.

    Args:
        x: tokens, [..., T, h].
        y: rows, [..., M, h].
        order: int64[..., M].
        k: experts a token, K.
        dtype: of the result.

    Returns:
        [..., T, K]; zeros for a pair without a row.
    """
    tokens, shape = x.shape[-2], (*order.shape[:-1], x.shape[-2], k)
    if not tokens or not order.shape[-1]:
        return x.new_zeros(shape, dtype=dtype)
    module = row_kernels_for(x)
    if module is not None:
        products: Tensor = module.dots(flat_groups(x, 2), flat_groups(y, 2), flat_groups(order, 1), k, dtype)
        return products.view(shape)
    kind = promoted(x.dtype, y.dtype)
    row_products = (_take(x, None, order, k, kind, True) * y.to(kind)).sum(-1)
    places = places_of(order, tokens, k).flatten(-2)
    picked = row_products.gather(-1, places.clamp_min(0))
    return torch.where(places > NO_ROW, picked, 0).to(dtype).view(shape)


# Pairs beyond an expert's capacity go to nobody. Nothing is read on the host. Leading dimensions, one for each axis
# that cuts tokens, stand for ranks: each fills its own places of every expert.


def _like_indices(indices: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(indices, memory_format=torch.contiguous_format)


@torch_operator("drop_by_position", fake=_like_indices, rule=Rule(formula("... _ _ -> ... _ _", "indices")))
def drop_by_position(indices: Tensor, experts: int, capacity: int) -> Tensor:
    """Drops pairs beyond each expert's capacity: an expert keeps the tokens that stand first.

    Args:
        indices: the experts of each token, int[..., T, K]; a value that is not an expert's number goes to nobody.
        experts: their number, E.
        capacity: of each expert, in rows.

    Returns:
        As `indices`, E for the pairs that are dropped.
    """
    return _kept(indices, None, experts, capacity)


@torch_operator(
    "drop_by_probability", fake=_like_indices, rule=Rule(formula("... _ _, ... _ _ -> ... _ _", "indices", "weights"))
)
def drop_by_probability(indices: Tensor, weights: Tensor, experts: int, capacity: int) -> Tensor:
    """Drops pairs beyond each expert's capacity: an expert keeps tokens of most weight, of equal ones the first.

    Args:
        indices: as `drop_by_position` takes them.
        weights: of the pairs, [..., T, K].
        experts: likewise.
        capacity: likewise.

    Returns:
        As `indices`, E for the pairs that are dropped.
    """
    return _kept(indices, weights, experts, capacity)


def _kept(indices: Tensor, weights: Tensor | None, experts: int, capacity: int) -> Tensor:
    flat = indices.flatten(-2)
    keys = _keys(flat, experts)
    heaviest = None if weights is None else weights.flatten(-2).sort(dim=-1, descending=True, stable=True).indices
    ranked, order = (keys if heaviest is None else keys.gather(-1, heaviest)).sort(dim=-1, stable=True)
    order = order if heaviest is None else heaviest.gather(-1, order)
    # Where a pair stands among those of its expert.
    place = torch.arange(ranked.shape[-1], device=ranked.device) - torch.searchsorted(ranked, ranked)
    is_kept = torch.empty_like(place, dtype=torch.bool).scatter(-1, order, place < capacity)
    return torch.where(is_kept, flat, experts).view(indices.shape)


# Each form is one kernel on GPUs with Triton, and elsewhere operations of torch, which are the reference.

NO_ROW = -1
# What rows hold that nobody reads, where it costs nothing to say so; tests set NaN. An integer, which does not
# make floats of integers.
UNREAD: float = 0
_HALVES = (torch.float16, torch.bfloat16)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def row_kernels_for(x: Tensor) -> ModuleType | None:
    """Returns the module of kernels for a tensor's device and type; None where there is none."""
    return kernels_on_device(x) if x.is_floating_point() else None


def kernels_on_device(x: Tensor) -> ModuleType | None:
    """Returns the module of kernels for a tensor's device; None where there is none."""
    if not x.is_cuda or not _has_triton():
        return None
    import fxpar.experts.operators.row_kernels as row_kernels

    return row_kernels


def flat_groups(x: Tensor, trailing: int) -> Tensor:
    """Returns x contiguous, with its leading dimensions in one before `trailing` others."""
    lead = x.shape[: x.dim() - trailing]
    return x.contiguous().view(math.prod(lead), *x.shape[x.dim() - trailing :])


def promoted(*dtypes: torch.dtype) -> torch.dtype:
    """Returns the type in which products and sums of these are computed: that of halves is float32."""
    kind = dtypes[0]
    for dtype in dtypes[1:]:
        kind = torch.promote_types(kind, dtype)
    return torch.float32 if kind in _HALVES else kind


def check_rows(y: Tensor, order: Tensor) -> None:
    """Refuses rows [..., M, h] for which an order int64[..., M] says nothing.

    Raises:
        ValueError: there are others than the order has.
    """
    if y.shape[:-1] != order.shape:
        raise ValueError(f"rows {list(y.shape)} in an order of {list(order.shape)}")


def _take(x: Tensor, weights: Tensor | None, order: Tensor, k: int, dtype: torch.dtype, fill: bool) -> Tensor:
    """Computes `moe_permute`, or with weights `take_weighed`."""
    shape = (*order.shape, x.shape[-1])
    if not x.shape[-2]:
        return x.new_zeros(shape, dtype=dtype)
    module = row_kernels_for(x)
    if module is not None:
        flat_weights = None if weights is None else flat_groups(weights, 2)
        taken: Tensor = module.take(flat_groups(x, 2), flat_weights, flat_groups(order, 1), k, dtype, fill)
        return taken.view(shape)
    place = order.clamp_min(0)
    rows = x.gather(-2, (place // k).unsqueeze(-1).expand(shape))
    if weights is not None:
        kind = promoted(x.dtype, weights.dtype)
        rows = rows.to(kind) * weights.flatten(-2).gather(-1, place).unsqueeze(-1).to(kind)
    filled: Tensor = torch.where((order > NO_ROW).unsqueeze(-1), rows, nobodys(fill)).to(dtype)
    return filled


def nobodys(fill: bool) -> float:
    """Returns what rows hold that are nobody's."""
    return 0 if fill else UNREAD


def places_of(order: Tensor, tokens: int, k: int) -> Tensor:
    """Returns where each pair's row stands, int64[..., T, K]; -1 where it has none."""
    shape, count = (*order.shape[:-1], tokens * k + 1), order.shape[-1]
    # The place after them is that of rows without a pair.
    flat_places = torch.full(shape, NO_ROW, dtype=torch.int64, device=order.device)
    pairs = torch.where(order > NO_ROW, order, tokens * k)
    flat_places.scatter_(-1, pairs, torch.arange(count, device=order.device).expand(order.shape))
    places: Tensor = flat_places[..., :-1].unflatten(-1, (tokens, k))
    return places


def _put(y: Tensor, weights: Tensor | None, order: Tensor, tokens: int, k: int, dtype: torch.dtype) -> Tensor:
    """Computes `moe_unpermute`, or with weights `moe_combine`."""
    shape = (*order.shape[:-1], tokens, y.shape[-1])
    if not order.shape[-1] or not k:
        return y.new_zeros(shape, dtype=dtype)
    places, module = places_of(order, tokens, k), row_kernels_for(y)
    if module is not None:
        flat_weights = None if weights is None else flat_groups(weights, 2)
        sums: Tensor = module.put(flat_groups(y, 2), flat_weights, flat_groups(places, 2), dtype)
        return sums.view(shape)
    kind = promoted(y.dtype, y.dtype if weights is None else weights.dtype)
    total = y.new_zeros(shape, dtype=kind)
    for j in range(k):
        place = places[..., j].unsqueeze(-1)
        rows = y.gather(-2, place.clamp_min(0).expand(shape)).to(kind)
        rows = rows if weights is None else rows * weights[..., j].unsqueeze(-1).to(kind)
        total = total + torch.where(place > NO_ROW, rows, 0)
    return total.to(dtype)
