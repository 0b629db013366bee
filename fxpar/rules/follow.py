"""Following a shard of a parameter through the graph.

Enters: a placeholder and a shard of it. Leaves: what became of the shard downstream, from which an override learns
which dimension it means and how a fused dimension must be cut.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx

from fxpar.layout import Piece, Placement, pieces_of, shard
from fxpar.program import operands, output_types, tensor_type
from fxpar.rules.engine import Labelling, Refusal, Signature, bind_arguments, call_of, seed_signature
from fxpar.rules.table import rule_of
from fxpar.symbols import divide, product

_aten = torch.ops.aten


@dataclass
class Trail:
    """Where a shard went.

    Attributes:
        role: what the first matrix product made of it: `column` (its output is a shard), `row` (partial), or "".
        product: that product; `products` are all that the parameter is a factor of.
        refused: operations that did not accept the shard, with their reasons.
        factored: whether a view made it a cut between blocks of several elements (heads).
        inner: whether a view left it in the last of the dimensions that it made (inside of heads).
        seen: the placements of the values that the shard reached.
        weights: those of them that are made from parameters alone (its transpose).
    """

    role: str = ""
    product: fx.Node | None = None
    products: list[fx.Node] = field(default_factory=list)
    refused: list[tuple[fx.Node, Refusal]] = field(default_factory=list)
    factored: bool = False
    inner: bool = False
    seen: dict[fx.Node, tuple[Placement, ...]] = field(default_factory=dict)
    weights: set[fx.Node] = field(default_factory=set)

    @property
    def torn(self) -> list[tuple[fx.Node, Refusal]]:
        """Refusals because the cut does not fit the shapes."""
        return [(node, refusal) for node, refusal in self.refused if refusal.structural]


Arrived = Mapping[fx.Node, tuple[Placement, ...]]
# What an operation makes of a shard of its operand of that index, and whether its dimension is summed. Trails of
# parameters of one graph meet in the residual stream and share these.
Steps = dict[tuple[fx.Node, int, Placement], tuple[Signature | Refusal, bool]]


def weights_of(graph: fx.Graph, owned: Iterable[fx.Node]) -> set[fx.Node]:
    """The placeholders `owned` and all values that are made from them alone."""
    found = set(owned)
    for node in graph.nodes:
        if node.op == "call_function" and operands(node) and all(other in found for other in operands(node)):
            found.add(node)
    return found


def follow(
    node: fx.Node,
    placement: Placement,
    n: int,
    weights: Set[fx.Node],
    arrived: Arrived | None = None,
    steps: Steps | None = None,
) -> Trail:
    """Follows a shard over n ranks until it is summed or refused. With n = 1 every division comes out even.

    Args:
        weights: the values that are made from parameters alone.
        arrived: placements that other parameters' shards gave to values. An operation at which they meet this one must
            accept both.
        steps: known from other trails over n ranks in the same graph; filled.
    """
    trail, known = Trail(), {} if steps is None else steps
    trail.seen[node] = (placement,)
    trail.weights.add(node)
    pending = [node]
    visited: set[tuple[fx.Node, fx.Node]] = set()
    while pending:
        current = min(pending)  # in the order of the graph
        pending.remove(current)
        for user in sorted(current.users):
            if user.op == "output" or (current, user) in visited:
                continue
            visited.add((current, user))
            outputs = _step(trail, current, user, weights, arrived or {}, n, known)
            if user in weights:
                trail.weights.add(user)
            if outputs and any(p.is_shard for p in outputs) and user not in trail.seen:
                trail.seen[user] = outputs
                pending.append(user)
    return trail


def _step(
    trail: Trail, current: fx.Node, user: fx.Node, weights: Set[fx.Node], arrived: Arrived, n: int, steps: Steps
) -> tuple[Placement, ...]:
    found = trail.seen[current]
    if user.target is operator.getitem:
        return (found[int(user.args[1])],)  # type: ignore[arg-type]
    if not found[0].is_shard:
        return ()
    rule = rule_of(user.target)
    if rule is None:
        trail.refused.append((user, Refusal("no rule says how the operation treats shards")))
        return ()
    inputs = operands(user)
    key = user, inputs.index(current), found[0]
    if key not in steps:
        call = call_of(user, n)
        labelling = rule.labels(call) if rule.labels else None
        is_sum = isinstance(labelling, Labelling) and bool(labelling.summed)
        steps[key] = seed_signature(rule, call, key[1], found[0]), is_sum
    signature, is_sum = steps[key]
    if isinstance(signature, Refusal):
        trail.refused.append((user, signature))
        return ()
    for other, wanted in zip(inputs, signature.operands, strict=True):
        given = trail.seen.get(other) or arrived.get(other)
        if given and given[0].is_shard and given[0] != wanted:
            trail.refused.append((user, Refusal(f"%{other.name} arrives as {given[0]} where {wanted} fits")))
    if is_sum and current in trail.weights and len(inputs) > 1:
        _note_product(trail, user, "row" if signature.outputs[0].kind == "P" else "column", weights)
    _note_view(trail, user, found[0], signature.outputs[0])
    return signature.outputs


def _note_product(trail: Trail, user: fx.Node, role: str, weights: Set[fx.Node]) -> None:
    """The first product with an activation gives the role, else the first one (of two weights, of a table)."""
    if not trail.role or (trail.product in weights and user not in weights):
        trail.role, trail.product = role, user
    trail.products.append(user)


def _note_view(trail: Trail, user: fx.Node, source: Placement, result: Placement) -> None:
    """Remembers what a view that makes several dimensions of one does to the cut.

    The runs are counted in larger units where the cut is between blocks: heads, also in `[s, b*heads, d]`.
    """
    if len(operands(user)) != 1 or not result.is_shard:
        return
    before, after = output_types(operands(user)[0])[0].shape, output_types(user)[0].shape
    if product(before) != product(after):
        return
    block = divide(source.pieces[0].size, result.pieces[0].size)
    trail.factored |= block not in (None, 1)
    parts = divide(before[source.dim], after[result.dim])
    trail.inner |= block == 1 and parts not in (None, 1) and result.dim + 1 == len(after)


def candidates(node: fx.Node, dim: int, weights: Set[fx.Node]) -> Iterator[Placement]:
    """Ways to cut a dimension, simplest first: plain, k equal parts, then at the splits and slices downstream."""
    size = tensor_type(node).shape[dim]
    yield shard(dim, size)
    for k in range(2, 17):
        share = divide(size, k)
        if share is not None:
            yield Placement("S", dim, (Piece(k, share),))
    edges = sorted(set(_edges(node, dim, weights)))
    if edges and isinstance(size, int):
        yield Placement("S", dim, pieces_of([Piece(1, b - a) for a, b in pairwise([0, *edges, size])]))


def _edges(node: fx.Node, dim: int, weights: Set[fx.Node]) -> Iterator[int]:
    """Positions at which splits and slices downstream cut the dimension."""
    size = tensor_type(node).shape[dim]
    for value, placements in follow(node, shard(dim, size), 1, weights).seen.items():
        piece = placements[0].piece
        if len(placements) > 1 or piece is None or piece.outer != 1 or not isinstance(size, int):
            continue
        unit = divide(size, piece.size)
        for user in value.users:
            if isinstance(unit, int) and user.op == "call_function":
                yield from (
                    position * unit for position in _cuts(user, placements[0].dim) if 0 < position * unit < size
                )


def _cuts(user: fx.Node, dim: int) -> Iterator[int]:
    """Positions at which one operation cuts a dimension."""
    kinds = output_types(user)
    if user.target is _aten.slice.Tensor or str(user.target).startswith(("aten.split", "aten.chunk")):
        source = output_types(operands(user)[0])[0].shape
        given = bind_arguments(user)
        if int(given.get("dim", 0)) % len(source) != dim or given.get("step", 1) != 1:
            return
        start = given.get("start") or 0
        position = start + source[dim] if isinstance(start, int) and start < 0 else start
        for kind in kinds:
            end = position + kind.shape[dim]
            yield from (edge for edge in (position, end) if isinstance(edge, int))
            position = end
