"""All ranks of a program in one CPU process, by PyTorch's LocalTensorMode.

Enters: a localised program, or a step, with whole weights and inputs. Leaves: every rank's outputs and parameter
gradients. The ranks execute the very operators of the runtime, collectives included, and the backward as it trains;
only the process group is simulated. One device runs a program of PyTorch's operators under PyTorch's autograd.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed._local_tensor import (
    LocalTensor,
    LocalTensorMode,
    _combine_rank_results,
    _map_to_rank_local_val,
    maybe_run_for_local_tensor,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpar.errors import CheckFailed, InputError, PassError, PlanError
from fxpar.ir.program import Program, ScalarType, has_note, module_of, note, output_layouts, output_node, output_types
from fxpar.ir.properties import Property
from fxpar.ir.stages import Stage, stages_of
from fxpar.ir.step import (
    PARAMETER,
    batch_size,
    is_buffer,
    is_forward,
    is_gradient,
    is_input_gradient,
    model_outputs,
    output_of,
    parameter_gradients,
)
from fxpar.layout.layout import Layout
from fxpar.layout.shards import local_block
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.manager import PassManager
from fxpar.mesh.axes import coordinates, joined_names
from fxpar.ops import counter, sdpa
from fxpar.ops.attention import attention_gradients, saving_attention
from fxpar.ops.lower import Lowered, lower
from fxpar.ops.process_group import Group
from fxpar.passes.differentiate import differentiate, of_outputs
from fxpar.torch_internals import no_dispatch
from fxpar.verify.reference_program import promote
from fxpar.verify.static import check_neighbours

# Several microbatches of one step: what runs in each of them, and what runs once on what all have left.

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
        once: takes what the step takes, and after it the sums of `unfinished`; gives the parameters' gradients.
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
        """Returns the outputs of each microbatch, and the gradients of all, by name.

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
    # fx takes collectives for impure by default, and would keep those that nobody reads.
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return module_of(graph)


def with_other_rows(program: Program, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the inputs of another microbatch: of each that has the batch's rows these in reverse.

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


# Of hundreds of operators without a collective: one rank after the other runs all of them, as the mode would run each
# of them on all ranks, which takes several times as long.
_OF_ONE_RANK = frozenset(
    {
        counter.dropout,
        counter.uniform,
        counter.uniform_like,
        sdpa.attention_with_dropout,
        saving_attention,
        attention_gradients,
    }
)
MOST_RANKS = 512  # some seconds for a small model; each rank has tensors of its own


@dataclass(frozen=True)
class SimulationResult:
    """Results of one forward and backward.

    Attributes:
        outputs: by output name.
        gradients: by parameter name; parameters that the loss does not reach are left out.
    """

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


class RanksMode(LocalTensorMode):
    """Runs operators on the tensors of all ranks, one rank after the other.

    For each operator torch's mode saves and restores generators, and makes storages of views one: most of its time. It
    still does so where an operator draws numbers, changes a tensor or communicates.
    """

    def __torch_dispatch__(
        self, func: Any, types: tuple[Any, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if LocalTensor not in types or not _is_plain(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        results = {}
        for rank in self.ranks:
            local = {name: _of_rank(value, rank) for name, value in (kwargs or {}).items()}
            results[rank] = func(*_of_rank(args, rank), **local)
        return _combine_rank_results(results, None)


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, (tuple, list)):
        return [_of_rank(item, rank) for item in value]
    return _map_to_rank_local_val(value, rank)


@cache
def _is_plain(func: Any) -> bool:
    """Returns whether an operator of torch computes its result, of one structure on all ranks, from operands alone."""
    is_computed = func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags
    return is_computed and not func._schema.is_mutable and func is not torch.ops.aten.split.Tensor


@contextlib.contextmanager
def simulated_world(axes: Mapping[str, int]) -> Iterator[dict[str, Group]]:
    """Makes process groups of ranks of this process only; yields the group of each set of axes (`dp`, `dp-tp`).

    Each is the group of rank 0: the simulator finds those of the other ranks by its shape.

    Args:
        axes: sizes of the mesh axes, the outermost first.

    Raises:
        CheckFailed: the process already belongs to a process group.
    """
    if dist.is_initialized():
        raise CheckFailed(
            "the process belongs to a process group already",
            where="simulation",
            remedy="verify values in a process that was not started by torchrun",
        )
    world = math.prod(axes.values())
    # This backend sends nothing: LocalTensorMode takes the collectives, and works out the other ranks' groups.
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield {name: _group(axes, name.split("-")) for name in joined_names(axes)}
    finally:
        dist.destroy_process_group()


def _group(axes: Mapping[str, int], names: Sequence[str]) -> Group:
    """Returns the group of rank 0 over some axes."""
    world = math.prod(axes.values())
    places = [coordinates(axes, rank) for rank in range(world)]
    ranks = [rank for rank in range(world) if not any(places[rank][axis] for axis in axes if axis not in names)]
    group = dist.group.WORLD if len(ranks) == world else dist.new_group(ranks)
    return Group(group.group_name, len(ranks))  # type: ignore[union-attr]


def check_world(size: int) -> None:
    """Refuses worlds whose simulation in one process would not end.

    Raises:
        InputError: there are more than `MOST_RANKS` ranks.
    """
    if size > MOST_RANKS:
        raise InputError(
            f"{size} ranks are more than the {MOST_RANKS} that one process simulates",
            where="values",
            remedy="check this program statically (--level static), and by value for fewer ranks",
        )


def symbol_values(program: Program, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns values of the program's symbols for given inputs.

    Raises:
        CheckFailed: the ranks that share out a size do not divide it.
    """
    for s in program.symbols:
        size = inputs[s.path].shape[s.dim]
        if size % s.multiple:
            raise CheckFailed(f"its size {size} is not divisible by {s.multiple}", where=f"input {s.path}.{s.dim}")
    return {s.name: inputs[s.path].shape[s.dim] // s.multiple for s in program.symbols}


def cotangents(program: Program, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Returns what gradients are taken of: whole upstream gradients by output.

    One for the loss. Of a program without loss every floating output is differentiated, with random numbers that are
    the same for each program that has the same outputs: a gradient that is wrong in one place cannot cancel.
    """
    upstream = {}
    for index, (name, node) in enumerate(program.output_nodes().items()):
        kind = output_types(node)[0]
        shape = [evaluate(size, sizes) for size in kind.shape]
        if name == program.loss:
            upstream[name] = torch.ones(shape, dtype=kind.dtype)
        elif not program.loss and kind.is_float and not is_gradient(name) and not is_buffer(name):
            generator = torch.Generator().manual_seed(index)
            wide = torch.complex128 if kind.dtype.is_complex else torch.float64
            upstream[name] = torch.randn(shape, dtype=wide, generator=generator).to(kind.dtype)
    return upstream


def run_single(program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> SimulationResult:
    """Runs a program without mesh axes on this device, forward and backward from its `cotangents`.

    Args:
        state: parameters, buffers and constants by name.
        inputs: by path.
    """
    upstream = cotangents(program, symbol_values(program, inputs))
    leaves = {name: value.detach() for name, value in state.items()}  # not copied: a program changes nothing in place
    for parameter in program.parameters:
        leaves[parameter.fqn].requires_grad_(parameter.trainable)
    device = next((value.device for value in leaves.values()), torch.device("cpu"))
    upstream = {name: value.to(device) for name, value in upstream.items()}
    lowered = lower(program, {}, device)
    values = [leaves[p.fqn] for p in program.parameters] + [inputs[i.path] for i in program.inputs]
    order = dict(zip(_names(program), values, strict=True))
    with torch.enable_grad():
        outputs = dict(zip(program.outputs, lowered.module(*[order[name] for name in lowered.inputs]), strict=True))
        roots = [name for name in upstream if outputs[name].requires_grad]
        if roots:
            torch.autograd.backward([outputs[name] for name in roots], [upstream[name] for name in roots])
    gradients = {n: t.grad for n, t in leaves.items() if t.grad is not None}
    return SimulationResult({n: t.detach() for n, t in outputs.items()}, gradients)


def step_of(program: Program) -> Program:
    """Returns a localised program with its backward, of the loss or of all outputs, by all parameters; a step as it is.

    So is what is cut into stages, each of which has a backward of its own.

    Raises:
        FxparError: the program cannot be differentiated, nor trained.
    """
    if not program.properties.isdisjoint({Property.STEP, Property.STAGES}):
        return program
    return PassManager([differentiate]).run(program)


def _names(program: Program) -> list[str]:
    return [p.node for p in program.parameters] + [i.node for i in program.inputs]


def run_ranks(
    program: Program,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    lowering: Callable[[Program, Mapping[str, Group]], Lowered] = lower,
) -> list[SimulationResult]:
    """Runs a step (`step_of`), or the stages of a pipeline, on all ranks at once; arguments whole, as for `run_single`.

    Args:
        sizes: values of the symbols.
        lowering: makes the module that the ranks run.

    Raises:
        PassError: the program's sizes are not yet those of a rank.
    """
    if Property.STAGES in program.properties:
        return _run_stages(program, state, inputs, sizes, lowering)
    with _Ranks(program, state, inputs, sizes, lowering) as ranks:
        outputs = ranks.run(program, {})
    return ranks.runs(outputs, parameter_gradients(program), model_outputs(program))


def run_microbatches(
    program: Program,
    state: Mapping[str, Tensor],
    microbatches: Sequence[Mapping[str, Tensor]],
    scales: Sequence[float],
    sizes: Mapping[str, int],
) -> list[list[SimulationResult]]:
    """Runs a step of several microbatches as it trains: what each rank has of each, with the gradients of all.

    Args:
        program: a step.
        microbatches: the inputs of each; otherwise as for `run_ranks`.
        scales: by what the tangents of each are multiplied.
    """
    with _Ranks(program, state, microbatches[0], sizes, lower) as ranks:
        outputs, gradients = ranks.run_phases(program, microbatches, scales)
    names = parameter_gradients(program)
    return [ranks.runs({**by_name, **gradients}, names, model_outputs(program)) for by_name in outputs]


def _run_stages(
    program: Program,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    lowering: Callable[[Program, Mapping[str, Group]], Lowered],
) -> list[SimulationResult]:
    """Runs the stages of a pipeline in sequence: each takes what the one before sends; gradients come back.

    Gradients of a parameter that several stages hold are summed. A forward runs once for what it sends, and again in
    front of its backward: it draws the same bits.
    """
    stages = stages_of(program)
    check_neighbours(stages)
    steps = [step_of_stage(stage) for stage in stages]
    outputs: dict[str, Tensor] = {}
    with _Ranks(program, state, inputs, sizes, lowering) as ranks:
        sent: list[dict[str, Tensor]] = [{}]
        for stage in stages[:-1]:
            received = {node: sent[-1][name] for name, node in stage.received.items()}
            returned = ranks.run(promote(stage.program), received)
            sent.append({name: returned[name] for name in stage.sent})
        gradients: dict[str, Tensor] = {}
        tangents: dict[str, Tensor] = {}
        for stage, step in zip(reversed(stages), reversed(steps), strict=True):
            received = {node: sent[stage.number][name] for name, node in stage.received.items()}
            entries = {output_of(entry.path): entry.node for entry in step.inputs if output_of(entry.path)}
            received |= {entries[name]: value for name, value in tangents.items() if name in entries}
            returned = ranks.run(promote(step), received)
            outputs |= {name: returned[name] for name in stage.program.outputs if name not in stage.sent}
            tangents = {name: returned[output] for name, output in stage.returned.items()}
            for fqn, name in parameter_gradients(step).items():
                gradients[fqn] = gradients[fqn] + returned[name] if fqn in gradients else returned[name]
    return ranks.runs({**outputs, **gradients}, {fqn: fqn for fqn in gradients}, tuple(outputs))


def step_of_stage(stage: Stage) -> Program:
    """Returns a stage's program with its backward."""
    program = stage.program
    trained = [p.fqn for p in program.parameters]
    return PassManager([of_outputs(stage.tangents, program.outputs, trained)]).run(program)


class _Ranks:
    """All ranks of a program, or of one stage after the other, in this process.

    Args:
        program: whose axes, and whose cotangents, are those of all that runs.
    """

    def __init__(
        self,
        program: Program,
        state: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        sizes: Mapping[str, int],
        lowering: Callable[[Program, Mapping[str, Group]], Lowered],
    ) -> None:
        axes = program.axes
        if axes and Property.LOCAL not in program.properties:
            raise PassError(
                "the sizes in it are those of whole tensors", where="program", remedy="run the pass localize"
            )
        self._program, self._state, self._inputs, self._sizes = program, state, inputs, sizes
        self._axes, self._lowering = axes, lowering
        self._world = math.prod(axes.values())
        check_world(self._world)
        self._places = [coordinates(axes, rank) for rank in range(self._world)]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Ranks:
        self._groups = self._stack.enter_context(simulated_world(self._axes))
        # What is made under the mode is one tensor a rank already.
        self._cotangents = cotangents(self._program, self._sizes)
        self._stack.enter_context(RanksMode(self._world))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def run(self, program: Program, local_inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the outputs of a program by name, one tensor a rank.

        Args:
            local_inputs: of some placeholders what the ranks have; of the others it is parts of whole values.
        """
        lowered = self._lowered(program)
        with torch.no_grad():
            results = lowered.module(*self._operands(program, lowered, local_inputs, self._inputs))
        return dict(zip(program.outputs, results, strict=True))

    def run_phases(
        self, program: Program, microbatches: Sequence[Mapping[str, Tensor]], scales: Sequence[float]
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Returns the outputs of each microbatch, and the gradients of all, by name; one tensor a rank."""
        lowered = self._lowered(program)
        calls = [
            partial(self._operands, program, lowered, {}, inputs, scale)
            for inputs, scale in zip(microbatches, scales, strict=True)
        ]
        with torch.no_grad():
            return phases_of(lowered).run(calls)

    def _lowered(self, program: Program) -> Lowered:
        lowered = self._lowering(program, self._groups)
        _run_by_rank(lowered)
        return lowered

    def _operands(
        self,
        program: Program,
        lowered: Lowered,
        local_inputs: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        scale: float = 1.0,
    ) -> list[Tensor]:
        """Returns what the ranks take, in order: `local_inputs` by name of the placeholder, else parts of whole values.

        Args:
            scale: by what tangents are multiplied.
        """
        layouts = _placeholder_layouts(program)
        whole = {p.node: self._state[p.fqn].detach() for p in program.parameters}
        for entry in program.inputs:
            output = output_of(entry.path)
            if entry.node not in local_inputs:
                whole[entry.node] = self._cotangents[output] * scale if output else inputs[entry.path]
        by_name = {**local_inputs, **{name: self._local(layouts[name], value) for name, value in whole.items()}}
        ranks = range(self._world)
        indices = [LocalTensor({r: torch.tensor(self._places[r][axis]) for r in ranks}) for axis in lowered.indices]
        return [*(by_name[name] for name in lowered.inputs), *indices]

    def runs(
        self, tensors: Mapping[str, Tensor], gradients: Mapping[str, str], outputs: Sequence[str]
    ) -> list[SimulationResult]:
        """Returns what each rank has.

        Args:
            gradients: by name of the parameter the name of the value.
        """
        return [
            SimulationResult(
                {name: _rank(tensors[name], r) for name in outputs},
                {fqn: _rank(tensors[name], r) for fqn, name in gradients.items()},
            )
            for r in range(self._world)
        ]

    def _local(self, layout: Layout, value: Tensor) -> LocalTensor:
        # Cloned: blocks that ranks share are views of one tensor, and each rank has memory of its own.
        blocks = (local_block(value, layout, self._axes, place, self._sizes).clone() for place in self._places)
        return LocalTensor(dict(enumerate(blocks)))


def _run_by_rank(lowered: Lowered) -> None:
    for node in lowered.module.graph.nodes:
        if node.target in _OF_ONE_RANK:
            node.target = maybe_run_for_local_tensor(_unwatched(node.target))
    lowered.module.recompile()


def _unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function on plain tensors, of whose operators no mode hears: the simulator would run each."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with no_dispatch():
            return function(*args, **kwargs)

    return call


def _rank(value: Tensor, rank: int) -> Tensor:
    return value._local_tensors[rank].detach() if isinstance(value, LocalTensor) else value.detach()


def _placeholder_layouts(program: Program) -> dict[str, Layout]:
    return {n.name: output_layouts(n)[0] for n in program.graph.nodes if n.op == "placeholder"}
