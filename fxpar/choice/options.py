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

from fxpar.layout import I, Placement, R
from fxpar.program import Program, operands, output_types
from fxpar.rules import Refusal, call_of, infer, rule_of, seed_signature
from fxpar.rules.engine import Call, Rule, partial_signatures
from fxpar.rules.follow import Steps, Trail, candidates, follow, weights_of
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
        steps: what the trails have in common.
    """

    n: int
    flags: Mapping[fx.Node, tuple[bool, ...]]
    weights: Set[fx.Node]
    of: dict[fx.Node, tuple[Option, ...]] = field(default_factory=dict)
    trails: dict[tuple[fx.Node, Placement], Trail] = field(default_factory=dict)
    uncut: dict[fx.Node, str] = field(default_factory=dict)
    steps: Steps = field(default_factory=dict)

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
    held = {p.node for p in program.parameters}
    owned = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in held]
    found = Options(n, flags, weights_of(program.graph, owned))
    reached = set()
    for node in program.graph.nodes:
        kinds = () if node.op == "output" else output_types(node)
        if not kinds or node.target is operator.getitem:
            continue
        parameter = program.parameter(node) if node.op == "placeholder" else None
        if parameter is not None and parameter.kind == "parameter":
            reached.add(node)
            cuts = (pins[node],) if node in pins else (I, *_cuts(found, node)) if is_free else (I,)
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


def _cuts(found: Options, node: fx.Node) -> Iterator[Placement]:
    """For each dimension the simplest cut that no view or split behind it tears."""
    is_table = any(user.target is aten.embedding.default for user in node.users)
    shape, refused, is_cut = output_types(node)[0].shape, "", False
    for dim in range(len(shape)):
        for cut in candidates(node, dim, found.weights):
            trail = follow(node, cut, found.n, found.weights, steps=found.steps)
            # What an embedding looks up would be gathered at once.
            if not trail.torn and not (trail.inner and trail.refused) and not (is_table and trail.refused):
                found.trails[node, cut], is_cut = trail, True
                yield cut
                break
            user, refusal = (trail.torn or trail.refused)[0]
            refused = refused or f"at {describe(user)} {refusal.reason}"
    if len(shape) > 1 and not is_cut:
        found.uncut[node] = refused


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
        for placement in found.placements(value):
            if placement.is_shard:
                signature = seed_signature(rule, call, index, placement)
                if not isinstance(signature, Refusal):
                    yield signature.operands, f"follows operand {call.names[index]}"
    for signature in partial_signatures(rule, call):
        members = [i for i, placement in enumerate(signature.operands) if placement.kind == "P"]
        if any(p.kind == "P" for i in members for p in found.placements(inputs[i])):
            yield signature.operands, f"sums later than operand {call.names[members[0]]}"
