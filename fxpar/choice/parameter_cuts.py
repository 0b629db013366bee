"""Ways to cut a dimension of a parameter.

Enters: a parameter and one of its dimensions. Leaves: cuts to try, simplest first: plain, in equal parts, and in the
segments at which the graph takes the dimension apart (a fused [qkv | gate | up]) or puts together what meets it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import fx

from fxpar.choice.shard_propagation import Weights, follow
from fxpar.layout.layout import Piece, Placement, padded_shard, shard
from fxpar.layout.shard_segments import pieces_of
from fxpar.layout.symbolic_sizes import divide
from fxpar.program.program import operands, output_types, tensor_type
from fxpar.rules.table import rule_of
from fxpar.signatures.op_call import bind_arguments, call_of
from fxpar.signatures.pointwise import pointwise_labels
from fxpar.signatures.rule import Labelling

_aten = torch.ops.aten

# Equal parts that a dimension is tried in: q, k and v, also of several layers, gates of recurrent cells.
MOST_PARTS = 16
# Splits of splits of splits: deeper ones are not looked for.
_DEEPEST = 4


def candidates(node: fx.Node, dim: int, n: int, weights: Weights) -> Iterator[Placement]:
    """Ways to cut a dimension over n ranks, simplest first.

    A vocabulary is padded. Other dimensions are cut plainly, into k equal parts, then at the splits and slices
    downstream; what n does not divide is padded where it can stay so to the program's end.
    """
    size = tensor_type(node).shape[dim]
    if isinstance(size, int) and size > 1:
        trail = follow(node, shard(dim, size), 1, weights)
        padded = padded_shard(dim, size, n)
        if trail.vocabulary or (size % n and not trail.refused and _stays(node, padded, n, weights)):
            yield padded
    yield shard(dim, size)
    for k in range(2, MOST_PARTS + 1):
        share = divide(size, k)
        if share is not None:
            yield Placement("S", dim, (Piece(k, share),))
    edges = cut_points(node, dim, weights)
    if edges and isinstance(size, int):
        yield segments(dim, [0, *edges, size])


def _stays(node: fx.Node, padded: Placement, n: int, weights: Weights) -> bool:
    """Whether a padded cut is neither summed nor refused on the way."""
    trail = follow(node, padded, n, weights)
    return trail.role != "row" and not trail.refused


def segments(dim: int, edges: list[int]) -> Placement:
    """The cut of each of the segments between the edges, both ends included."""
    return Placement("S", dim, pieces_of([Piece(1, b - a) for a, b in pairwise(edges)]))


def alone(dim: int, lengths: list[int], index: int, piece: Piece) -> Placement:
    """One segment cut, the others whole."""
    return Placement("S", dim, pieces_of([piece if i == index else Piece(1, k, False) for i, k in enumerate(lengths)]))


def cut_points(node: fx.Node, dim: int, weights: Weights) -> list[int]:
    """Positions at which splits and slices downstream cut the dimension, in order, those of parts of parts included."""
    size = tensor_type(node).shape[dim]
    if not isinstance(size, int):
        return []
    edges = sorted(set(_edges(node, shard(dim, size), size, weights)))
    for _ in range(_DEEPEST if edges else 0):
        bounds = [0, *edges, size]
        lengths = [b - a for a, b in pairwise(bounds)]
        points = set(edges)
        for i, (start, length) in enumerate(zip(bounds, lengths, strict=False)):
            part = alone(dim, lengths, i, Piece(1, length))
            points |= {start + position for position in _edges(node, part, length, weights)}
        if points == set(edges):
            break
        edges = sorted(points)
    return edges


def _edges(node: fx.Node, placement: Placement, size: int, weights: Weights) -> Iterator[int]:
    """Positions inside a part of `size` elements at which values that hold nothing else are cut."""
    for value, placements in follow(node, placement, 1, weights).seen.items():
        piece = placements[0].piece
        if len(placements) > 1 or piece is None or piece.outer != 1:
            continue
        unit = divide(size, piece.size)
        for user in value.users:
            if isinstance(unit, int) and user.op == "call_function":
                yield from (
                    position * unit for position in _cuts(user, placements[0].dim) if 0 < position * unit < size
                )


def met_cut(node: fx.Node, dim: int, weights: Weights) -> Placement | None:
    """The segments of what a parameter's dimension is summed with, where a concatenation made that of parts."""
    size = tensor_type(node).shape[dim]
    trail = follow(node, shard(dim, size), 1, weights)
    if trail.role != "row" or trail.product is None or not isinstance(size, int):
        return None
    for index, operand in enumerate(operands(trail.product)):
        if operand in weights:
            continue
        summed = _summed_dim(trail.product, index)
        if summed is None:
            continue
        edges = sorted(set(_joints(operand, summed, 0)))
        if edges and output_types(operand)[0].shape[summed] == size:
            return segments(dim, [0, *edges, size])
    return None


def _summed_dim(node: fx.Node, index: int) -> int | None:
    rule, call = rule_of(node.target), call_of(node, 1)
    labelling = rule.labels(call) if rule is not None and rule.labels is not None else None
    if not isinstance(labelling, Labelling):
        return None
    return next((d for d, label in enumerate(labelling.operands[index]) if label in labelling.summed), None)


def _joints(value: fx.Node, dim: int, offset: int) -> Iterator[int]:
    """Where a concatenation joins parts of a dimension, seen through what is element-wise."""
    shape = output_types(value)[0].shape
    if value.target is _aten.cat.default:
        if int(bind_arguments(value).get("dim", 0)) % len(shape) != dim:
            return
        for part in operands(value):
            length = output_types(part)[0].shape[dim]
            if not isinstance(length, int):
                return
            yield from _joints(part, dim, offset)
            offset += length
            yield offset
        return
    same = [o for o in operands(value) if value.op == "call_function" and output_types(o)[0].shape == shape]
    rule = rule_of(value.target) if len(same) == 1 else None
    if rule is not None and rule.labels is pointwise_labels:
        yield from _joints(same[0], dim, offset)


def _cuts(user: fx.Node, dim: int) -> Iterator[int]:
    """Positions at which one operation cuts a dimension."""
    kinds = output_types(user)
    if user.target is _aten.slice.Tensor or str(user.target).startswith(("aten.split", "aten.chunk")):
        source = output_types(operands(user)[0])[0].shape
        arguments = bind_arguments(user)
        if int(arguments.get("dim", 0)) % len(source) != dim or arguments.get("step", 1) != 1:
            return
        start = arguments.get("start") or 0
        position = start + source[dim] if isinstance(start, int) and start < 0 else start
        for kind in kinds:
            end = position + kind.shape[dim]
            yield from (edge for edge in (position, end) if isinstance(edge, int))
            position = end
