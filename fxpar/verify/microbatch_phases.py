"""Several microbatches of one step: what runs in each of them, and what runs once on what all have left.

Enters: a lowered step, or the inputs of a call. Leaves: the two parts of the step; the inputs of another microbatch.

What a step makes of one microbatch says nothing of its phases: only with a second one does it matter when a value is
made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxpar.errors import PlanError
from fxpar.ops.lower import Lowered
from fxpar.program.batch_dim import batch_size
from fxpar.program.program import Program, ScalarType, has_note, module_of, note, output_node
from fxpar.program.step import PARAMETER, is_forward, is_gradient, is_input_gradient

# By what the gradients of each microbatch are multiplied. They differ, so that what is not linear in them shows even
# where the microbatches' gradients are equal; one is negative because of what is linear in positive numbers alone.
SCALES = (1.0, -0.5)


@dataclass(frozen=True)
class Phases:
    """A lowered step in two parts.

    Attributes:
        each: takes what the step takes; gives its outputs but for the parameters' gradients, and what is `unfinished`.
        outputs: names of the outputs that `each` gives.
        unfinished: names of the values that microbatches add up.
        once: takes what the step takes, and behind it the sums of `unfinished`; gives the parameters' gradients.
        gradients: names of these.
    """

    each: fx.GraphModule
    outputs: tuple[str, ...]
    unfinished: tuple[str, ...]
    once: fx.GraphModule
    gradients: tuple[str, ...]

    def run(
        self, microbatches: Sequence[Callable[[], Sequence[Tensor]]]
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """The outputs of each microbatch, and the gradients of all, by name.

        Args:
            microbatches: each gives what the step takes.
        """
        outputs, total, values = [], list[Tensor](), list[Tensor]()
        for microbatch in microbatches:
            values = list(microbatch())
            returned = self.each(*values)
            outputs.append(dict(zip(self.outputs, returned, strict=False)))
            left = returned[len(self.outputs) :]
            total = [one + other for one, other in zip(total, left, strict=True)] if total else list(left)
        return outputs, dict(zip(self.gradients, self.once(*values, *total), strict=True))


def phases_of(lowered: Lowered) -> Phases:
    """Cuts a lowered step where its microbatches meet."""
    source = lowered.module.graph
    ends: dict[str, fx.Node] = dict(zip(lowered.outputs, output_node(source).args[0], strict=True))  # type: ignore[arg-type]
    gradients = {name: node for name, node in ends.items() if is_gradient(name) and not is_input_gradient(name)}
    late = [node for node in source.nodes if _is_late(node)]
    reads = [read for node in late for read in node.all_input_nodes]
    early = (node for node in (*reads, *gradients.values()) if not (_is_late(node) or _is_number(node)))
    summed = dict.fromkeys(node for node in early if node.op != "placeholder" or not is_forward(node))
    outputs = tuple(name for name in ends if name not in gradients)
    return Phases(
        _each(source, [*(ends[name] for name in outputs), *summed]),
        outputs,
        tuple(node.name for node in summed),
        _once(source, list(summed), list(gradients.values())),
        tuple(gradients),
    )


def _is_late(node: fx.Node) -> bool:
    return node.op == "call_function" and has_note(node) and note(node).phase == PARAMETER and not _is_number(node)


def _is_number(node: fx.Node) -> bool:
    return node.op == "call_function" and (not has_note(node) or isinstance(note(node).type, ScalarType))


def _each(source: fx.Graph, results: Sequence[fx.Node]) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(source, copies)
    graph.output(tuple(copies[node] for node in results))
    return _pruned(graph)


def _once(source: fx.Graph, summed: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in source.nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
    for node in summed:
        copies[node] = graph.placeholder(f"{node.name}_sum")
    for node in source.nodes:
        if node.op == "call_function" and node not in copies and all(read in copies for read in node.all_input_nodes):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return _pruned(graph)


def _pruned(graph: fx.Graph) -> fx.GraphModule:
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return module_of(graph)


def with_other_rows(program: Program, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of another microbatch: of each that has the batch's rows these in reverse.

    What an author's forward takes for granted of a batch as a whole, how many pictures come with it say, is so still.
    """
    try:
        size = batch_size(program)
    except PlanError:  # no input says which its rows are: tangents and random bits differ alone
        return dict(inputs)
    flipped = dict(inputs)
    for entry in program.inputs:
        dims = [dim for dim, other in enumerate(entry.type.shape) if other == size]
        if dims and entry.path in flipped:
            flipped[entry.path] = torch.flip(flipped[entry.path], [program.plan.batch_dims.get(entry.path, dims[0])])
    return flipped
