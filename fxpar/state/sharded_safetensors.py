"""Safetensors files that all ranks write at once, each the boxes that it stands for.

Enters: names, types and whole shapes of tensors, alike on every rank, and a rank's parts. Leaves: files as
`safetensors` reads them, and check sums of the boxes. A file's layout follows from names, types and shapes alone, so
that a rank knows where its elements belong; no rank holds more than its own parts.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpar.layout.shards import Box

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
_ALIGNMENT = 8


@dataclass(frozen=True)
class Spec:
    """Element type and whole shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{_NAMES.get(self.dtype, self.dtype)}{list(self.shape)}"


def can_hold(dtype: torch.dtype) -> bool:
    """Whether files have a name for a type."""
    return dtype in _NAMES


def split_files(stem: str, specs: Mapping[str, Spec], limit: int) -> dict[str, list[str]]:
    """Names of tensors by file, in order.

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
    """The index of several files."""
    places = {name: file for file, names in files.items() for name in names}
    total = sum(spec.bytes for spec in specs.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"


class BoxFile:
    """One file's layout.

    Attributes:
        size: bytes of the file.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec]) -> None:
        self.path, self._specs = path, dict(specs)
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it, transformers refuses the file
        self._starts: dict[str, int] = {}
        end = 0
        # Wide elements first, so that each begins at a multiple of its width.
        for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
            entries[name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [end, end + spec.bytes],
            }
            self._starts[name], end = end, end + spec.bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._header = len(text).to_bytes(8, "little") + text
        self.size = len(self._header) + end

    def create(self) -> None:
        """Makes the file, with its header and no values. OSError where that cannot be."""
        with self.path.open("xb") as file:
            file.write(self._header)
            file.truncate(self.size)

    def is_whole(self) -> bool:
        """Whether the file is there, as long as it must be and with this header."""
        try:
            with self.path.open("rb") as file:
                return file.read(len(self._header)) == self._header and os.fstat(file.fileno()).st_size == self.size
        except FileNotFoundError:
            return False

    def write(self, descriptor: int, name: str, box: Box, part: Tensor) -> int:
        """Writes a box of a rank's part; returns its check sum."""
        values = box.within(part) if box.sizes else part
        elements: Any = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        data = memoryview(elements)
        done = 0
        for offset, length in self._runs(name, box):
            _write_all(descriptor, data[done : done + length], offset)
            done += length
        return zlib.crc32(data)

    def check(self, descriptor: int, name: str, box: Box) -> int:
        """The check sum of a box as the file has it now. OSError where the file ends before."""
        checksum = 0
        for offset, length in self._runs(name, box):
            checksum = zlib.crc32(_read_all(descriptor, length, offset), checksum)
        return checksum

    def _runs(self, name: str, box: Box) -> Iterator[tuple[int, int]]:
        """The places of a box in the file, as offset and length in bytes, in the order of its elements."""
        spec = self._specs[name]
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
        for outer in _counted(box.sizes[:inner]):
            place = first + sum(i * s for i, s in zip(outer, strides[:inner], strict=True))
            yield start + place * width, length


def _counted(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All indices below the sizes, the last running fastest."""
    total = math.prod(sizes)
    for flat in range(total):
        indices = []
        for size in reversed(sizes):
            flat, index = divmod(flat, size)
            indices.append(index)
        yield tuple(reversed(indices))


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
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
