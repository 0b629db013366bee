"""Rows moved between tokens and experts: each form in one kernel on GPUs with Triton, elsewhere in torch's operations.

Enters: tokens, rows, and which row is whose. Leaves: rows of tokens, or sums over the rows of a token. For the terms
see `fxpar.ops.permute`; its operators and those of `fxpar.ops.combine` are made of these.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

NO_ROW = -1
# What rows hold that nobody reads, where it costs nothing to say so; tests set a value that is no number. An integer,
# which does not make floats of integers.
UNREAD: float = 0
_HALVES = (torch.float16, torch.bfloat16)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def kernels(x: Tensor) -> ModuleType | None:
    """The module of kernels for a tensor's device and type, None where there is none."""
    if not x.is_cuda or not x.is_floating_point() or not _has_triton():
        return None
    from fxpar.ops import row_kernels

    return row_kernels


def _flat(x: Tensor, trailing: int) -> Tensor:
    """Contiguous, leading dimensions in one before `trailing` others."""
    lead = x.shape[: x.dim() - trailing]
    return x.contiguous().view(math.prod(lead), *x.shape[x.dim() - trailing :])


def promoted(*dtypes: torch.dtype) -> torch.dtype:
    """The type in which products and sums of these are computed: that of halves is float32."""
    kind = dtypes[0]
    for dtype in dtypes[1:]:
        kind = torch.promote_types(kind, dtype)
    return torch.float32 if kind in _HALVES else kind


def check(y: Tensor, order: Tensor) -> None:
    """Refuses rows [..., M, h] for which an order int64[..., M] says nothing.

    Raises:
        ValueError: there are others than the order has.
    """
    if y.shape[:-1] != order.shape:
        raise ValueError(f"rows {list(y.shape)} in an order of {list(order.shape)}")


def take(x: Tensor, weights: Tensor | None, order: Tensor, k: int, dtype: torch.dtype, fill: bool) -> Tensor:
    """Each row's token, times its weight; zeros where the order is -1, or with `fill` False anything.

    Args:
        x: [..., T, h].
        weights: [..., T, K], or None.
        order: int64[..., M].
        k: K.
        dtype: of the result.

    Returns:
        [..., M, h].
    """
    shape = (*order.shape, x.shape[-1])
    if not x.shape[-2]:
        return x.new_zeros(shape, dtype=dtype)
    module = kernels(x)
    if module is not None:
        flat_weights = None if weights is None else _flat(weights, 2)
        taken: Tensor = module.take(_flat(x, 2), flat_weights, _flat(order, 1), k, dtype, fill)
        return taken.view(shape)
    place = order.clamp_min(0)
    rows = x.gather(-2, (place // k).unsqueeze(-1).expand(shape))
    if weights is not None:
        kind = promoted(x.dtype, weights.dtype)
        rows = rows.to(kind) * weights.flatten(-2).gather(-1, place).unsqueeze(-1).to(kind)
    filled: Tensor = torch.where((order > NO_ROW).unsqueeze(-1), rows, nobodys(fill)).to(dtype)
    return filled


def nobodys(fill: bool) -> float:
    """What rows hold that are nobody's."""
    return 0 if fill else UNREAD


def places_of(order: Tensor, tokens: int, k: int) -> Tensor:
    """Where each pair's row stands, int64[..., T, K]; -1 where it has none."""
    shape, count = (*order.shape[:-1], tokens * k + 1), order.shape[-1]
    # The place behind them is that of rows without a pair.
    flat_places = torch.full(shape, NO_ROW, dtype=torch.int64, device=order.device)
    pairs = torch.where(order > NO_ROW, order, tokens * k)
    flat_places.scatter_(-1, pairs, torch.arange(count, device=order.device).expand(order.shape))
    places: Tensor = flat_places[..., :-1].unflatten(-1, (tokens, k))
    return places


def put(y: Tensor, weights: Tensor | None, order: Tensor, tokens: int, k: int, dtype: torch.dtype) -> Tensor:
    """For each token the sum of its rows, times their weights, added in the order of its experts k = 0, 1, ….

    Args:
        y: [..., M, h].
        weights: [..., T, K], or None.
        order: int64[..., M].
        tokens: T.
        k: K.
        dtype: of the result.

    Returns:
        [..., T, h]; zeros for a token without rows.
    """
    shape = (*order.shape[:-1], tokens, y.shape[-1])
    if not order.shape[-1] or not k:
        return y.new_zeros(shape, dtype=dtype)
    places, module = places_of(order, tokens, k), kernels(y)
    if module is not None:
        flat_weights = None if weights is None else _flat(weights, 2)
        sums: Tensor = module.put(_flat(y, 2), flat_weights, _flat(places, 2), dtype)
        return sums.view(shape)
    kind = promoted(y.dtype, y.dtype if weights is None else weights.dtype)
    total = y.new_zeros(shape, dtype=kind)
    for j in range(k):
        place = places[..., j].unsqueeze(-1)
        rows = y.gather(-2, place.clamp_min(0).expand(shape)).to(kind)
        rows = rows if weights is None else rows * weights[..., j].unsqueeze(-1).to(kind)
        total = total + torch.where(place > NO_ROW, rows, 0)
    return total.to(dtype)


def dots(x: Tensor, y: Tensor, order: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """For each pair the product of its row with its token, summed over h.

    Args:
        x: tokens, [..., T, h].
        y: rows, [..., M, h].
        order: int64[..., M].
        k: K.
        dtype: of the result.

    Returns:
        [..., T, K]; zeros for a pair without a row.
    """
    tokens, shape = x.shape[-2], (*order.shape[:-1], x.shape[-2], k)
    if not tokens or not order.shape[-1]:
        return x.new_zeros(shape, dtype=dtype)
    module = kernels(x)
    if module is not None:
        products: Tensor = module.dots(_flat(x, 2), _flat(y, 2), _flat(order, 1), k, dtype)
        return products.view(shape)
    kind = promoted(x.dtype, y.dtype)
    row_products = (take(x, None, order, k, kind, True) * y.to(kind)).sum(-1)
    places = places_of(order, tokens, k).flatten(-2)
    picked = row_products.gather(-1, places.clamp_min(0))
    return torch.where(places > NO_ROW, picked, 0).to(dtype).view(shape)
