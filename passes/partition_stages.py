"""partition_stages: the program of a pipeline, each node on its stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from fxpar.cost.stage_cut_points import Divisible, divisible
from fxpar.errors import PassError, PlanError
from fxpar.ir.program import Note, Program, TensorType, copy_node, describe, insert_call, note, update
from fxpar.ir.properties import Property
from fxpar.ir.stages import is_one_stage, stage_of
from fxpar.ir.step import buffer_name, is_buffer
from fxpar.manager import Pass, register_pass
from fxpar.ops.collectives import sum_gradients
from fxpar.ops.small_operators import transfer
from fxpar.passes.prune import shrink
from fxpar.passes.recompute import mark_layers
from fxpar.pipeline.compiler.partition import choose_stages, cuts_as_held, stage_ends
from fxpar.rewrite.loss_reduction import COUNT


def _has_stages(program: Program) -> bool:
    """the plan has a pipeline"""
    is_whole = Property.STEP not in program.properties and not is_one_stage(program)
    return program.plan.pipeline_stages > 1 and is_whole


@register_pass("partition_stages", requires={Property.LOCAL}, provides={Property.STAGES}, when=_has_stages)
def partition_stages(program: Program) -> Program:
    """Gives each operation to a stage of the pipeline, and transfers what a later stage reads.

    Before (pp 2)::

        %h = aten.add.Tensor(%x, %y) : f32[b, 96]
        %out = aten.mm.default(%h, %w) : f32[b, 64]

    After::

        %h = aten.add.Tensor(%x, %y) : f32[b, 96] {stage=0}
        %h_on_1 = fxpar.transfer(%h) : f32[b, 96] {stage=1}
        %out = aten.mm.default(%h_on_1, %w) : f32[b, 64] {stage=1}

    Terms: a *place* lies between two operations in the program's order; what *crosses* it is there before it and read
    after it. A value is passed from stage to stage until the last that reads it, and its gradient the same way back.

    Algorithm: cheap values of inputs (positions, masks, rotary tables) and values of parameters alone are computed by
    each stage that reads them, and never sent; a parameter is held by each stage that reads it, so tied ones are by
    several. Of the other operations, places are candidates where no less crosses another one near. Over the candidates
    the cut is exact (`fxpar.pipeline.compiler.partition`): the longest stage is as short as it can be, then what a
    stage holds and keeps as little, then what crosses. `Pipeline.stages` says where some or all stages begin.

    Values stay equal. Refuses more stages than there are places, and a plan's place that is none.
    """
    chosen = choose_stages(program)
    return _cut(chosen.divisible, [chosen.bounds[i] for i in chosen.cuts])


def holding(holders: Mapping[str, tuple[int, ...]]) -> Pass:
    """Returns `partition_stages` for a further program of a module that exists already.

    Args:
        holders: the stages that hold each parameter in the module, by its name. The program is cut so that they do.
    """

    def run(program: Program) -> Program:
        forward = divisible(program)
        return _cut(forward, cuts_as_held(forward, holders))

    return replace(partition_stages, run=run)


def _cut(forward: Divisible, cuts: Sequence[int]) -> Program:
    # Layers are found by repetition, and a stage may hold one alone: they are marked while all are there.
    if forward.program.plan.recompute.mode == "full":
        mark_layers(forward.program)
    stage: dict[fx.Node, int] = {}
    for index, (start, end) in enumerate(stage_ends(cuts, len(forward.order))):
        stage.update({node: index for node in forward.order if start <= forward.places[node] < end})
    _Stages(forward.program, stage).place()
    return forward.program


class _Stages:
    """Puts copies and transfers into a program.

    Args:
        stage: of each operation that is computed by one.
    """

    def __init__(self, program: Program, stage: Mapping[fx.Node, int]) -> None:
        self.program, self.graph, self.stage = program, program.graph, stage
        self.made: dict[tuple[fx.Node, int], fx.Node] = {}
        # Of a copy what it is a copy of.
        self.origin: dict[fx.Node, fx.Node] = {}

    def place(self) -> None:
        """Gives every node its stages."""
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        for node, stage in self.stage.items():
            update(node, stages=(stage,))
            self.made[node, stage] = node
        for node in nodes:
            if node in self.stage:
                self._read_here(node, self.stage[node])
        end = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        last = max(self.stage.values())
        # By the count the last stage, which has the loss, weighs microbatches.
        count = self.program.output_nodes().get(COUNT)
        new = {node for name, node in self.program.output_nodes().items() if is_buffer(name)}
        for value in end.all_input_nodes:
            if value.op == "call_function" and (value not in self.stage or value is count):
                # The new value of a buffer stays where it is read.
                read = [stage for computed, stage in self.made if computed is value and value in new]
                end.replace_input_with(value, self._on(value, min(read, default=last), end))
        for node in reversed(nodes):
            if node not in self.stage and not node.users:
                self.graph.erase_node(node)
        for node in self.graph.nodes:
            if node.target is sum_gradients and isinstance(note(node).type, tuple):
                shrink(node)
        self._hold()

    def _read_here(self, node: fx.Node, stage: int) -> None:
        """Lets a node read what its stage has."""
        for read in dict.fromkeys(node.all_input_nodes):
            if read.op == "call_function":
                local = self._on(read, stage, node)
                if local is not read:
                    node.replace_input_with(read, local)

    def _on(self, value: fx.Node, stage: int, reader: fx.Node) -> fx.Node:
        """Returns a value on a stage, computed there or received."""
        value = self.origin.get(value, value)
        # One transfer for all readers of a stage: a second message would be another receive in the schedule.
        known = self.made.get((value, stage))
        if known is not None:
            return known
        new = self._received(value, stage, reader) if value in self.stage else self._computed(value, stage, reader)
        self.made[value, stage] = new
        return new

    def _received(self, value: fx.Node, stage: int, reader: fx.Node) -> fx.Node:
        if not isinstance(note(value).type, TensorType):
            raise PassError(
                f"%{reader.name} of stage {stage} reads it, and only tensors can be sent",
                where=describe(value),
                remedy="move the beginning of that stage by Plan(pipeline=Pipeline(…))",
            )
        # Only neighbours have channels. A value for a later stage goes through
        # all between, which keeps the order of messages.
        source = self._on(value, stage - 1, reader)
        noted = note(value)
        sent = Note(type=noted.type, layout=noted.layout, fqn=noted.fqn, source=noted.source, stages=(stage,))
        return insert_call(reader, transfer, (source,), sent, f"{value.name}_on_{stage}")

    def _computed(self, value: fx.Node, stage: int, reader: fx.Node) -> fx.Node:
        """Returns a copy of what each stage computes for itself; the first takes the node itself."""
        sources = {read: self._on(read, stage, reader) for read in value.all_input_nodes if read.op == "call_function"}
        sources |= {read: read for read in value.all_input_nodes if read.op == "placeholder"}
        if not note(value).stages:
            for read, local in sources.items():
                if local is not read:
                    value.replace_input_with(read, local)
            return update(value, stages=(stage,))
        with self.graph.inserting_after(value):
            new = copy_node(self.graph, value, sources, f"{value.name}_on_{stage}")
        self.origin[new] = value
        return update(new, stages=(stage,))

    def _hold(self) -> None:
        """Gives parameters to the stages that read them, buffers to that which writes them, others to the first.

        Raises:
            PlanError: a buffer is written by one stage and read by another, which would not know the new value.
        """
        ends = self.program.output_nodes()
        for parameter in self.program.parameters:
            node, new = self.program.node(parameter.node), ends.get(buffer_name(parameter.fqn))
            stages = {stage_of(user) for user in node.users if user.op == "call_function"}
            if new is not None and new.op == "call_function":
                others = stages - {stage_of(new)}
                if others:
                    raise PlanError(
                        f"stage {stage_of(new)} writes this buffer, and stage {min(others)} reads it, which would not "
                        "know its new value",
                        where=parameter.fqn,
                        remedy="begin stages so that one has both (Plan(pipeline=Pipeline(…))), or give each module a "
                        "buffer of its own",
                    )
                stages.add(stage_of(new))
            update(node, stages=tuple(sorted(stages)) or (0,))
