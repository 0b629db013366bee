"""The first node of a program that computes something else than in another program of the same model.

Enters: two localised programs, of which one is right. Leaves: the first node in the order of the other's step, forward
and backward, whose value deviates on a rank. Nodes are compared that both have under one name, with the same type and
layout; summands are compared where they are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxpar.cost.communication import layer_of
from fxpar.ir.program import Program, TensorType, describe, has_note, note, output_layouts, output_node
from fxpar.layout.shards import without_padding
from fxpar.mesh.axes import coordinates
from fxpar.verify.reference_program import promote
from fxpar.verify.simulate_ranks import run_ranks, step_of, symbol_values
from fxpar.verify.values import TOLERANCE, given_inputs, relative_gap, wide_state

_PROBE = "probe of "


@dataclass(frozen=True)
class DeviatingNode:
    """A node whose value deviates.

    Attributes:
        node: its name.
        text: the name with its module and the author's line.
        module: the module it comes from.
        phase: forward, backward or parameter.
        deviation: of the value, over its largest element on any rank.
    """

    node: str
    text: str
    module: str
    phase: str
    deviation: float

    @property
    def layer(self) -> str:
        """Returns the layer of its module, or the module where that has no number."""
        return layer_of(self.module) or self.module

    def __str__(self) -> str:
        place = f" of {self.layer}" if self.layer else ""
        return f"the first node that deviates is {self.text} in the {self.phase}{place}, by {self.deviation:.3g}"


def first_deviation(
    right: Program, other: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> DeviatingNode | None:
    """Returns the first node that deviates; None where no node that both have does.

    Args:
        right: localised, without stages.
        other: likewise.
        state: parameters, buffers and constants by name, whole.
        inputs: by path, whole.
    """
    steps = [promote(step_of(program)) for program in (right, other)]
    common = _comparable(*steps)
    before, after = (_values(step, common, state, inputs) for step in steps)
    for name in common:
        node = steps[1].node(name)
        gap = _gap(node, steps[1].axes, [run[name] for run in before], [run[name] for run in after])
        if gap > TOLERANCE:
            noted = note(node)
            return DeviatingNode(name, describe(node), noted.fqn, noted.phase or "forward", gap)
    return None


def _gap(node: fx.Node, axes: Mapping[str, int], expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Returns by how much the ranks' values of a node deviate, over the largest element of any; padding left out."""
    layouts, scale = output_layouts(node), max(map(_largest, expected))
    gap = 0.0
    for rank, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if layouts:
            place = coordinates(axes, rank)
            one, other = (without_padding(part, layouts[0], axes, place) for part in (one, other))
        gap = max(gap, relative_gap(other, one, scale))
    return gap


def _comparable(right: Program, other: Program) -> list[str]:
    """Returns names of the nodes to compare, in the order of the other program."""
    known = {node.name: node for node in right.graph.nodes if _is_value(node)}

    def is_same(node: fx.Node) -> bool:
        one = known.get(node.name)
        if one is None or note(one).type != note(node).type or output_layouts(one) != output_layouts(node):
            return False
        return all(placement.kind in "IRS" for layout in output_layouts(node) for _, placement in layout)

    return [node.name for node in other.graph.nodes if _is_value(node) and is_same(node)]


def _is_value(node: fx.Node) -> bool:
    kind = note(node).type if node.op == "call_function" and has_note(node) else None
    return isinstance(kind, TensorType) and kind.is_float


def _values(
    step: Program, names: Sequence[str], state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Returns what each rank has of some nodes."""
    probed = step.copy()
    output = output_node(probed.graph)
    results = output.args[0]
    assert isinstance(results, (tuple, list))
    nodes = {node.name: node for node in probed.graph.nodes}
    output.args = ((*results, *(nodes[name] for name in names)),)
    probed = probed.with_(outputs=(*probed.outputs, *(f"{_PROBE}{name}" for name in names)))
    runs = run_ranks(probed, wide_state(step, state), given_inputs(step, inputs, 0), symbol_values(step, inputs))
    return [{name: run.outputs[f"{_PROBE}{name}"] for name in names} for run in runs]


def _largest(value: Tensor) -> float:
    finite = value[torch.isfinite(value)].abs()
    return float(finite.max()) if finite.numel() else 0.0
