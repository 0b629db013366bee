"""Brute force: what n ranks hold of a value and of its gradient under a placement.

Enters: sample calls with concrete arguments, placements. Leaves: the ranks' parts, and whether given parts are the
right ones. Nothing of `fxpar.layout`'s arithmetic is used: which elements a rank holds is counted out here from the
definition of a piece, so that a fault there cannot hide one in a rule.

The values (left) and the gradients (right) that the ranks must hold for a global value x and its gradient g:

=====  ==============================  ========================================================
I      x on every rank                 g on every rank
R      x on every rank                 summands of g
S      the rank's positions of x       the same positions of g; summands where several ranks hold them
~      the same and anything after     the same and zeros after
S; I   the rank's positions of x       the same positions of g
S; P   the same, as summands of those  none: it is a gradient itself
       that several ranks hold
~; 0   the rank's positions of x and   none
       zeros after
P      summands of x                   g on every rank
V      the rank's index                none
=====  ==============================  ========================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from fxpar.layout.layout import Piece, Placement

# Relative to the largest value. What is wrong is wrong by about that; casts to float32 round.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Sample:
    """One call with concrete arguments.

    Attributes:
        args: arguments by position; tensors are the operands.
        kwargs: arguments by name.
        fixed: indices of float operands that the operation cannot differentiate.
        segments: lengths of the segments of a fused dimension (`(12, 6, 6)`); every dimension of their sum is also
            tried as a shard of some of them.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    segments: tuple[tuple[int, ...], ...] = ()
    fixed: tuple[int, ...] = ()


def sample(
    *args: Any, segments: tuple[tuple[int, ...], ...] = (), fixed: tuple[int, ...] = (), **kwargs: Any
) -> Sample:
    """Returns a sample written as the call."""
    return Sample(args, kwargs, segments, fixed)


def shuffled(call: Sample, generator: torch.Generator) -> Sample:
    """Returns the same call on other values: the elements of every operand in another order."""

    def visit(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.reshape(-1)[torch.randperm(item.numel(), generator=generator)].view(item.shape)
        return type(item)(visit(inner) for inner in item) if isinstance(item, (list, tuple)) else item

    kwargs = {key: visit(value) for key, value in call.kwargs.items()}
    return Sample(visit(call.args), kwargs, call.segments, call.fixed)


@lru_cache(maxsize=4096)
def _index(placement: Placement, n: int, rank: int) -> torch.Tensor:
    """Returns `local_positions` as a tensor."""
    return torch.tensor(local_positions(placement, n, rank), dtype=torch.int64)


def local_positions(placement: Placement, n: int, rank: int) -> list[int]:
    """Returns positions of the sharded dimension that a rank holds, in the order in which it holds them."""
    return _held(placement.pieces, n, rank, 0)


def _held(pieces: Sequence[Piece], n: int, rank: int, start: int) -> list[int]:
    positions: list[int] = []
    for piece in pieces:
        outer, size = int(piece.outer), int(piece.size)
        block = -(-size * piece.copies // n)
        index = n - 1 - rank if piece.reversed else rank // piece.copies
        for _ in range(outer):
            if piece.segments:
                positions.extend(_held(piece.segments, n, rank, start))
            else:
                first = start + index * block if piece.sharded else start
                last = min(first + block, start + size) if piece.sharded else start + size
                positions.extend(range(first, last))
            start += size
    return positions


def padding(placement: Placement, n: int, rank: int) -> int:
    """Returns elements that a rank holds after those of the value."""
    return sum(int(piece.padded) // n for piece in placement.pieces if piece.padded) - (
        len(local_positions(placement, n, rank)) if placement.is_padded else 0
    )


def divides(placement: Placement, shape: Sequence[int], n: int) -> bool:
    """Returns whether the pieces cover the dimension exactly and every run falls into equal blocks, n or n/c."""
    if not placement.is_shard:
        return True
    total = sum(int(p.outer) * int(p.size) for p in placement.pieces)
    cut = [p for p in placement.pieces if p.sharded]
    if placement.is_padded:
        if len(placement.pieces) > 1:
            return False
        (only,) = cut
        share = int(only.padded) // n
        return total == shape[placement.dim] and only.padded % n == 0 and share * n >= total and -(-total // n) <= share
    runs = [q for p in cut for q in p.segments or (p,)]
    even = all(n % p.copies == 0 and p.copies < n and int(p.size) % (n // p.copies) == 0 for p in runs)
    return 0 <= placement.dim < len(shape) and total == shape[placement.dim] and even


def _block(x: torch.Tensor, placement: Placement, n: int, rank: int) -> torch.Tensor:
    return x.index_select(placement.dim, _index(placement, n, rank))


def is_continuous(x: torch.Tensor) -> bool:
    """Returns whether its numbers are real or complex, so that it can have a gradient."""
    return x.is_floating_point() or x.is_complex()


def random_like(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns a gradient for it: normal numbers, real unless its own are complex."""
    dtype = torch.complex128 if x.is_complex() else torch.float64
    return torch.randn(x.shape, generator=generator, dtype=dtype)


def _summands(x: torch.Tensor, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    if is_continuous(x):
        parts = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(n - 1)]
    else:
        parts = [torch.randint(-9, 9, x.shape, generator=generator, dtype=x.dtype) for _ in range(n - 1)]
    return [*parts, x - sum(parts)]


def _padded(
    part: torch.Tensor, placement: Placement, n: int, rank: int, generator: torch.Generator | None
) -> torch.Tensor:
    """Returns the part with its padding: anything, or zeros where there is no generator."""
    count = padding(placement, n, rank)
    if not count:
        return part
    shape = [count if dim == placement.dim else size for dim, size in enumerate(part.shape)]
    more = torch.zeros(shape) if generator is None else torch.randn(shape, generator=generator)
    return torch.cat([part, more.to(part.dtype)], placement.dim)


def _unpadded(part: torch.Tensor, placement: Placement, n: int, rank: int) -> torch.Tensor:
    count = padding(placement, n, rank)
    if count <= 0 or part.dim() <= placement.dim or part.shape[placement.dim] < count:
        return part
    return part.narrow(placement.dim, 0, part.shape[placement.dim] - count)


def place(x: torch.Tensor, placement: Placement, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Returns what each rank holds of the value x."""
    if placement.kind == "P":
        return _summands(x, n, generator)
    if placement.partial:
        return _shared_summands(x, placement, n, generator)
    if placement.is_shard:
        behind = None if placement.zeros else generator
        return [_padded(_block(x, placement, n, rank), placement, n, rank, behind) for rank in range(n)]
    if placement.kind == "V":
        return [torch.full_like(x, rank) for rank in range(n)]
    return [x] * n


def place_gradient(g: torch.Tensor, placement: Placement, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Returns what each rank holds of the gradient of a value so placed."""
    if placement.kind in "IP":
        return [g] * n
    if not placement.is_shard:
        return _summands(g, n, generator)
    if placement.reduced or placement.is_padded:
        return [_padded(_block(g, placement, n, rank), placement, n, rank, None) for rank in range(n)]
    return _shared_summands(g, placement, n, generator)


def _shared_summands(g: torch.Tensor, placement: Placement, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Returns random summands of each element on the ranks that hold it, which the last makes up to g."""
    missing, last = g.clone(), {p: rank for rank in range(n) for p in local_positions(placement, n, rank)}
    summands = []
    for rank in range(n):
        mine = local_positions(placement, n, rank)
        ends = torch.tensor([last[p] == rank for p in mine]).view(-1, *(1,) * (g.dim() - placement.dim - 1))
        block = _block(missing, placement, n, rank)
        part = torch.where(ends, block, torch.randn(block.shape, generator=generator, dtype=g.dtype))
        missing.index_add_(placement.dim, torch.tensor(mine), part, alpha=-1)
        summands.append(part)
    return summands


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether tensors are the same, up to rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    is_equal = torch.equal(a, b)
    if is_equal or not is_continuous(a):
        return is_equal
    scale = float(b.detach().abs().max()) if b.numel() else 0.0
    return math.isfinite(scale) and torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * min(scale, 1.0))


def _alike(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns what all ranks hold; None where they hold different things."""
    return parts[0] if all(part is parts[0] or close(part, parts[0]) for part in parts[1:]) else None


def _summed(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if any(part.shape != parts[0].shape for part in parts):
        return None
    return torch.stack(list(parts)).sum(0, dtype=parts[0].dtype)


def _blocks(
    parts: Sequence[torch.Tensor], placement: Placement
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]] | None:
    """Returns a zero tensor of the whole's shape, and each rank's positions and elements without padding.

    None where a rank has another number of them.
    """
    n, dim = len(parts), placement.dim
    blocks, shape = [], list(parts[0].shape)
    for rank, part in enumerate(parts):
        mine, elements = _index(placement, n, rank), _unpadded(part, placement, n, rank)
        if list(elements.shape) != [*shape[:dim], len(mine), *shape[dim + 1 :]]:
            return None
        blocks.append((mine, elements))
    shape[dim] = sum(int(piece.outer) * int(piece.size) for piece in placement.pieces)
    return torch.zeros(shape, dtype=parts[0].dtype), blocks


def _has_zeros_behind(
    part: torch.Tensor, positions: torch.Tensor, elements: torch.Tensor, placement: Placement
) -> bool:
    """Returns whether a rank holds nothing but zeros after its elements."""
    assert elements.shape[placement.dim] == len(positions)
    behind = part.narrow(placement.dim, len(positions), part.shape[placement.dim] - len(positions))
    return not behind.numel() or float(behind.abs().max()) <= TOLERANCE


def value_of(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor | None:
    """Returns the value of which the ranks' parts are so placed; None where they are none of one."""
    if not placement.is_shard:
        return _summed(parts) if placement.kind == "P" else _alike(parts)
    blocks = _blocks(parts, placement)
    if blocks is None:
        return None
    whole, owned = blocks
    if placement.zeros and not all(_has_zeros_behind(p, *o, placement) for p, o in zip(parts, owned, strict=True)):
        return None
    if placement.partial:
        for positions, elements in owned:
            whole.index_add_(placement.dim, positions, elements.detach())
        return whole
    for positions, elements in owned:
        whole.index_copy_(placement.dim, positions, elements.detach())
    is_one = all(close(elements, whole.index_select(placement.dim, positions)) for positions, elements in owned)
    return whole if is_one else None


def gradient_of(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor | None:
    """Returns the gradient whose parts, of a value so placed, the ranks have; None where there is none."""
    if placement.kind in "IP":
        return _alike(parts)
    if not placement.is_shard:
        return _summed(parts)
    if placement.reduced:
        return value_of(parts, placement)
    blocks = _blocks(parts, placement)
    if blocks is None:
        return None
    whole, owned = blocks
    for (positions, elements), part in zip(owned, parts, strict=True):
        if not _has_zeros_behind(part, positions, elements, placement):
            return None  # padding has no gradient
        whole.index_add_(placement.dim, positions, elements)
    return whole


def agree(parts: Sequence[torch.Tensor], placement: Placement, x: torch.Tensor) -> bool:
    """Returns whether the ranks' parts are the value x as placed."""
    whole = value_of(parts, placement)
    return whole is not None and close(whole, x)


def agree_gradient(parts: Sequence[torch.Tensor], placement: Placement, g: torch.Tensor) -> bool:
    """Returns whether the ranks' parts are the gradient g of a value so placed."""
    whole = gradient_of(parts, placement)
    return whole is not None and close(whole, g)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of arguments or results in order, lists flattened."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for item in value for t in tensors_of(item)] if isinstance(value, (list, tuple)) else []


def with_tensors(value: Any, tensors: Sequence[Any]) -> Any:
    """Returns the arguments with other values in place of the tensors, in the order of `tensors_of`."""
    remaining = iter(tensors)

    def visit(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return next(remaining)
        if isinstance(item, Mapping):
            return {key: visit(inner) for key, inner in item.items()}
        return type(item)(visit(inner) for inner in item) if isinstance(item, (list, tuple)) else item

    return visit(value)
