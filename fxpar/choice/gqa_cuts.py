"""Cuts of attention's weights by heads that are fewer than the ranks (SPEC section 2.2).

Enters: a parameter and one of its dimensions, on an axis of n ranks. Leaves: all ways to cut it, those included whose
blocks neighbours share; and which matrices stay whole, because the heads of their attention cannot be divided.

k heads over n ranks: where n divides k, plainly; where k divides n, one head on each n/k neighbours; one head of a
segment beside others (`q | !k | !v`) on every rank. Where neither divides, nothing of that attention is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import fx

from fxpar.choice.parameter_cuts import MOST_PARTS, alone, candidates, cut_points
from fxpar.choice.shard_propagation import INSIDE, Trail, Weights, follow
from fxpar.layout.layout import Piece, Placement, fits, shard
from fxpar.layout.shard_segments import pieces_of
from fxpar.layout.symbolic_sizes import Size, product, simplify
from fxpar.program.program import operands, output_types, tensor_type
from fxpar.signatures.rule import Refusal


def all_cuts(node: fx.Node, dim: int, weights: Weights, n: int) -> Iterator[Placement]:
    """`candidates` and, where they tear heads, cuts whose blocks are shared; segments each as finely as it can be."""
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
    """Whether nothing tears the cut, and what ranks share of it are single heads."""
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
    """The segments at which splits downstream cut the dimension, some of them in equal parts, shared or whole."""
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
    """How many heads the first view of the products makes of what is cut; 0 where none makes any."""
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
    """Where a view of an activation makes several dimensions of the one that is cut: the first of them."""
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
    """Whether views took one of the cuts apart, or it met a product of activations inside of heads."""
    for trail in trails:
        for value, placements in trail.seen.items():
            if any(splits(user, value, placements[0], weights) is not None for user in value.users):
                return True
        if any(refusal.reason == INSIDE for _, refusal in trail.refused):
            return True
    return False


def farthest(trails: Sequence[Trail]) -> tuple[fx.Node, Refusal]:
    """What stopped the cut between heads that came farthest: it stops all the others too.

    Args:
        trails: of which each is torn or refused somewhere.
    """
    torn = [trail.torn[-1] for trail in trails if trail.torn and not trail.inner]
    torn = torn or [trail.torn[0] for trail in trails if trail.torn]
    torn = torn or [trail.refused[0] for trail in trails if trail.refused]
    order = {node: i for i, node in enumerate(torn[0][0].graph.nodes)}
    return max(torn, key=lambda item: order[item[0]])


def natural_cut(node: fx.Node, dim: int, weights: Weights) -> tuple[Placement, Trail]:
    """The simplest cut that the shapes alone do not tear, were every division even; and where it goes."""
    for cut in candidates(node, dim, 1, weights):
        trail = follow(node, cut, 1, weights)
        if not trail.torn:
            return cut, trail
    return shard(dim, tensor_type(node).shape[dim]), Trail()


def shares_attention(trail: Trail, other: Trail) -> bool:
    """Whether the products of a matrix meet where the cut of another one goes."""
    met = {operand for node in trail.products for operand in operands(node)}
    return not other.seen.keys().isdisjoint({*met, *trail.seen})
