"""The choice as numbers: what each node's options cost, and what conversions between them cost.

Enters: options. Leaves: their `Prices`, in seconds of a training step; a `Problem`, in which nodes are positions and
placements are numbers, so that equal layers make equal problems; and its exact minimum, as a mixed integer program.

One binary variable for each option of a node; exactly one of them is 1. For each use of a value a flow from the
placements that its producer may give to those that its user may want, whose sums are those variables. A conversion is
paid once for each value and pair of placements, however many users share it: its variable is at least each flow. In
this form the linear relaxation is integral but for few instances, so that the solver rarely has to branch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from torch import fx

from fxpar.cost.flops import matmul_flops
from fxpar.cost.seconds import access_seconds, collective_seconds, materialised, optimizer_seconds, product_seconds
from fxpar.ir.operators import computed_fraction, held_fraction, shared_fraction
from fxpar.ir.program import Program, TensorType, output_types
from fxpar.ir.step import held_type
from fxpar.ir.symbols import with_counted
from fxpar.layout.layout import I, Placement
from fxpar.layout.symbolic_sizes import evaluate, names, product
from fxpar.ops.collectives import coercion
from fxpar.plan.cost import Cost
from fxpar.sharding.options import AxisOptions, Option, Value, value_of

_BATCH, _SEQUENCE, _WIDTH = 8, 1024, 4096

# Ties are broken in favour of less work that is the same on every rank: f late, g early, residual streams invariant.
TIE = {"I": 0.0, "S": 0.0, "R": 1e-9, "P": 4e-9}
TIE_CONVERSION = 1e-9
# A parameter is converted rather than what is made from it, so that the gradients of many are summed together.
TIE_MADE = 2e-8
# Where ranks may share out tokens, a stream that is cut over them is preferred to one that is not.
TIE_WHOLE = 2e-9


@dataclass
class Prices:
    """Prices on one axis.

    Attributes:
        width: what the commonest width is taken for.
    """

    program: Program
    options: AxisOptions
    cost: Cost
    width: int = _WIDTH

    def __post_init__(self) -> None:
        self._symbols = reference_sizes(self.program)
        self._stored = materialised(self.program, self.options.products, self.options.weights)
        self._scale = self.width / common_width(self.program)
        self._flops = {
            node: evaluate(count, self._symbols) * self._scale**2 for node, count in matmul_flops(self.program)
        }

    def bytes_of(self, value: Value) -> float:
        """Returns the size of the whole value at reference sizes."""
        node, index = value
        kind = output_types(node)[index]
        matrix = node in self.options.weights and is_matrix(kind)
        count = evaluate(product(kind.shape), self._symbols)
        widths = 2 if matrix else 1 if kind.shape else 0
        return float(count) * kind.dtype.itemsize * self._scale**widths

    def terms(self, node: fx.Node, option: Option) -> Mapping[str, float]:
        """Returns seconds of a node under an option, by what takes them."""
        n = self.options.n
        terms = {}
        if node in self._flops:
            part = computed_fraction(option.operands, n)
            terms["matrix product"] = product_seconds(self._flops[node], part, self.cost)
        if node in self._stored:
            terms["memory"] = sum(
                self._accesses((node, i), placement)
                for i, (placement, carries) in enumerate(zip(option.outputs, self.options.flags[node], strict=True))
                if carries
            )
        if node.op == "placeholder" and self.options.flags[node][0] and len(output_types(node)[0].shape) > 1:
            kind = output_types(node)[0]
            count = self.bytes_of((node, 0)) / kind.dtype.itemsize
            terms["optimizer"] = optimizer_seconds(count, held_fraction(option.outputs[0], n), self.cost)
        return terms

    def _accesses(self, value: Value, placement: Placement) -> float:
        """Returns seconds in which an activation is stored and read, and its gradient.

        A cut over tokens is the means to save them. One over features saves as much where matrices make it, but is no
        reason to choose it: streams would be cut and gathered again for every norm.
        """
        share = 1 / self.options.n if self.options.is_token_cut(value, placement) else 1.0
        return access_seconds(self.bytes_of(value), share, self.cost)

    def node(self, node: fx.Node, option: Option) -> float:
        """Returns seconds of a node under an option, ties included."""
        seconds = sum(self.terms(node, option).values())
        for index, (placement, carries) in enumerate(zip(option.outputs, self.options.flags[node], strict=True)):
            if carries:
                seconds += TIE[placement.kind]
                if placement == I and self.options.token_cut((node, index)):
                    seconds += TIE_WHOLE
        return seconds

    def told_of(self, node: fx.Node) -> Hashable:
        """Returns all of a node that the prices of its options depend on."""
        is_weight, is_placed = node in self.options.weights, node.op == "placeholder"
        flops, flags = self._flops.get(node), self.options.flags[node]
        return output_types(node), flags, flops, node in self._stored, is_weight, is_placed

    def told(self, value: Value) -> Hashable:
        """Returns all of a value that the price of its conversions depends on."""
        node, index = value
        origin = node in self.options.weights, node in self.options.tables, node.op == "placeholder"
        return output_types(node)[index], self.options.carries(value), origin, value in self.options.demanded

    def conversion(self, value: Value, source: Placement, target: Placement) -> float | None:
        """Returns seconds of a conversion, forward and backward; None where it is not offered.

        Not offered: gathering what a parameter's shards make, or cutting a whole matrix (both belong to sharded
        optimizers); and, but where the program itself demands a cut, shards cut anew and partial sums that become
        shards of anything but tokens.
        """
        carries = self.options.carries(value)
        if source == target:
            return 0.0
        row = coercion(source, target)
        is_asked = value in self.options.demanded
        if row is None or (row.forward and source.is_shard and target.is_shard and not is_asked):
            return None
        if source.kind == "P" and target.is_shard and not is_asked and not self.options.is_token_cut(value, target):
            return None
        whole_matrix = target.is_shard and carries and is_matrix(output_types(value[0])[value[1]])
        is_held = value[0] in self.options.weights or value[0] in self.options.tables
        if is_held and (source.is_shard or whole_matrix) and not source.reduced:
            return None
        # A gradient travels by the conjugate, so a choice that is cheap forward may cost its price again backward.
        collectives = [row.forward] if not carries else [row.forward, row.backward]
        n, size = self.options.n, self.bytes_of(value)
        # Gradients of parameters are summed many at once.
        latency = 0.0 if value[0] in self.options.weights else self.cost.latency
        if row.operator.sums_gradients and value[0] in self.options.weights:
            kind = output_types(value[0])[value[1]]
            size *= held_type(self.program.plan, kind).dtype.itemsize / kind.dtype.itemsize
        if source.reduced:
            part, total = shared_fraction(source)
            size *= part / total
        # Free conversions cost a tie, or one could be made there and back and the choice would not be unique.
        seconds = TIE_CONVERSION
        if value[0] in self.options.weights and value[0].op != "placeholder":
            seconds += TIE_MADE
        if row.forward:  # what it yields is stored as other activations are
            seconds += self._accesses(value, target)
        for collective in filter(None, collectives):
            seconds += collective_seconds(collective, n, size, self.cost, latency)
        return seconds


def is_matrix(kind: TensorType) -> bool:
    """Returns whether a weight has two dimensions or more; those of size 1 do not count."""
    return len([size for size in kind.shape if size != 1]) > 1


def reference_sizes(program: Program) -> dict[str, int]:
    """Returns values of the symbols at which layouts are compared: the first is a batch, others are lengths."""
    sizes = {}
    for index, symbol in enumerate(program.symbols):
        # Fixed, and not the example's: a module's layouts must not depend on the batch that it was made with.
        size = _BATCH if index == 0 and len(program.symbols) > 1 else _SEQUENCE
        sizes[symbol.name] = -(-size // symbol.multiple)
    return with_counted(program.counted, sizes)


def common_width(program: Program) -> int:
    """Returns the commonest size of a dimension of the parameters with two or more."""
    counts: Counter[int] = Counter()
    for parameter in program.parameters:
        shape = parameter.type.shape
        if parameter.kind == "parameter" and len(shape) > 1 and not names(shape):
            counts.update(int(size) for size in shape)
    return max(counts, key=lambda size: (counts[size], size)) if counts else _WIDTH


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
