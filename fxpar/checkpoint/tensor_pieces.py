"""Tensors of a checkpoint's files, and tensors that are made of them: stacked, joined and divided, without a copy.

What is made says of each of its boxes in which file's tensor that lies. So a rank that holds a part of it reads
no more than that part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fxpar.errors import CheckpointError


@dataclass(frozen=True)
class Entry:
    """Where a tensor is.

    Attributes:
        file: the file, or the first one where several tensors make it.
        key: its name there.
        shape: of the tensor.
        dtype: its type's name.
        pieces: what it is made of, if it is no tensor of a file.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[SourceBox, ...] = ()

    @property
    def leaves(self) -> tuple[SourceBox, ...]:
        """Returns the pieces of files that fill it."""
        return self.pieces or (SourceBox(self, (0,) * len(self.shape), self.shape, (0,) * len(self.shape)),)


@dataclass(frozen=True)
class SourceBox:
    """A box of a tensor that lies in another tensor, of a file.

    Attributes:
        source: that tensor.
        offsets: of its first element in the tensor that it is a piece of.
        sizes: of the box.
        start: of its first element in the source, which may lack leading dimensions of size 1.
    """

    source: Entry
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: tuple[int, ...]

    def within(self, offsets: Sequence[int], sizes: Sequence[int]) -> SourceBox | None:
        """Returns what of it is in a box of its tensor, with offsets in that box; None if that is nothing."""
        first = [max(a, b) for a, b in zip(self.offsets, offsets, strict=True)]
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, offsets, sizes, strict=True)]
        if any(end <= begin for begin, end in zip(first, ends, strict=True)):
            return None
        return SourceBox(
            self.source,
            tuple(begin - offset for begin, offset in zip(first, offsets, strict=True)),
            tuple(end - begin for begin, end in zip(first, ends, strict=True)),
            tuple(start + begin - offset for start, begin, offset in zip(self.start, first, self.offsets, strict=True)),
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        """Returns where it is in the source."""
        places = tuple(slice(start, start + size) for start, size in zip(self.start, self.sizes, strict=True))
        return places[len(places) - len(self.source.shape) :]


def stacked(entries: Sequence[Entry], where: str) -> Entry:
    """Returns the tensor whose first dimension numbers tensors of one shape."""
    return concatenated([_deeper(entry) for entry in entries], 0, where)


def _deeper(entry: Entry) -> Entry:
    pieces = (SourceBox(p.source, (0, *p.offsets), (1, *p.sizes), (0, *p.start)) for p in entry.leaves)
    return dataclasses.replace(entry, shape=(1, *entry.shape), pieces=tuple(pieces))


def concatenated(entries: Sequence[Entry], dim: int, where: str) -> Entry:
    """Returns the tensor of tensors one after the other.

    Raises:
        CheckpointError: their types or other dimensions differ.
    """
    first, length, pieces = entries[0], 0, list[SourceBox]()
    dim %= len(first.shape)
    for entry in entries:
        if (entry.dtype, _without(entry.shape, dim)) != (first.dtype, _without(first.shape, dim)):
            reason = f"is made of {first.key} {first.dtype}{list(first.shape)} and {entry.key} {entry.dtype}"
            remedy = "download or save it again"
            raise CheckpointError(f"{reason}{list(entry.shape)}", where=where, remedy=remedy)
        for piece in entry.leaves:
            offsets = (*piece.offsets[:dim], piece.offsets[dim] + length, *piece.offsets[dim + 1 :])
            pieces.append(dataclasses.replace(piece, offsets=offsets))
        length += entry.shape[dim]
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return Entry(first.file, ", ".join(entry.key for entry in entries), shape, first.dtype, tuple(pieces))


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def divided(entry: Entry, dim: int, count: int) -> list[Entry]:
    """Returns the parts into which `torch.chunk` cuts a tensor."""
    dim %= len(entry.shape)
    length, parts = -(-entry.shape[dim] // count), list[Entry]()
    for begin in range(0, entry.shape[dim], length):
        sizes = (*entry.shape[:dim], min(length, entry.shape[dim] - begin), *entry.shape[dim + 1 :])
        offsets = (*(0,) * dim, begin, *(0,) * (len(sizes) - dim - 1))
        pieces = tuple(piece for leaf in entry.leaves if (piece := leaf.within(offsets, sizes)) is not None)
        parts.append(dataclasses.replace(entry, shape=sizes, pieces=pieces))
    return parts
