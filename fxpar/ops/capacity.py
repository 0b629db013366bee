"""Which rows an expert of a limited capacity takes.

Enters: for each token the experts that it chose. Leaves: the same, where what goes beyond an expert's capacity goes to
nobody. For the terms see `fxpar.ops.permute`. Nothing is read on the host.

Leading dimensions, one for each axis that cuts tokens, stand for ranks: each fills its own places of every expert.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("fxpar::drop_by_position", mutates_args=())
def drop_by_position(indices: Tensor, experts: int, capacity: int) -> Tensor:
    """Each expert keeps the tokens that stand first.

    Args:
        indices: the experts of each token, int[..., T, K]; what is no number of an expert goes to nobody.
        experts: their number, E.
        capacity: of each expert, in rows.

    Returns:
        As `indices`, E for the pairs that are dropped.
    """
    return _kept(indices, None, experts, capacity)


@torch.library.custom_op("fxpar::drop_by_probability", mutates_args=())
def drop_by_probability(indices: Tensor, weights: Tensor, experts: int, capacity: int) -> Tensor:
    """Each expert keeps the tokens that give it most weight, of equal ones those that stand first.

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
    keys = torch.where((flat >= 0) & (flat < experts), flat, experts).to(torch.int32)
    heaviest = None if weights is None else weights.flatten(-2).sort(dim=-1, descending=True, stable=True).indices
    ranked, order = (keys if heaviest is None else keys.gather(-1, heaviest)).sort(dim=-1, stable=True)
    order = order if heaviest is None else heaviest.gather(-1, order)
    # Where a pair stands among those of its expert.
    place = torch.arange(ranked.shape[-1], device=ranked.device) - torch.searchsorted(ranked, ranked)
    is_kept = torch.empty_like(place, dtype=torch.bool).scatter(-1, order, place < capacity)
    return torch.where(is_kept, flat, experts).view(indices.shape)


@drop_by_position.register_fake
def _first_shape(indices: Tensor, experts: int, capacity: int) -> Tensor:
    return torch.empty_like(indices, memory_format=torch.contiguous_format)


@drop_by_probability.register_fake
def _heaviest_shape(indices: Tensor, weights: Tensor, experts: int, capacity: int) -> Tensor:
    return torch.empty_like(indices, memory_format=torch.contiguous_format)
