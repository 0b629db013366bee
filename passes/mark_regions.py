"""mark_regions: what no CUDA graph can hold says why."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from fxpar.cost.capturable import scopes, why_not_capturable
from fxpar.errors import InputError, PassError
from fxpar.ir.program import Program, ScalarType, note, operands, output_types, update
from fxpar.ir.properties import Property
from fxpar.ir.regions import regions
from fxpar.layout.symbolic_sizes import names
from fxpar.manager import register_pass


@register_pass("mark_regions", requires={Property.CANONICAL}, preserves="dataflow")
def mark_regions(program: Program) -> Program:
    """Marks the operations at which CUDA graphs end, each with its reason.

    Before::

        %m = aten.amax.default(%h) : f32[]
        %scale = fxpar.item(%m) : f64[]
        %y = aten.div.Tensor(%h, %scale) : f32[b, 8]

    After::

        %m = aten.amax.default(%h) : f32[]
        %scale = fxpar.item(%m) : f64[] {uncaptured="reads a value on the host; keep it a tensor: leave item() out"}
        %y = aten.div.Tensor(%h, %scale) : f32[b, 8]

    What stands between marks in one phase is a region that one graph can hold, as large as it can be: it goes across
    layers. Numbers of sizes are in none. Where the plan names scopes, what is outside of them is marked too. It runs
    before `outline_layers`, for which a mark is part of an operation.
    """
    if regions(program):
        raise PassError("the program has calls of regions already", where="mark_regions", remedy="run it before")
    chosen = program.plan.cuda_graphs.scope
    scope_of = scopes(program) if chosen else {}
    absent = [scope for scope in chosen if scope not in scope_of.values()]
    if absent:
        there = ", ".join(sorted(set(scope_of.values()))) or "none"
        raise InputError(f"no part of the model is {absent[0]}", where="cuda_graphs.scope", remedy=f"it has: {there}")
    outside = f"is outside of the scope {', '.join(chosen)}"
    counted = {number.name for number in program.counted}
    for node in program.graph.nodes:
        if node.op != "call_function" or isinstance(note(node).type, ScalarType):
            continue
        is_outside = bool(chosen) and scope_of.get(node) not in chosen
        reason = reason_of(node, counted) or (outside if is_outside else "")
        if reason != note(node).uncaptured:
            update(node, uncaptured=reason)
    return program


def reason_of(node: fx.Node, counted: Collection[str]) -> str:
    """Returns why no CUDA graph can hold a node; empty where one can.

    Args:
        counted: names of the numbers of rows that are counted.
    """
    return why_not_capturable(node) or _of_counted_rows(node, counted)


def _of_counted_rows(node: fx.Node, counted: Collection[str]) -> str:
    """Returns why what has or reads rows that are counted is in no graph; empty for others."""
    kinds = [kind for tensor in (node, *operands(node)) for kind in output_types(tensor)] if counted else []
    if names(size for kind in kinds for size in kind.shape).isdisjoint(counted):
        return ""
    return "has as many rows as the routing decides; give experts.dispatch='static'"
