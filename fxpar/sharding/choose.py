"""The choice on one axis: overrides become pins, the rest is free or whole, and the cheapest is taken.

Enters: a canonical program and the name of an axis. Leaves: a `Choice`, or an error that names the plan's line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NoReturn

from torch import fx

from fxpar.errors import PassError, PlanError
from fxpar.ir.grad_flow import carried, weights_of
from fxpar.ir.operators import as_parameter, canonical_placement
from fxpar.ir.program import Parameter, Program, describe, operands, tensor_type
from fxpar.ir.step import batch_rows, batch_size, is_buffer
from fxpar.layout.layout import I, Layout, Placement, shard
from fxpar.layout.symbolic_sizes import divide
from fxpar.mesh.axes import Cuts
from fxpar.rules.table import check_declared
from fxpar.sharding.batch_sharding import peel_program, place_batch
from fxpar.sharding.collapse import cheapest
from fxpar.sharding.options import AxisOptions, Option, Value, held_over, list_options, value_of
from fxpar.sharding.parameter_cuts import all_cuts, candidates
from fxpar.sharding.problem import Prices, cost_of, problem_of
from fxpar.sharding.shard_propagation import Arrived, Trail, Weights, follow

# What a plan's split lines mean for parameters: for each its placement, with role and reason.


@dataclass(frozen=True)
class Pin:
    """The placement an override gives a parameter on the tp axis, the role it plays and the line that says so.

    Attributes:
        product: the matrix product that has the role.
        products: all matrix products of the parameter, to which biases are added.
    """

    placement: Placement
    role: str
    origin: str
    product: fx.Node | None = None
    products: tuple[fx.Node, ...] = ()


Lines = Mapping[Parameter, tuple[str, str]]


def resolve_overrides(
    program: Program, lines: Lines, n: int, known: Mapping[str, Placement] | None = None
) -> dict[fx.Node, Pin]:
    """Returns the pins of all overridden parameters, by placeholder, on an axis of n ranks.

    A parameter that no operation uses stays whole.

    Args:
        known: placements that parameters have already, by name: they are kept, and parameters without one stay whole.

    Raises:
        PlanError: a line cannot be carried out, or is about unused parameters alone.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    if known:
        owned = [p for p in program.parameters if p.kind == "parameter"]
        return {nodes[p.node]: _known_pin(known.get(p.fqn, I), lines.get(p)) for p in owned}
    weights = Weights(weights_of(program.graph, [nodes[p.node] for p in program.parameters]))
    pins: dict[fx.Node, Pin] = {}
    arrived: Arrived = {}
    used = _used(lines, nodes)
    # Rows last: their cut must be that of the values which column splits send them.
    for parameter, (glob, how) in sorted(used.items(), key=lambda item: item[1][1] == "row"):
        node = nodes[parameter.node]
        if how == "replicate":
            pins[node] = Pin(I, "", f"plan: {glob} = {how}")
        elif len(parameter.type.shape) > 1:
            pins[node], seen = _pin_matrix(node, parameter, (glob, how), n, weights, arrived)
            arrived = {**seen, **arrived}
    for parameter, line in used.items():
        if line[1] != "replicate" and len(parameter.type.shape) < 2:
            pins[nodes[parameter.node]] = _pin_vector(nodes[parameter.node], parameter, line, n, weights, arrived, pins)
    return pins


def _known_pin(placement: Placement, line: tuple[str, str] | None) -> Pin:
    pinned = placement if placement.is_shard else I
    if line is None:
        return Pin(pinned, "", "as in the module's first program")
    return Pin(pinned, "" if line[1] == "replicate" else line[1], f"plan: {line[0]} = {line[1]}")


def _used(lines: Lines, nodes: Mapping[str, fx.Node]) -> Lines:
    """Returns the lines of the parameters that some operation uses."""
    used = {parameter: line for parameter, line in lines.items() if nodes[parameter.node].users}
    for parameter, (glob, how) in lines.items():
        if how != "replicate" and glob not in {other for other, _ in used.values()}:
            raise PlanError(
                f"no operation uses {parameter.fqn}", where=f"split[{glob!r}]", remedy="leave it out of the plan"
            )
    return used


def match_lines(program: Program) -> Lines:
    """Finds glob and split of each parameter: of the line that names it itself, else of that which names its module.

    Raises:
        PlanError: a glob matches nothing, two lines contradict each other, or other lines leave nothing to one.
    """
    owned = [p for p in program.parameters if p.kind == "parameter"]
    lines: dict[Parameter, tuple[list[str], list[str]]] = {p: ([], []) for p in owned}
    split: Mapping[str, str] = program.plan.split
    for glob in split:
        for parameter in owned:
            names = (parameter.fqn, *parameter.tied)
            if any(fnmatchcase(name, glob) for name in names):
                lines[parameter][0].append(glob)
            elif any(fnmatchcase(name.rpartition(".")[0], glob) for name in names):
                lines[parameter][1].append(glob)
        if not any(glob in exact or glob in modules for exact, modules in lines.values()):
            shown = ", ".join(sorted({p.fqn.rpartition(".")[0] for p in owned})[:6])
            raise PlanError(
                "matches no module and no parameter", where=f"split[{glob!r}]", remedy=f"names look like {shown}, …"
            )
    matches, consumed = {}, set()
    for parameter, (exact, modules) in lines.items():
        consumed |= set(exact or modules)
        first, *others = sorted(exact or modules) or [""]
        for other in others:
            if split[other] != split[first]:
                raise PlanError(
                    f"says {split[other]}, but split[{first!r}] says {split[first]}, of {parameter.fqn}",
                    where=f"split[{other!r}]",
                    remedy="narrow one of the globs",
                )
        if first:
            matches[parameter] = (first, split[first])
    for glob in sorted(split.keys() - consumed):
        raise PlanError(
            "says nothing: other lines name all its parameters themselves",
            where=f"split[{glob!r}]",
            remedy="remove it, or narrow the other lines",
        )
    return matches


def _pin_matrix(
    node: fx.Node, parameter: Parameter, line: tuple[str, str], n: int, weights: Weights, arrived: Arrived
) -> tuple[Pin, Arrived]:
    """Returns the dimension that has the role, cut so that nothing downstream tears it; and where the shard goes."""
    glob, how = line
    role = "column" if how == "head" else how
    dims = [d for d in range(len(tensor_type(node).shape)) if role in _roles(node, d, weights)]
    if not dims:
        raise PlanError(
            f"{parameter.fqn} is used in no {'lookup or loss' if how == 'vocab' else 'matrix product'} that it could "
            f"split by {how}",
            where=f"split[{glob!r}]",
            remedy="leave it out of the plan",
        )
    cuts = all_cuts(node, dims[0], weights, n)
    tried = [(placement, follow(node, placement, n, weights, arrived)) for placement in cuts]
    costs = [_unfitness(trail, how) for _, trail in tried]
    placement, trail = tried[costs.index(min(costs))]
    if min(costs) >= _UNFIT:
        _refuse_matrix([trail for _, trail in tried], parameter, line, n)
    return Pin(as_parameter(placement), how, f"plan: {glob} = {how}", trail.product, tuple(trail.products)), trail.seen


def _roles(node: fx.Node, dim: int, weights: Weights) -> set[str]:
    """Returns the roles of a dimension: some cut of it reaches a product; others may be torn on the way."""
    for placement in candidates(node, dim, 1, weights):
        trail = follow(node, placement, 1, weights)
        roles = {"vocab"} if trail.vocabulary else set()
        if trail.role or roles:
            return {trail.role} | roles
    return set()


_UNFIT = 1000


def _unfitness(trail: Trail, how: str) -> int:
    """Returns how many operations refuse a cut; `_UNFIT` for each reason for which it cannot be."""
    unfit = len(trail.torn) + (how == "head" and not trail.factored) + (trail.inner and bool(trail.refused))
    return len(trail.refused) + _UNFIT * unfit


def _refuse_matrix(trails: Sequence[Trail], parameter: Parameter, line: tuple[str, str], n: int) -> NoReturn:
    """Tells of the cut between heads that came farthest: what stopped it stops all the others too."""
    glob, how = line
    where = f"split[{glob!r}]"
    torn = [trail.torn[0] for trail in trails if trail.torn and not trail.inner]
    torn = torn or [trail.torn[0] for trail in trails if trail.torn]
    if not torn or not (trails[0].torn or trails[0].factored):
        raise PlanError(
            f"no view makes heads of the output of {parameter.fqn}", where=where, remedy="use 'column' instead"
        )
    order = {other: i for i, other in enumerate(torn[0][0].graph.nodes)}
    user, refusal = max(torn, key=lambda item: order[item[0]])
    raise PlanError(
        f"{parameter.fqn} cannot be split by {how} over {n} ranks: at {describe(user)} {refusal.reason}",
        where=where,
        remedy=f"choose a tp that divides it (heads, features), or split[{glob!r}] = 'replicate'",
    )


def _pin_vector(
    node: fx.Node,
    parameter: Parameter,
    line: tuple[str, str],
    n: int,
    weights: Weights,
    arrived: Arrived,
    pins: Mapping[fx.Node, Pin],
) -> Pin:
    """Pins a bias as the matrix whose product it is added to: cut alike by column, whole by row."""
    glob, how = line
    pin = _meets(node, weights, {product: pin for pin in pins.values() for product in pin.products})
    if pin is None:
        raise PlanError(
            f"{parameter.fqn} is not a bias of a split matrix, so {how} says nothing of it",
            where=f"split[{glob!r}]",
            remedy="narrow the glob",
        )
    if pin.role == "row":
        return Pin(I, "row", f"plan: {glob} = {how}")
    cuts = list(all_cuts(node, 0, weights, n))
    if tensor_type(node).shape[0] == sum(piece.length for piece in pin.placement.pieces):
        cuts.insert(0, pin.placement.at(0))
    trails = [follow(node, placement, n, weights, arrived) for placement in cuts]
    # What refuses the sum, further on, refuses the matrix.
    costs = [sum(not trail.weights.isdisjoint(operands(user)) for user, _ in trail.refused) for trail in trails]
    return Pin(as_parameter(cuts[costs.index(min(costs))]), pin.role, f"plan: {glob} = {how}")


def _meets(node: fx.Node, weights: Weights, products: Mapping[fx.Node, Pin]) -> Pin | None:
    """Returns the pin of the first product that meets the vector, or a part or view of it."""
    pending = [node]
    for current in pending:
        for user in current.users:
            pin = next((products[other] for other in operands(user) if other in products and other != current), None)
            if pin is not None:
                return pin
            if user in weights and user not in pending:
                pending.append(user)
    return None


@dataclass(frozen=True)
class Choice:
    """What was chosen on an axis, and from what.

    Attributes:
        options: what each node may be.
        prices: what that costs.
        pins: what the plan's lines decide.
        ends: what values that leave the program may be.
        solution: the cheapest choice.
    """

    options: AxisOptions
    prices: Prices
    pins: Mapping[fx.Node, Pin]
    ends: Mapping[Value, tuple[Placement, ...]]
    solution: Solution

    @property
    def chosen(self) -> Mapping[fx.Node, Option]:
        """Returns the option of each node."""
        return self.solution.chosen

    def without(self, graph: fx.Graph, node: fx.Node) -> Solution | None:
        """Returns the cheapest choice in which a node is something else; None where it cannot be."""
        mine = self.chosen[node].outputs
        others = tuple(option for option in self.options.of[node] if option.outputs != mine)
        if not others:
            return None
        saved = self.options.of[node]
        # In place and put back: options of a deep model are large, and explain asks for one node.
        self.options.of[node] = others
        try:
            return solve(graph, self.options, self.prices, self.ends)
        finally:
            self.options.of[node] = saved


def choose(program: Program, axis: str, lines: Lines, layouts: Mapping[str, Layout]) -> Choice:
    """Returns the cheapest choice on an axis.

    Args:
        lines: the plan's lines by parameter.
        layouts: those that parameters have already, by name; they are taken.

    Raises:
        PlanError: a line cannot be carried out.
    """
    n = program.axes[axis]
    known = {name: layout.on(axis) for name, layout in layouts.items()}
    pins = resolve_overrides(program, lines, n, known)
    pinned = {node: pin.placement for node, pin in pins.items()}
    for node, dim in held_over(program, axis).items():
        pinned[node] = canonical_placement(shard(dim, tensor_type(node).shape[dim]), carried(program)[node][0])
    options = list_options(program, n, carried(program), pinned, is_free=not layouts, axis=axis)
    prices, ends = Prices(program, options, program.plan.cost.on([axis])), _ends(program, options)
    solution = solve(program.graph, options, prices, ends)
    if solution is None:
        _refuse(program, options, pins)
    return Choice(options, prices, pins, ends, solution)


def _ends(program: Program, options: AxisOptions) -> dict[Value, tuple[Placement, ...]]:
    """Returns how values may end: the loss and buffers whole, with the gradient on every rank; others as shards too."""
    ends: dict[Value, tuple[Placement, ...]] = {}
    for name, node in program.output_nodes().items():
        value = value_of(node)
        whole = canonical_placement(I, options.carries(value))
        shards = [p for p in options.placements(value) if p.is_shard and not p.is_shared]
        # Shared blocks are no end: a DTensor has no placement for what several ranks hold of a dimension.
        allowed = (whole,) if name == program.loss or is_buffer(name) else (whole, *shards)
        ends[value] = min(ends.get(value, allowed), allowed, key=len)
    return ends


def _refuse(program: Program, options: AxisOptions, pins: Mapping[fx.Node, Pin]) -> NoReturn:
    """Names the plan line that cuts what an operation needs whole."""
    for node in program.graph.nodes:
        if node.op != "call_function" or node not in options.of:
            continue
        for position, operand in enumerate(operands(node)):
            value = value_of(operand)
            offered = options.placements(value)
            needed = {option.operands[position] for option in options.of[node]}
            if value[0] in options.weights and all(p.is_shard for p in offered) and not needed.intersection(offered):
                raise PlanError(
                    f"{describe(node)} cannot work with a part of %{operand.name}, which the plan cuts",
                    where=_pin_of(value[0], pins).origin,
                    remedy="replicate that parameter",
                )
    raise PlanError(
        "no choice of layouts satisfies all lines at once",
        where="split",
        remedy="remove lines until one is left that cannot be carried out",
    )


def _pin_of(weight: fx.Node, pins: Mapping[fx.Node, Pin]) -> Pin:
    """Returns the pin of the parameter that a weight is made from."""
    pending = [weight]
    while pending[0] not in pins:
        pending = [*operands(pending[0]), *pending[1:]]
    return pins[pending[0]]


@dataclass(frozen=True)
class Solution:
    """The choice and its cost in seconds, ties included."""

    chosen: Mapping[fx.Node, Option]
    cost: float


def solve(
    graph: fx.Graph, options: AxisOptions, prices: Prices, ends: Mapping[Value, tuple[Placement, ...]]
) -> Solution | None:
    """Chooses an option for every node. Layers that pose the same problem are solved once.

    Args:
        ends: what values that leave the program may be.
    """
    nodes, problem = problem_of(graph, options, prices, ends)
    picks = cheapest(problem)
    if picks is None:
        return None
    chosen = {node: options.of[node][pick] for node, pick in zip(nodes, picks, strict=True)}
    return Solution({node: chosen[node] for node in options.of}, cost_of(problem, picks))


# The choice on all axes, from the outermost: the batch's follow from the inputs, the features' are solved.


@dataclass(frozen=True)
class MultiAxisChoice:
    """What was decided.

    Attributes:
        options: by axis, what each node is.
        choices: by solved axis, what was chosen from what, on `inner`.
        inner: the program as solved axes see it. Its nodes have the names of the program's.
    """

    options: Mapping[str, Mapping[fx.Node, Option]]
    choices: Mapping[str, Choice]
    inner: Program


def place(program: Program, layouts: Mapping[str, Layout]) -> MultiAxisChoice:
    """Places the program on every axis.

    Args:
        layouts: those that parameters have already, by name; they are taken.

    Raises:
        PassError: a size that ranks share out is not divided.
        PlanError: a line of the plan cannot be carried out.
        LayoutError: an operation mixes rows of the batch.
    """
    plan, inner = program.plan, program
    options: dict[str, dict[fx.Node, Option]] = {}
    if not layouts:  # a further program of a module may lack an operator, in evaluation say
        check_declared(program)
    for axis in plan.axes_for(Cuts.BATCH):
        rows = batch_size(inner)
        if divide(rows, plan.axes[axis]) is None:
            raise PassError(f"no pass has divided the batch {rows}", where="annotate", remedy="run divide_batch before")
        placed = place_batch(inner, axis, batch_rows(inner, rows))
        options[axis] = _of(program, placed)
        inner = peel_program(inner, axis, placed)
    lines = match_lines(inner)
    choices = {axis: choose(inner, axis, lines, layouts) for axis in plan.axes_for(Cuts.FEATURES)}
    options |= {axis: _of(program, choice.chosen) for axis, choice in choices.items()}
    return MultiAxisChoice(options, choices, inner)


def _of(program: Program, placed: Mapping[fx.Node, Option]) -> dict[fx.Node, Option]:
    """Returns the options of the program's own nodes: peeling adds some, and copies all."""
    named = {node.name: option for node, option in placed.items()}
    return {node: named[node.name] for node in program.graph.nodes if node.name in named}
