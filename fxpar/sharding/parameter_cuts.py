"""Ways to cut a dimension of a parameter.

Enters: a parameter and one of its dimensions. Leaves: cuts to try, simplest first: plain, in equal parts, and in the
segments at which the graph takes the dimension apart (a fused [qkv | gate | up]) or puts together what meets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import fx

from fxpar.ir.program import operands, output_types, tensor_type
from fxpar.layout.layout import Piece, Placement, fits, padded_shard, shard
from fxpar.layout.nesting import pieces_of
from fxpar.layout.symbolic_sizes import Size, divide, product, simplify
from fxpar.rules.table import rule_of
from fxpar.sharding.shard_propagation import INSIDE, Trail, Weights, follow, labels_of
from fxpar.signatures.engine import Refusal
from fxpar.signatures.op_call import bind_arguments
from fxpar.signatures.pointwise import pointwise_labels

_aten = torch.ops.aten

# Equal parts that a dimension is tried in: q, k and v, also of several layers, gates of recurrent cells.
MOST_PARTS = 16
# Splits of splits of splits: deeper ones are not looked for.
_DEEPEST = 4


def candidates(node: fx.Node, dim: int, n: int, weights: Weights) -> Iterator[Placement]:
    """Yields ways to cut a dimension over n ranks, simplest first.

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
    """Returns whether a padded cut is neither summed nor refused on the way."""
    trail = follow(node, padded, n, weights)
    return trail.role != "row" and not trail.refused


def segments(dim: int, edges: list[int]) -> Placement:
    """Returns the cut of each of the segments between the edges, both ends included."""
    return Placement("S", dim, pieces_of([Piece(1, b - a) for a, b in pairwise(edges)]))


def alone(dim: int, lengths: list[int], index: int, piece: Piece) -> Placement:
    """Returns one segment cut, the others whole."""
    return Placement("S", dim, pieces_of([piece if i == index else Piece(1, k, False) for i, k in enumerate(lengths)]))


def cut_points(node: fx.Node, dim: int, weights: Weights) -> list[int]:
    """Returns the positions at which splits and slices downstream cut the dimension, parts of parts too, in order."""
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
    """Yields positions inside a part of `size` elements at which values that hold nothing else are cut."""
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
    """Returns the segments of what a parameter's dimension is summed with, where a concatenation made that of parts."""
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
    labelling = labels_of(node)
    if labelling is None:
        return None
    return next((d for d, label in enumerate(labelling.operands[index]) if label in labelling.summed), None)


def _joints(value: fx.Node, dim: int, offset: int) -> Iterator[int]:
    """Yields where a concatenation joins parts of a dimension, seen through what is element-wise."""
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
    """Yields positions at which one operation cuts a dimension."""
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


# Cuts of attention's weights by heads that are fewer than the ranks (SPEC section 2.2).


def all_cuts(node: fx.Node, dim: int, weights: Weights, n: int) -> Iterator[Placement]:
    """Yields `candidates` and, where they tear heads, cuts of shared blocks; segments each as finely as can be."""
    is_segmented = False
    for cut in candidates(node, dim, n, weights):
        if len(cut.pieces) > 1 and not is_segmented:
            is_segmented = True
            yield from _segmented(node, dim, weights, n)
        yield cut
    if not is_segmented:
        yield from _segmented(node, dim, weights, n)
    size = tensor_type(node).shape[dim]
    for copies in _divisors(n):
        cut = Placement("S", dim, (Piece(1, size, copies=copies),))
        if _is_fit(node, cut, weights, n):
            yield cut


def _divisors(n: int) -> list[int]:
    return [c for c in range(2, n) if n % c == 0]


def _is_fit(node: fx.Node, cut: Placement, weights: Weights, n: int) -> bool:
    """Returns whether nothing tears the cut, and what ranks share of it are single heads."""
    if not fits(cut, tensor_type(node).shape, n):
        return False
    trail = follow(node, cut, n, weights)
    if trail.torn or (trail.inner and trail.refused):
        return False
    if all(piece.copies == 1 for piece in cut.pieces):
        return True
    pieces = [piece for placements in trail.seen.values() for p in placements for piece in p.pieces]
    return any(piece.copies > 1 and piece.size == n // piece.copies for piece in pieces)


def _segmented(node: fx.Node, dim: int, weights: Weights, n: int) -> Iterator[Placement]:
    """Yields segments at which splits downstream cut the dimension, some in equal parts, shared or whole."""
    size = tensor_type(node).shape[dim]
    edges = cut_points(node, dim, weights)
    if n == 1 or not edges or not isinstance(size, int):
        return
    lengths = [b - a for a, b in pairwise([0, *edges, size])]
    pieces: list[Piece] = []
    for i, length in enumerate(lengths):
        options = [Piece(1, length), *(Piece(1, length, copies=c) for c in _divisors(n))]
        options += [Piece(k, length // k) for k in range(2, MOST_PARTS + 1) if length % k == 0]
        fitting = (piece for piece in options if _is_fit(node, alone(dim, lengths, i, piece), weights, n))
        piece = next(fitting, None)
        if piece is None:
            if heads_of(node, alone(dim, lengths, i, Piece(1, length)), weights) not in (0, 1):
                return
            piece = Piece(1, length, False)
        pieces.append(piece)
    cut = Placement("S", dim, pieces_of(pieces))
    is_plain = all(piece.is_plain and piece.outer == 1 for piece in pieces)
    if not is_plain and fits(cut, tensor_type(node).shape, n):
        yield cut


def heads_of(node: fx.Node, cut: Placement, weights: Weights) -> Size:
    """Returns how many heads the first view of the products makes of what is cut; 0 where none makes any."""
    trail = follow(node, cut, 1, weights)
    for value, placements in trail.seen.items():
        for user in value.users:
            first = splits(user, value, placements[0], weights)
            if first is None or user not in trail.seen:
                continue
            after = trail.seen[user][0]
            return simplify(sum(p.length for p in after.pieces if p.sharded)) if after.dim == first else 1
    return 0


def splits(user: fx.Node, value: fx.Node, placement: Placement, weights: Weights) -> int | None:
    """Returns where a view of an activation makes several dimensions of the one that is cut: the first of them."""
    if user.op != "call_function" or user in weights or operands(user) != [value] or not placement.is_shard:
        return None
    kinds = output_types(user)
    before, after = output_types(value)[0].shape, kinds[0].shape if len(kinds) == 1 else ()
    if len(after) <= len(before) or product(before) != product(after):
        return None
    lead = product(before[: placement.dim])
    first = next((d for d in range(len(after)) if product(after[:d]) == lead), None)
    return None if first is None or after[first] == before[placement.dim] else first


def met_heads(trails: Sequence[Trail], weights: Weights) -> bool:
    """Returns whether views took one of the cuts apart, or it met a product of activations inside of heads."""
    for trail in trails:
        for value, placements in trail.seen.items():
            if any(splits(user, value, placements[0], weights) is not None for user in value.users):
                return True
        if any(refusal.reason == INSIDE for _, refusal in trail.refused):
            return True
    return False


def farthest(trails: Sequence[Trail]) -> tuple[fx.Node, Refusal]:
    """Returns what stopped the cut between heads that came farthest: it stops all the others too.

    Args:
        trails: of which each is torn or refused somewhere.
    """
    torn = [trail.torn[-1] for trail in trails if trail.torn and not trail.inner]
    torn = torn or [trail.torn[0] for trail in trails if trail.torn]
    torn = torn or [trail.refused[0] for trail in trails if trail.refused]
    order = {node: i for i, node in enumerate(torn[0][0].graph.nodes)}
    return max(torn, key=lambda item: order[item[0]])


def natural_cut(node: fx.Node, dim: int, weights: Weights) -> tuple[Placement, Trail]:
    """Returns the simplest cut that the shapes alone do not tear, were every division even; and where it goes."""
    for cut in candidates(node, dim, 1, weights):
        trail = follow(node, cut, 1, weights)
        if not trail.torn:
            return cut, trail
    return shard(dim, tensor_type(node).shape[dim]), Trail()


def shares_attention(trail: Trail, other: Trail) -> bool:
    """Returns whether the products of a matrix meet where the cut of another one goes."""
    met = {operand for node in trail.products for operand in operands(node)}
    return not other.seen.keys().isdisjoint({*met, *trail.seen})
