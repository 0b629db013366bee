"""What each node may be on one mesh axis.

Enters: a program, the number of ranks and the placements that a plan gives to parameters. Leaves: for each node its
options: the placements of its operands and of its outputs.

Shards start at parameters and flow forward through the rules: an operation's options are all operands whole, and what
its rule makes of each shard or partial sum that an operand may arrive as. What no parameter reaches (ids, masks,
rotary tables) has one option, whole on every rank.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.cost.flops import matmul_flops
from fxpar.ir.grad_flow import weights_of
from fxpar.ir.operators import as_parameter, axes_of, canonical_placement, pending
from fxpar.ir.program import Program, describe, operands, output_types, tensor_type
from fxpar.layout.layout import I, Placement, R, fits, shard
from fxpar.layout.symbolic_sizes import Size, names
from fxpar.ops.operator import Operator
from fxpar.ops.rank_dim import expand_over, replicate_over, shard_over, sum_over
from fxpar.rules import Refusal, Signature, call_of, inferred, rule_of, seeded
from fxpar.sharding.parameter_cuts import (
    all_cuts,
    farthest,
    heads_of,
    met_cut,
    met_heads,
    natural_cut,
    shares_attention,
)
from fxpar.sharding.shard_propagation import PropagationStep, Trail, Weights, advance, follow, labels_of, step_of
from fxpar.signatures.engine import partial_signatures
from fxpar.signatures.op_call import OpCall

# Which dimensions of parameters stand for tokens.

# Of each value the cuts over tokens that are known, one tuple of outputs for each dimension of an input.
Rows = Mapping[fx.Node, list[tuple[Placement | None, ...]]]


def tokens_of(program: Program, owned: Sequence[fx.Node]) -> tuple[dict[tuple[fx.Node, int], str], Weights]:
    """Returns the dimensions that stand for tokens, with the reason, and the weights.

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
    """Returns where the inputs' tokens are."""
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
    """Returns where a dimension of an input goes, and whether it is a row of a product with a matrix on the way."""
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
    """Returns what an operation makes of a cut; one that needs the dimension whole may keep its place."""
    kinds = output_types(node)
    if not isinstance(step.signature, Refusal):
        return tuple(p if p.is_shard else None for p in step.signature.outputs)
    rank = len(output_types(operands(node)[0])[0].shape)
    return tuple(
        shard(cut.dim, kind.shape[cut.dim]) if len(kind.shape) == rank and cut.dim < rank else None for kind in kinds
    )


def _is_row(node: fx.Node, index: int, step: PropagationStep, weights: Weights) -> bool:
    """Returns whether a cut of operand `index` is one of rows: of a product with a matrix that stays whole."""
    signature = step.signature
    if not step.is_sum or node in weights or isinstance(signature, Refusal) or not signature.outputs[0].is_shard:
        return False
    others = [
        (o, p) for i, (o, p) in enumerate(zip(weights.operands(node), signature.operands, strict=True)) if i != index
    ]
    return any(other in weights and not placement.is_shard for other, placement in others)


def token_reason(node: fx.Node, dim: int, weights: Weights, rows: Rows) -> str:
    """Returns why a dimension of a parameter stands for tokens; empty where it does not."""
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
    """Returns whether an input's tokens are what is cut."""
    pairs = [pair for known in rows.get(user, ()) for pair in zip(outputs, known, strict=False)]
    return any(other is not None and _is_same_factor(cut, other) for cut, other in pairs)


def _is_same_factor(cut: Placement, other: Placement) -> bool:
    return cut.is_shard and cut.dim == other.dim and cut.pieces[0].outer == other.pieces[0].outer


def _becomes_rows(trail: Trail, current: fx.Node, user: fx.Node, weights: Weights, rows: Rows) -> bool:
    """Returns whether a product takes the cut for rows, other than heads of one matrix or features between tokens."""
    placements = trail.seen[current]
    if user.target is operator.getitem or not placements[0].is_shard or (trail.role == "column" and trail.factored):
        return False
    index = weights.operands(user).index(current)
    step = step_of(user, index, placements[0], 1, weights)
    if current in trail.weights or not _is_row(user, index, step, weights):
        return False
    return not _sums_tokens(user, index, rows)


def _sums_tokens(user: fx.Node, index: int, rows: Rows) -> bool:
    """Returns whether what a product sums of an operand are tokens."""
    labelling = labels_of(user)
    if labelling is None:
        return False
    summed = {d for d, label in enumerate(labelling.operands[index]) if label in labelling.summed}
    known = rows.get(operands(user)[index], ())
    return any(placements[0] is not None and placements[0].dim in summed for placements in known)


def _is_sum_with_others(trail: Trail, user: fx.Node, weights: Weights) -> bool:
    """Returns whether an operation other than a product joins the values of a feature with others and is as these."""
    others = [o for o in weights.operands(user) if o not in trail.seen and o not in weights]
    labelling = labels_of(user)
    return bool(others) and (labelling is None or not labelling.summed)


# What a program says itself of its layouts (`fxpar.shard_over`, `fxpar.expand_over`, …).

aten = torch.ops.aten


def demands(node: fx.Node, axis: str) -> bool:
    """Returns whether an operation has its values held in one way on the axis."""
    return isinstance(node.target, Operator) and node.target.demand is not None and axis in axes_of(node)


def demanded_by(node: fx.Node, n: int) -> Signature:
    """Returns how an operation that demands it has its operands and its result held on an axis of n ranks."""
    assert isinstance(node.target, Operator)
    assert node.target.demand is not None
    signature = node.target.demand(call_of(node, n))
    assert not isinstance(signature, Refusal), signature.reason
    return signature


def without_demand(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns what such an operation is to other axes, over what a rank has: an operation of torch, and its arguments.

    What moves tokens between ranks is no operation of torch on one of them: it stays.
    """
    if node.target is expand_over:
        return aten.unsqueeze.default, node.args, {}
    if node.target is sum_over:
        return aten.squeeze.dim, node.args, {}
    if node.target in (shard_over, replicate_over):
        return aten.alias.default, node.args[:1], {}
    return node.target, node.args, node.kwargs


def held_over(program: Program, axis: str) -> dict[fx.Node, int]:
    """Returns parameters whose first dimension the axis cuts, as what is made of each alone demands it."""
    dims: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if node.target is shard_over and demands(node, axis):
            source = operands(node)[0]
            while source.op == "call_function" and len(operands(source)) == 1 and source.target is not operator.getitem:
                source = operands(source)[0]
            if source.op == "placeholder" and program.parameter(source) is not None:
                dims[source] = 0
    return dims


# A tensor: the node that makes it, and which of its outputs it is.
Value = tuple[fx.Node, int]


@dataclass(frozen=True)
class Option:
    """Placements of a node's operands and outputs, and why it is offered."""

    operands: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    why: str = ""


@dataclass
class AxisOptions:
    """All options on one axis.

    Attributes:
        n: ranks of the axis.
        flags: which outputs carry a gradient.
        weights: values that are made from parameters alone, tokens excepted.
        of: the options of each node that has any; of a `getitem` those of the node that it takes an item of.
        trails: where a cut of a parameter goes.
        uncut: why a parameter with two or more dimensions cannot be cut.
        shared: symbols of sizes that ranks share out: activations may be cut over them.
        products: matrix products and attention.
        over_tokens: whether they may be cut over tokens; that is another axis' work.
        tokens: dimensions of parameters that stand for tokens, and why.
        tables: those parameters, and views of them.
        demanded: values that the program itself has cut.
        headed: parameters whose heads n does not divide, and the dimension that makes them.
    """

    n: int
    flags: Mapping[fx.Node, tuple[bool, ...]]
    weights: Weights
    of: dict[fx.Node, tuple[Option, ...]] = field(default_factory=dict)
    trails: dict[tuple[fx.Node, Placement], Trail] = field(default_factory=dict)
    uncut: dict[fx.Node, str] = field(default_factory=dict)
    shared: Set[Size] = frozenset()
    products: Set[fx.Node] = frozenset()
    over_tokens: bool = False
    tokens: Mapping[tuple[fx.Node, int], str] = field(default_factory=dict)
    tables: set[fx.Node] = field(default_factory=set)
    demanded: set[Value] = field(default_factory=set)
    headed: dict[fx.Node, int] = field(default_factory=dict)

    def carries(self, value: Value) -> bool:
        """Returns whether a gradient flows through a value."""
        return self.flags[value[0]][value[1]]

    def placements(self, value: Value) -> tuple[Placement, ...]:
        """Returns what a value may be."""
        return tuple(dict.fromkeys(option.outputs[value[1]] for option in self.of[value[0]]))

    def token_cut(self, value: Value) -> Placement | None:
        """Returns the cut of an activation over its tokens, where exactly one dimension is theirs."""
        if not self.shared or value[0] in self.weights:
            return None
        shape = output_types(value[0])[value[1]].shape
        # With two such dimensions, as scores of attention have, it is not clear which one are the tokens of the stream.
        dims = [d for d, size in enumerate(shape) if self._is_shared(size)]
        return shard(dims[0], shape[dims[0]]) if len(dims) == 1 and shape[dims[0]] in self.shared else None

    def is_token_cut(self, value: Value, placement: Placement) -> bool:
        """Returns whether a shard of an activation is one of its tokens, also where a view joined them to the batch."""
        is_one = placement.is_shard and value[0] not in self.weights
        return is_one and self._is_shared(output_types(value[0])[value[1]].shape[placement.dim])

    def _is_shared(self, size: Size) -> bool:
        return not names((size,)).isdisjoint(names(self.shared))


def value_of(node: fx.Node) -> Value:
    """Returns the tensor that an operand stands for."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        return source, index
    return node, 0


# Tokens are cut only where divide_sequence has written a size as a multiple of n: no other shard is even for all sizes.
# Equal options are one object, because what is written of them later is looked up by identity.
def list_options(
    program: Program,
    n: int,
    flags: Mapping[fx.Node, tuple[bool, ...]],
    pins: Mapping[fx.Node, Placement],
    is_free: bool,
    data_parallel: bool = False,
    axis: str = "",
) -> AxisOptions:
    """Returns the options of every node.

    Args:
        pins: placements of parameters that are decided.
        is_free: whether the other parameters may be cut; else they stay whole, as do those that nothing uses.
        data_parallel: whether matrix products may be cut over tokens, the weights being whole.
        axis: its name, by which the program itself may say what is cut on it.
    """
    placeholders = {p.node for p in program.parameters}
    owned = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in placeholders]
    tokens, weights = tokens_of(program, owned)
    options = AxisOptions(n, flags, weights, tokens=tokens)
    options.tables = _tables(program.graph, tokens)
    options.shared = {s.size for s in program.symbols if s.ranks == n}
    options.products = {node for node, _ in matmul_flops(program)}
    options.over_tokens = data_parallel
    parameters = dict.fromkeys(program.node(p.node) for p in program.parameters if p.kind == "parameter")
    free = {node: _cuts(options, node) for node in parameters if is_free and node not in pins}
    _keep_attention_whole(options, free)
    reached = set()
    answers: dict[Hashable, tuple[Option, ...]] = {}  # equal layers put equal questions
    interned: dict[tuple[Option, ...], tuple[Option, ...]] = {}  # and what they have is one object
    for node in program.graph.nodes:
        kinds = () if node.op == "output" else output_types(node)
        if not kinds or node.target is operator.getitem:
            continue
        if node in parameters:
            reached.add(node)
            cuts = (pins[node],) if node in pins else _offered(options, node, free.get(node, []))
            carries = flags[node][0]
            offered = tuple(Option((), (canonical_placement(c, carries),), _why(options, node, c)) for c in cuts)
            options.of[node] = interned.setdefault(offered, offered)
        elif node.op == "placeholder":
            options.of[node] = interned.setdefault((Option((), (R,)),), (Option((), (R,)),))
        elif demands(node, axis):
            demanded = demanded_by(node, n)
            options.of[node] = (Option(demanded.operands, demanded.outputs),)
            options.demanded.update(map(value_of, operands(node)))
            reached.add(node)
        else:
            inputs = [value_of(o) for o in weights.operands(node)]
            if any(source in reached for source, _ in inputs):
                reached.add(node)
                question = _question(options, node, inputs)
                if question not in answers:
                    answers[question] = tuple(_signatures(options, node, inputs))
                options.of[node] = answers[question]
            else:
                whole = (Option((R,) * len(inputs), (R,) * len(kinds)),)
                options.of[node] = interned.setdefault(whole, whole)
    return options


def _tables(graph: fx.Graph, tokens: Mapping[tuple[fx.Node, int], str]) -> set[fx.Node]:
    """Returns parameters with tokens, and what is made of one of them alone."""
    tables = {node for node, _ in tokens}
    for node in graph.nodes:
        if node.op == "call_function" and len(operands(node)) == 1 and operands(node)[0] in tables:
            tables.add(node)
    return tables


def _offered(options: AxisOptions, node: fx.Node, cuts: list[Placement]) -> tuple[Placement, ...]:
    """Returns what a parameter may be; a vocabulary that can be cut is, as one value a token decides its cost."""
    return tuple(cuts) if any(_is_vocabulary(options, node, cut) for cut in cuts) else (I, *cuts)


def _is_vocabulary(options: AxisOptions, node: fx.Node, cut: Placement) -> bool:
    trail = options.trails.get((node, cut), Trail())
    return len(output_types(node)[0].shape) > 1 and bool(trail.vocabulary) and not trail.refused


def _why(options: AxisOptions, node: fx.Node, cut: Placement) -> str:
    return "a vocabulary that can be cut is cut" if _is_vocabulary(options, node, cut) else ""


def _cuts(options: AxisOptions, node: fx.Node) -> list[Placement]:
    """Returns for each dimension the simplest cut that no view or split after it tears.

    Weights of attention are cut between heads or not at all: their other dimension, which is summed, is only cut where
    the heads are divided plainly.
    """
    is_table = any(user.target is aten.embedding.default for user in node.users)
    shape, refused = output_types(node)[0].shape, "" if node.users else "no operation uses it"
    cuts: list[Placement] = []
    headed: int | None = None
    # No operation tells which cuts fit what nothing uses.
    for dim in range(len(shape) if node.users else 0):
        if (node, dim) in options.tokens:
            refused = refused or options.tokens[node, dim]
            continue
        tried = []
        for cut in all_cuts(node, dim, options.weights, options.n):
            trail = follow(node, cut, options.n, options.weights)
            tried.append(trail)
            # What an embedding looks up of a part of each row would be gathered at once.
            is_gathered = trail.refused and (trail.inner or (is_table and not trail.vocabulary))
            if not trail.torn and not is_gathered:
                options.trails[node, cut] = options.trails[node, as_parameter(cut)] = trail
                cuts.append(as_parameter(cut))
                _add_met(options, node, dim, cuts)
                break
            user, refusal = (trail.torn or trail.refused)[0]
            refused = refused or f"at {describe(user)} {refusal.reason}"
        else:
            if met_heads(tried, options.weights):
                headed = dim
                user, refusal = farthest(tried)
                refused = f"at {describe(user)} {refusal.reason}"
    if headed is not None and not _has_head_dim(options, node, cuts):
        options.headed[node] = headed
    shared = [cut for cut in cuts if cut.is_shared]
    # With shared blocks the plain cut is no choice: fewer kv heads than ranks make a cut between heads impossible.
    cuts = [] if node in options.headed else shared or cuts
    if len(shape) > 1 and not cuts:
        options.uncut[node] = refused
    return cuts


def _add_met(options: AxisOptions, node: fx.Node, dim: int, cuts: list[Placement]) -> None:
    """Adds the cut of the parts that a sum over the dimension takes in, next to the plain one."""
    met = met_cut(node, dim, options.weights)
    if met is None or met in cuts or not fits(met, output_types(node)[0].shape, options.n):
        return
    trail = follow(node, met, options.n, options.weights)
    if not trail.torn:
        options.trails[node, met] = trail
        cuts.append(met)


def _has_head_dim(options: AxisOptions, node: fx.Node, cuts: list[Placement]) -> bool:
    """Returns whether a weight of three dimensions or more has its heads in one of their own, and that can be cut."""
    is_stacked = len(output_types(node)[0].shape) > 2
    return is_stacked and any(options.trails[node, cut].role == "column" for cut in cuts)


def _keep_attention_whole(options: AxisOptions, free: dict[fx.Node, list[Placement]]) -> None:
    """Keeps all matrices of an attention whole where n does not divide the heads of one of them.

    A single head is no such case: every rank has it.
    """
    for node, dim in options.headed.items():
        cut, goes = natural_cut(node, dim, options.weights)
        if heads_of(node, cut, options.weights) == 1:
            options.uncut[node] = _why_whole(cut, goes, options.n)
            continue
        for other, cuts in free.items():
            trails = [options.trails[other, cut] for cut in cuts]
            if len(output_types(other)[0].shape) > 1 and any(shares_attention(trail, goes) for trail in trails):
                free[other] = []
                options.uncut[other] = f"its attention stays whole, as %{node.name} does: {options.uncut[node]}"


def _why_whole(cut: Placement, goes: Trail, n: int) -> str:
    """Returns why every rank has all heads of a matrix.

    Args:
        cut: between heads, were every division even; of `torch.nn.MultiheadAttention` one of q, k and v each.
        goes: where it goes.
    """
    (piece, *others), pieces = cut.pieces, [p for placements in goes.seen.values() for p in placements[0].pieces]
    heads = min((p.size for p in pieces if p.sharded and isinstance(p.size, int)), default=piece.size)
    if others or piece.outer == 1 or heads == piece.size:
        return "it makes one head, which every rank needs"
    return f"it makes {heads} heads, which {n} ranks cannot share out"


def _question(options: AxisOptions, node: fx.Node, inputs: list[Value]) -> Hashable:
    """Returns all that `_signatures` is told of a node."""
    flags = tuple(options.carries(value) for value in inputs), options.flags[node], node in options.products
    layouts = tuple(
        (options.placements(value), options.token_cut(value), value[0] in options.weights) for value in inputs
    )
    return options.weights.operation(node).question, flags, layouts


def _signatures(options: AxisOptions, node: fx.Node, inputs: list[Value]) -> Iterator[Option]:
    call = call_of(node, options.n)
    carries = [options.carries(value) for value in inputs]
    seen = set()
    for placements, why in _wanted(options, call, inputs, node in options.products and not options.over_tokens):
        canonical = tuple(
            canonical_placement(placement, flag) for placement, flag in zip(placements, carries, strict=True)
        )
        if canonical in seen:
            continue
        seen.add(canonical)
        result = inferred(call, canonical, carries, composite=True)
        if not isinstance(result, Refusal):
            outputs = zip(result, options.flags[node], strict=True)
            yield Option(canonical, tuple(canonical_placement(placement, flag) for placement, flag in outputs), why)


def _wanted(
    options: AxisOptions, call: OpCall, inputs: list[Value], is_product: bool
) -> Iterator[tuple[tuple[Placement, ...], str]]:
    count = len(inputs)
    # Both are always legal: I where all ranks compute the same, R where what follows is summed.
    yield (I,) * count, ""
    yield (R,) * count, ""
    rule = rule_of(call.target)
    if rule is None:
        return
    for index, value in enumerate(inputs):
        tokens = None if is_product else options.token_cut(value)
        offered = (pending(placement) for placement in options.placements(value))
        for placement in dict.fromkeys((*offered, *([tokens] if tokens else []))):
            if placement.is_shard and not (is_product and options.is_token_cut(value, placement)):
                signature, _ = seeded(call, index, placement)
                if not isinstance(signature, Refusal):
                    yield signature.operands, f"follows operand {call.names[index]}"
    for signature in partial_signatures(rule, call):
        members = [i for i, placement in enumerate(signature.operands) if placement.kind == "P"]
        if any(p.kind == "P" for i in members for p in options.placements(inputs[i])):
            yield signature.operands, f"sums later than operand {call.names[members[0]]}"
