"""Which dimensions of parameters stand for tokens.

Enters: a program and its parameters. Leaves: the dimensions of parameters that stand for tokens, each with the reason,
and the values that are made from parameters alone and are weights indeed.

A tensor axis divides features. To cut the rows of a product whose matrix is whole is data or sequence parallelism, and
the choice leaves it to those. Rows come from the inputs (batch, sequence, the pixels of an image), but parameters have
them too: position tables, learned queries, biases of attention scores. A size tells nothing: it may be a symbol, a
number that the model fixes, or equal to a number of features. What tells is the way through the graph:

- A dimension of an input that is a row of some product with a matrix stands for tokens wherever it goes, and so does
  one of a parameter that meets it, in a sum say.
- So does one that becomes a row of a product itself, before any product made it a feature. Heads, which a matrix made
  and a view took apart, may be rows: of a matrix that all heads share. Features may be rows of a matrix between tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from fxpar.choice.shard_propagation import PropagationStep, Trail, Weights, advance, step_of
from fxpar.layout.layout import Placement, shard
from fxpar.program.parameter_flow import weights_of
from fxpar.program.program import Program, describe, operands, output_types, tensor_type
from fxpar.rules import Refusal, call_of, rule_of
from fxpar.signatures.rule import Labelling

# Of each value the cuts over tokens that are known, one tuple of outputs for each dimension of an input.
Rows = Mapping[fx.Node, list[tuple[Placement | None, ...]]]


def tokens_of(program: Program, owned: Sequence[fx.Node]) -> tuple[dict[tuple[fx.Node, int], str], Weights]:
    """The dimensions that stand for tokens, with the reason, and the weights.

    What is made from learned queries is no weight but an activation, before it meets any input too.

    Args:
        owned: placeholders of parameters and buffers.
    """
    weights = Weights(weights_of(program.graph, owned))
    rows = token_rows(program, weights)
    tokens, queries = {}, set()
    for node in owned:
        for dim, size in enumerate(tensor_type(node).shape):
            if reason := token_reason(node, dim, weights, rows):
                tokens[node, dim] = reason
                queries |= {node} if size != 1 else set()
    if not queries:
        return tokens, weights
    activations = queries.copy()
    for node in program.graph.nodes:
        if node in weights and not activations.isdisjoint(operands(node) if node.op == "call_function" else ()):
            activations.add(node)
    return tokens, Weights(weights - (activations - queries))


def token_rows(program: Program, weights: Weights) -> Rows:
    """Where the inputs' tokens are."""
    rows: dict[fx.Node, list[tuple[Placement | None, ...]]] = {}
    for item in program.inputs:
        node = program.node(item.node)
        for dim, size in enumerate(tensor_type(node).shape):
            reached, are_rows = _spread(node, shard(dim, size), weights)
            for value, placements in reached.items() if are_rows else ():
                if placements not in rows.setdefault(value, []):
                    rows[value].append(placements)
    return rows


def _spread(
    source: fx.Node, placement: Placement, weights: Weights
) -> tuple[dict[fx.Node, tuple[Placement | None, ...]], bool]:
    """Where a dimension of an input goes, and whether it is a row of a product with a matrix on the way."""
    reached: dict[fx.Node, tuple[Placement | None, ...]] = {source: (placement,)}
    are_rows = False
    for node in source.graph.nodes:
        inputs = weights.operands(node) if node.op == "call_function" else []
        for index, operand in enumerate(inputs):
            if operand not in reached:
                continue
            if node.target is operator.getitem:
                reached[node] = (reached[operand][int(node.args[1])],)
                break
            cut = reached[operand][0] if len(reached[operand]) == 1 else None
            if cut is None:
                continue
            step = step_of(node, index, cut, 1, weights)
            are_rows |= _is_row(node, index, step, weights)
            after = _after(node, cut, step)
            if any(p is not None for p in after):
                reached[node] = after
                break
    return reached, are_rows


def _after(node: fx.Node, cut: Placement, step: PropagationStep) -> tuple[Placement | None, ...]:
    """What an operation makes of a cut. One that needs the dimension whole keeps it where it has as many dimensions."""
    kinds = output_types(node)
    if not isinstance(step.signature, Refusal):
        return tuple(p if p.is_shard else None for p in step.signature.outputs)
    rank = len(output_types(operands(node)[0])[0].shape)
    return tuple(
        shard(cut.dim, kind.shape[cut.dim]) if len(kind.shape) == rank and cut.dim < rank else None for kind in kinds
    )


def _is_row(node: fx.Node, index: int, step: PropagationStep, weights: Weights) -> bool:
    """Whether a cut of operand `index` is one of rows: of a product with a matrix that stays whole."""
    signature = step.signature
    if not step.is_sum or node in weights or isinstance(signature, Refusal) or not signature.outputs[0].is_shard:
        return False
    others = [
        (o, p) for i, (o, p) in enumerate(zip(weights.operands(node), signature.operands, strict=True)) if i != index
    ]
    return any(other in weights and not placement.is_shard for other, placement in others)


def token_reason(node: fx.Node, dim: int, weights: Weights, rows: Rows) -> str:
    """Why a dimension of a parameter stands for tokens; empty where it does not."""
    trail = Trail()
    trail.seen[node] = (shard(dim, tensor_type(node).shape[dim]),)
    trail.weights.add(node)
    pending = [node]
    visited: set[tuple[fx.Node, fx.Node]] = set()
    while pending:
        current = min(pending)
        pending.remove(current)
        for user in sorted(current.users):
            if user.op == "output" or (current, user) in visited:
                continue
            visited.add((current, user))
            was_feature = bool(trail.role)
            outputs = advance(trail, current, user, weights, {}, 1)
            if user in weights:
                trail.weights.add(user)
            elif _meets(rows, user, outputs):
                return f"its dimension {dim} stands for tokens, which it meets at {describe(user)}"
            if _becomes_rows(trail, current, user, weights, rows):
                return f"its dimension {dim} stands for tokens, the rows of {describe(user)}"
            is_summed = was_feature and _is_sum_with_others(trail, user, weights)
            if outputs and any(p.is_shard for p in outputs) and user not in trail.seen:
                trail.seen[user] = outputs
                pending += [] if is_summed else [user]
    return ""


def _meets(rows: Rows, user: fx.Node, outputs: tuple[Placement, ...]) -> bool:
    """Whether an input's tokens are what is cut."""
    pairs = [pair for known in rows.get(user, ()) for pair in zip(outputs, known, strict=False)]
    return any(other is not None and _is_same_factor(cut, other) for cut, other in pairs)


def _is_same_factor(cut: Placement, other: Placement) -> bool:
    return cut.is_shard and cut.dim == other.dim and cut.pieces[0].outer == other.pieces[0].outer


def _becomes_rows(trail: Trail, current: fx.Node, user: fx.Node, weights: Weights, rows: Rows) -> bool:
    """Whether a product takes the cut for rows, other than heads of one matrix or features between tokens."""
    placements = trail.seen[current]
    if user.target is operator.getitem or not placements[0].is_shard or (trail.role == "column" and trail.factored):
        return False
    index = weights.operands(user).index(current)
    step = step_of(user, index, placements[0], 1, weights)
    if current in trail.weights or not _is_row(user, index, step, weights):
        return False
    return not _sums_tokens(user, index, rows)


def _sums_tokens(user: fx.Node, index: int, rows: Rows) -> bool:
    """Whether what a product sums of an operand are tokens."""
    rule, call = rule_of(user.target), call_of(user, 1)
    labelling = rule.labels(call) if rule is not None and rule.labels is not None else None
    if not isinstance(labelling, Labelling):
        return False
    summed = {d for d, label in enumerate(labelling.operands[index]) if label in labelling.summed}
    known = rows.get(operands(user)[index], ())
    return any(placements[0] is not None and placements[0].dim in summed for placements in known)


def _is_sum_with_others(trail: Trail, user: fx.Node, weights: Weights) -> bool:
    """Whether an operation, no product, joins the values of a feature with others: what those are, this one is too."""
    others = [o for o in weights.operands(user) if o not in trail.seen and o not in weights]
    rule = rule_of(user.target)
    labelling = rule.labels(call_of(user, 1)) if rule is not None and rule.labels is not None else None
    is_product = isinstance(labelling, Labelling) and bool(labelling.summed)
    return bool(others) and not is_product
