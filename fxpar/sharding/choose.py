"""The choice on one axis: overrides become pins, the rest is free or whole, and the cheapest is taken.

Enters: a canonical program and the name of an axis. Leaves: a `Choice`, or an error that names the plan's line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from torch import fx

from fxpar.errors import PassError, PlanError
from fxpar.ir.grad_flow import carried
from fxpar.ir.operators import canonical_placement
from fxpar.ir.program import Program, describe, operands, tensor_type
from fxpar.ir.step import batch_rows, batch_size, is_buffer
from fxpar.layout.layout import I, Layout, Placement, shard
from fxpar.layout.symbolic_sizes import divide
from fxpar.mesh.axes import Cuts
from fxpar.rules.table import check_declared
from fxpar.sharding.batch_sharding import peel_program, place_batch
from fxpar.sharding.collapse import cheapest
from fxpar.sharding.options import AxisOptions, Option, Value, held_over, list_options, value_of
from fxpar.sharding.overrides import Lines, Pin, match_lines, resolve_overrides
from fxpar.sharding.problem import Prices, cost_of, problem_of


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
        """The option of each node."""
        return self.solution.chosen

    def without(self, graph: fx.Graph, node: fx.Node) -> Solution | None:
        """The cheapest choice in which a node is something else; None where it cannot be."""
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
    """The cheapest choice on an axis.

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
    """The loss ends whole, with its gradient on every rank, and so do buffers; other outputs may stay shards."""
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
    """The pin of the parameter that a weight is made from."""
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
    """The options of the program's own nodes: peeling adds some, and copies all."""
    named = {node.name: option for node, option in placed.items()}
    return {node: named[node.name] for node in program.graph.nodes if node.name in named}
