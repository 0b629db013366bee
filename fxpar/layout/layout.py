"""The layout type system: what each rank of a mesh axis holds of a value (and of its gradient).

Enters: global shapes. Leaves: `Placement` (one axis) and `Layout` (all axes), their text, and which of them fit a
shape. The arithmetic of shards through views and concatenations is in `fxpar.layout.nesting`, through slices in
`fxpar.layout.shards`; how several axes share a value is said by `fxpar.layout.nesting`.

For each mesh axis a value is one of

====  =======================================================  ==========================
kind  value on the ranks of the axis                           gradient on those ranks
====  =======================================================  ==========================
I     invariant: the same                                      the same
R     replicated: the same                                     partial, to be summed
S     shard: each rank holds a block of one factor of one dim  the same block
P     partial: each rank holds a summand                       the same (replicated)
V     varying: differs, and is no shard of anything            none
====  =======================================================  ==========================

A sharded dimension is a sequence of *pieces*. A piece `outer × size` is `outer` repetitions of a run of `size`
elements; where it is sharded, every run is cut into n equal blocks and rank r holds the r-th block of each run.
So `1 × h` is the plain shard, `3 × h` is a fused [q|k|v] of equal parts, `b × s` is a sequence shard of a flattened
b·s, and `h | kv | kv` are segments of unequal size. A run is contiguous, hence "heads × head size" needs no third
number: that n divides the number of heads is checked by the view that makes the heads a dimension.

Five more forms of a piece. `!kv` is a segment that every rank holds whole. `kv / c` is cut into n/c blocks of which
each is held by c neighbours (the axis is factored, SPEC section 2.2): the gradient of a block is partial among them, as
with R, or the same on all of them, as with I, where the placement is *reduced* (`S(0: kv / 2; I)`). `v ~ p` is a run of
v elements that n need not divide (a vocabulary): every rank holds p/n, of which the first are its ceil(v/n) elements or
what is left of them, the others padding. In `s reversed` rank r holds the r-th block from the end of each run. And the
runs may consist of segments: `b x (s | s reversed)` is the zigzag of context parallelism (SPEC section 6), in a
flattened b·2s. A cut with such blocks is one run or its repetitions, with no other pieces next to it. Rules refuse
these two (`Placement.in_rank_order`) where they do more than hand a cut on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from fxpar.errors import TextError
from fxpar.layout.symbolic_sizes import Size, divide, parse_size, simplify

# Frozen values that work out their hash once: layouts and types are keys of whatever equal layers ask again.

_Class = TypeVar("_Class", bound=type)


def remembers_hash(kind: _Class) -> _Class:
    """Has a frozen dataclass keep its hash; hashes of strings are others in another process, so it is no state."""
    changed: Any = kind
    compute: Callable[[Any], int] = changed.__hash__

    def kept(self: Any) -> int:
        try:
            return self._hash  # type: ignore[no-any-return]
        except AttributeError:
            # Through the dict, because a frozen dataclass refuses to be assigned to.
            computed = self.__dict__["_hash"] = compute(self)
            return computed

    def state(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    changed.__hash__, changed.__getstate__ = kept, state
    return kind


@remembers_hash
@dataclass(frozen=True)
class Piece:
    """`outer` runs of `size` elements of one dimension; every run is cut over the axis if `sharded`.

    Attributes:
        copies: neighbouring ranks that hold the same block.
        padded: elements that all ranks hold of the run, padding included; 0 where there is none.
        reversed: whether the ranks' order is that of the blocks from the end of each run.
        segments: what a run consists of, where it is not one: cuts of `size` elements in all, some of them reversed,
            none whole, shared, padded or of segments itself.
    """

    outer: Size
    size: Size
    sharded: bool = True
    copies: int = 1
    padded: int = 0
    reversed: bool = False
    segments: tuple[Piece, ...] = ()

    @property
    def length(self) -> Size:
        """Returns how many elements of the dimension the piece covers (global)."""
        return simplify(self.outer * self.size)

    @property
    def is_plain(self) -> bool:
        """Returns whether the ranks' blocks differ and hold nothing else."""
        return self.sharded and self.copies == 1 and not self.padded and self.in_rank_order

    @property
    def in_rank_order(self) -> bool:
        """Returns whether each rank's blocks are those of its number, counted from the start of each run."""
        return not self.reversed and not self.segments

    def __str__(self) -> str:
        mark = "" if self.sharded else "!"
        run = f"({' | '.join(map(str, self.segments))})" if self.segments else f"{self.size}"
        text = f"{mark}{run}" if self.outer == 1 else f"{mark}{self.outer} x {run}"
        text += " reversed" if self.reversed else ""
        return text + (f" / {self.copies}" if self.copies > 1 else "") + (f" ~ {self.padded}" if self.padded else "")


@remembers_hash
@dataclass(frozen=True)
class Placement:
    """The layout of a value on one mesh axis; everything but `kind` only where that is "S".

    Attributes:
        kind: I, R, S, P or V.
        dim: the dimension that is cut.
        pieces: what it consists of.
        reduced: of shared blocks, whether their gradients are the same on the ranks that hold them.
        partial: of shared blocks, whether the values are summands among the ranks that hold them (a gradient's are).
        zeros: of a padded cut, whether the padding is zero (that of a gradient is).
    """

    kind: str
    dim: int = -1
    pieces: tuple[Piece, ...] = ()
    reduced: bool = False
    partial: bool = False
    zeros: bool = False

    @property
    def is_shard(self) -> bool:
        """Returns whether the ranks hold blocks."""
        return self.kind == "S"

    @property
    def piece(self) -> Piece | None:
        """Returns the only piece of a shard without segments, else None."""
        return self.pieces[0] if len(self.pieces) == 1 else None

    @property
    def is_shared(self) -> bool:
        """Returns whether some elements are on several ranks."""
        return any(not piece.sharded or piece.copies > 1 for piece in self.pieces)

    @property
    def is_padded(self) -> bool:
        """Returns whether ranks hold elements that are none of the value."""
        return any(piece.padded for piece in self.pieces)

    @property
    def in_rank_order(self) -> bool:
        """Returns whether each rank's blocks are those of its number; true of what is no shard."""
        return all(piece.in_rank_order for piece in self.pieces)

    def at(self, dim: int) -> Placement:
        """Returns the same cut on another dimension."""
        return self if dim == self.dim else _at(self, dim)

    @property
    def plain(self) -> Placement:
        """Returns the same cut as values of the forward have it: of no summands, with whatever padding."""
        return replace(self, partial=False, zeros=False) if self.partial or self.zeros else self

    @property
    def cut_text(self) -> str:
        """Returns the pieces, as `S(1: …)` shows them."""
        mark = "I" if self.reduced else "P" if self.partial else "0" if self.zeros else ""
        return " | ".join(str(p) for p in self.pieces) + (f"; {mark}" if mark else "")

    def __str__(self) -> str:
        if not self.is_shard:
            return self.kind
        only = self.piece
        if only is not None and only.outer == 1 and only.is_plain:
            return f"S({self.dim})"
        return f"S({self.dim}: {self.cut_text})"


@lru_cache(maxsize=65536)
def _at(placement: Placement, dim: int) -> Placement:
    return replace(placement, dim=dim)


I = Placement("I")  # noqa: E741 - the field's letter
R = Placement("R")
P = Placement("P")
V = Placement("V")


def shard(dim: int, size: Size) -> Placement:
    """Returns the plain shard of a dimension of `size` elements: one contiguous block a rank."""
    return Placement("S", dim, (Piece(1, size),))


def padded_shard(dim: int, size: int, n: int) -> Placement:
    """Returns the shard of a vocabulary of `size` elements, padded to a multiple of 128·n (SPEC section 2.2).

    Of a smaller one than that, and where nothing is padded, the plain shard or the least that is even.
    """
    unit = 128 * n if size >= 128 * n else n
    padded = -(-size // unit) * unit
    return Placement("S", dim, (Piece(1, size, padded=padded if padded != size else 0),))


def fits(placement: Placement, shape: Sequence[Size], n: int) -> bool:
    """Returns whether the shard covers its dimension of `shape` exactly and its blocks divide every sharded run."""
    return not placement.is_shard or _cuts(placement, tuple(shape), n)


@lru_cache(maxsize=65536)
def _cuts(placement: Placement, shape: tuple[Size, ...], n: int) -> bool:
    if not 0 <= placement.dim < len(shape) or not any(p.sharded for p in placement.pieces):
        return False
    total = simplify(sum(p.length for p in placement.pieces))
    if (placement.reduced or placement.partial) and not placement.is_shared:
        return False
    if (placement.reduced and placement.partial) or (placement.zeros and not placement.is_padded):
        return False
    if not _is_one_order(placement.pieces):
        return False
    return total == shape[placement.dim] and all(_fits(p, n, len(placement.pieces)) for p in placement.pieces)


def _is_one_order(pieces: Sequence[Piece]) -> bool:
    """Returns whether blocks out of the order of ranks stand alone: one run of them, or its repetitions."""
    if all(piece.in_rank_order for piece in pieces) or len(pieces) == 1:
        return True
    return all(replace(piece, reversed=False).is_plain for piece in pieces)


def _fits(piece: Piece, n: int, count: int) -> bool:
    if piece.padded:
        one_run = (
            piece.in_rank_order
            and piece.sharded
            and piece.outer == piece.copies == count == 1
            and isinstance(piece.size, int)
        )
        return one_run and piece.padded % n == 0 and -(-int(piece.size) // n) <= piece.padded // n
    if not piece.in_rank_order:
        return piece.sharded and piece.copies == 1 and _fits_out_of_order(piece, n)
    if not piece.sharded:
        return piece.copies == 1
    return piece.copies < max(n, 2) and n % piece.copies == 0 and divide(piece.size, n // piece.copies) is not None


def _fits_out_of_order(piece: Piece, n: int) -> bool:
    if not piece.segments:
        return divide(piece.size, n) is not None
    cuts = all(replace(p, reversed=False).is_plain for p in piece.segments)
    cuts = cuts and any(p.reversed for p in piece.segments)
    lengths = simplify(sum(p.length for p in piece.segments))
    return cuts and not piece.reversed and lengths == piece.size and all(divide(p.size, n) for p in piece.segments)


def share_of(piece: Piece, n: int) -> Size | None:
    """Returns how many elements of a piece a rank holds; None where its blocks are not equal."""
    if piece.padded:
        return piece.padded // n
    return divide(piece.length, n // piece.copies) if piece.sharded else piece.length


@remembers_hash
@dataclass(frozen=True)
class Layout:
    """Placements by axis name, the outermost axis first (`fxpar.layout.nesting`)."""

    placements: tuple[tuple[str, Placement], ...] = ()

    @staticmethod
    def of(placements: Mapping[str, Placement]) -> Layout:
        """Returns the layout with these placements, in this order."""
        return Layout(tuple(placements.items()))

    def on(self, axis: str) -> Placement:
        """Returns the placement on an axis.

        Raises:
            KeyError: the axis is not in the layout.
        """
        for name, placement in self.placements:
            if name == axis:
                return placement
        raise KeyError(axis)

    def with_(self, axis: str, placement: Placement) -> Layout:
        """Returns a copy with another placement on one axis, listed where it was."""
        return Layout.of({**dict(self.placements), axis: placement})

    def __iter__(self) -> Iterator[tuple[str, Placement]]:
        return iter(self.placements)

    def __str__(self) -> str:
        return _text(self)


@lru_cache(maxsize=65536)
def _text(layout: Layout) -> str:
    return " ".join(f"{axis}:{placement}" for axis, placement in layout.placements)


_SHARD = re.compile(r"S\((\d+)(?::\s*([^;]*?)(?:; ([IP0]))?)?\)$")
_PIECE = re.compile(r"(!?)(.*?)( reversed)?(?: / (\d{1,9}))?(?: ~ (\d{1,18}))?$")
_BAR = re.compile(r"\|(?![^(]*\))")  # outside of brackets
_SEGMENTS = re.compile(r"(?:(.*?) x )?\((.*\|.*)\)$")


def parse_placement(text: str, shape: Sequence[Size] | None) -> Placement:
    """Returns the inverse of `str(placement)`; `shape` is the global shape, which a plain shard leaves unsaid."""
    text = text.strip()
    if text in ("I", "R", "P", "V"):
        return Placement(text)
    match = _SHARD.match(text)
    if match is None or shape is None or int(match[1]) >= len(shape):
        raise TextError(f"'{text}' is not a layout of {shape}", remedy="write I, R, P, V or S(dim)")
    dim = int(match[1])
    if match[2] is None:
        return shard(dim, shape[dim])
    return Placement("S", dim, _parse_pieces(match[2]), match[3] == "I", match[3] == "P", match[3] == "0")


def _parse_pieces(text: str) -> tuple[Piece, ...]:
    return tuple(_parse_piece(part.strip()) for part in _BAR.split(text))


def _parse_piece(text: str) -> Piece:
    within = _SEGMENTS.match(text)
    if within is not None:
        segments = tuple(_parse_piece(part.strip()) for part in within[2].split("|"))
        size = simplify(sum(piece.length for piece in segments))
        return Piece(parse_size(within[1]) if within[1] else 1, size, segments=segments)
    match = _PIECE.match(text)
    assert match is not None  # every part but the middle may be empty
    outer, mark, size_text = match[2].rpartition(" x ")
    copies, padded = int(match[4] or 1), int(match[5] or 0)
    if copies < 1 or (match[5] is not None and padded < 1):
        raise TextError(f"'{text}' is not a piece of a dimension", remedy="write numbers from 1 on behind / and ~")
    sizes = parse_size(outer) if mark else 1, parse_size(size_text)
    return Piece(*sizes, not match[1], copies, padded, match[3] is not None)
