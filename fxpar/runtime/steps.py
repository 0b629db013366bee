"""The training steps of a program, lowered and cut by phase; one for each choice of what is differentiated.

Enters: a compiled program and process groups. Leaves: `LoweredStep`, whose parts a rank runs without autograd, as they
are or compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, fx

from fxpar.compile import compile_step, lower_program, outlined
from fxpar.cost.buffer_reuse import Reach
from fxpar.ir.grad_flow import gathered_parameters
from fxpar.ir.program import Program, output_layouts, output_node
from fxpar.ir.stages import Stage, stages_of
from fxpar.ir.step import is_gradient, is_input_gradient, output_of, parameter_gradients, written
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import Size
from fxpar.ops.lower import ROWS, Lowered
from fxpar.ops.process_group import Group
from fxpar.passes import counted_steps
from fxpar.passes.differentiate import differentiable
from fxpar.plan.plan import Plan
from fxpar.runtime.batch import user_inputs
from fxpar.runtime.calls import (
    ForwardCalls,
    GradientSink,
    LoweredStep,
    Runnable,
    StepCalls,
    Values,
    cut,
    eager_calls,
    once_calls,
    uncaptured,
)
from fxpar.runtime.graph_modes import NoGraphs
from fxpar.runtime.world import World

if TYPE_CHECKING:
    from fxpar.runtime.compiled import Compiler


@dataclass
class FinishedForward:
    """A forward that has run, and what its backward takes; a backward runs once.

    Attributes:
        step: what ran.
        calls: as what it ran.
        sources: values of the program's inputs.
        sizes: of the call, by symbol.
        outputs: of the model, by name.
        saved: what the backward reads, by name.
    """

    step: LoweredStep
    calls: Runnable
    sources: Mapping[str, Any]
    sizes: Mapping[str, int]
    outputs: dict[str, Tensor]
    saved: Values

    def __post_init__(self) -> None:
        self.types = {name: value.dtype for name, value in self.outputs.items()}

    def release(self, names: Sequence[str]) -> None:
        """Forgets outputs that were handed on; the backward keeps what it reads itself."""
        self.outputs = {name: value for name, value in self.outputs.items() if name not in names}

    def backward(
        self, tangents: Mapping[str, Tensor], *, whole: bool, place: GradientSink | None = None
    ) -> dict[str, Tensor]:
        """Returns what this rank has of the gradients by name of the value; where `whole`, the parameters' by their
        names.

        Args:
            tangents: gradients of the step's outputs, by name.
            place: called with gradients as soon as they are there, gives them where they are to stay.
        """
        # Taken away from here, so that each value is freed at its last use in the backward.
        calls, saved, self.saved = self.calls, self.saved, {}
        if calls.whole != whole:  # for another backward than the one that was expected
            calls = eager_calls(self.step, whole=whole)
            _, saved = calls.forward(self.sources, self.sizes)
        like = {name: _like(tangent, self.types[name]) for name, tangent in tangents.items()}
        calls.input_backward(saved, like, place)
        gradients = calls.weight_backward(saved, place)
        return {fqn: gradients[value] for fqn, value in self.step.gradients.items()} if whole else gradients

    def input_backward(self, tangents: Mapping[str, Tensor], place: GradientSink) -> dict[str, Tensor]:
        """Runs the part of a backward that the gradients of inputs need; returns these by name of the output."""
        like = {name: _like(tangent, self.types[name]) for name, tangent in tangents.items()}
        gradients = self.calls.input_backward(self.saved, like, place)
        return {name: gradients[value] for name, value in self.step.returned.items()}

    def weight_backward(self, place: GradientSink) -> dict[str, Tensor]:
        """Runs the rest of the backward; returns what this rank has of the gradients, by name of the value.

        The next forward of the stage may overwrite them.
        """
        saved, self.saved = self.saved, {}
        return self.calls.weight_backward(saved, place)

    def parameter(self, local_gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the gradients by name of the parameter. A collective call.

        Args:
            local_gradients: what the backward left, of one microbatch or summed over several.
        """
        values = {**self.sources, **local_gradients}
        for part in self.step.parameter:
            part(values)
        return {fqn: values[value] for fqn, value in self.step.gradients.items()}


def _like(tangent: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tangent as the step takes it: dense, of the output's type."""
    return tangent.to(dtype).contiguous()


class PeerMemory(Protocol):
    """Memory of a module's ranks into which they copy in place of collectives. Making one is a collective call.

    Attributes:
        names: of the axes, and of joined ones (`dp-tp`), whose ranks copy what is large; the same on all ranks.
    """

    names: frozenset[str]

    @property
    def reach(self) -> Reach:
        """Returns which ranks can copy, and how much of this rank's memory they do it into."""

    def groups(self, program: Program) -> Mapping[str, Group]:
        """Returns the groups of a program's axes, with what its copies go through. A collective call."""

    def line(self, buffers: int) -> str:
        """Returns the name of the symmetric buffer of this rank's pipeline; empty where its ranks cannot copy, or are
        not to. A collective call.

        Args:
            buffers: that have flags.
        """

    def mark(self) -> None:
        """Notes that work was queued whose copies are waited for."""

    def close(self) -> None:
        """Frees the memory; what is compiled for it can no longer run."""


# By how values travel, what opens the memory of a module's ranks. `fxpar.api` fills it in.
TRANSPORTS: dict[str, Callable[[Plan, World], PeerMemory]] = {}


@dataclass
class Steps:
    """What a rank runs of a program: its forward alone, and its steps.

    Attributes:
        program: after all passes of the forward.
        local_stages: the stages of a pipeline that this rank holds.
        graphs: what of its calls is replayed.
        splits: whether its schedule runs backwards in two parts.
        is_stage: whether it is of one stage.
        peer_memory: through which steps copy.
        enter: called in front of what communicates.
        lowered: the forward alone.
        once: gathers what data ranks share out, in front of all microbatches; None where nothing is.
        gathered: of each value that it gives, the name of the parameter.
        differentiable: the outputs that carry a gradient.
        stages: by number those that this rank holds, and what it runs of each.
    """

    program: Program
    groups: Mapping[str, Group]
    device: torch.device
    plan: Plan
    uneven_rows: bool = False
    graphs: NoGraphs = field(default_factory=NoGraphs)
    local_stages: tuple[int, ...] = ()
    splits: bool = False
    is_stage: bool = False
    peer_memory: PeerMemory | None = None
    enter: Callable[[], None] = lambda: None
    _made: dict[Hashable, LoweredStep] = field(default_factory=dict)
    _eager: dict[Hashable, StepCalls] = field(default_factory=dict)
    _forwards: dict[tuple[str, ...], tuple[fx.Graph, ForwardCalls, fx.Node | None]] = field(default_factory=dict)
    _compiler: Compiler | None = None

    def __post_init__(self) -> None:
        self.lowered = self.lowering(self.program)
        self.once = once_calls(self.lowered.module.graph)
        self.gathered = gathered_parameters(self.program)
        self.differentiable = differentiable(self.program)
        # What the caller differentiated last, which is known in its backward alone.
        self.expected = tuple(n for n in self.differentiable if n == self.program.loss) or self.differentiable
        self.stages = (
            {stage.number: (stage, self._of(stage)) for stage in stages_of(self.program)} if self.local_stages else {}
        )
        if self.plan.compile and not self.is_stage:
            from fxpar.runtime.compiled import Compiler  # Inductor takes a second to import

            # One for all stages, so that layers that are equal are compiled once.
            all_steps = [steps for _, steps in self.stages.values() if steps is not None] or [self]
            shapes = {name: shape for steps in all_steps for name, shape in steps._shapes().items()}
            compiler = Compiler(self.plan, self.device, shapes)
            for steps in all_steps:
                steps._compiler = compiler

    @property
    def of_rank(self) -> list[Steps]:
        """Returns itself, or those of the stages that this rank holds."""
        return [steps for _, steps in self.stages.values() if steps is not None] if self.local_stages else [self]

    def _of(self, stage: Stage) -> Steps | None:
        """Returns what this rank runs of a stage; None of those of others."""
        if stage.number not in self.local_stages:
            return None
        more: dict[str, Any] = {"splits": self.splits, "is_stage": True, "peer_memory": self.peer_memory}
        graphs = self.graphs.stage(stage.number)
        return Steps(stage.program, self.groups, self.device, self.plan, self.uneven_rows, graphs, **more)

    def step(self, names: Sequence[str], trained: Collection[str], outputs: Sequence[str] = ()) -> LoweredStep:
        """Returns the step of some outputs.

        Args:
            names: outputs that have a tangent.
            outputs: those that it returns; all by default.
            trained: parameters whose gradients are wanted.

        Raises:
            FxparError: a pass or a check refused it.
        """
        returned = tuple(outputs) or self.program.outputs
        key = (tuple(names), frozenset(trained), returned)
        if key not in self._made:
            # Which collectives are copies changes the step: a copy is a send and, in front of its reader, a take.
            copies = () if self.peer_memory is None else self.peer_memory.names
            step = compile_step(self.program, returned, names, trained, splits=self.splits, copies=copies)
            self._made[key] = self._cut(step)
        return self._made[key]

    def run(
        self,
        sizes: Mapping[str, int],
        step: LoweredStep,
        sources: Mapping[str, Any],
        *,
        whole: bool,
        gradients: Hashable = None,
        rows: tuple[int, ...] = (),
    ) -> FinishedForward:
        """Runs the forward of a step.

        Args:
            sizes: of the call, by symbol.
            sources: values of the program's inputs, by name of the placeholder.
            whole: whether the backward is expected to end with the parameters' gradients, and not with what each rank
                has of them.
            gradients: equal for calls whose backwards place gradients alike; None for those that place none.
            rows: of each data rank, where they differ. Graphs are for all of them: ranks record in the same call.
        """
        values = self._values(sources)
        calls = self.calls(sizes, step, values, whole=whole)
        runnable = self.graphs.step(calls, values, partial(self.moving, sources, values), (gradients, rows))
        # After all that may fail on one rank alone, such as compiling or the number
        # of graphs, and in front of the first collective.
        self.enter()
        outputs, saved = runnable.forward(values, sizes)
        return FinishedForward(step, runnable, values, sizes, outputs, saved)

    def moving(self, sources: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns names of the values whose addresses change from call to call.

        Those are inputs, buffers that are written, and what was made dense.

        Args:
            values: as what runs takes `sources`.
        """
        inputs = {*(entry.node for entry in self.program.inputs), *written(self.program).values(), *ROWS}
        return tuple(name for name, value in values.items() if name in inputs or value is not sources[name])

    def calls(
        self, sizes: Mapping[str, int], step: LoweredStep, values: Mapping[str, Any], *, whole: bool
    ) -> StepCalls:
        """Returns what a step runs, eager or compiled; as for `run`."""
        if self._compiler is not None:
            return self._compiler.step(step, sizes, values, whole=whole)
        key = (id(step), whole)
        if key not in self._eager:
            self._eager[key] = eager_calls(step, whole=whole)
        return self._eager[key]

    def outputs(
        self, sizes: Mapping[str, int], requested: Sequence[str], sources: Mapping[str, Any], rows: tuple[int, ...] = ()
    ) -> dict[str, Tensor]:
        """Returns outputs of the forward alone, for which nothing is kept; `rows` as for `run`."""
        values = self._values(sources)
        calls = self.forward_calls(sizes, requested, values)
        runnable = self.graphs.forward(calls, values, partial(self.moving, sources, values), rows)
        self.enter()
        return runnable(values, sizes)

    def forward_calls(
        self, sizes: Mapping[str, int], requested: Sequence[str], values: Mapping[str, Any]
    ) -> ForwardCalls:
        """Returns what a forward alone runs; as for `outputs`."""
        graph, eager, _ = self._forward(tuple(requested))
        if self._compiler is None:
            return eager
        return self._compiler.forward(graph, eager.results, sizes, values)

    def uncaptured(self, requested: Sequence[str]) -> fx.Node | None:
        """Returns the first operation of the forward alone that no CUDA graph can hold; as for `outputs`."""
        return self._forward(tuple(requested))[-1]

    def _forward(self, key: tuple[str, ...]) -> tuple[fx.Graph, ForwardCalls, fx.Node | None]:
        if key not in self._forwards:
            graph = self.lowering(outlined(self.program)).only(key).module.graph
            nodes: Any = output_node(graph).args[0]
            results = dict(zip(key, (node.name for node in nodes), strict=True))
            self._forwards[key] = graph, ForwardCalls(cut(graph)[0], results, {}), uncaptured(graph)
        return self._forwards[key]

    def _values(self, sources: Mapping[str, Any]) -> dict[str, Any]:
        """Returns inputs as what runs takes them: compiled units are made for dense ones."""
        if self._compiler is None and not self.graphs.is_on:
            return dict(sources)
        return {name: value.contiguous() for name, value in sources.items()}

    def _shapes(self) -> dict[str, tuple[Size, ...]]:
        """Returns what a rank has of the inputs, in the program's symbols, by name of the placeholder."""
        shapes = {}
        for entry in user_inputs(self.program):
            shape = entry.type.shape
            for layout in output_layouts(self.program.node(entry.node)):
                shape = local_shape(shape, layout, self.program.axes)
            shapes[entry.node] = shape
        return shapes

    def lowering(self, program: Program) -> Lowered:
        """Returns what this rank runs of a program, or of a step of it."""
        groups = self.groups if self.peer_memory is None else self.peer_memory.groups(program)
        return lower_program(program, groups, self.device, uneven_rows=self.uneven_rows)

    def counted(self, copies: Collection[str]) -> Iterator[tuple[Program, Program, Lowered]]:
        """Returns what a report counts, where nothing is sent: of what ranks copy, the collectives it stands for.

        Args:
            copies: axes, and joined ones, whose ranks can copy into each other's memory.
        """
        lowering = partial(lower_program, groups=self.groups, device=self.device, uneven_rows=self.uneven_rows)
        return counted_steps(self.program, lowering, copies=copies)

    def _cut(self, program: Program) -> LoweredStep:
        lowered = self.lowering(program)
        graph = lowered.module.graph
        values: Any = output_node(graph).args[0]
        ends: dict[str, fx.Node] = dict(zip(program.outputs, values, strict=True))
        forward, early, late, parameter, both = cut(graph)
        gradients = {fqn: ends[name].name for fqn, name in parameter_gradients(program).items()}
        computed = {name for part in parameter for name in part.gives}
        takes = (name for part in parameter for name in part.takes)
        needed = dict.fromkeys(name for name in takes if name not in computed and name not in lowered.sources)
        needed |= dict.fromkeys(name for name in gradients.values() if name not in computed)
        return LoweredStep(
            program,
            graph,
            forward,
            (*early, *late),
            parameter,
            both,
            {name: node.name for name, node in ends.items() if not is_gradient(name)},
            gradients,
            tuple(needed),
            {output_of(entry.path): entry.node for entry in program.inputs if output_of(entry.path)},
            {name: node.name for name, node in ends.items() if is_input_gradient(name)},
            len(early),
            () if self.once is None else self.once.finish,
        )
