"""Calls as an axis sees them: over what the axes outside it leave.

Enters: a call over global shapes with the placements of its operands and outputs on one axis. Leaves: the call that
the axes inside see. And the way back: a call of a localised program, whose literals speak of a rank's part, becomes the
call over the whole. The only literals that count are the bounds of slices; others that the pass `localize` rewrites
(sizes of views and splits) the rules read off the types instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fxpar.ir.program import TensorType
from fxpar.layout.layout import Layout, Piece, Placement
from fxpar.layout.nesting import local_size, peel, seen_by
from fxpar.layout.shards import local_bounds
from fxpar.layout.symbolic_sizes import Size
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.rule import Refusal


def whole_call(call: OpCall, layout: Layout, axes: Mapping[str, int]) -> OpCall | Refusal:
    """The call with global bounds where it slices a dimension that is cut; else the call itself.

    Args:
        call: over global shapes, its bounds those of a rank's part.
        layout: of what it slices.
        axes: sizes of the mesh axes.
    """
    cuts = [(axis, placement) for axis, placement in layout if _is_sliced(call, placement)]
    if not cuts or _is_everything(call, cuts[0][1].dim):
        return replace(call, arguments={**call.arguments, **_EVERYTHING}) if cuts else call
    seen = seen_by(layout, call.operands[0].shape, axes)
    for axis, placement in reversed(cuts):
        bounds = _whole_bounds(call, placement, seen[axis][placement.dim], axes[axis])
        if isinstance(bounds, Refusal):
            return bounds
        call = replace(call, arguments={**call.arguments, "start": bounds[0], "end": bounds[1]})
    return call


_EVERYTHING = {"start": 0, "end": None, "step": 1}


def _is_sliced(call: OpCall, placement: Placement) -> bool:
    if call.target is not torch.ops.aten.slice.Tensor or not placement.is_shard:
        return False
    return int(call.get("dim", 0)) % len(call.operands[0].shape) == placement.dim


def _is_everything(call: OpCall, dim: int) -> bool:
    return call.outputs[0].shape[dim] == call.operands[0].shape[dim]


def _whole_bounds(call: OpCall, placement: Placement, size: Size, n: int) -> tuple[int, int] | Refusal:
    """The bounds of a slice as the axis sees them, for those of what it leaves."""
    part, step = local_size(placement, n), call.get("step", 1)
    bounds = _in_numbers(call, part)
    if bounds is None or not isinstance(size, int) or not isinstance(part, int):
        return Refusal(f"the slice {call.get('start')}:{call.get('end')} of {placement} is not known in numbers")
    if not 0 < step <= part:
        return Refusal(f"the step {step} is none of a rank's part of {part} elements")
    whole = global_bounds(placement.pieces, *bounds, step, n)
    if whole is None:
        low, high = bounds
        return Refusal(f"the slice {low}:{high}:{step} of a rank's part tears {placement} over {n} ranks")
    return whole


def _in_numbers(call: OpCall, size: Size) -> tuple[int, int] | None:
    """The bounds of a slice of a dimension of `size` elements, from its start and end."""
    start, end = call.get("start"), call.get("end")
    low, high = 0 if start is None else start, size if end is None else end
    if not all(isinstance(value, int) for value in (low, high, size, call.get("step", 1))):
        return None
    return tuple(max(0, min(size, value + size if value < 0 else value)) for value in (low, high))  # type: ignore[return-value]


def peeled_call(call: OpCall, operands: Sequence[Placement], outputs: Sequence[Placement]) -> OpCall:
    """The call as the axes inside see it, once its axis has cut operands and outputs as given.

    Raises:
        ValueError: a slice tears what the axis cuts, or a size is not divisible.
    """
    arguments = call.arguments
    if operands and _is_sliced(call, operands[0]):
        dim, step = operands[0].dim, call.get("step", 1)
        bounds = _in_numbers(call, call.operands[0].shape[dim])
        if _is_everything(call, dim):
            arguments = {**arguments, **_EVERYTHING}
        elif bounds is None:
            raise ValueError(
                f"the slice {call.get('start')}:{call.get('end')} of {operands[0]} is not known in numbers"
            )
        else:
            start, end = local_bounds(operands[0].pieces, *bounds, step, call.n)
            arguments = {**arguments, "start": start, "end": end}
    return replace(
        call,
        arguments=arguments,
        operands=_peeled(call.operands, operands, call.n),
        outputs=_peeled(call.outputs, outputs, call.n),
    )


def _peeled(kinds: Sequence[TensorType], placements: Sequence[Placement], n: int) -> tuple[TensorType, ...]:
    pairs = zip(kinds, placements, strict=True)
    return tuple(replace(kind, shape=peel(kind.shape, placement, n)) for kind, placement in pairs)


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
