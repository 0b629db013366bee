"""Rules of operations that move elements: views, permutations, slices, splits, concatenation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fxpar.ir.program import TensorType
from fxpar.layout.layout import P, Piece, Placement, R
from fxpar.layout.nesting import local_size, pieces_of, through_view
from fxpar.layout.shards import slice_pieces, strided_pieces
from fxpar.layout.symbolic_sizes import Size, divide, sign, simplify
from fxpar.signatures.engine import (
    Labelling,
    Labels,
    Refusal,
    Rule,
    Signature,
    by_overload,
    numbered,
    seed_signature,
    transfer,
)
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import broadcast, keeps_sums

_SELF = (("self",),)
# torch writes an open end as the largest 64-bit number, 2**63 - 1.
_END = 2**62


def wrap(dim: int, rank: int) -> int:
    """Counts the dimension from the front."""
    return dim + rank if dim < 0 else dim


def _view(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    after = through_view(placement, call.operands[0].shape, call.outputs[0].shape, call.n)
    if after is None:
        shapes = f"{call.operands[0]} to {call.outputs[0]}"
        return Refusal(f"the view from {shapes} tears {placement} over {call.n} ranks", structural=True)
    return Signature((placement,), (after,))


def _squeeze(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    """Cuts as a view does, but a rank removes each named dimension of which one element is left to it."""
    rank = len(call.operands[0].shape)
    dims = call.get("dim", list(range(rank)))
    named = [wrap(d, rank) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
    if placement.dim in named:
        part = local_size(placement, call.n)
        if not isinstance(part, int) or part == 1:
            return Refusal(f"a rank's part of {placement} may be one element, which it would squeeze", structural=True)
    return _view(call, index, placement)


def _permute(call: OpCall) -> Labelling | Refusal:
    rank = len(call.operands[0].shape)
    labels = numbered(rank)
    name = call.target._schema.name
    if name == "aten::t":
        order = [1, 0] if rank == 2 else list(range(rank))
    elif name == "aten::transpose":
        order = list(range(rank))
        a, b = wrap(call.get("dim0"), rank), wrap(call.get("dim1"), rank)
        order[a], order[b] = order[b], order[a]
    else:
        order = [wrap(d, rank) for d in call.get("dims")]
    return Labelling((labels,), (tuple(labels[i] for i in order),))


def _without_dim(call: OpCall) -> Labelling | Refusal:
    """Removes `dim` from the result (select)."""
    labels = numbered(len(call.operands[0].shape), call.get("dim", 0))
    return Labelling((labels,), (tuple(label for label in labels if label is not None),) * len(call.outputs))


def _select(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    """Refuses a cut of what is taken one by one: a rank holds some of it, and the cut is torn."""
    if placement.dim == wrap(call.get("dim", 0), len(call.operands[0].shape)):
        return Refusal(f"one element of dimension {placement.dim} is taken, and {placement} cuts it", structural=True)
    return seed_signature(Rule(_without_dim, _SELF, padding=("self",)), call, index, placement)


def along(call: OpCall) -> Labelling | Refusal:
    """Aligns all operands with the results and broadcasts them; `dim` or `dims` are whole, of `[]` all.

    A dimension that runs may have another size in each of them.
    """
    out = call.outputs[0].shape
    dims = call.get("dims", call.get("dim"))
    if dims == []:
        dims = range(len(out))
    labels = numbered(len(out), *([dims] if isinstance(dims, int) else dims))
    return Labelling(tuple(broadcast(kind.shape, out, labels) for kind in call.operands), (labels,) * len(call.outputs))


def _expand(call: OpCall) -> Labelling | Refusal:
    out = call.outputs[0].shape
    return Labelling((broadcast(call.operands[0].shape, out),), (numbered(len(out)),))


def _repeat(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    """Repeats the pieces of a dimension k times, as the dimension is."""
    out, shape = call.outputs[0].shape, call.operands[0].shape
    dim = len(out) - len(shape) + placement.dim
    times, piece = divide(out[dim], shape[placement.dim]), placement.piece
    if times == 1:
        return Signature((placement,), (placement.at(dim),))
    if placement.is_padded:
        return Refusal(f"the padding of {placement} would stand among its repetitions", structural=True)
    if times is not None and piece is not None:
        repeated = replace(piece, outer=simplify(times * piece.outer))
        return Signature((placement,), (Placement("S", dim, (repeated,)),))
    if isinstance(times, int) and times > 0:
        return Signature((placement,), (Placement("S", dim, pieces_of(placement.pieces * times)),))
    return Refusal(f"{placement} is repeated an unknown number of times", structural=True)


def slice_bounds(call: OpCall, size: Size) -> tuple[Size, Size]:
    """Returns start and end of a slice of a dimension of `size` elements, counted from its front."""
    start, end = call.get("start") or 0, call.get("end")

    def clamp(value: Size) -> Size:
        if isinstance(value, int) and isinstance(size, int):
            return max(0, min(size, value + size if value < 0 else value))
        if isinstance(value, int) and value >= _END:
            return size
        if sign(value) == -1:
            value = simplify(size + value)
        return size if sign(simplify(value - size)) == 1 else value

    return clamp(start), size if end is None else clamp(end)


def _slice(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    shape = call.operands[0].shape
    dim = wrap(call.get("dim", 0), len(shape))
    if placement.dim != dim:
        return Signature((placement,), (placement,))
    if placement.is_padded:
        return Refusal(f"the slice of {placement} would count its padding", structural=True)
    start, end = slice_bounds(call, shape[dim])
    step = call.get("step", 1)
    if (start, end) == (0, shape[dim]) and step == 1:
        return Signature((placement,), (placement,))
    if step == 1:
        return _parts(call, placement, [(start, end)])
    pieces = strided_pieces(placement.pieces, start, end, step, call.n)
    if pieces is None:
        reason = f"the slice {start}:{end}:{step} tears {placement} over {call.n} ranks"
        return Refusal(reason, structural=True)
    return Signature((placement,), (_part(dim, pieces),))


def _split(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    rank = len(call.operands[0].shape)
    dim = wrap(call.get("dim", 0), rank)
    if placement.dim != dim:
        return Signature((placement,), (placement,) * len(call.outputs))
    if placement.is_padded:
        return Refusal(f"the parts of {placement} would count its padding", structural=True)
    cuts: list[tuple[Size, Size]] = []
    offset: Size = 0
    for kind in call.outputs:
        end = simplify(offset + kind.shape[dim])
        cuts.append((offset, end))
        offset = end
    return _parts(call, placement, cuts)


def _part(dim: int, pieces: tuple[Piece, ...]) -> Placement:
    return Placement("S", dim, pieces) if any(p.sharded for p in pieces) else R


def _parts(call: OpCall, placement: Placement, cuts: list[tuple[Size, Size]]) -> Signature | Refusal:
    outs = []
    for start, end in cuts:
        pieces = slice_pieces(placement.pieces, start, end)
        if pieces is None:
            return Refusal(f"the cut at {start}:{end} tears {placement} over {call.n} ranks", structural=True)
        outs.append(_part(placement.dim, pieces))
    return Signature((placement,), tuple(outs))


def _cat_dim(call: OpCall) -> int:
    return wrap(call.get("dim", 0), len(call.outputs[0].shape))


def _cat(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    """Passes a cut of another dimension on; along the same one every part must be cut, and the pieces join."""
    dim = _cat_dim(call)
    source = call.operands[index].shape[placement.dim]
    ins: list[Placement] = []
    for kind in call.operands:
        moved = transfer(placement, source, placement.dim, kind.shape[placement.dim], call.n)
        if isinstance(moved, Refusal):
            return moved
        if not moved.is_shard:
            return Refusal(f"{kind} cannot follow the cut {placement} over {call.n} ranks", structural=True)
        ins.append(moved)
    if placement.dim != dim:
        return Signature(tuple(ins), (placement,))
    return Signature(tuple(ins), (Placement("S", dim, pieces_of([p for i in ins for p in i.pieces])),))


def _cat_segments(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal | None:
    """Joins segments that are cut in different ways, or not at all, to one dimension with a layout for each.

    A partial value is a segment that all ranks hold summands of.
    """
    dim = _cat_dim(call)
    if not any(p.is_shard and p.dim == dim for p in placements):
        return None
    padded = next((p for p in placements if p.is_padded), None)
    if padded is not None:
        return Refusal(f"the padding of {padded} would stand among the parts", structural=True)
    pieces: list[Piece] = []
    for placement, kind in zip(placements, call.operands, strict=True):
        if placement.is_shard and placement.dim == dim:
            pieces.extend(placement.pieces)
        elif placement in (R, P):
            pieces.append(Piece(1, kind.shape[dim], False))
        else:
            return Refusal(f"a part with {placement} is concatenated to parts that are cut along dimension {dim}")
    if P in placements and R in placements:
        return Refusal("a partial (P) part meets one that each rank would add (R)")
    return (Placement("S", dim, pieces_of(pieces), partial=P in placements),)


def _stack(call: OpCall) -> Labelling | Refusal:
    labels = numbered(len(call.operands[0].shape))
    dim = wrap(call.get("dim", 0), len(labels) + 1)
    return Labelling((labels,) * len(call.operands), ((*labels[:dim], None, *labels[dim:]),))


def _pad(call: OpCall) -> Labelling | Refusal:
    """Keeps a dimension whole that is padded, which needs its ends."""
    pad = call.get("pad")
    ends = (-1 - i for i in range(len(pad) // 2) if tuple(pad[2 * i : 2 * i + 2]) != (0, 0))
    labels = numbered(len(call.operands[0].shape), *ends)
    return Labelling((labels,), (labels,))


def _pad_with_zeros(call: OpCall, placements: Sequence[Placement]) -> Refusal | None:
    """Refuses to pad summands with a number other than zero: all other padding is linear."""
    if P in placements and call.get("mode", "constant") == "constant" and call.get("value") not in (None, 0):
        return Refusal("padding of a partial (P) value would be added by every rank: reduce it first")
    return None


def _scatter(call: OpCall) -> Labelling | Refusal:
    """Keeps `dim` whole, of which a part, or one element, is put in place of what is there."""
    whole = numbered(len(call.operands[0].shape))
    dim = wrap(call.get("dim", 0), len(whole))
    is_slice = call.target is torch.ops.aten.slice_scatter.default
    if is_slice and call.operands[0].shape == call.operands[1].shape and call.get("step", 1) == 1:
        return Labelling((whole,) * 2, (whole,))  # all of it is replaced
    labels = numbered(len(whole), dim)
    part = labels[:dim] + labels[dim + 1 :] if call.target is torch.ops.aten.select_scatter.default else labels
    return Labelling((labels, part), (labels,))


def mixed(count: int) -> Callable[[OpCall], Labelling | Refusal]:
    """Returns labels where the last dimensions are mixed, as of pooled pixels, and those in front are apart."""

    def labels(call: OpCall) -> Labelling | Refusal:
        def apart(kinds: Sequence[TensorType]) -> tuple[Labels, ...]:
            return tuple((*numbered(len(kind.shape) - count), *(None,) * count) for kind in kinds)

        return Labelling(apart(call.operands), apart(call.outputs))

    return labels


def _made(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    """Gives R for a tensor in the shape of none of its operands: they serve for element type and device alone."""
    return Signature((placement,), (R,))


def _made_anyway(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return (R,)


def view_rules() -> dict[str, Rule]:
    """Returns rules by `aten` overload name."""
    padded = ("self",)
    return by_overload(
        {
            "view reshape _unsafe_view flatten.using_ints unflatten.int unsqueeze": Rule(
                partial=_SELF, seed=_view, padding=padded
            ),
            "squeeze squeeze.dim squeeze.dims": Rule(partial=_SELF, seed=_squeeze, padding=padded),
            "permute transpose.int t": Rule(_permute, _SELF, padding=padded),
            "expand": Rule(_expand, _SELF, padding=padded),
            "repeat tile": Rule(partial=_SELF, seed=_repeat),
            "select.int unbind.int": Rule(_without_dim, _SELF, seed=_select, padding=padded),
            "slice.Tensor": Rule(partial=_SELF, seed=_slice, padding=padded),
            "split.Tensor split_with_sizes split.sizes chunk": Rule(partial=_SELF, seed=_split, padding=padded),
            "cat": Rule(partial=(("tensors",),), seed=_cat, check=_cat_segments),
            "stack": Rule(_stack, (("tensors",),), padding=("tensors",)),
            "flip roll": Rule(along, _SELF),
            "cumsum": Rule(along, _SELF, check=keeps_sums),
            "diff": Rule(along, (("self", "prepend?", "append?"),)),
            "softmax.int _softmax log_softmax.int _log_softmax sort": Rule(along),
            "pad constant_pad_nd": Rule(_pad, _SELF, check=_pad_with_zeros),
            "slice_scatter select_scatter": Rule(_scatter, (("self", "src"),)),
            "pixel_shuffle pixel_unshuffle": Rule(mixed(3), _SELF),
            "adaptive_avg_pool1d": Rule(mixed(1), _SELF),
            "adaptive_avg_pool2d _adaptive_avg_pool2d tril triu": Rule(mixed(2), _SELF),
            "new_ones new_zeros new_full": Rule(seed=_made, check=_made_anyway),
        }
    )
