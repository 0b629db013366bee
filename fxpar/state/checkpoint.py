"""Safetensors checkpoints, read by pieces.

Enters: a file, an index of many files, or a folder with either. Leaves: each tensor's shape at once, and a rank's part
of it on demand; nothing else of it is copied into memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fxpar.errors import CheckpointError, shown
from fxpar.layout.layout import Layout
from fxpar.layout.shards import boxes, local_block, part_shape

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"

# A part of more pieces than this is cut out of its tensor: a read has its price too.
_MOST_READS = 64


@dataclass(frozen=True)
class _Entry:
    """Where a tensor is: its file, its name there, its shape and its type's name."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """A safetensors checkpoint that lies in one file or in many.

    Args:
        path: a `.safetensors` file, an `.index.json`, or a folder with `model.safetensors` or
            `model.safetensors.index.json`.
        rename: the model's name for a name of the checkpoint, or None to leave that tensor out; by default the names
            are the model's.

    Attributes:
        shapes: whole shape of each tensor by the model's name.
        kinds: of numbers that each tensor holds: "float", "int", "bool" or "complex".

    Raises:
        CheckpointError: there is no such checkpoint, its files cannot be read or contradict its index, or two tensors
            get one name.
    """

    def __init__(self, path: str | Path, rename: Callable[[str], str | None] | None = None) -> None:
        if not isinstance(path, (str, Path)):
            remedy = "pass a path or a fxpar.Checkpoint; load_full_state_dict takes tensors by name"
            raise CheckpointError(f"a {type(path).__name__} names no checkpoint", where="checkpoint", remedy=remedy)
        if rename is not None and not callable(rename):
            remedy = "pass a function from the checkpoint's name to the model's"
            raise CheckpointError(f"{shown(rename)} is no function", where="rename", remedy=remedy)
        self.path = Path(path)
        self._entries: dict[str, _Entry] = {}
        for entry in _entries(self.path):
            name = entry.key if rename is None else rename(entry.key)
            if name is None:
                continue
            if not isinstance(name, str) or not name:
                raise CheckpointError(
                    f"rename gives {shown(name)}, which is no name",
                    where=f"{self.path}: {entry.key}",
                    remedy="return the model's name, or None to leave the tensor out",
                )
            if name in self._entries:
                raise CheckpointError(
                    f"{self._entries[name].key} and {entry.key} get the same name",
                    where=f"{self.path}: {name}",
                    remedy="let rename return different names, or None for one of them",
                )
            self._entries[name] = entry
        self.shapes: Mapping[str, tuple[int, ...]] = {name: entry.shape for name, entry in self._entries.items()}
        self.kinds: Mapping[str, str] = {name: _kind(entry.dtype) for name, entry in self._entries.items()}

    @property
    def digest(self) -> str:
        """Tells checkpoints apart that differ in a name, shape, type or file size, on whatever machine they lie."""
        sizes = {entry.file.name: entry.file.stat().st_size for entry in self._entries.values()}
        text = [(name, e.file.name, e.key, e.shape, e.dtype) for name, e in sorted(self._entries.items())]
        return hashlib.sha256(repr((text, sorted(sizes.items()))).encode()).hexdigest()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reader]:
        """Opens the files, each once, for as long as tensors are read."""
        with contextlib.ExitStack() as stack:
            yield Reader(self._entries, stack)


class Reader:
    """Reads parts of tensors.

    Attributes:
        bytes_read: of all parts so far.
        latest: bytes of the largest piece of the file that was in memory for the latest part, besides the part.
    """

    def __init__(self, entries: Mapping[str, _Entry], stack: contextlib.ExitStack) -> None:
        self._entries, self._stack = entries, stack
        self._files: dict[Path, Any] = {}
        self.bytes_read = self.latest = 0

    def part(self, name: str, layout: Layout, axes: Mapping[str, int], coordinates: Mapping[str, int]) -> Tensor:
        """A rank's block of a tensor as `local_block` cuts it, on the CPU, in the file's type; padding is zero.

        What is returned shares no memory with the file.

        Raises:
            CheckpointError: the file cannot be read any more.
        """
        entry, self.latest = self._entries[name], 0
        try:
            if entry.file not in self._files:
                self._files[entry.file] = self._stack.enter_context(safe_open(entry.file, "pt", device="cpu"))
            file = self._files[entry.file]
            pieces = boxes(entry.shape, layout, axes, coordinates) if entry.shape else []
            if not entry.shape or len(pieces) > _MOST_READS:
                whole = self._counted(file.get_tensor(entry.key))
                return local_block(whole, layout, axes, coordinates).clone(memory_format=torch.contiguous_format)
            slices = file.get_slice(entry.key)
            shape = part_shape(entry.shape, layout, axes)
            if len(pieces) == 1 and pieces[0].sizes == shape:
                block = self._counted(slices[pieces[0].slices])
                return block.clone(memory_format=torch.contiguous_format)
            part: Tensor | None = None
            for piece in pieces:
                block = self._counted(slices[piece.slices])
                part = block.new_zeros(shape) if part is None else part
                piece.within(part).copy_(block)
            return slices[tuple(slice(0, 0) for _ in shape)].new_zeros(shape) if part is None else part
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"cannot be read: {error}", where=f"{entry.file}: {entry.key}", remedy="download or save it again"
            ) from error

    def _counted(self, value: Tensor) -> Tensor:
        size = value.numel() * value.element_size()
        self.bytes_read += size
        self.latest = max(self.latest, size)
        return value


def _kind(dtype: str) -> str:
    """The kind of a type by its name in safetensors: F32, BF16, F8_E4M3, I64, U8, BOOL, C64."""
    if dtype.startswith(("F", "BF")):
        return "float"
    return {"B": "bool", "C": "complex"}.get(dtype[0], "int")


def kind_of(dtype: torch.dtype) -> str:
    """The kind of an element type, as `Checkpoint.kinds` names it."""
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else "bool" if dtype == torch.bool else "int"


def _entries(path: Path) -> list[_Entry]:
    """All tensors of a checkpoint."""
    try:
        exists, is_folder = path.exists(), path.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise CheckpointError(str(error.strerror), where=str(path), remedy="check the path") from None
    if not exists:
        raise CheckpointError("there is no such file or folder", where=str(path), remedy="check the path")
    if is_folder:
        files = [path / name for name in (FILE, INDEX) if (path / name).is_file()]
        if len(files) != 1:
            raise CheckpointError(
                f"the folder holds {'both' if files else 'neither'} {FILE} {'and' if files else 'nor'} {INDEX}",
                where=str(path),
                remedy="name the file to load" if files else "save the model as safetensors",
            )
        path = files[0]
    if path.name.endswith(".index.json"):
        return _indexed(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            "is no safetensors checkpoint",
            where=str(path),
            remedy="name a .safetensors file, an .index.json, or a folder that holds one",
        )
    return _headers(path)


def _indexed(path: Path) -> list[_Entry]:
    """The tensors of an index, each in the file that it names."""
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(key): str(file) for key, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"is no index: {type(error).__name__} {error}", where=str(path), remedy="download or save it again"
        ) from error
    tensors = []
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise CheckpointError(
                f"names the file {file!r} in another folder", where=str(path), remedy="keep all files in one folder"
            )
        entries = {entry.key: entry for entry in _headers(path.parent / file)}
        missing = [key for key, place in files.items() if place == file and key not in entries]
        if missing:
            raise CheckpointError(
                f"{file} lacks {missing[0]}, which the index places there",
                where=str(path),
                remedy="download or save it again",
            )
        tensors += [entries[key] for key, place in files.items() if place == file]
    return tensors


def _headers(path: Path) -> list[_Entry]:
    """The tensors of one file."""
    if not path.is_file():
        raise CheckpointError("there is no such file", where=str(path), remedy="download or save it again")
    try:
        with safe_open(path, "pt", device="cpu") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
            return [_Entry(path, key, tuple(s.get_shape()), str(s.get_dtype())) for key, s in slices.items()]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"cannot be read: {error}", where=str(path), remedy="download or save it again"
        ) from error
