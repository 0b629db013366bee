"""A lowered step, cut by phase: what runs in the forward, in the backward, and once behind all microbatches.

Enters: the lowered graph of a step. Leaves: parts that hand values on by name, each of one phase, and cut in front of
and behind what no CUDA graph can hold. A value that a later part reads is a result of the earlier one; inputs of the
program are read by any.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx, nn
from torch.fx.graph import CodeGen

from fxpar.ir.program import Program, ScalarType, has_note, note
from fxpar.ir.step import PHASES, RECOMPUTE


class Emptying(CodeGen):
    """Code that takes its arguments as one list and empties it, so that each is freed behind its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        """The head of the function, and how it takes its arguments."""
        names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars]
        names = [name for name in names if name != "self"]
        taken = f"\n    {', '.join(names)}, = values\n    values.clear()" if names else ""
        return f"def {self._func_name}(self, values){maybe_return_annotation}:{taken}"


@dataclass(frozen=True)
class StepPart:
    """One part of a step.

    Attributes:
        module: called with one list of values, which it empties; gives a tuple.
        inputs: names of the values that it takes.
        outputs: names of those that it gives.
        uncaptured: why no CUDA graph can hold it; empty where one can.
    """

    module: Callable[[list[Any]], Sequence[Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    uncaptured: str = ""

    def __call__(self, values: dict[str, Any]) -> None:
        """Takes its inputs from `values`, and puts its results there."""
        operands = [values[name] for name in self.inputs]
        values.update(zip(self.outputs, self.module(operands), strict=True))


Parts = tuple[StepPart, ...]


@dataclass(frozen=True)
class LoweredStep:
    """A step as a rank runs it, operator by operator.

    Attributes:
        program: forward, backward and parameter phase.
        graph: that, lowered.
        forward: the parts, which hand values on by name.
        backward: leaves what each rank has of the parameters' gradients.
        parameter: makes the gradients of these, once behind all microbatches.
        whole_backward: both in one.
        results: names of the model's outputs' values.
        gradients: of each parameter that has one, the name of its value.
        unfinished: names of the values that the backward leaves for the parameter phase, gradients among them.
        tangents: of each output that has one, the name of the tangent's value.
        returned: of each gradient of an input, by name of the output, the name of its value.
        early: how many parts of the backward come before what only gradients of weights need.
    """

    program: Program
    graph: fx.Graph
    forward: Parts
    backward: Parts
    parameter: Parts
    whole_backward: Parts
    results: Mapping[str, str]
    gradients: Mapping[str, str]
    unfinished: tuple[str, ...]
    tangents: Mapping[str, str]
    returned: Mapping[str, str]
    early: int

    @property
    def ends(self) -> tuple[str, ...]:
        """Names of the values that a backward leaves whose gradients wait for others."""
        return tuple(dict.fromkeys((*self.unfinished, *self.returned.values())))

    @property
    def signature(self) -> Hashable:
        """Equal for steps that leave the same of the gradients, and make the same of it."""
        return self.unfinished, tuple(self.gradients.items())

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names of the values that any part takes."""
        return frozenset(name for part in (*self.forward, *self.whole_backward) for name in part.inputs)

    @cached_property
    def uncaptured(self) -> fx.Node | None:
        """The first operation that no CUDA graph can hold."""
        nodes = (node for node in self.graph.nodes if node.op == "call_function" and has_note(node))
        return next((node for node in nodes if note(node).uncaptured), None)

    @cached_property
    def recomputes(self) -> bool:
        """Whether the program says what is computed again."""
        nodes = (node for node in self.graph.nodes if node.op == "call_function" and has_note(node))
        return any(note(node).recompute or note(node).origin == RECOMPUTE for node in nodes)


def _phase_of(node: fx.Node) -> int | None:
    """Its place among the phases; None of numbers, which any part makes itself.

    Numbers are sizes of inputs, and what lowering makes of a rank's indices.
    """
    if node.op == "call_function" and (not has_note(node) or isinstance(note(node).type, ScalarType)):
        return None
    return PHASES.index(note(node).phase) if has_note(node) else 0


def cut(graph: fx.Graph) -> tuple[Parts, Parts, Parts, Parts, Parts]:
    """The parts of a lowered step by phase, and those of all phases but the first together.

    Results of the graph are found under the names of the nodes that give them.
    """
    end = next(node for node in reversed(graph.nodes) if node.op == "output")
    phases = {node: _phase_of(node) for node in graph.nodes if node.op != "output"}
    returned = set(end.all_input_nodes)

    def parts(first: int, last: int) -> Parts:
        nodes = [n for n, phase in phases.items() if _is_made(n) and phase is not None and first <= phase <= last]
        runs = itertools.groupby(nodes, key=lambda node: note(node).uncaptured if has_note(node) else "")
        return tuple(_part(list(run), phases, returned, uncaptured) for uncaptured, run in runs)

    last = len(PHASES) - 1
    return parts(0, 0), parts(1, 1), parts(2, 2), parts(last, last), parts(1, last)


def _is_made(node: fx.Node) -> bool:
    return node.op == "call_function"


def _part(
    computed: Sequence[fx.Node], phases: Mapping[fx.Node, int | None], returned: Collection[fx.Node], uncaptured: str
) -> StepPart:
    """What computes some nodes, with the numbers that they read."""
    inside = set(computed)

    def is_read_outside(node: fx.Node) -> bool:
        """Also where a part reads a size off it, which it makes itself."""
        users = [user for user in node.users if user.op != "output" and user not in inside]
        return any(phases[user] is not None or is_read_outside(user) for user in users)

    outputs = [node for node in computed if node in returned or is_read_outside(node)]
    for node in reversed(computed[0].graph.nodes):
        if node in inside:
            inside.update(read for read in node.all_input_nodes if phases[read] is None)
    nodes = [node for node in computed[0].graph.nodes if node in inside]
    inputs = list(dict.fromkeys(read for node in nodes for read in node.all_input_nodes if read not in inside))
    graph = fx.Graph()
    graph.set_codegen(Emptying())
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    names = [tuple(node.name for node in group) for group in (inputs, outputs)]
    return StepPart(fx.GraphModule(nn.Module(), graph), names[0], names[1], uncaptured)
