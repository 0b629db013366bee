"""Whole state dicts of a split model.

Enters: what the ranks hold. Leaves: tensors under the author's names in their original shapes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.errors import CheckpointError
from fxpar.layout.shards import local_block
from fxpar.state.initial import ModelTensor
from fxpar.state.rank_tensors import RankTensors
from fxpar.state.sharded import local_of, whole_of

_SAMPLES = 1024


def full_state_dict(weights: RankTensors) -> dict[str, Tensor]:
    """What `state_dict()` of the unsplit model would hold, on the CPU, the same on every rank. A collective call.

    Tensors share no memory with the module's; tied names share one tensor.

    Raises:
        CheckpointError: the unsplit model's state dict holds something else than parameters and buffers.
    """
    entries = weights.entries()
    state: dict[str, Tensor] = {}
    done: dict[str, Tensor] = {}
    for name in weights.saved:
        check_saved(name, entries)
        entry = entries[name]
        if entry.first not in done:
            whole, local = on_all(weights, entry), local_of(entry.tensor)
            is_own = not local.is_meta and whole.data_ptr() == local.data_ptr()
            done[entry.first] = whole.to("cpu", copy=is_own)
        state[name] = done[entry.first]
    return state


def on_all(weights: RankTensors, entry: ModelTensor) -> Tensor:
    """A whole tensor on every rank, whoever holds it, detached. A collective call."""
    if weights.line is None or entry.first not in weights.line.first:
        return whole_of(entry.tensor)
    whole = whole_of(entry.tensor) if weights.counts(entry) else None
    return weights.line.shared(entry.first, whole, entry.tensor)


def load_full_state_dict(weights: RankTensors, state: Mapping[str, Any]) -> None:
    """Loads what `full_state_dict` or the unsplit model's `state_dict` gives; each rank keeps its shards.

    Values are cast to the module's element types. Tied names may be left out if one of them is there.

    Raises:
        CheckpointError: a name is missing or unknown, a tensor has another shape, or tied names have different
            values; nothing is loaded then.
    """
    entries = weights.entries()
    groups = [entry.names for entry in weights.everything]
    check_names(state, weights.saved, groups, "state dict", "load the model it was saved from")
    first: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"has the type {type(value).__name__} and must be a tensor of shape {list(weights.shape_of(name))}",
                where=name,
                remedy="load the state dict of a model of the same configuration",
            )
        check_shape(name, tuple(value.shape), weights.shape_of(name))
        known = first.setdefault(entries[name].first, name)
        if state[known] is not value and not torch.equal(state[known], value):
            raise CheckpointError(
                f"is tied to {known} and has other values", where=name, remedy="leave one of the two names out"
            )
    tensors = weights.by_name()
    with torch.no_grad():
        for name in (name for name in first.values() if name in tensors):
            part = local_block(state[name], weights.layout_of(name), weights.axes, weights.coordinates)
            local_of(tensors[name]).copy_(part)


def check_saved(name: str, tensors: Collection[str]) -> None:
    """Checks a name that the unsplit model saves.

    Raises:
        CheckpointError: it is no tensor's.
    """
    if name not in tensors:
        raise CheckpointError(
            "is in the model's state dict and is no parameter or buffer",
            where=name,
            remedy="keep extra state and renaming hooks out of the model",
        )


def check_names(
    keys: Collection[str],
    saved: Sequence[str],
    groups: Sequence[Sequence[str]],
    where: str,
    remedy: str,
    strict: bool = True,
) -> tuple[list[str], list[str]]:
    """Checks the names of what is to be loaded; returns those that are missing and unknown.

    Args:
        saved: the names that the model saves.
        groups: all names of each tensor of the model; one of them is enough.
        strict: whether there may be any.

    Raises:
        CheckpointError: a name is missing or unknown, or there is no mapping at all.
    """
    if isinstance(keys, (str, bytes)) or not hasattr(keys, "__iter__"):
        raise CheckpointError(
            f"a {type(keys).__name__} is no mapping from names to tensors", where=where, remedy=remedy
        )
    missing, unknown = _misfits(keys, saved, groups)
    if strict and (missing or unknown):
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"has the unknown {_some(unknown)}"] if unknown else []
        raise CheckpointError(" and ".join(parts), where=where, remedy=remedy)
    return missing, unknown


def names_fit(keys: Collection[str], saved: Sequence[str], groups: Sequence[Sequence[str]]) -> bool:
    """Whether `check_names` takes them."""
    return not any(_misfits(keys, saved, groups))


def _misfits(
    keys: Collection[str], saved: Sequence[str], groups: Sequence[Sequence[str]]
) -> tuple[list[str], list[str]]:
    known = set(keys)
    present = {name for names in groups if not known.isdisjoint(names) for name in names} | known
    return [name for name in saved if name not in present], sorted(known - set(saved))


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Checks the whole shape of what is to be loaded.

    Raises:
        CheckpointError: it is another one.
    """
    if shape != expected:
        raise CheckpointError(
            f"has shape {list(shape)} and must be a tensor of shape {list(expected)}",
            where=name,
            remedy="load the state dict of a model of the same configuration",
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def fingerprints(model: nn.Module) -> dict[str, str]:
    """A digest of each parameter's and buffer's type and of up to 1024 of its elements, evenly spread.

    Of meta tensors the type and shape alone: their values follow from the plan's seed.
    """
    digests = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta:
            digests[name] = f"meta {value.dtype}{tuple(value.shape)}"
            continue
        flat = value.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu()
        data = some.view(torch.uint8).numpy().tobytes() if some.numel() else b""
        digests[name] = hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + data).hexdigest()
    return digests
