"""Why a value is laid out as it is.

Enters: a canonical program, the choice on an axis and a node. Leaves: an `Explanation`: what it costs, what the
runner-up would cost, and the chain of reasons from the node back to what decided it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from fxpar.ir.operators import CHEAPEST, ONLY, pending
from fxpar.ir.program import Program, describe, operands
from fxpar.layout.layout import Placement
from fxpar.rules import Refusal, call_of, seeded
from fxpar.sharding.choose import Choice
from fxpar.sharding.options import AxisOptions, Option, Value, value_of
from fxpar.sharding.problem import Prices


@dataclass(frozen=True)
class Explanation:
    """Times are seconds of a training step at the reference sizes of `fxpar.sharding.problem`.

    Attributes:
        node: name and place.
        placement: what was chosen.
        reason: why: a plan's line, the cost, or that there was nothing to choose.
        terms: what the node and the conversions of its operands cost.
        compared: what else the operation offers. The whole program was solved again with these alone.
        runner_up: which of them the cheapest such program has; None where there is none, for `reason` then says why.
        extra: by how much the whole step would be longer then.
        chain: the nodes after it whose layouts it follows, nearest first, with their placements.
    """

    node: str
    placement: Placement
    reason: str
    terms: Mapping[str, float]
    compared: tuple[Placement, ...]
    runner_up: Placement | None
    extra: float
    chain: tuple[tuple[str, str], ...]


def explain(program: Program, choice: Choice, node: fx.Node) -> Explanation:
    """Explains the layout of a node's first output."""
    maker, index = value_of(node)
    option = choice.chosen[maker]
    terms = dict(choice.prices.terms(maker, option))
    for operand, target in zip(operands(maker) if maker.op == "call_function" else (), option.operands, strict=False):
        source = choice.chosen[value_of(operand)[0]].outputs[value_of(operand)[1]]
        price = choice.prices.conversion(value_of(operand), source, target)
        if source != target and price:
            terms[f"%{operand.name}: {source} to {target}"] = price
    other = choice.without(program.graph, maker)
    reason = reason_of(choice, maker)
    if other is None and reason == CHEAPEST:
        reason = f"{ONLY}: all else would contradict the layouts of other values"
    return Explanation(
        describe(node),
        option.outputs[index],
        reason,
        terms,
        tuple(dict.fromkeys(outputs[index] for outputs in compared(choice, maker))),
        other.chosen[maker].outputs[index] if other is not None else None,
        other.cost - choice.solution.cost if other is not None else 0.0,
        tuple(_chain(choice, maker)),
    )


def followed(program: Program, axis: str, node: fx.Node, placed: Mapping[fx.Node, Option]) -> Explanation:
    """Explains the layout of a node's first output on an axis where nothing is chosen."""
    maker, index = value_of(node)
    placement = placed[maker].outputs[index]
    reason = f"{axis} shares out the batch: rows are cut, parameters are whole"
    if axis in program.plan.sharding_axes and any(p.node == maker.name for p in program.sharded_parameters):
        reason += (
            f" where they are read; shard={program.plan.shard} cuts them over {axis} at rest, where its ranks divide"
        )
    if maker.name in {parameter.node for parameter in program.parameters} and placement.is_shard:
        reason = f"{axis} shares out the batch and the experts: a rank holds the parameters of its own"
    return Explanation(describe(node), placement, reason, {}, (), None, 0.0, ())


def reason_of(choice: Choice, node: fx.Node) -> str:
    """Returns why a node has its option, in a few words."""
    pin, option = choice.pins.get(node), choice.chosen[node]
    if pin is not None:
        return pin.origin
    if node in choice.options.uncut:
        return f"no cut fits: {choice.options.uncut[node]}"
    if option.why:
        return option.why
    others = compared(choice, node)
    stops = [blocked(choice.options, choice.prices, choice.ends, node, outputs) for outputs in others]
    if not all(stops):
        return CHEAPEST
    return f"{ONLY}: {stops[0]}" if stops else ONLY


def compared(choice: Choice, node: fx.Node) -> list[tuple[Placement, ...]]:
    """Returns what else the outputs of a node may be, by its own operation."""
    mine = choice.chosen[node].outputs
    return list(dict.fromkeys(o.outputs for o in choice.options.of[node] if o.outputs != mine))


def _chain(choice: Choice, node: fx.Node) -> list[tuple[str, str]]:
    """Goes from operand to operand as long as the node's option follows one, to where a shard or a sum starts."""
    chain = []
    while node.op == "call_function":
        placements = choice.chosen[node].operands
        split = [i for i, placement in enumerate(placements) if placement.kind in "SP"]
        if not split:
            break
        # A weight ends the chain: its cut was chosen, the rest followed.
        first = next((i for i in split if value_of(operands(node)[i])[0] in choice.options.weights), split[0])
        node = value_of(operands(node)[first])[0]
        chain.append((describe(node), str(choice.chosen[node].outputs[0])))
    return chain


Ends = Mapping[Value, tuple[Placement, ...]]


def blocked(options: AxisOptions, prices: Prices, ends: Ends, node: fx.Node, outputs: tuple[Placement, ...]) -> str:
    """Returns what stops a node from having these outputs; empty where each user has an option for them.

    Each operation is asked for itself: that all of them agree, the solver alone can tell.
    """
    for index, placement in enumerate(outputs):
        value = (node, index)
        if value in ends and not any(_becomes(prices, value, placement, end) for end in ends[value]):
            return f"it leaves the program, and cannot as {placement}"
        for user, position in _uses(value):
            fitting = [o for o in options.of[user] if _becomes(prices, value, placement, o.operands[position])]
            if not fitting:
                return f"at {describe(user)} {_refusal(options, user, position, placement)}"
            if user in options.weights:
                stops = [blocked(options, prices, ends, user, option.outputs) for option in fitting]
                if all(stops):
                    return stops[-1]
    return ""


def _becomes(prices: Prices, value: Value, source: Placement, target: Placement) -> bool:
    return source == target or prices.conversion(value, source, target) is not None


def _uses(value: Value) -> Iterator[tuple[fx.Node, int]]:
    """Yields the operations that take a value, and as which operand."""
    for user in value[0].users:
        taking = list(user.users) if user.target is operator.getitem else [user]
        for other in taking if value_of(user) == value or user.target is not operator.getitem else ():
            if other.op == "call_function":
                yield from ((other, i) for i, operand in enumerate(operands(other)) if value_of(operand) == value)


def _refusal(options: AxisOptions, user: fx.Node, position: int, placement: Placement) -> str:
    if not placement.is_shard:
        return f"it cannot be {placement}"
    signature, _ = seeded(call_of(user, options.n), position, pending(placement))
    return signature.reason if isinstance(signature, Refusal) else f"other operands cannot follow {placement}"
