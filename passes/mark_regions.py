"""mark_regions: what no CUDA graph can hold says why."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from fxpar.cost.capturable import scopes, why_not_capturable
from fxpar.errors import InputError, PassError
from fxpar.ir.program import Program, ScalarType, note, operands, output_types, update
from fxpar.ir.properties import Property
from fxpar.ir.regions import regions
from fxpar.layout.symbolic_sizes import Size, names
from fxpar.manager import register_pass
from fxpar.ops.operator import alike, is_view

# A graph would first copy what stands outside of graphs, or launch nothing.
_PASSES_ON = "passes on what stands between graphs"


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
    layers. Numbers of sizes are in none. Views of what is marked are marked too; and between marks views of parameters,
    and casts. Where the plan names scopes, what is outside of them is marked. It runs before `outline_layers`, for
    which a mark is part of an operation.
    """
    if regions(program):
        raise PassError("the program has calls of regions already", where="mark_regions", remedy="run it before")
    chosen = program.plan.cuda_graphs.scope
    inside = {*chosen, *(("moe_router", "moe_preprocess") if "moe" in chosen else ())}
    scope_of = scopes(program) if chosen else {}
    absent = [scope for scope in chosen if scope not in scope_of.values()]
    if absent:
        there = ", ".join(sorted(set(scope_of.values()))) or "none"
        raise InputError(f"no part of the model is {absent[0]}", where="cuda_graphs.scope", remedy=f"it has: {there}")
    counted = {number.name for number in program.counted}
    nodes = [n for n in program.graph.nodes if n.op == "call_function" and not isinstance(note(n).type, ScalarType)]
    for node in nodes:
        is_outside = bool(chosen) and scope_of.get(node) not in inside
        reason = reason_of(node, counted) or (program.plan.cuda_graphs.outside if is_outside else "")
        if reason != note(node).uncaptured:
            update(node, uncaptured=reason)
    _mark_views(nodes, {program.node(parameter.node) for parameter in program.parameters})
    return program


def reason_of(node: fx.Node, counted: Collection[str]) -> str:
    """Returns why no CUDA graph can hold a node; empty where one can.

    Args:
        counted: names of the numbers of rows that are counted.
    """
    return why_not_capturable(node) or _of_counted_rows(node, counted)


def _of_counted_rows(node: fx.Node, counted: Collection[str]) -> str:
    """Returns why what has or reads rows that are counted, or their number, is in no graph; empty for others."""
    sizes: list[Size] = []
    for tensor in (node, *node.all_input_nodes) if counted else ():
        kind = note(tensor).type
        sizes += [kind.value] if isinstance(kind, ScalarType) else [n for t in output_types(tensor) for n in t.shape]
    if names(sizes).isdisjoint(counted):
        return ""
    return "has as many rows as the routing decides; give experts.dispatch='static'"


def _mark_views(nodes: Sequence[fx.Node], parameters: Collection[fx.Node]) -> None:
    """Marks views after a mark that are of what is marked; up to the next mark those of parameters, and casts, too.

    Views of what a graph computes stay in graphs, for their memory is the graphs'.
    """
    marked, waiting, follows = set[fx.Node](), list[fx.Node](), False
    for node in nodes:
        reads = operands(node)
        if note(node).uncaptured or (follows and is_view(node) and marked.issuperset(reads)):
            for view in (*waiting, node):
                update(view, uncaptured=note(view).uncaptured or _PASSES_ON)
            marked.update(waiting, [node])
            waiting, follows = [], True
        elif follows and _passes_on(node) and all(o in marked or o in parameters or o in waiting for o in reads):
            waiting.append(node)
        else:
            waiting, follows = [], False


def _passes_on(node: fx.Node) -> bool:
    return is_view(node) or alike(node.target) is torch.ops.aten._to_copy.default
