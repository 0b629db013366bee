"""One reduction for the gradients of many parameters, on local tensors (`fxpar.all_reduce_coalesced`).

Enters: a rank's gradients, and for each what of it several ranks hold. Leaves: their sums over the axis, which travel
as one flat tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpar.ops.collectives import Group, arrived, start_sum
from fxpar.ops.factored import Shared, restored, summand

# Dimension and pieces of a weight of which ranks share blocks, as tuples of `Shared`'s fields; None of one that every
# rank holds whole.
Held = tuple[int, Sequence[Sequence[Any]]] | None


def sum_gradients(weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`fxpar.sum_gradients`: the values stay the same."""
    return tuple(weights)


def start_sums(gradients: Sequence[Tensor], cuts: Sequence[Held], group: str, size: int, index: Tensor) -> Tensor:
    """All sums in one flat tensor, on its way."""
    return start_sum(torch.cat([part.reshape(-1) for part in _parts(gradients, cuts, size, index)]), Group(group, size))


def sums(
    started: Tensor, gradients: Sequence[Tensor], cuts: Sequence[Held], size: int, index: Tensor
) -> tuple[Tensor, ...]:
    """Of `start_sums`."""
    parts = list(_parts(gradients, cuts, size, index))
    totals = arrived(started).split([part.numel() for part in parts])
    summed = []
    for gradient, item, part, flat in zip(gradients, cuts, parts, totals, strict=True):
        total = flat.view(part.shape)
        summed.append(total if item is None else restored(gradient, total, *_pieces(item), size, index))
    return tuple(summed)


def _parts(gradients: Sequence[Tensor], cuts: Sequence[Held], size: int, index: Tensor) -> Iterator[Tensor]:
    """What is summed of each."""
    for gradient, item in zip(gradients, cuts, strict=True):
        yield gradient if item is None else summand(gradient, *_pieces(item), size, index)


def _pieces(item: tuple[int, Sequence[Sequence[Any]]]) -> tuple[int, list[Shared]]:
    return item[0], [Shared(*piece) for piece in item[1]]
