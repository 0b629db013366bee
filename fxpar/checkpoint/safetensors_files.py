"""Reads parts of tensors from safetensors, and writes files of which every rank holds parts.

A file's layout follows from names, types and shapes alone, so each rank knows where its elements belong. No rank copies
more of a file into memory than its parts and the piece at hand.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fxpar.checkpoint.tensor_pieces import Entry, SourceBox
from fxpar.errors import CheckpointError, InputError, shown
from fxpar.layout.layout import Layout
from fxpar.layout.shards import Box, boxes, local_block, part_shape

# Their names in safetensors' headers.
_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
# By their names in torch.
NAMED_DTYPES: Mapping[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in _NAMES}
_ALIGNMENT = 8


METADATA = {"format": "pt"}  # without it, transformers refuses a file
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def folder_of(folder: str | Path) -> Path:
    """Returns the path of a folder.

    Raises:
        CheckpointError: it is not a path.
    """
    if not isinstance(folder, (str, Path)) or "\0" in str(folder):
        raise CheckpointError(f"must be a path, got {shown(folder)}", where="folder", remedy="name a folder")
    return Path(folder)


def bytes_of(size: int | str) -> int:
    """Returns a size in bytes, also from a text such as "500MB".

    Raises:
        InputError: it is not a size.
    """
    text = shown(size) if isinstance(size, int) else str(size)
    match = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([KMGT]?B|)", text, re.IGNORECASE)
    count = int(float(match[1]) * _UNITS[match[2].upper()]) if match and not isinstance(size, bool) else 0
    if count < 1:
        raise InputError(
            f"must be a size in bytes, got {shown(size)}",
            where="shard_size",
            remedy='pass bytes, or a text such as "5GB"',
        )
    return count


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turns what the file system refuses into an error that names the place."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise CheckpointError(reason, where=str(path), remedy="check the folder and the space left") from error


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Writes a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a save; of one that lies elsewhere, the link to it."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


@dataclass(frozen=True)
class Spec:
    """Element type and whole shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """Returns the spec of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        """Returns the size of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{_NAMES.get(self.dtype, self.dtype)}{list(self.shape)}"


def can_hold(dtype: torch.dtype) -> bool:
    """Tells whether files have a name for a type."""
    return dtype in _NAMES


def split_files(stem: str, specs: Mapping[str, Spec], limit: int) -> dict[str, list[str]]:
    """Returns names of tensors by file, in order.

    Args:
        stem: what the files' names begin with.
        limit: the most bytes of tensors in a file; a larger tensor has one of its own.
    """
    groups: list[list[str]] = []
    room = 0
    for name, spec in specs.items():
        if not groups or spec.bytes > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= spec.bytes
    if len(groups) <= 1:
        return {f"{stem}.safetensors": [name for group in groups for name in group]}
    return {f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def index_document(specs: Mapping[str, Spec], files: Mapping[str, Sequence[str]]) -> str:
    """Returns the index of several files."""
    places = {name: file for file, names in files.items() for name in names}
    total = sum(spec.bytes for spec in specs.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"


class BoxFile:
    """A safetensors file that all ranks write at once, each the boxes that it stands for.

    Attributes:
        specs: its tensors by name.
        size: bytes of the file.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec]) -> None:
        self.path, self.specs = path, specs
        entries: dict[str, Any] = {"__metadata__": METADATA}
        self._starts: dict[str, int] = {}
        end = 0
        # Wide elements first, so that each begins at a multiple of its width.
        for name, spec in sorted(specs.items(), key=lambda pair: -pair[1].dtype.itemsize):
            self._starts[name], end = end, end + spec.bytes
            offsets = [self._starts[name], end]
            entries[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._header = len(text).to_bytes(8, "little") + text
        self.size = len(self._header) + end

    def create(self) -> None:
        """Creates the file, with its header and no values. OSError where that cannot be."""
        with self.path.open("xb") as file:
            file.write(self._header)
            # A hole of the full length: ranks write to their places in any order, from whatever machine.
            file.truncate(self.size)

    def is_complete(self) -> bool:
        """Tells whether the file is there, as long as it must be and with this header."""
        try:
            with self.path.open("rb") as file:
                return file.read(len(self._header)) == self._header and os.fstat(file.fileno()).st_size == self.size
        except FileNotFoundError:
            return False

    def write(self, blocks: Iterable[tuple[str, Box, Tensor]]) -> list[tuple[str, Box, int]]:
        """Writes blocks of tensors to the disk; returns them with their checksums. OSError where that cannot be.

        Args:
            blocks: the name of the tensor, the place of the block in it, and its values.
        """
        rows = []
        with self.path.open("r+b", buffering=0) as file:
            for name, box, values in blocks:
                elements: Any = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                content = memoryview(elements)
                done = 0
                for offset, length in self._runs(name, box):
                    _write_all(file.fileno(), content[done : done + length], offset)
                    done += length
                rows.append((name, box, zlib.crc32(content)))
            os.fsync(file.fileno())
        return rows

    def checksum(self, name: str, box: Box) -> int:
        """Returns the checksum of a box as the file has it now. OSError where the file ends before."""
        checksum = 0
        with self.path.open("rb", buffering=0) as file:
            for offset, length in self._runs(name, box):
                checksum = zlib.crc32(_read_all(file.fileno(), length, offset), checksum)
        return checksum

    def _runs(self, name: str, box: Box) -> Iterator[tuple[int, int]]:
        """Yields the places of a box in the file, as offset and length in bytes, in the order of its elements."""
        spec = self.specs[name]
        width, start = spec.dtype.itemsize, len(self._header) + self._starts[name]
        if math.prod(box.sizes) == 0:
            return
        # The trailing dimensions that a box fills are one run with the one before them.
        inner = len(spec.shape)
        while inner > 0 and box.sizes[inner - 1] == spec.shape[inner - 1]:
            inner -= 1
        inner = max(inner - 1, 0)
        strides = [math.prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape))]
        length = math.prod(box.sizes[inner:]) * width
        first = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
        for outer in itertools.product(*map(range, box.sizes[:inner])):
            place = first + sum(i * s for i, s in zip(outer, strides[:inner], strict=True))
            yield start + place * width, length


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        # It may take a part: Linux writes 2 GiB at most at once.
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _read_all(descriptor: int, length: int, offset: int) -> bytes:
    content = b""
    while len(content) < length:
        piece = os.pread(descriptor, length - len(content), offset + len(content))
        if not piece:
            raise OSError(f"it ends at byte {offset + len(content)}")
        content = piece if not content else content + piece
    return content


FILE, INDEX = "model.safetensors", "model.safetensors.index.json"

# A part of more pieces than this is cut out of its tensor: a read has its price too.
_MOST_READS = 64


class Checkpoint:
    """Names a safetensors checkpoint of one or more files, and reads parts of its tensors.

    Example:
        ```python
        model.save_checkpoint("out")
        checkpoint = fxpar.Checkpoint("out", rename=lambda name: name.removeprefix("model."))
        model.load_checkpoint(checkpoint)
        ```

    Args:
        path: a `.safetensors` file, an `.index.json`, or a folder with `model.safetensors` or
            `model.safetensors.index.json`.
        rename: returns the model's name for a name of the checkpoint, or None to leave that tensor out. By default the
            names are the model's.

    Attributes:
        shapes: the whole shape of each tensor, by the model's name.
        kinds: the kind of numbers in each tensor: "float", "int", "bool" or "complex".
        absent: names that the model saves, and that need not be here.

    Raises:
        CheckpointError: there is no such checkpoint, its files cannot be read or contradict its index, or two tensors
            get one name.
    """

    def __init__(self, path: str | Path, rename: Callable[[str], str | None] | None = None) -> None:
        if not isinstance(path, (str, Path)):
            remedy = "pass a path or a fxpar.Checkpoint; load_full_state_dict takes tensors by name"
            raise CheckpointError(
                f"must be a path or a Checkpoint, got a {type(path).__name__}", where="checkpoint", remedy=remedy
            )
        if rename is not None and not callable(rename):
            remedy = "pass a function from the checkpoint's name to the model's"
            raise CheckpointError(f"must be a function, got {shown(rename)}", where="rename", remedy=remedy)
        self.path = Path(path)
        entries: dict[str, Entry] = {}
        for entry in _entries_at(self.path):
            name = entry.key if rename is None else rename(entry.key)
            if name is None:
                continue
            if not isinstance(name, str) or not name:
                raise CheckpointError(
                    f"rename must return a name or None, got {shown(name)}",
                    where=f"{self.path}: {entry.key}",
                    remedy="return the model's name, or None to leave the tensor out",
                )
            if name in entries:
                raise CheckpointError(
                    f"{entries[name].key} and {entry.key} get the same name",
                    where=f"{self.path}: {name}",
                    remedy="let rename return different names, or None for one of them",
                )
            entries[name] = entry
        self._name(entries)
        self.absent: Collection[str] = ()

    def _name(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self.shapes: Mapping[str, tuple[int, ...]] = {name: entry.shape for name, entry in entries.items()}
        self.kinds: Mapping[str, str] = {name: _kind(entry.dtype) for name, entry in entries.items()}

    def with_entries(self, entries: Mapping[str, Entry]) -> Checkpoint:
        """Returns the checkpoint with tensors that are made of its own, by the model's names."""
        changed = copy.copy(self)
        changed._name(entries)
        return changed

    def of_part(self, names: Mapping[str, Sequence[str]], saved: Iterable[str]) -> Checkpoint:
        """Returns the checkpoint of a part of a model, of which the rest stays as it is.

        Args:
            names: the model's names of each tensor, by its name here; others keep theirs, and are the model's or not.
            saved: all names that the model saves.
        """
        part = copy.copy(self)
        part._name({other: e for name, e in self.entries.items() for other in names.get(name, (name,))})
        part.absent = {*saved} - {other for others in names.values() for other in others}
        return part

    @property
    def digest(self) -> str:
        """Returns a hash of names, shapes, types and file sizes, which is the same on every machine."""
        leaves = [(name, piece) for name, e in sorted(self.entries.items()) for piece in e.leaves]
        sizes = {piece.source.file.name: piece.source.file.stat().st_size for _, piece in leaves}
        sources = ((name, piece, piece.source) for name, piece in leaves)
        text = [(name, s.file.name, s.key, s.shape, s.dtype, p.offsets, p.start) for name, p, s in sources]
        return hashlib.sha256(repr((text, sorted(sizes.items()))).encode()).hexdigest()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reader]:
        """Opens the files, each once, for as long as tensors are read."""
        with contextlib.ExitStack() as stack:
            yield Reader(self.entries, stack)


class Reader:
    """Reads parts of tensors.

    Attributes:
        bytes_read: of all parts so far.
        latest: bytes of the largest piece of the file that was in memory for the latest part, besides the part.
    """

    def __init__(self, entries: Mapping[str, Entry], stack: contextlib.ExitStack) -> None:
        self.entries, self._stack = entries, stack
        self._files: dict[Path, Any] = {}
        self.bytes_read = self.latest = 0

    def part(self, name: str, layout: Layout, axes: Mapping[str, int], coordinates: Mapping[str, int]) -> Tensor:
        """Reads a rank's block of a tensor, as `local_block` cuts it, to the CPU in the file's type; padding is zero.

        What is returned shares no memory with the file.

        Raises:
            CheckpointError: the file cannot be read any more.
        """
        entry, self.latest = self.entries[name], 0
        cuts = boxes(entry.shape, layout, axes, coordinates) if entry.shape else []
        reads = sum(leaf.within(cut.offsets, cut.sizes) is not None for cut in cuts for leaf in entry.leaves)
        if not entry.shape or reads > max(_MOST_READS, 2 * len(entry.leaves)):
            whole = self._box(entry, (0,) * len(entry.shape), entry.shape)
            return local_block(whole, layout, axes, coordinates).clone(memory_format=torch.contiguous_format)
        shape = part_shape(entry.shape, layout, axes)
        if len(cuts) == 1 and cuts[0].sizes == shape:
            return self._box(entry, cuts[0].offsets, shape)
        # A part that is all padding reads nothing. The empty box tells the file's type.
        part = self._box(entry, (0,) * len(shape), (0,) * len(shape)).new_zeros(shape)
        for cut in cuts:
            cut.within(part).copy_(self._box(entry, cut.offsets, cut.sizes))
        return part

    def _box(self, entry: Entry, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Reads a box of a tensor, which shares no memory with the file."""
        pieces = [piece for leaf in entry.leaves if (piece := leaf.within(offsets, sizes)) is not None]
        if len(pieces) == 1 and len(pieces[0].source.shape) == len(sizes):
            return self._read(pieces[0]).clone(memory_format=torch.contiguous_format)
        if not pieces:
            leaf = entry.leaves[0]
            return self._read(dataclasses.replace(leaf, sizes=(0,) * len(sizes))).new_zeros(tuple(sizes))
        box: Tensor | None = None
        for piece in pieces:
            block = self._read(piece)
            box = block.new_empty(tuple(sizes)) if box is None else box
            box[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))] = block
        assert box is not None
        return box

    def _read(self, piece: SourceBox) -> Tensor:
        source = piece.source
        try:
            if source.file not in self._files:
                self._files[source.file] = self._stack.enter_context(safe_open(source.file, "pt", device="cpu"))
            file = self._files[source.file]
            if not source.shape:
                return self._counted(file.get_tensor(source.key))
            return self._counted(file.get_slice(source.key)[piece.slices])
        except (SafetensorError, OSError) as error:
            raise _broken(f"cannot be read: {error}", f"{source.file}: {source.key}") from error

    def _counted(self, value: Tensor) -> Tensor:
        size = value.numel() * value.element_size()
        self.bytes_read += size
        self.latest = max(self.latest, size)
        return value


def _kind(dtype: str) -> str:
    """Returns the kind of a type by its name in safetensors: F32, BF16, F8_E4M3, I64, U8, BOOL, C64."""
    if dtype.startswith(("F", "BF")):
        return "float"
    return {"B": "bool", "C": "complex"}.get(dtype[0], "int")


def kind_of(dtype: torch.dtype) -> str:
    """Returns the kind of an element type, as `Checkpoint.kinds` names it."""
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else "bool" if dtype == torch.bool else "int"


def _entries_at(path: Path) -> list[Entry]:
    """Returns all tensors of a checkpoint."""
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
            "must be a safetensors checkpoint",
            where=str(path),
            remedy="name a .safetensors file, an .index.json, or a folder that holds one",
        )
    return _headers(path)


def _indexed(path: Path) -> list[Entry]:
    """Returns the tensors of an index, each in the file that it names."""
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(key): str(file) for key, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(f"cannot be read as an index: {type(error).__name__} {error}", path) from error
    tensors = []
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise CheckpointError(
                f"names the file {file!r} in another folder", where=str(path), remedy="keep all files in one folder"
            )
        entries = {entry.key: entry for entry in _headers(path.parent / file)}
        missing = [key for key, place in files.items() if place == file and key not in entries]
        if missing:
            raise _broken(f"{file} lacks {missing[0]}, which the index places there", path)
        tensors += [entries[key] for key, place in files.items() if place == file]
    return tensors


def _headers(path: Path) -> list[Entry]:
    """Returns the tensors of one file."""
    if not path.is_file():
        raise _broken("there is no such file", path)
    try:
        with safe_open(path, "pt", device="cpu") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
            return [Entry(path, key, tuple(s.get_shape()), str(s.get_dtype())) for key, s in slices.items()]
    except (SafetensorError, OSError) as error:
        raise _broken(f"cannot be read: {error}", path) from error


def _broken(reason: str, where: Path | str) -> CheckpointError:
    return CheckpointError(reason, where=str(where), remedy="download or save it again")
