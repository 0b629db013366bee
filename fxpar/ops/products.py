"""Products that are gradients of weights, written where the gradients are to stay.

Enters: the factors, and by `into` the places of a call's results. Leaves: the product there: added to what is there,
which the product's kernel reads, or in its place.

Places are no operands: units that compute the same are compiled once, and whether a step adds to gradients is known
when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpar.ops.torch_operators import torch_operator

# Bytes on whose multiples compiled code takes results to begin: it asserts that of them.
_ALIGNED = 16


@dataclass(frozen=True, eq=False)
class Destination:
    """Where a gradient is to stay.

    Attributes:
        tensor: the memory.
        adds: whether the gradient is added to what is there.
    """

    tensor: Tensor
    adds: bool


_given: ContextVar[Sequence[Destination | None]] = ContextVar("where a call's results are to stay", default=())


@contextmanager
def into(destinations: Sequence[Destination | None]) -> Iterator[None]:
    """While it lasts, products that are results of a call go there, by number of the result."""
    token = _given.set(destinations)
    try:
        yield
    finally:
        _given.reset(token)


def destinations() -> Sequence[Destination | None]:
    """Where the results of the call go that is under way."""
    return _given.get()


@torch_operator("placed_product", torch.Tag.flexible_layout)
def placed_product(a: Tensor, b: Tensor, result: int) -> Tensor:
    """The product of two matrices [m, k] and [k, n], which is a result of the call under way.

    Args:
        result: its number.

    Returns:
        [m, n]: where that result is to stay, if a product of this type and shape can be written there; else new.
    """
    places = _given.get()
    place = places[result] if result < len(places) else None
    if place is None or not _fits(place.tensor, a, b):
        return torch.mm(a, b)
    if place.adds:
        return place.tensor.addmm_(a, b)
    return torch.mm(a, b, out=place.tensor)


@placed_product.register_fake
def _placed(a: Tensor, b: Tensor, result: int) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _fits(place: Tensor, a: Tensor, b: Tensor) -> bool:
    is_alike = place.dtype == a.dtype and place.device == a.device and type(place) is Tensor
    is_laid_out = place.is_contiguous() and place.data_ptr() % _ALIGNED == 0
    return is_alike and is_laid_out and place.shape == (a.shape[0], b.shape[1])
