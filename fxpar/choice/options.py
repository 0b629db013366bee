"""What each node may be on one mesh axis.

Enters: a program, the number of ranks and the placements that a plan gives to parameters. Leaves: for each node its
options: the placements of its operands and of its outputs.

Shards start at parameters and flow forward through the rules: an operation's options are all operands whole, and what
its rule makes of each shard or partial sum that an operand may arrive as. What no parameter reaches (ids, masks,
rotary tables) has one option, whole on every rank.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import fx

from fxpar.coercions import at_rest, unsettled
from fxpar.layout import I, Placement, R
from fxpar.program import Program, operands, output_types
from fxpar.rules import Refusal, call_of, infer, rule_of, seed_signature
from fxpar.rules.engine import Call, Rule, partial_signatures
from fxpar.rules.follow import Trail, follow, weights_of
from fxpar.rules.heads import all_cuts, farthest, heads_of, met_heads, natural_cut, shares_attention
from fxpar.rules.inference import describe, resting

aten = torch.ops.aten

# A tensor: the node that makes it, and which of its outputs it is.
Value = tuple[fx.Node, int]


@dataclass(frozen=True)
class Option:
    """Placements of a node's operands and outputs, and why it is offered."""

    operands: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    why: str = ""


@dataclass
class Options:
    """All options on one axis.

    Attributes:
        n: ranks of the axis.
        flags: which outputs carry a gradient.
        weights: values that are made from parameters alone.
        of: the options of each node that has any; of a `getitem` those of the node that it takes an item of.
        trails: where a cut of a parameter goes.
        uncut: why a parameter with two or more dimensions cannot be cut.
        headed: parameters whose heads n does not divide, and the dimension that makes them.
    """

    n: int
    flags: Mapping[fx.Node, tuple[bool, ...]]
    weights: Set[fx.Node]
    of: dict[fx.Node, tuple[Option, ...]] = field(default_factory=dict)
    trails: dict[tuple[fx.Node, Placement], Trail] = field(default_factory=dict)
    uncut: dict[fx.Node, str] = field(default_factory=dict)
    headed: dict[fx.Node, int] = field(default_factory=dict)

    def carries(self, value: Value) -> bool:
        """Whether a gradient flows through a value."""
        return self.flags[value[0]][value[1]]

    def placements(self, value: Value) -> tuple[Placement, ...]:
        """What a value may be."""
        return tuple(dict.fromkeys(option.outputs[value[1]] for option in self.of[value[0]]))


def value_of(node: fx.Node) -> Value:
    """The tensor that an operand stands for."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        return source, index
    return node, 0


def list_options(
    program: Program,
    n: int,
    flags: Mapping[fx.Node, tuple[bool, ...]],
    pins: Mapping[fx.Node, Placement],
    is_free: bool,
) -> Options:
    """The options of every node.

    Args:
        pins: placements of parameters that are decided.
        is_free: whether the other parameters may be cut; else they stay whole.
    """
    owned = [program.node(p.node) for p in program.parameters]
    found = Options(n, flags, weights_of(program.graph, owned))
    parameters = [program.node(p.node) for p in program.parameters if p.kind == "parameter"]
    free = {node: _cuts(found, node) for node in parameters if is_free and node not in pins}
    _keep_attention_whole(found, free)
    reached = set()
    for node in program.graph.nodes:
        kinds = () if node.op == "output" else output_types(node)
        if not kinds or node.target is operator.getitem:
            continue
        parameter = program.parameter(node) if node.op == "placeholder" else None
        if parameter is not None and parameter.kind == "parameter":
            reached.add(node)
            cuts = (pins[node],) if node in pins else (I, *free.get(node, ()))
            found.of[node] = tuple(Option((), (resting(cut, flags[node][0]),)) for cut in cuts)
        elif node.op == "placeholder":
            found.of[node] = (Option((), (R,)),)
        else:
            inputs = [value_of(o) for o in operands(node)]
            if any(source in reached for source, _ in inputs):
                reached.add(node)
                found.of[node] = tuple(_signatures(found, node, inputs))
            else:
                found.of[node] = (Option((R,) * len(inputs), (R,) * len(kinds)),)
    return found


def _cuts(found: Options, node: fx.Node) -> list[Placement]:
    """For each dimension the simplest cut that no view or split behind it tears.

    Weights of attention are cut between heads or not at all: their other dimension, which is summed, is only cut where
    the heads are divided plainly.
    """
    is_table = any(user.target is aten.embedding.default for user in node.users)
    shape, refused = output_types(node)[0].shape, ""
    cuts: list[Placement] = []
    for dim in range(len(shape)):
        tried = []
        for cut in all_cuts(node, dim, found.weights, found.n):
            trail = follow(node, cut, found.n, found.weights)
            tried.append(trail)
            # What an embedding looks up would be gathered at once.
            if not trail.torn and not (trail.inner and trail.refused) and not (is_table and trail.refused):
                found.trails[node, cut] = found.trails[node, at_rest(cut)] = trail
                cuts.append(at_rest(cut))
                break
            user, refusal = (trail.torn or trail.refused)[0]
            refused = refused or f"at {describe(user)} {refusal.reason}"
        else:
            if met_heads(tried, found.weights):
                found.headed[node] = dim
                user, refusal = farthest(tried)
                refused = f"at {describe(user)} {refusal.reason}"
    shared = [cut for cut in cuts if cut.is_shared]
    cuts = [] if node in found.headed else shared or cuts
    if len(shape) > 1 and not cuts:
        found.uncut[node] = refused
    return cuts


def _keep_attention_whole(found: Options, free: dict[fx.Node, list[Placement]]) -> None:
    """Where n does not divide the heads of one matrix, those that take part in its attention stay whole too.

    A single head is no such case: every rank has it.
    """
    for node, dim in found.headed.items():
        cut, goes = natural_cut(node, dim, found.weights)
        if heads_of(node, cut, found.weights) == 1:
            found.uncut[node] = "it makes one head, which every rank needs"
            continue
        for other, cuts in free.items():
            trails = [found.trails[other, cut] for cut in cuts]
            if len(output_types(other)[0].shape) > 1 and any(shares_attention(trail, goes) for trail in trails):
                free[other] = []
                found.uncut[other] = f"its attention stays whole, as %{node.name} does: {found.uncut[node]}"


def _signatures(found: Options, node: fx.Node, inputs: list[Value]) -> Iterator[Option]:
    rule, call = rule_of(node.target), call_of(node, found.n)
    carries = [found.carries(value) for value in inputs]
    seen = set()
    for wanted, why in _wanted(found, rule, call, inputs):
        settled = tuple(resting(placement, flag) for placement, flag in zip(wanted, carries, strict=True))
        if settled in seen:
            continue
        seen.add(settled)
        result = infer(rule, call, settled, carries)
        if not isinstance(result, Refusal):
            outputs = zip(result, found.flags[node], strict=True)
            yield Option(settled, tuple(resting(placement, flag) for placement, flag in outputs), why)


def _wanted(
    found: Options, rule: Rule | None, call: Call, inputs: list[Value]
) -> Iterator[tuple[tuple[Placement, ...], str]]:
    count = len(inputs)
    yield (I,) * count, ""
    yield (R,) * count, ""
    if rule is None:
        return
    for index, value in enumerate(inputs):
        for placement in dict.fromkeys(unsettled(p) for p in found.placements(value)):
            if placement.is_shard:
                signature = seed_signature(rule, call, index, placement)
                if not isinstance(signature, Refusal):
                    yield signature.operands, f"follows operand {call.names[index]}"
    for signature in partial_signatures(rule, call):
        members = [i for i, placement in enumerate(signature.operands) if placement.kind == "P"]
        if any(p.kind == "P" for i in members for p in found.placements(inputs[i])):
            yield signature.operands, f"sums later than operand {call.names[members[0]]}"
