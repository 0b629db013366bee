"""Parameters and gradients that travel between layers: one layer ahead of their use, and behind it.

Enters: a step with the calls of its regions written out. Leaves: the same, in which the gathers and scatters of a layer
stand outside of it, so that they travel while its neighbours are computed and all of a layer's go in one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set

from torch import fx

from fxpar.ir.operators import axes_of
from fxpar.ir.program import Program, ScalarType, has_note, note, operands, output_node, update
from fxpar.ir.step import PHASES
from fxpar.ops.collectives import all_gather, reduce_scatter


def move_between_layers(program: Program) -> dict[fx.Node, fx.Node | None]:
    """Moves gathers of parameters in front of the layer before, and scatters of their gradients behind their layer.

    Layers are calls of regions. What ranks copy into each other's memory stays, as does everything if a CUDA graph ends
    between: a collective must be waited for in the graph that has it.

    Returns:
        Each node that was moved with where it is to be waited for: a gather in front of that node, the first of its
        layer; a scatter behind that node, the last of the layer after, or where its phase ends (None).
    """
    if program.plan.shard not in ("gradients", "parameters"):
        return {}
    graphs, places = program.plan.cuda_graphs.impl, {node: i for i, node in enumerate(program.graph.nodes)}
    computed = (node for node in places if node.op == "call_function" and has_note(node))
    nodes = [node for node in computed if not isinstance(note(node).type, ScalarType)]
    if graphs == "partial" and any(note(node).uncaptured for node in nodes):
        return {}
    waits: dict[fx.Node, fx.Node | None] = {}
    returned = set(output_node(program.graph).all_input_nodes)
    for phase in PHASES[:-1]:
        of_phase = [node for node in nodes if note(node).phase == phase]
        runs = [list(run) for _, run in itertools.groupby(of_phase, key=lambda node: note(node).region)]
        layers = [run for run in runs if note(run[0]).region]
        before = of_phase[:1]  # where the gathers of a layer start
        scattered: list[fx.Node] = []
        for layer in layers:
            first = places[before[0]]
            gathers = [node for node in layer if _is_gather(node) and all(places[o] < first for o in operands(node))]
            scatters = [node for node in layer if _is_scatter(node, program.plan.sharding_axes, returned)]
            start, *_, end = [node for node in layer if node not in {*gathers, *scatters}]
            # The first layer's would otherwise be in front of what they stand in front of themselves.
            at = start if before[0] in gathers else before[0]
            for node in gathers:
                at.prepend(node)
            for node in reversed(scatters):
                end.append(node)
            waits |= dict.fromkeys(gathers, start) | dict.fromkeys(scattered, end) | dict.fromkeys(scatters)
            before, scattered = [start], scatters
    for node in waits:
        update(node, region="", eager=program.plan.compile)
    return waits


def _is_gather(node: fx.Node) -> bool:
    return node.target is all_gather and note(node).shard == "parameters" and not note(node).buffer


def _is_scatter(node: fx.Node, axes: Sequence[str], returned: Set[fx.Node]) -> bool:
    """Returns whether a node scatters the gradient of a parameter, which nothing else reads."""
    is_scatter = node.target is reduce_scatter and not note(node).buffer and set(axes_of(node)) <= set(axes)
    return is_scatter and node in returned and len(node.users) == 1
