"""The exact minimum, as a mixed integer program.

Enters: options and prices. Leaves: one option for each node, of least total cost; or None where there is none.

One binary variable for each option of a node; exactly one of them is 1. For each use of a value a flow from the
placements that its producer may give to those that its user may want, whose sums are those variables. A conversion is
paid once for each value and pair of placements, however many users share it: its variable is at least each flow. In
this form the linear relaxation is integral but for few instances, so that the solver rarely has to branch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from torch import fx

from fxpar.choice.options import Option, Options, Value, value_of
from fxpar.choice.prices import Prices
from fxpar.layout import Placement
from fxpar.program import operands


@dataclass(frozen=True)
class Solution:
    """The choice and its cost in seconds, ties included."""

    chosen: Mapping[fx.Node, Option]
    cost: float


@dataclass
class _Model:
    """Rows and columns as they are collected."""

    costs: list[float] = field(default_factory=list)
    integral: list[int] = field(default_factory=list)
    rows: list[tuple[int, int, float]] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def variable(self, cost: float, integral: bool) -> int:
        self.costs.append(cost)
        self.integral.append(int(integral))
        return len(self.costs) - 1

    def row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        index = len(self.lower)
        self.rows.extend((index, column, factor) for column, factor in terms)
        self.lower.append(lower)
        self.upper.append(upper)


def solve(
    graph: fx.Graph, options: Options, prices: Prices, ends: Mapping[Value, tuple[Placement, ...]]
) -> Solution | None:
    """Chooses an option for every node.

    Args:
        ends: what values that leave the program may be.
    """
    model = _Model()
    picks: dict[fx.Node, list[int]] = {}
    for node, found in options.of.items():
        picks[node] = [model.variable(prices.node(node, option), True) for option in found]
        model.row([(column, 1.0) for column in picks[node]], 1.0, 1.0)
    conversions: dict[tuple[Value, Placement, Placement], int] = {}
    for value, wanted in _uses(graph, options, picks, ends):
        if not _connect(model, options, prices, picks, conversions, value, wanted):
            return None
    chosen = _minimum(model)
    if chosen is None:
        return None
    picked = {node: options.of[node][int(np.argmax(chosen[columns]))] for node, columns in picks.items()}
    return Solution(picked, float(np.dot(model.costs, chosen)))


_Wanted = dict[Placement, list[int] | None]


def _uses(
    graph: fx.Graph,
    options: Options,
    picks: Mapping[fx.Node, list[int]],
    ends: Mapping[Value, tuple[Placement, ...]],
) -> list[tuple[Value, _Wanted]]:
    """Every use of a value: for each placement it may be wanted as the variables of the options that want it.

    None in place of variables: any of the placements will do.
    """
    found: list[tuple[Value, _Wanted]] = []
    for node in graph.nodes:
        if node not in picks or node.op != "call_function":
            continue
        for position, operand in enumerate(operands(node)):
            wanted: _Wanted = defaultdict(list)
            for option, column in zip(options.of[node], picks[node], strict=True):
                columns = wanted[option.operands[position]]
                assert columns is not None
                columns.append(column)
            found.append((value_of(operand), wanted))
    found.extend((value, dict.fromkeys(placements)) for value, placements in ends.items())
    return found


def _connect(
    model: _Model,
    options: Options,
    prices: Prices,
    picks: Mapping[fx.Node, list[int]],
    conversions: dict[tuple[Value, Placement, Placement], int],
    value: Value,
    wanted: _Wanted,
) -> bool:
    """The flows of one use; False where nothing the value may be can become what is wanted."""
    node, index = value
    given: dict[Placement, list[int]] = defaultdict(list)
    for option, column in zip(options.of[node], picks[node], strict=True):
        given[option.outputs[index]].append(column)
    if len(given) == len(wanted) == 1 and given.keys() == wanted.keys():
        return True
    out: dict[Placement, list[int]] = defaultdict(list)
    into: dict[Placement, list[int]] = defaultdict(list)
    for source in given:
        for target in wanted:
            price = prices.conversion(value, source, target)
            if price is None:
                continue
            flow = model.variable(0.0, False)
            out[source].append(flow)
            into[target].append(flow)
            if price > 0.0:
                key = (value, source, target)
                if key not in conversions:
                    conversions[key] = model.variable(price, False)
                model.row([(conversions[key], 1.0), (flow, -1.0)], 0.0, np.inf)
    for source, columns in given.items():
        model.row([(flow, 1.0) for flow in out[source]] + [(column, -1.0) for column in columns], 0.0, 0.0)
    for target, users in wanted.items():
        if users is not None:
            model.row([(flow, 1.0) for flow in into[target]] + [(column, -1.0) for column in users], 0.0, 0.0)
    return bool(out)


def _minimum(model: _Model) -> np.ndarray | None:
    """Values of the variables at the minimum; None where there is no solution."""
    rows, columns, factors = zip(*model.rows, strict=True)
    matrix = csr_array((factors, (rows, columns)), shape=(len(model.lower), len(model.costs)))
    # Microseconds: the solver's tolerances are absolute.
    result = milp(
        np.asarray(model.costs) * 1e6,
        integrality=np.asarray(model.integral),
        bounds=Bounds(0.0, 1.0),
        constraints=LinearConstraint(matrix, np.asarray(model.lower), np.asarray(model.upper)),
        options={"mip_rel_gap": 0.0},
    )
    return None if result.x is None else np.asarray(result.x)
