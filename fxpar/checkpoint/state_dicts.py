"""Saves and loads a split model's tensors under the author's names, in the shapes of the unsplit model.

There are full state dicts, parts for `torch.distributed.checkpoint`, and an export to safetensors that transformers'
`from_pretrained` and `fxpar.Checkpoint` read.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.module import _IncompatibleKeys

from fxpar.checkpoint.rank_tensors import ModelTensor, RankTensors, ShardSpec
from fxpar.checkpoint.safetensors_files import FILE, INDEX
from fxpar.checkpoint.sharded import Sharded, local_of, whole_of
from fxpar.checkpoint.sharded_ops import part_of
from fxpar.errors import CheckpointError, InputError, shown
from fxpar.layout.shards import local_block

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


def sharded_state_dict(weights: RankTensors) -> dict[str, Tensor]:
    """This rank's part of what the unsplit model would save; shares memory with the module's tensors.

    Raises:
        CheckpointError: the unsplit model's state dict holds something else than parameters and buffers.
    """
    tensors, entries = weights.by_name(), weights.entries()
    for name in weights.saved:
        check_saved(name, entries)
    return {name: tensors[name].detach() for name in weights.saved if name in tensors}


def load_sharded_state_dict(weights: RankTensors, state: Mapping[str, Any], strict: bool) -> _IncompatibleKeys:
    """Inverse of `sharded_state_dict`; what shares memory with the module's tensors is in its place already.

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
    # What other ranks of a pipeline hold may be there, and need not: `sharded_state_dict` is without.
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


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def save_checkpoint(weights: RankTensors, model: nn.Module, folder: str | Path, shard_size: int | str) -> None:
    """Writes the whole model from rank 0, one file after the other. A collective call.

    Each tensor is gathered by itself: the ranks hold one whole tensor at a time, rank 0 besides those of one file.

    Args:
        model: the unsplit one, for its `config`; its tensors are not looked at.
        folder: is made if it is not there.
        shard_size: the most bytes of tensors in a file, as a number or such as "500MB"; a larger tensor has a file of
            its own.

    Raises:
        CheckpointError: the folder holds a checkpoint already or cannot be written, or the unsplit model's state dict
            holds something else than parameters and buffers.
        InputError: `shard_size` is no size.
    """
    entries = saved_once(weights)
    tensors = {name: entry.tensor for name, entry in entries.items()}
    files = _files(weights, tensors, bytes_of(shard_size))
    path, is_writer = folder_of(folder), weights.rank == 0
    if is_writer:
        _prepare(path)
    # What the writer is refused, the others hear here and not in a gather that it never joins.
    weights.agree({"the files": " ".join(files)}, "save the same model on every rank")
    for file, names in files.items():
        written: dict[str, Tensor] = {}
        for name in names:
            whole = on_all(weights, entries[name])
            if is_writer:
                written[name] = whole.cpu().contiguous()
            del whole
        if is_writer:
            _write(path / file, written)
    if is_writer:
        _describe(path, model, tensors, files)
    weights.agree({}, "")  # all files are there


def folder_of(folder: str | Path) -> Path:
    """The path of a folder.

    Raises:
        CheckpointError: it is none.
    """
    if not isinstance(folder, (str, Path)) or "\0" in str(folder):
        raise CheckpointError(f"{shown(folder)} is no path", where="folder", remedy="name a folder")
    return Path(folder)


def bytes_of(size: int | str) -> int:
    """A size in bytes, also from a text such as "500MB".

    Raises:
        InputError: it is none.
    """
    text = shown(size) if isinstance(size, int) else str(size)
    match = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([KMGT]?B|)", text, re.IGNORECASE)
    count = int(float(match[1]) * _UNITS[match[2].upper()]) if match and not isinstance(size, bool) else 0
    if count < 1:
        raise InputError(f"{shown(size)} is no size", where="shard_size", remedy='pass bytes, or a text such as "5GB"')
    return count


def _files(weights: RankTensors, tensors: dict[str, Tensor], limit: int) -> dict[str, list[str]]:
    """Names of tensors by file, in the model's order."""
    groups: list[list[str]] = []
    room = 0
    for name, value in tensors.items():
        size = torch.Size(weights.shape_of(name)).numel() * value.element_size()
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    if len(groups) <= 1:
        return {FILE: [name for group in groups for name in group]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _prepare(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        files = sorted(file.name for file in path.glob("model*.safetensors*"))
    except OSError as error:
        raise _unwritable(path, error) from error
    if files:
        raise CheckpointError(
            f"the folder holds {files[0]} already", where=str(path), remedy="save to another folder, or empty it"
        )


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})  # without it, transformers refuses the file
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)  # what is there of it is no checkpoint, and would bar the next one
        raise _unwritable(path, error) from error


def _describe(path: Path, model: nn.Module, tensors: dict[str, Tensor], files: dict[str, list[str]]) -> None:
    """The index of several files, and the configuration of a model of transformers."""
    try:
        if len(files) > 1:
            places = {name: file for file, names in files.items() for name in names}
            total = sum(file.stat().st_size for file in path.glob("model-*.safetensors"))
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
            (path / INDEX).write_text(text + "\n", encoding="utf-8")
        save_configuration(path, model, tensors)
    except OSError as error:
        raise _unwritable(path, error) from error


def save_configuration(path: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Writes the configuration of a model of transformers. OSError where that cannot be."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__]
        config.dtype = next((value.dtype for value in tensors.values() if value.is_floating_point()), None)
        config.save_pretrained(path)


def _unwritable(path: Path, error: Exception) -> CheckpointError:
    reason = getattr(error, "strerror", None) or str(error)
    return CheckpointError(
        f"cannot be written: {reason}",
        where=str(path),
        remedy="check the folder and the space left",
    )
