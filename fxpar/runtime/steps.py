"""The training steps of a program, lowered and cut by phase; one for each choice of what is differentiated.

Enters: a compiled program and process groups. Leaves: `Step`, whose parts a rank runs without autograd, as they are or
compiled.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fxpar.compile import compile_step, lower_program, outlined
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbols import Size
from fxpar.ops.collectives import Group
from fxpar.ops.lower import Lowered
from fxpar.passes.differentiate import differentiable
from fxpar.plan.plan import Plan
from fxpar.program.program import Program, output_layouts, output_node
from fxpar.program.step import is_gradient, output_of, parameter_gradients
from fxpar.runtime.batch import user_inputs
from fxpar.runtime.parts import Part, Step, cut

if TYPE_CHECKING:
    from fxpar.runtime.compiled import CompiledStep, Compiler, Place

Values = dict[str, Any]


@dataclass
class Pending:
    """A forward that has run, and what its backward takes; a backward runs once.

    Attributes:
        step: what ran.
        sources: values of the program's inputs.
        outputs: of the model, by name.
        values: what the backward reads, by name.
        whole: whether a compiled backward has the parameter phase in it.
        compiled: the compiled step, and what its backward takes.
    """

    step: Step
    sources: Mapping[str, Any]
    outputs: dict[str, Tensor]
    values: Values
    whole: bool
    compiled: tuple[CompiledStep, Values] | None = None

    def backward(self, tangents: Mapping[str, Tensor], *, whole: bool, place: Place | None = None) -> dict[str, Tensor]:
        """What this rank has of the gradients by name of the value; where `whole`, the parameters' by their names.

        Args:
            tangents: gradients of the step's outputs, by name.
            place: of a whole backward: called with gradients by parameter as soon as they are there, gives them where
                they are to stay.
        """
        step, compiled = self.step, self.compiled
        self.compiled = None
        given = {name: _like(tangent, self.outputs[name]) for name, tangent in tangents.items()}
        if compiled is not None and whole == self.whole:
            made = compiled[0].backward(compiled[1], given, place)
        else:
            if compiled is not None:  # for another backward than the one that was expected
                self.values = dict(self.sources)
                step.forward(self.values)
            self.values.update({step.tangents[name]: tangent for name, tangent in given.items()})
            part = step.whole_backward if whole else step.backward
            made = _run(part, self.values, tuple(step.gradients.values()) if whole else step.held)
        self.values = {}
        return {fqn: made[value] for fqn, value in step.gradients.items()} if whole else made

    def parameter(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients by name of the parameter. A collective call.

        Args:
            held: what the backward left, of one microbatch or summed over several.
        """
        given = {**self.sources, **held}
        self.step.parameter(given)
        return {fqn: given[value] for fqn, value in self.step.gradients.items()}


def _like(tangent: Tensor, output: Tensor) -> Tensor:
    """A tangent as the step takes it: dense, of the output's type."""
    return tangent.to(output.dtype).contiguous()


def _run(part: Part, values: Values, names: Sequence[str]) -> dict[str, Tensor]:
    """Runs a part, which takes all that is in `values`: what nobody else holds is freed behind its last use."""
    given = {name: values[name] for name in part.inputs}
    own = {name: values[name] for name in names if name in values}
    values.clear()
    inputs = [given.pop(name) for name in part.inputs]
    found = dict(zip(part.outputs, part.module(inputs), strict=True))
    return {name: own[name] if name in own else found[name] for name in names}


@dataclass
class Steps:
    """What a rank runs of a program: its forward alone, and its steps.

    Attributes:
        program: after all passes of the forward.
        lowered: the forward alone.
        differentiable: the outputs that carry a gradient.
    """

    program: Program
    groups: Mapping[str, Group]
    device: torch.device
    plan: Plan
    uneven_rows: bool = False
    _made: dict[Hashable, Step] = field(default_factory=dict)
    _forwards: dict[Hashable, fx.GraphModule] = field(default_factory=dict)
    _compiler: Compiler | None = None

    def __post_init__(self) -> None:
        self.lowered = self.lowering(self.program)
        self.differentiable = differentiable(self.program)
        # What the caller differentiated last, which is known in its backward alone.
        self.expected = tuple(n for n in self.differentiable if n == self.program.loss) or self.differentiable
        if self.plan.compile:
            from fxpar.runtime.compiled import Compiler  # Inductor takes a second to import

            self._compiler = Compiler(self.plan, self.device, self._shapes())

    def step(self, names: Sequence[str], trained: Collection[str], outputs: Sequence[str] = ()) -> Step:
        """The step of some outputs.

        Args:
            names: outputs that have a tangent.
            outputs: those that it returns; all by default.
            trained: parameters whose gradients are wanted.

        Raises:
            FxparError: a pass or a check refused it.
        """
        wanted = tuple(outputs) or self.program.outputs
        key = (tuple(names), frozenset(trained), wanted)
        if key not in self._made:
            self._made[key] = self._cut(compile_step(self.program, wanted, names, trained))
        return self._made[key]

    def run(self, sizes: Mapping[str, int], step: Step, sources: Mapping[str, Any], *, whole: bool) -> Pending:
        """Runs the forward of a step.

        Args:
            sizes: of the call, by symbol.
            sources: values of the program's inputs, by name of the placeholder.
            whole: whether the backward is expected to end with the parameters' gradients, and not with what each rank
                has of them.
        """
        if self._compiler is None:
            values = dict(sources)
            step.forward(values)
            outputs = {name: values[value] for name, value in step.results.items()}
            return Pending(step, sources, outputs, values, whole)
        given = {name: value.contiguous() for name, value in sources.items()}
        compiled = self._compiler.step(step, sizes, given, whole=whole)
        outputs, left = compiled.forward(given, sizes)
        return Pending(step, sources, outputs, {}, whole, (compiled, left))

    def outputs(self, sizes: Mapping[str, int], wanted: Sequence[str], sources: Mapping[str, Any]) -> dict[str, Tensor]:
        """Outputs of the forward alone, for which nothing is kept."""
        key = ("outputs", tuple(wanted))
        if self._compiler is None:
            if key not in self._forwards:
                self._forwards[key] = self.lowered.only(tuple(wanted)).module
            given = [sources[name] for name in self.lowered.sources]
            return dict(zip(wanted, self._forwards[key](*given), strict=True))
        if key not in self._forwards:
            self._forwards[key] = self.lowering(outlined(self.program)).only(tuple(wanted)).module
        values = {name: value.contiguous() for name, value in sources.items()}
        return self._compiler.forward(self._forwards[key].graph, wanted, sizes, values)(values, sizes)

    def _shapes(self) -> dict[str, tuple[Size, ...]]:
        """What a rank has of the inputs, in the program's symbols, by name of the placeholder."""
        found = {}
        for entry in user_inputs(self.program):
            shape = entry.type.shape
            for layout in output_layouts(self.program.node(entry.node)):
                shape = local_shape(shape, layout, self.program.axes)
            found[entry.node] = shape
        return found

    def lowering(self, program: Program) -> Lowered:
        """What this rank runs of a program, or of a step of it."""
        return lower_program(program, self.groups, self.device, uneven_rows=self.uneven_rows)

    def _cut(self, program: Program) -> Step:
        lowered = self.lowering(program)
        graph = lowered.module.graph
        values: Any = output_node(graph).args[0]
        ends: dict[str, fx.Node] = dict(zip(program.outputs, values, strict=True))
        forward, backward, parameter, both = cut(graph)
        gradients = {fqn: ends[name].name for fqn, name in parameter_gradients(program).items()}
        made = set(parameter.outputs)
        held = dict.fromkeys(name for name in parameter.inputs if name not in lowered.sources)
        held |= dict.fromkeys(name for name in gradients.values() if name not in made)
        return Step(
            program,
            graph,
            forward,
            backward,
            parameter,
            both,
            {name: node.name for name, node in ends.items() if not is_gradient(name)},
            gradients,
            tuple(held),
            {output_of(entry.path): entry.node for entry in program.inputs if output_of(entry.path)},
        )
