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
from fxpar.state.held import Held
from fxpar.state.initial import Named
from fxpar.state.sharded import local_of, whole_of

_SAMPLES = 1024


def full_state_dict(held: Held) -> dict[str, Tensor]:
    """What `state_dict()` of the unsplit model would hold, on the CPU, the same on every rank. A collective call.

    Tensors share no memory with the module's; tied names share one tensor.

    Raises:
        CheckpointError: the unsplit model's state dict holds something else than parameters and buffers.
    """
    entries = held.entries()
    found: dict[str, Tensor] = {}
    done: dict[str, Tensor] = {}
    for name in held.saved:
        check_saved(name, entries)
        entry = entries[name]
        if entry.first not in done:
            whole, own = on_all(held, entry), local_of(entry.tensor)
            is_own = not own.is_meta and whole.data_ptr() == own.data_ptr()
            done[entry.first] = whole.to("cpu", copy=is_own)
        found[name] = done[entry.first]
    return found


def on_all(held: Held, entry: Named) -> Tensor:
    """A whole tensor on every rank, whoever holds it, detached. A collective call."""
    if held.line is None or entry.first not in held.line.first:
        return whole_of(entry.tensor)
    own = whole_of(entry.tensor) if held.counts(entry) else None
    return held.line.shared(entry.first, own, entry.tensor)


def load_full_state_dict(held: Held, state: Mapping[str, Any]) -> None:
    """Loads what `full_state_dict` or the unsplit model's `state_dict` gives; each rank keeps its shards.

    Values are cast to the module's element types. Tied names may be left out if one of them is there.

    Raises:
        CheckpointError: a name is missing or unknown, a tensor has another shape, or tied names have different
            values; nothing is loaded then.
    """
    entries = held.entries()
    groups = [entry.names for entry in held.everything]
    check_names(state, held.saved, groups, "state dict", "load the model it was saved from")
    first: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"has the type {type(value).__name__} and must be a tensor of shape {list(held.shape_of(name))}",
                where=name,
                remedy="load the state dict of a model of the same configuration",
            )
        check_shape(name, tuple(value.shape), held.shape_of(name))
        known = first.setdefault(entries[name].first, name)
        if state[known] is not value and not torch.equal(state[known], value):
            raise CheckpointError(
                f"is tied to {known} and has other values", where=name, remedy="leave one of the two names out"
            )
    tensors = held.by_name()
    with torch.no_grad():
        for name in (name for name in first.values() if name in tensors):
            part = local_block(state[name], held.layout_of(name), held.axes, held.coordinates)
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
    given: Collection[str],
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
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise CheckpointError(
            f"a {type(given).__name__} is no mapping from names to tensors", where=where, remedy=remedy
        )
    missing, unknown = _misfits(given, saved, groups)
    if strict and (missing or unknown):
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"has the unknown {_some(unknown)}"] if unknown else []
        raise CheckpointError(" and ".join(parts), where=where, remedy=remedy)
    return missing, unknown


def names_fit(given: Collection[str], saved: Sequence[str], groups: Sequence[Sequence[str]]) -> bool:
    """Whether `check_names` takes them."""
    return not any(_misfits(given, saved, groups))


def _misfits(
    given: Collection[str], saved: Sequence[str], groups: Sequence[Sequence[str]]
) -> tuple[list[str], list[str]]:
    known = set(given)
    present = {name for names in groups if not known.isdisjoint(names) for name in names} | known
    return [name for name in saved if name not in present], sorted(known - set(saved))


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Checks the whole shape of what is to be loaded.

    Raises:
        CheckpointError: it is another one.
    """
    if found != wanted:
        raise CheckpointError(
            f"has shape {list(found)} and must be a tensor of shape {list(wanted)}",
            where=name,
            remedy="load the state dict of a model of the same configuration",
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def fingerprints(model: nn.Module) -> dict[str, str]:
    """A digest of each parameter's and buffer's type and of up to 1024 of its elements, evenly spread.

    Of meta tensors the type and shape alone: their values follow from the plan's seed.
    """
    found = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta:
            found[name] = f"meta {value.dtype}{tuple(value.shape)}"
            continue
        flat = value.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu()
        data = some.view(torch.uint8).numpy().tobytes() if some.numel() else b""
        found[name] = hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + data).hexdigest()
    return found
