"""Phases of a step, judged by values: an executor that runs each phase when the runtime does, and edits of phases.

Enters: a model, a plan and batches. Leaves: the gradients of all microbatches together, of the step and of edits of it.
The executor shares nothing with `fxpar.verify.simulate_ranks`: it looks each value up where a rank would have it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed._local_tensor import LocalTensor
from torch.fx.node import map_arg

from fxpar.compile import compile_model, compile_step
from fxpar.ir.program import Program, ScalarType, has_note, note, output_layouts, output_node, update
from fxpar.ir.regions import inlined
from fxpar.ir.step import PARAMETER, PHASES, RNG_PATH, is_gradient, output_of, parameter_gradients
from fxpar.layout.layout import Layout
from fxpar.layout.shards import local_block
from fxpar.mesh.axes import coordinates
from fxpar.ops.lower import lower
from fxpar.plan.plan import Plan
from fxpar.verify.reference_program import promote
from fxpar.verify.simulate_ranks import RanksMode, simulated_world, symbol_values
from fxpar.verify.values import call_inputs, program_state, reference_run, rng_state

ALLOWED = 1e-9  # of the largest gradient


class CannotRunError(Exception):
    """A phase reads what is not there when it runs, or hands on what cannot be added up."""


@dataclass(frozen=True)
class Edit:
    """A step whose phases are edited.

    Attributes:
        what: the node, and its phases before and behind.
        program: the edited step.
    """

    what: str
    program: Program


class Microbatches:
    """A step of several microbatches, node by node.

    Args:
        model: in training mode, in float64.
        batches: one for each microbatch.
        plan: options of it.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Mapping[str, Tensor]], **plan: Any) -> None:
        compiled = compile_model(model, dict(batches[0]), Plan(**plan))
        program = compiled.program
        trained = [p.fqn for p in program.parameters if p.trainable]
        self.captured, self.compiled = compiled.captured, program
        self.step = inlined(compile_step(program, (program.loss,), (program.loss,), trained))
        self.state = program_state(compiled.captured.program, model)
        self.inputs = [call_inputs(compiled.captured, model, dict(batch)) for batch in batches]
        self.axes = program.axes
        self.places = [coordinates(self.axes, rank) for rank in range(len(self._ranks()))]
        self.values: list[dict[str, Any]] = []
        with simulated_world(self.axes) as self.groups, RanksMode(len(self._ranks())):
            graph = self._lowered(self.step)
            for index in range(len(batches)):
                known = dict(self._sources(index))
                for node in graph.nodes:
                    if node.op == "call_function":
                        known[node.name] = _called(node, _Named(known))
                self.values.append(known)
        self.gradients = self.run(self.step)

    def _ranks(self) -> range:
        count = 1
        for size in self.axes.values():
            count *= size
        return range(count)

    def reference(self) -> dict[str, Tensor]:
        """The sum of all microbatches' gradients on one device, by parameter."""
        total: dict[str, Tensor] = {}
        for index, inputs in enumerate(self.inputs):
            run = reference_run(self.captured.program, self.state, inputs, microbatch=index)
            for name, value in run.gradients.items():
                total[name] = total[name] + value if name in total else value
        return total

    def is_reference(self) -> bool:
        """Whether the step's gradients are those of one device, on each rank."""
        sizes, layouts = symbol_values(self.step, self.inputs[0]), self._layouts()
        whole = self.reference()
        largest = max(float(value.abs().max()) for value in whole.values())
        nodes = {p.fqn: p.node for p in self.step.parameters}
        return all(
            float((mine[rank] - local_block(whole[fqn], layouts[nodes[fqn]], self.axes, place, sizes)).abs().max())
            <= ALLOWED * largest
            for fqn, mine in self.gradients.items()
            for rank, place in enumerate(self.places)
        )

    def deviation(self, program: Program) -> float:
        """The largest difference of an edited step's gradients, of the largest gradient.

        Raises:
            CannotRunError: nothing could be compared.
        """
        found = self.run(program)
        pairs = [(found[fqn], mine) for fqn, mine in self.gradients.items()]
        largest = max(float(part.abs().max()) for mine in self.gradients.values() for part in mine)
        if any(a.shape != b.shape for other, mine in pairs for a, b in zip(other, mine, strict=True)):
            return float("inf")
        gaps = [float((a - b).abs().max()) for other, mine in pairs for a, b in zip(other, mine, strict=True)]
        return max(gap if gap == gap else float("inf") for gap in gaps) / largest

    def run(self, program: Program) -> dict[str, list[Tensor]]:
        """What each rank has of each parameter's gradient.

        Raises:
            CannotRunError: a phase reads what is not there when it runs.
        """
        with simulated_world(self.axes) as self.groups, RanksMode(len(self._ranks())):
            graph = self._lowered(program)
            self._check_order(program, graph)
            late = self._late(graph)
            ends = dict(zip(program.outputs, output_node(graph).args[0], strict=True))  # type: ignore[arg-type]
            for name, node in ends.items():
                if not is_gradient(name) and _phase(node) != "":
                    raise CannotRunError(f"the forward does not give {name}")
            made = {fqn: late[ends[name]] for fqn, name in parameter_gradients(program).items()}
        return {fqn: [value._local_tensors[rank] for rank in self._ranks()] for fqn, value in made.items()}

    def _check_order(self, program: Program, graph: fx.Graph) -> None:
        """Runs forward and backward of one microbatch by name alone."""
        tangents = {entry.node for entry in program.inputs if output_of(entry.path)}
        done = {node for node in graph.nodes if node.op == "placeholder" and node.name not in tangents}
        for phase in PHASES[:-1]:
            done |= {node for node in graph.nodes if node.name in tangents} if phase else set()
            for node in graph.nodes:
                if node.op == "call_function" and _phase(node) == phase:
                    missing = next((read for read in _tensors_read(node) if read not in done), None)
                    if missing is not None:
                        raise CannotRunError(f"%{node.name} reads %{missing.name}")
                    done.add(node)

    def _late(self, graph: fx.Graph) -> _Late:
        late = _Late(self.values)
        for node in graph.nodes:
            if node.op == "call_function" and _phase(node) == PARAMETER:
                late.made[node] = _called(node, late.__getitem__)
        return late

    def _lowered(self, program: Program) -> fx.Graph:
        return lower(promote(program), self.groups).module.graph

    def _layouts(self) -> dict[str, Layout]:
        return {n.name: output_layouts(n)[0] for n in self.step.graph.nodes if n.op == "placeholder"}

    def _sources(self, index: int) -> Iterator[tuple[str, Any]]:
        """What the ranks have of what a microbatch takes, by name of the placeholder."""
        sizes, layouts = symbol_values(self.step, self.inputs[index]), self._layouts()
        whole = {p.node: self.state[p.fqn] for p in self.step.parameters}
        for entry in self.step.inputs:
            if entry.path == RNG_PATH:
                whole[entry.node] = rng_state(self.step.plan.seed, microbatch=index)
            elif output_of(entry.path):
                whole[entry.node] = torch.ones((), dtype=torch.float64)
            else:
                whole[entry.node] = self.inputs[index][entry.path]
        for name, value in whole.items():
            blocks = [local_block(value, layouts[name], self.axes, place, sizes) for place in self.places]
            yield name, LocalTensor({rank: block.detach().clone() for rank, block in enumerate(blocks)})
        for axis in self.axes:
            yield f"{axis}_rank", LocalTensor({r: torch.tensor(place[axis]) for r, place in enumerate(self.places)})


class _Named:
    """Looks values up by name of the node."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __call__(self, node: fx.Node) -> Any:
        return self._values[node.name]


class _Late:
    """Values as the parameter phase has them: its own, inputs of the last microbatch, and sums of all others."""

    def __init__(self, values: Sequence[Mapping[str, Any]]) -> None:
        self._values = values
        self.made: dict[fx.Node, Any] = {}

    def __getitem__(self, node: fx.Node) -> Any:
        if node in self.made:
            return self.made[node]
        if node.op == "placeholder" and _phase(node) == "":
            return self._values[-1][node.name]
        if _phase(node) is None:
            return _called(node, self.__getitem__)
        found = [values[node.name] for values in self._values]
        if not all(isinstance(value, Tensor) for value in found):
            raise CannotRunError(f"%{node.name} is no tensor")
        total = found[0]
        for value in found[1:]:
            total = total + value
        return total


def _called(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), value)
    with torch.no_grad():
        try:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # sums of indices are no indices, say
            raise CannotRunError(f"%{node.name}: {error}") from None


def _phase(node: fx.Node) -> str | None:
    """When a node runs; None of numbers, which each phase makes for itself."""
    if node.op == "call_function" and (not has_note(node) or isinstance(note(node).type, ScalarType)):
        return None
    return note(node).phase if has_note(node) else ""


def _tensors_read(node: fx.Node) -> Iterator[fx.Node]:
    for read in node.all_input_nodes:
        if _phase(read) is None:
            yield from _tensors_read(read)
        else:
            yield read


def edits(program: Program) -> Iterator[Edit]:
    """Each node in each other phase: alone, and with all that reads of it, which no order of reading gives away."""
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        for phase in PHASES:
            if phase == note(node).phase:
                continue
            what = f"%{node.name} ({node.target}): {note(node).phase or 'forward'} to {phase or 'forward'}"
            made = program.copy()
            update(made.node(node.name), phase=phase)
            yield Edit(what, made)
            readers = _readers(node, phase)
            if readers:
                made = program.copy()
                for each in (node, *readers):
                    update(made.node(each.name), phase=phase)
                yield Edit(f"{what}, and {len(readers)} that read of it", made)


def _readers(node: fx.Node, phase: str) -> list[fx.Node]:
    """What reads of a node, directly or not, and is of an earlier phase."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "call_function" and user not in found:
                pending.append(user)
                if PHASES.index(note(user).phase) < PHASES.index(phase):
                    found[user] = None
    return list(found)


def sample(program: Program, count: int, seed: int) -> list[Edit]:
    """Some of the edits; all with a count of 0."""
    found = list(edits(program))
    return random.Random(seed).sample(found, count) if count else found
