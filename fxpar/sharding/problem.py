"""The choice as numbers: what each node's options cost, and what conversions between them cost.

Enters: options and prices. Leaves: a `Problem`, in which nodes are positions and placements are numbers, so that equal
layers make equal problems; and its exact minimum, as a mixed integer program.

One binary variable for each option of a node; exactly one of them is 1. For each use of a value a flow from the
placements that its producer may give to those that its user may want, whose sums are those variables. A conversion is
paid once for each value and pair of placements, however many users share it: its variable is at least each flow. In
this form the linear relaxation is integral but for few instances, so that the solver rarely has to branch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from torch import fx

from fxpar.layout.layout import Placement
from fxpar.sharding.options import AxisOptions, Option, Value, value_of
from fxpar.sharding.prices import Prices

# How far from a whole number the solver leaves a variable that is one.
_INTEGRAL = 1e-6

# A value: the position of its node, and which of its outputs it is.
Place = tuple[int, int]
# A conversion of a value, from one placement to another.
Conversion = tuple[Place, int, int]


@dataclass(frozen=True)
class Use:
    """One use of a value.

    Attributes:
        user: position of the node that uses it; None where the value leaves the program.
        value: what is used.
        wanted: for each placement in which it may be wanted the user's options that want it; none where it leaves: any
            of the placements will do then.
        prices: the conversions that are offered: from, to, seconds.
    """

    user: int | None
    value: Place
    wanted: tuple[tuple[int, tuple[int, ...]], ...]
    prices: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class Problem:
    """Options by number; their order is that of `AxisOptions.of`.

    Attributes:
        costs: of each option of each node.
        outputs: placements of the outputs of each option of each node.
        uses: in the order of their users.
    """

    costs: tuple[tuple[float, ...], ...]
    outputs: tuple[tuple[tuple[int, ...], ...], ...]
    uses: tuple[Use, ...]

    def placements(self, value: Place) -> tuple[int, ...]:
        """Returns what a value may be."""
        return tuple(dict.fromkeys(option[value[1]] for option in self.outputs[value[0]]))


@dataclass(frozen=True)
class Given:
    """What is decided already.

    Attributes:
        allowed: the options of a node that are left.
        paid: conversions that cost nothing more.
        barred: conversions that are not to be used.
    """

    allowed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    paid: Set[Conversion] = frozenset()
    barred: Set[Conversion] = frozenset()


def problem_of(
    graph: fx.Graph, options: AxisOptions, prices: Prices, ends: Mapping[Value, tuple[Placement, ...]]
) -> tuple[list[fx.Node], Problem]:
    """Returns the nodes in the order of their positions, and the problem.

    Parameters and inputs stand right before their first user, so that what belongs together stands together.
    """
    nodes = _ordered(graph, options)
    position = {node: i for i, node in enumerate(nodes)}
    writer = _Writer(options, prices)
    uses = []
    for node in nodes:
        for index, operand in enumerate(options.weights.operands(node) if node.op == "call_function" else ()):
            value = value_of(operand)
            uses.append(Use(position[node], (position[value[0]], value[1]), *writer.use(node, index, value)))
    for value, placements in ends.items():
        targets = {placement: list[int]() for placement in placements}
        uses.append(Use(None, (position[value[0]], value[1]), *writer.written(value, targets)))
    costs = tuple(writer.costs(node) for node in nodes)
    outputs = tuple(writer.outputs(options.of[node]) for node in nodes)
    return nodes, Problem(costs, outputs, tuple(uses))


# What a `Use` says besides its place: placements that are wanted, and prices.
_Wanted = tuple[tuple[tuple[int, tuple[int, ...]], ...], tuple[tuple[int, int, float], ...]]


class _Writer:
    """Numbers and prices of options; what equal layers ask again is answered once.

    Options are told apart as objects: equal layers share them, and while a problem is written they stay.
    """

    def __init__(self, options: AxisOptions, prices: Prices) -> None:
        self.options, self.prices = options, prices
        self._numbers: dict[Placement, int] = {}
        self._conversions: dict[tuple[Hashable, Placement, Placement], float | None] = {}
        self._uses: dict[Hashable, _Wanted] = {}
        self._costs: dict[Hashable, tuple[float, ...]] = {}
        self._outputs: dict[int, tuple[tuple[int, ...], ...]] = {}

    def _number(self, placement: Placement) -> int:
        return self._numbers.setdefault(placement, len(self._numbers))

    def use(self, node: fx.Node, index: int, value: Value) -> _Wanted:
        """Returns what a node's options want of its operand `index`."""
        of = self.options.of
        key = self.prices.told(value), id(of[value[0]]), value[1], id(of[node]), index
        if key not in self._uses:
            targets: dict[Placement, list[int]] = defaultdict(list)
            for i, option in enumerate(of[node]):
                targets[option.operands[index]].append(i)
            self._uses[key] = self.written(value, targets)
        return self._uses[key]

    def written(self, value: Value, targets: Mapping[Placement, list[int]]) -> _Wanted:
        """Returns what is wanted of a value: for each placement, the options that want it."""
        offered, traits = [], self.prices.told(value)
        for source in self.options.placements(value):
            for target in targets:
                key = (traits, source, target)
                if key not in self._conversions:
                    self._conversions[key] = self.prices.conversion(value, source, target)
                price = self._conversions[key]
                if price is not None:
                    offered.append((self._number(source), self._number(target), price))
        return tuple((self._number(placement), tuple(users)) for placement, users in targets.items()), tuple(offered)

    def costs(self, node: fx.Node) -> tuple[float, ...]:
        """Returns seconds of each option of a node."""
        options = self.options.of[node]
        key = self.prices.told_of(node), id(options)
        if key not in self._costs:
            self._costs[key] = tuple(self.prices.node(node, option) for option in options)
        return self._costs[key]

    def outputs(self, options: tuple[Option, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns placements of the outputs of each option."""
        if id(options) not in self._outputs:
            self._outputs[id(options)] = tuple(tuple(map(self._number, option.outputs)) for option in options)
        return self._outputs[id(options)]


def _ordered(graph: fx.Graph, options: AxisOptions) -> list[fx.Node]:
    ordered: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node in options.of:
            ordered.update((source, None) for source, _ in map(value_of, options.weights.operands(node)))
            ordered[node] = None
    return [*ordered, *(node for node in options.of if node not in ordered)]


def cost_of(problem: Problem, picks: Sequence[int], constraints: Given | None = None) -> float:
    """Returns seconds of a choice of one option for each node."""
    constraints = constraints or Given()
    total = sum(costs[pick] for costs, pick in zip(problem.costs, picks, strict=True))
    paid = set(constraints.paid)
    for use in sorted(problem.uses, key=lambda use: use.user is None):
        source = problem.outputs[use.value[0]][picks[use.value[0]]][use.value[1]]
        offered = {
            target: 0.0 if (use.value, source, target) in paid else price
            for start, target, price in use.prices
            if start == source and (use.value, source, target) not in constraints.barred
        }
        targets = [t for t, users in use.wanted if use.user is None or picks[use.user] in users]
        target = min((t for t in targets if t in offered), key=offered.__getitem__)
        total += offered[target]
        paid.add((use.value, source, target))
    return total


@dataclass
class _MilpBuilder:
    """Rows and columns as they are collected."""

    costs: list[float] = field(default_factory=list)
    integral: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def variable(self, cost: float, integral: bool) -> int:
        self.costs.append(cost)
        self.integral.append(int(integral))
        return len(self.costs) - 1

    def row(self, ones: Sequence[int], others: Sequence[int], lower: float, upper: float) -> None:
        """Bounds the sum of some variables less that of others."""
        self.rows += [len(self.lower)] * (len(ones) + len(others))
        self.columns += [*ones, *others]
        self.factors += [1.0] * len(ones) + [-1.0] * len(others)
        self.lower.append(lower)
        self.upper.append(upper)


def minimum(problem: Problem, constraints: Given | None = None) -> tuple[int, ...] | None:
    """Returns the cheapest option of each node; None where there is no choice."""
    constraints, model = constraints or Given(), _MilpBuilder()
    picks: list[dict[int, int]] = []
    for node, costs in enumerate(problem.costs):
        left = constraints.allowed.get(node, range(len(costs)))
        picks.append({option: model.variable(costs[option], True) for option in left})
        model.row([*picks[node].values()], [], 1.0, 1.0)
    conversions: dict[Conversion, int] = {}
    for use in problem.uses:
        if not _connect(model, problem, constraints, picks, conversions, use):
            return None
    chosen = _solved(model)
    if chosen is None:
        return None
    # The largest and not the one that equals 1: a solver's 1 may be 0.9999999.
    return tuple(max(columns, key=lambda option: chosen[columns[option]]) for columns in picks)


def _connect(
    model: _MilpBuilder,
    problem: Problem,
    constraints: Given,
    picks: Sequence[Mapping[int, int]],
    conversions: dict[Conversion, int],
    use: Use,
) -> bool:
    """Adds the flows of one use; returns False where the value can become nothing that is wanted."""
    node, index = use.value
    makers: dict[int, list[int]] = defaultdict(list)
    for option, column in picks[node].items():
        makers[problem.outputs[node][option][index]].append(column)
    users: dict[int, list[int] | None] = {}
    for target, options in use.wanted:
        columns = None if use.user is None else [picks[use.user][o] for o in options if o in picks[use.user]]
        if columns is None or columns:
            users[target] = columns
    # The common case needs no flow at all, which keeps the programs of segments small.
    if len(makers) == len(users) == 1 and makers.keys() == users.keys():
        return True
    out: dict[int, list[int]] = defaultdict(list)
    into: dict[int, list[int]] = defaultdict(list)
    for source, target, price in use.prices:
        key = (use.value, source, target)
        if source not in makers or target not in users or key in constraints.barred:
            continue
        flow = model.variable(0.0, False)
        out[source].append(flow)
        into[target].append(flow)
        # One variable for all users: at the minimum it is the largest of their flows, 1 as soon as one needs it.
        if price > 0.0 and key not in constraints.paid:
            if key not in conversions:
                conversions[key] = model.variable(price, False)
            model.row([conversions[key]], [flow], 0.0, np.inf)
    for source, columns in makers.items():
        model.row(out[source], columns, 0.0, 0.0)
    for target, wanting in users.items():
        if wanting is not None:
            model.row(into[target], wanting, 0.0, 0.0)
    return bool(out)


def _solved(model: _MilpBuilder) -> np.ndarray | None:
    """Returns values of the variables at the minimum; None where there is no solution."""
    shape = (len(model.lower), len(model.costs))
    matrix = csr_array((model.factors, (model.rows, model.columns)), shape=shape)
    # Microseconds: the solver's tolerances are absolute.
    costs, integral = np.asarray(model.costs) * 1e6, np.asarray(model.integral)
    constraints = LinearConstraint(matrix, np.asarray(model.lower), np.asarray(model.upper))
    solution: np.ndarray | None = None
    # A relaxation whose solution is integral is solved in a fraction of the time and is the minimum.
    for integrality in (np.zeros_like(integral), integral):
        result = milp(
            costs,
            integrality=integrality,
            bounds=Bounds(0.0, 1.0),
            constraints=constraints,
            options={"mip_rel_gap": 0.0},
        )
        solution = None if result.x is None else np.asarray(result.x)
        if solution is None or np.all(np.abs(solution - np.round(solution))[integral > 0] < _INTEGRAL):
            break
    return solution
