"""Following a shard of a parameter through the graph.

Enters: a placeholder and a shard of it. Leaves: what became of the shard downstream, from which an override learns
which dimension it means and how a fused dimension must be cut.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx

from fxpar.layout import Piece, Placement, pieces_of, shard
from fxpar.program import operands, output_types, tensor_type
from fxpar.rules.engine import Labelling, Refusal, call_of, seed_signature
from fxpar.rules.table import rule_of
from fxpar.symbols import divide


@dataclass
class Trail:
    """Where a shard went.

    Attributes:
        role: what the first matrix product made of it: `column` (its output is a shard), `row` (partial), or "".
        product: that product.
        refused: operations that did not accept the shard, with their reasons.
        factored: whether a view made a dimension of its own of the cut factor (heads).
    """

    role: str = ""
    product: fx.Node | None = None
    refused: list[tuple[fx.Node, Refusal]] = field(default_factory=list)
    factored: bool = False

    @property
    def torn(self) -> list[tuple[fx.Node, Refusal]]:
        """Refusals because the cut does not fit the shapes."""
        return [(node, refusal) for node, refusal in self.refused if refusal.structural]


def follow(node: fx.Node, placement: Placement, n: int) -> Trail:
    """Follows a shard over n ranks until it is summed or refused. With n = 1 every division comes out even."""
    trail = Trail()
    order = {other: i for i, other in enumerate(node.graph.nodes)}
    seen: dict[fx.Node, tuple[Placement, ...]] = {node: (placement,)}
    pending = [node]
    visited: set[tuple[fx.Node, fx.Node]] = set()
    while pending:
        current = min(pending, key=order.__getitem__)
        pending.remove(current)
        for user in sorted(current.users, key=order.__getitem__):
            if user.op == "output" or (current, user) in visited:
                continue
            visited.add((current, user))
            outputs = _step(trail, current, user, seen[current], n)
            if outputs and any(p.is_shard for p in outputs) and user not in seen:
                seen[user] = outputs
                pending.append(user)
    return trail


def _step(trail: Trail, current: fx.Node, user: fx.Node, found: tuple[Placement, ...], n: int) -> tuple[Placement, ...]:
    if user.target is operator.getitem:
        return (found[int(user.args[1])],)  # type: ignore[arg-type]
    if not found[0].is_shard:
        return ()
    rule = rule_of(user.target)
    if rule is None:
        trail.refused.append((user, Refusal("no rule says how the operation treats shards")))
        return ()
    call = call_of(user, n)
    signature = seed_signature(rule, call, operands(user).index(current), found[0])
    if isinstance(signature, Refusal):
        trail.refused.append((user, signature))
        return ()
    labelling = rule.labels(call) if rule.labels else None
    if isinstance(labelling, Labelling) and labelling.summed and not trail.role and _is_product(user):
        trail.role = "row" if signature.outputs[0].kind == "P" else "column"
        trail.product = user
    after = signature.outputs[0]
    if after.is_shard and len(output_types(user)[0].shape) > len(output_types(current)[0].shape):
        cut = output_types(user)[0].shape[after.dim]
        trail.factored |= cut != tensor_type(current).shape[found[0].dim] if len(output_types(current)) == 1 else False
    return signature.outputs


def _is_product(node: fx.Node) -> bool:
    return len(operands(node)) > 1


def candidates(node: fx.Node, dim: int) -> Iterator[Placement]:
    """Ways to cut a dimension, simplest first: plain, k equal parts, then the segments of a split downstream."""
    size = tensor_type(node).shape[dim]
    yield shard(dim, size)
    for k in range(2, 17):
        share = divide(size, k)
        if share is not None:
            yield Placement("S", dim, (Piece(k, share),))
    for sizes in _segments(node, dim):
        if sum(sizes) == size:
            yield Placement("S", dim, pieces_of([Piece(1, part) for part in sizes]))


def _segments(node: fx.Node, dim: int) -> Iterator[list[int]]:
    """Part sizes of the splits and slices that the dimension reaches."""
    size = tensor_type(node).shape[dim]
    cuts: set[int] = set()
    reached, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "output" or user in reached or len(reached) > 64:
                continue
            kinds = output_types(user)
            if len(kinds) > 1:
                for d in range(len(kinds[0].shape)):
                    parts = [kind.shape[d] for kind in kinds]
                    if all(isinstance(p, int) for p in parts) and sum(parts) == size:
                        yield [int(p) for p in parts]
            elif str(user.target) == "aten.slice.Tensor" and size not in kinds[0].shape:
                cuts |= {c for c in user.args[2:4] if isinstance(c, int) and 0 < c < int(size)}
            reached.add(user)
            pending.append(user)
    if cuts:
        edges = [0, *sorted(cuts), int(size)]
        yield [b - a for a, b in pairwise(edges)]
