"""Export to safetensors under the author's names.

Enters: what a rank holds, a folder. Leaves: `model.safetensors`, or several files with an index, as transformers'
`from_pretrained` and `fxpar.Checkpoint` read them.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from fxpar.errors import CheckpointError, InputError, shown
from fxpar.state.checkpoint import FILE, INDEX
from fxpar.state.distributed_state import saved_once
from fxpar.state.full_state import on_all
from fxpar.state.rank_tensors import RankTensors

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
