"""recompute: what the forward computed is computed again in the backward, and not kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from fxpar.layout.layout import Layout
from fxpar.manager import register_pass
from fxpar.ops.coercions import IN_BACKWARD
from fxpar.program.coercions import in_backward
from fxpar.program.program import Program, note, operands, output_layouts, set_note
from fxpar.program.properties import Property
from fxpar.program.step import BACKWARD, RECOMPUTE, is_forward
from fxpar.program.weights import weights_of


@register_pass("recompute", requires={Property.STEP}, preserves="dataflow")
def recompute(program: Program) -> Program:
    """Regions that the author checkpointed are computed again where the backward needs them.

    Before::

        %h = aten.tanh.default(%x) : f32[b, 8] tp:I {recompute=1}
        %g = aten.tanh_backward.default(%y, %h) : f32[b, 8] tp:R {recompute=1, phase=backward}

    After::

        %h = aten.tanh.default(%x) : f32[b, 8] tp:I {recompute=1}
        %h_again = aten.tanh.default(%x) : f32[b, 8] tp:R {origin="recompute", recompute=1, phase=backward}
        %g = aten.tanh_backward.default(%y, %h_again) : f32[b, 8] tp:R {recompute=1, phase=backward}

    Terms: a *region* is what the author put into one checkpoint; backward nodes belong to the region of what they
    differentiate. A region keeps what enters it; what leaves it is kept where something outside reads it. Draws draw
    the same bits again; collectives inside of a region run again. Values stay equal.

    Algorithm: in front of the first backward node of a region stand copies of those of its nodes from which the
    backward of the region reads.
    """
    regions: dict[int, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and note(node).recompute:
            regions.setdefault(note(node).recompute, []).append(node)
    owned = [program.node(p.node) for p in program.parameters]
    weights = weights_of(program.graph, owned)
    for nodes in regions.values():
        backward = [node for node in nodes if not is_forward(node)]
        forward = [node for node in nodes if is_forward(node) and node not in weights]
        if backward:
            _again(program, forward, backward)
    return program


def _again(program: Program, forward: list[fx.Node], backward: list[fx.Node]) -> None:
    made: dict[fx.Node, fx.Node] = {}
    inside, wanted = set(forward), set[fx.Node]()
    for node in backward:
        wanted.update(_inside(node, inside))
    for node in reversed(forward):
        if node in wanted:
            wanted.update(_inside(node, inside))
    for node in forward:
        if node in wanted:
            made[node] = _copy(program, node, made, backward[0])
    for node in backward:
        node.args = fx.node.map_arg(node.args, lambda each: made.get(each, each))
        node.kwargs = fx.node.map_arg(node.kwargs, lambda each: made.get(each, each))


def _inside(node: fx.Node, inside: set[fx.Node]) -> Iterator[fx.Node]:
    return (read for read in node.all_input_nodes if read in inside)


def _copy(program: Program, node: fx.Node, made: Mapping[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
    target: Any = IN_BACKWARD.get(node.target, node.target)
    if target is None:
        (source,) = operands(node)
        return made.get(source, source)
    kept = note(node)
    layouts = tuple(Layout(tuple((axis, in_backward(p)) for axis, p in layout)) for layout in output_layouts(node))
    with program.graph.inserting_before(before):
        new = program.graph.node_copy(node, lambda each: made.get(each, each))
    new.target, new.name = target, f"{node.name}_again"
    layout = layouts if isinstance(kept.type, tuple) else layouts[0] if layouts else None
    return set_note(new, replace(kept, layout=layout, phase=BACKWARD, origin=RECOMPUTE))
