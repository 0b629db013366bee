"""Bounds of slices in localised programs, put back into global positions.

Enters: a call whose literals speak of a rank's part, and the layout of what it slices. Leaves: the same call over the
whole, which the rules can judge. It is the inverse of what the pass `localize` does; other literals that it rewrites
(sizes of views and splits) the rules read off the global types instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fxpar.layout.layout import Piece, Placement, local_size
from fxpar.layout.slices import local_bounds
from fxpar.rules.engine import Call, Refusal


def whole_call(call: Call, placements: Sequence[Placement]) -> Call | Refusal:
    """The call with global bounds where it slices the dimension that one axis cuts; else the call itself."""
    if call.target is not torch.ops.aten.slice.Tensor or not placements or not placements[0].is_shard:
        return call
    shape, placement = call.operands[0].shape, placements[0]
    dim, size = placement.dim, shape[placement.dim]
    if int(call.get("dim", 0)) % len(shape) != dim:
        return call
    if call.outputs[0].shape[dim] == size:  # a rank's whole part
        return replace(call, arguments={**call.arguments, "start": 0, "end": None, "step": 1})
    start, end, step = call.get("start"), call.get("end"), call.get("step", 1)
    part = local_size(placement, size, call.n)
    bounds = (0 if start is None else start, part if end is None else end)
    if not isinstance(part, int) or not all(isinstance(v, int) for v in (*bounds, step)):
        return Refusal(f"the slice {start}:{end} of {placement} is not known in numbers")
    if not 0 < step <= part:
        return Refusal(f"the step {step} is none of a rank's part of {part} elements")
    low, high = (max(0, min(part, v + part if v < 0 else v)) for v in bounds)
    found = global_bounds(placement.pieces, low, high, step, call.n)
    if found is None:
        return Refusal(f"the slice {low}:{high}:{step} of a rank's part tears {placement} over {call.n} ranks")
    return replace(call, arguments={**call.arguments, "start": found[0], "end": found[1]})


def global_bounds(pieces: Sequence[Piece], start: int, stop: int, step: int, n: int) -> tuple[int, int] | None:
    """Global bounds whose `local_bounds` are the given ones; None where there are none."""
    last = _global_position(pieces, stop, n)
    for phase in range(step):
        first = _global_position(pieces, start - phase, n)
        if first is None or last is None or first + phase >= last:
            continue
        try:
            if local_bounds(pieces, first + phase, last, step, n) == (start, stop):
                return first + phase, last
        except ValueError:
            continue
    return None


def _global_position(pieces: Sequence[Piece], local: int, n: int) -> int | None:
    """The position between two runs whose `local_position` is the given one."""
    offset = 0
    for piece in pieces:
        length, size = int(piece.length), int(piece.size)
        part = length * piece.copies // n if piece.sharded else length
        if 0 <= local <= part:
            if not piece.sharded:
                return offset + local
            runs, inside = divmod(local, size * piece.copies // n)
            return None if inside else offset + runs * size
        local, offset = local - part, offset + length
    return None
