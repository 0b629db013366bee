"""Following a shard of a parameter through the graph.

Enters: a placeholder and a shard of it. Leaves: what became of the shard downstream, from which an override learns
which dimension it means and how a fused dimension must be cut.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import torch
from torch import fx

from fxpar.ir.operators import pending
from fxpar.ir.program import operands, output_types
from fxpar.layout.layout import Placement
from fxpar.layout.symbolic_sizes import Size, divide, product
from fxpar.ops.collectives import coercion
from fxpar.rules.table import question, rule_of, seeded
from fxpar.signatures.engine import Labelling, Refusal, Signature
from fxpar.signatures.matmul import einsum_labels
from fxpar.signatures.op_call import call_of

_aten = torch.ops.aten

# Products of activations that may be batched by heads.
_BY_HEADS = frozenset(
    {
        _aten.scaled_dot_product_attention.default,
        _aten.einsum.default,
        _aten.matmul.default,
        _aten.bmm.default,
    }
)

INSIDE = "the features of a head are needed together"


@dataclass
class Trail:
    """Where a shard went.

    Attributes:
        role: what the first matrix product made of it: `column` (its output is a shard), `row` (partial), or "".
        product: that product; `products` are all that the parameter is a factor of.
        refused: operations that did not accept the shard, with their reasons.
        factored: whether a view made it a cut between blocks of several elements (heads).
        inner: whether a view left it in the last of the dimensions that it made (inside of heads).
        vocabulary: operations over a vocabulary that took the shard for one.
        seen: the placements of the values that the shard reached.
        weights: those of them that are made from parameters alone (its transpose).
    """

    role: str = ""
    product: fx.Node | None = None
    products: list[fx.Node] = field(default_factory=list)
    refused: list[tuple[fx.Node, Refusal]] = field(default_factory=list)
    factored: bool = False
    inner: bool = False
    vocabulary: list[fx.Node] = field(default_factory=list)
    seen: dict[fx.Node, tuple[Placement, ...]] = field(default_factory=dict)
    weights: set[fx.Node] = field(default_factory=set)

    @property
    def torn(self) -> list[tuple[fx.Node, Refusal]]:
        """Returns refusals because the cut does not fit the shapes."""
        return [(node, refusal) for node, refusal in self.refused if refusal.structural]


Shape = tuple[Size, ...]
Arrived = Mapping[fx.Node, tuple[Placement, ...]]


@dataclass(frozen=True)
class PropagationStep:
    """What an operation makes of a shard of one of its operands.

    Attributes:
        is_sum: whether it is a product, which sums a dimension.
        is_composite: whether it takes the shard for a part of a vocabulary.
    """

    signature: Signature | Refusal
    is_sum: bool
    is_composite: bool


class PropagationNode:
    """What trails learnt of one operation, through which those of many parameters go.

    Attributes:
        inputs: its tensor operands.
        by_heads: whether it is a product that may be batched by heads.
        steps: by number of ranks, index of the operand and shard.
    """

    def __init__(self, node: fx.Node) -> None:
        self.node, self.inputs = node, operands(node)
        self.by_heads = node.target in _BY_HEADS
        self.steps: dict[tuple[int, int, Placement], PropagationStep] = {}

    @cached_property
    def question(self) -> Hashable:
        """Returns what rules are told of it."""
        return question(self.node)

    @cached_property
    def view(self) -> tuple[Shape, Shape] | None:
        """Returns the shapes before and after, where it makes one tensor of one, with as many elements."""
        if len(self.inputs) != 1:
            return None
        before, after = output_types(self.inputs[0])[0].shape, output_types(self.node)[0].shape
        return (before, after) if product(before) == product(after) else None


@dataclass(frozen=True)
class _Rest:
    """What a trail met after a value, when it had reached nothing else whose users come later.

    Whatever trail gets there so, with the same placements, meets the same from there on: an operation of later layers
    reads nothing else that it has seen. Hence trails through the residual stream, which all later layers read, are
    followed once.

    Attributes:
        trail: to its end.
        seen: how many values it had seen there; likewise `refused` and `vocabulary`.
        factored: whether a view after it did that; likewise `inner`.
    """

    trail: Trail
    seen: int
    refused: int
    vocabulary: int
    factored: bool
    inner: bool

    def add_to(self, trail: Trail) -> None:
        """Takes another trail to the end."""
        trail.seen.update(islice(self.trail.seen.items(), self.seen, None))
        trail.refused += self.trail.refused[self.refused :]
        trail.vocabulary += self.trail.vocabulary[self.vocabulary :]
        trail.factored |= self.factored
        trail.inner |= self.inner


class Weights(set[fx.Node]):
    """Values of one graph that are made from parameters alone, and what trails learnt of its operations.

    Trails of the parameters meet in the residual stream. The graph stays as it is while they are followed.

    Attributes:
        operations: what was learnt of each.
        answers: steps by all that rules are told of an operation in place of the operation: equal layers.
        placements: that were met.
        trails: of shards that met no others, by where they start and the number of ranks.
        rests: of those trails, by the value and its placements and the number of ranks.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        super().__init__(nodes)
        self.operations: dict[fx.Node, PropagationNode] = {}
        self.answers: dict[tuple[int, Hashable, int, Placement], PropagationStep] = {}
        self.placements: dict[Placement, Placement] = {}
        self.trails: dict[tuple[fx.Node, Placement, int], Trail] = {}
        self.rests: dict[tuple[fx.Node, tuple[Placement, ...], int], _Rest] = {}

    def operation(self, node: fx.Node) -> PropagationNode:
        """Returns what trails learnt of an operation."""
        operation = self.operations.get(node)
        if operation is None:
            operation = self.operations[node] = PropagationNode(node)
        return operation

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """Returns the tensor operands of an operation."""
        return self.operation(node).inputs

    def placement(self, placement: Placement) -> Placement:
        """Returns the first placement that is equal."""
        return self.placements.setdefault(placement, placement)


def follow(node: fx.Node, placement: Placement, n: int, weights: Weights, arrived: Arrived | None = None) -> Trail:
    """Follows a shard over n ranks until it is summed or refused. With n = 1 every division comes out even.

    What is asked again gives the same trail, which is only to be read.

    Args:
        weights: the values that are made from parameters alone.
        arrived: placements that other parameters' shards gave to values. An operation at which they meet this one must
            accept both.
    """
    if arrived:
        return _followed(node, placement, n, weights, arrived)
    key = node, placement, n
    if key not in weights.trails:
        weights.trails[key] = _followed(node, placement, n, weights, {})
    return weights.trails[key]


def _followed(node: fx.Node, placement: Placement, n: int, weights: Weights, arrived: Arrived) -> Trail:
    trail = Trail()
    trail.seen[node] = (weights.placement(pending(placement)),)
    trail.weights.add(node)
    waiting = [node]
    visited: set[tuple[fx.Node, fx.Node]] = set()
    last = node  # of all users
    passed: list[tuple[tuple[fx.Node, tuple[Placement, ...], int], _Rest]] = []
    while waiting:
        current = min(waiting)  # in the order of the graph
        waiting.remove(current)
        if not arrived and not waiting and last is current and current not in trail.weights:
            key = current, trail.seen[current], n
            if key in weights.rests:
                weights.rests[key].add_to(trail)
                break
            counts = len(trail.seen), len(trail.refused), len(trail.vocabulary)
            passed.append((key, _Rest(trail, *counts, trail.factored, trail.inner)))
            trail.factored = trail.inner = False
        for user in sorted(current.users):
            if user.op == "output" or (current, user) in visited:
                continue
            visited.add((current, user))
            last = max(last, user)
            outputs = advance(trail, current, user, weights, arrived, n)
            if user in weights:
                trail.weights.add(user)
            if outputs and any(p.is_shard for p in outputs) and user not in trail.seen:
                trail.seen[user] = outputs
                waiting.append(user)
    # From the end on: what a view did after a value, it did after all values before that.
    for key, before in reversed(passed):
        weights.rests[key] = replace(before, factored=trail.factored, inner=trail.inner)
        trail.factored |= before.factored
        trail.inner |= before.inner
    return trail


def advance(
    trail: Trail, current: fx.Node, user: fx.Node, weights: Weights, arrived: Arrived, n: int
) -> tuple[Placement, ...]:
    """Takes a trail from a value to an operation that uses it: the outputs, none where the shard ends there."""
    placements = trail.seen[current]
    if user.target is operator.getitem:
        return (placements[int(user.args[1])],)  # type: ignore[arg-type]
    if not placements[0].is_shard:
        return ()
    operation = weights.operation(user)
    if operation.by_heads and _is_inside(current, user, placements[0], weights):
        trail.refused.append((user, Refusal(INSIDE, structural=True)))
        return ()
    inputs = operation.inputs
    step = step_of(user, inputs.index(current), placements[0], n, weights)
    signature = step.signature
    if isinstance(signature, Refusal):
        trail.refused.append((user, signature))
        return ()
    for other, expected in zip(inputs, signature.operands, strict=True):
        arriving = trail.seen.get(other) or arrived.get(other)
        if arriving and arriving[0].is_shard and not _can_meet(arriving[0], expected):
            reason = f"%{other.name} arrives as {arriving[0]} where {expected} fits"
            # Parts of one weight that are cut in ways that do not fit each other.
            trail.refused.append((user, Refusal(reason, structural=other in trail.seen)))
    if step.is_composite:
        trail.vocabulary.append(user)
        return signature.outputs
    if step.is_sum and current in trail.weights and len(inputs) > 1:
        _note_product(trail, user, "row" if signature.outputs[0].kind == "P" else "column", weights)
    _note_view(trail, operation.view, placements[0], signature.outputs[0])
    return signature.outputs


def _can_meet(cut: Placement, other: Placement) -> bool:
    """Returns whether two cuts are the same, or one is a part that the ranks can take of the other's blocks."""
    if cut is other or cut == other:
        return True
    return (cut.is_shared or other.is_shared) and bool(coercion(cut, other) or coercion(other, cut))


def _is_inside(current: fx.Node, user: fx.Node, placement: Placement, weights: Weights) -> bool:
    """Returns whether a product of activations, batched by heads, takes the cut for features of a head."""
    target, rank = user.target, len(output_types(current)[0].shape)
    inputs = weights.operands(user)
    if target is _aten.scaled_dot_product_attention.default:
        return current in inputs[:3] and placement.dim == rank - 1
    if target is _aten.einsum.default and weights.isdisjoint(inputs):
        return len(inputs) == 2 and _is_inside_einsum(user, inputs.index(current), placement.dim)
    if target is _aten.einsum.default or rank < 3 or not weights.isdisjoint(inputs):
        return False
    return placement.dim == rank - 1 or (current is inputs[1] and placement.dim == rank - 2)


def _is_inside_einsum(user: fx.Node, index: int, dim: int) -> bool:
    """Returns the same of an equation, in any order of labels: batch and heads are those that stay in both.

    Of a product without heads only what is summed is needed together.
    """
    labelling = einsum_labels(call_of(user, 1))
    if isinstance(labelling, Refusal):
        return False
    label, both = labelling.operands[index][dim], set(labelling.operands[0]) & set(labelling.operands[1])
    batched = both - labelling.summed - {None}
    return label not in batched and bool(batched) and (label in labelling.summed or len(batched) > 1)


def step_of(user: fx.Node, index: int, placement: Placement, n: int, weights: Weights) -> PropagationStep:
    """Returns what an operation makes of a shard of its operand `index`, over n ranks."""
    operation, key = weights.operation(user), (n, index, placement)
    step = operation.steps.get(key)
    if step is None:
        query = n, operation.question, index, placement
        step = weights.answers.get(query)
        if step is None:
            step = weights.answers[query] = _judged(user, index, placement, n, weights)
        operation.steps[key] = step
    return step


def _judged(user: fx.Node, index: int, placement: Placement, n: int, weights: Weights) -> PropagationStep:
    signature, is_composite = seeded(call_of(user, n), index, placement)
    if not isinstance(signature, Refusal):  # equal placements are one object: they are compared at every meeting
        sides = (tuple(map(weights.placement, side)) for side in (signature.operands, signature.outputs))
        signature = Signature(*sides)
    labelling = labels_of(user, n)
    return PropagationStep(signature, labelling is not None and bool(labelling.summed), is_composite)


def labels_of(node: fx.Node, n: int = 1) -> Labelling | None:
    """Returns how an operation labels its dimensions on an axis of n ranks; None where its rule has no labels."""
    rule = rule_of(node.target)
    labelling = rule.labels(call_of(node, n)) if rule is not None and rule.labels is not None else None
    return labelling if isinstance(labelling, Labelling) else None


def _note_product(trail: Trail, user: fx.Node, role: str, weights: Weights) -> None:
    """Takes the role from the first product with an activation, else from the first one (of two weights, a table)."""
    if not trail.role or (trail.product in weights and user not in weights):
        trail.role, trail.product = role, user
    trail.products.append(user)


def _note_view(trail: Trail, view: tuple[Shape, Shape] | None, source: Placement, result: Placement) -> None:
    """Remembers what a view that makes several dimensions of one does to the cut.

    The runs are counted in larger units where the cut is between blocks: heads, also in `[s, b*heads, d]`.
    """
    if view is None or not result.is_shard:
        return
    before, after = view
    block = divide(source.pieces[0].size, result.pieces[0].size)
    trail.factored |= block not in (None, 1)
    parts = divide(before[source.dim], after[result.dim])
    trail.inner |= block == 1 and parts not in (None, 1) and result.dim + 1 == len(after)
