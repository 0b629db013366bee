"""State for `torch.distributed.checkpoint`: each rank's part, named and placed in the original tensors.

Enters: what a rank holds. Leaves: a state dict that DCP saves and loads in place, whatever the plan it is loaded with.
What is cut is a `Sharded`, of whose chunks the first rank that holds them writes each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.module import _IncompatibleKeys

from fxpar.errors import CheckpointError
from fxpar.state.full_state import check_names, check_saved, check_shape
from fxpar.state.initial import ModelTensor
from fxpar.state.operand import part_of
from fxpar.state.place import ShardSpec
from fxpar.state.rank_tensors import RankTensors
from fxpar.state.sharded import Sharded, local_of


def saved_once(weights: RankTensors) -> dict[str, ModelTensor]:
    """What the unsplit model would save, each tensor under the first of its names that are saved.

    Raises:
        CheckpointError: the unsplit model's state dict holds something else than parameters and buffers.
    """
    entries = weights.entries()
    saved: dict[str, ModelTensor] = {}
    done: set[str] = set()
    for name in weights.saved:
        check_saved(name, entries)
        if entries[name].first not in done:
            done.add(entries[name].first)
            saved[name] = entries[name]
    return saved


def state_dict(weights: RankTensors) -> dict[str, Tensor]:
    """This rank's part of what the unsplit model would save; shares memory with the module's tensors.

    Raises:
        CheckpointError: the unsplit model's state dict holds something else than parameters and buffers.
    """
    tensors, entries = weights.by_name(), weights.entries()
    for name in weights.saved:
        check_saved(name, entries)
    return {name: tensors[name].detach() for name in weights.saved if name in tensors}


def load_state_dict(weights: RankTensors, state: Mapping[str, Any], strict: bool) -> _IncompatibleKeys:
    """Inverse of `state_dict`; what shares memory with the module's tensors is in its place already.

    Whole tensors are taken too, each rank its part.

    Args:
        strict: whether names that are missing or unknown are an error.

    Raises:
        CheckpointError: a name is missing or unknown, or a tensor is another part; nothing is loaded then.
    """
    tensors = weights.by_name()
    elsewhere = {name for name in weights.entries() if name not in tensors}
    groups = [entry.names for entry in weights.everything]
    remedy = "load the state dict of the same model and plan; torch.distributed.checkpoint.load fits it to other plans"
    # What other ranks of a pipeline hold may be there, and need not: `state_dict` is without.
    keys = [*state, *elsewhere] if isinstance(state, Mapping) else state
    missing, unknown = check_names(keys, weights.saved, groups, "state dict", remedy, strict)
    parts: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in unknown or name in elsewhere:
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(f"is a {type(value).__name__} and must be a tensor", where=name, remedy=remedy)
        check_shape(name, tuple(value.shape), weights.shape_of(name))
        parts[name] = _part(name, value, tensors[name], remedy)
    _check_ties(parts, tensors)
    with torch.no_grad():
        for name, part in parts.items():
            target = local_of(tensors[name])
            if target.data_ptr() != part.data_ptr():
                target.copy_(part)
    return _IncompatibleKeys(missing, unknown)


def _part(name: str, value: Tensor, target: Tensor, remedy: str) -> Tensor:
    """What a rank takes of a value that has the whole's shape."""
    if isinstance(value, DTensor) and not isinstance(value, Sharded):
        if all(isinstance(placement, Replicate) for placement in value.placements):
            value = value.to_local()
        elif not isinstance(target, Sharded) or tuple(value.placements) != target.placements:
            raise CheckpointError(f"is placed {value.placements}, other than here", where=name, remedy=remedy)
    if isinstance(target, Sharded):
        if isinstance(value, Sharded) and not value.place.is_like(target.place):
            what = f"is cut {_text(value.place)} and must be cut {_text(target.place)}"
            raise CheckpointError(what, where=name, remedy=remedy)
        return part_of(value.detach(), target.place)
    if isinstance(value, Sharded):
        raise CheckpointError(f"is cut {_text(value.place)} and must be whole", where=name, remedy=remedy)
    return value.detach()


def _check_ties(parts: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Names of one tensor bring one value."""
    first: dict[int, str] = {}
    for name, part in parts.items():
        known = first.setdefault(id(tensors[name]), name)
        same = parts[known].data_ptr() == part.data_ptr() or torch.equal(parts[known], part)
        if not same:
            raise CheckpointError(
                f"is tied to {known} and has other values", where=name, remedy="leave one of the two names out"
            )


def _text(place: ShardSpec) -> str:
    return f"{place.layout} on {' x '.join(str(size) for size in place.axes.values())} ranks"
