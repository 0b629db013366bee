"""Why a value cannot be what its operation offers.

Enters: options, and one of a node that was not chosen. Leaves: the operation that has no option for it, or nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

from torch import fx

from fxpar.choice.options import Options, Value, value_of
from fxpar.choice.prices import Prices
from fxpar.layout.layout import Placement
from fxpar.program.coercions import unsettled
from fxpar.program.program import describe, operands
from fxpar.rules import Refusal, call_of, seeded

Ends = Mapping[Value, tuple[Placement, ...]]


def blocked(options: Options, prices: Prices, ends: Ends, node: fx.Node, outputs: tuple[Placement, ...]) -> str:
    """What stops a node from having these outputs; empty where every operation that uses them has an option for them.

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
    """The operations that take a value, and as which operand."""
    for user in value[0].users:
        taking = list(user.users) if user.target is operator.getitem else [user]
        for other in taking if value_of(user) == value or user.target is not operator.getitem else ():
            if other.op == "call_function":
                yield from ((other, i) for i, operand in enumerate(operands(other)) if value_of(operand) == value)


def _refusal(options: Options, user: fx.Node, position: int, placement: Placement) -> str:
    if not placement.is_shard:
        return f"it cannot be {placement}"
    signature, _ = seeded(call_of(user, options.n), position, unsettled(placement))
    return signature.reason if isinstance(signature, Refusal) else f"other operands cannot follow {placement}"
