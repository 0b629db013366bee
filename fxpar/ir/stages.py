"""The stages of a pipeline in a program, and the program of one of them.

Enters: a program that `partition_stages` has cut. Leaves: which stage computes a node and which hold a parameter; the
program of one stage, in which what is received is an input with a layout and a gradient, and what is sent an output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from fxpar.ir.grad_flow import carried, reached
from fxpar.ir.operators import GraphOperator
from fxpar.ir.program import Input, Program, TensorType, copy_node, module_of, note, output_node, tensor_type, update
from fxpar.ir.properties import Property
from fxpar.ir.step import input_gradient_name

# Origin of an input that is an activation: a placeholder with a gradient that is no parameter.
RECEIVED = "received"

_RECEIVED = "fxpar.received."
_SENT = "fxpar.sent."


@dataclass(frozen=True)
class StageCut:
    """A value that one stage sends to the next.

    Attributes:
        node: the transfer.
        source: what is sent.
        carries: whether its gradient comes back.
    """

    node: fx.Node
    source: fx.Node
    carries: bool

    @property
    def receiver(self) -> int:
        """Returns the stage that receives it."""
        return stage_of(self.node)

    @property
    def type(self) -> TensorType:
        """Returns the type of the value."""
        return tensor_type(self.node)


def stage_of(node: fx.Node) -> int:
    """Returns the stage that computes a node."""
    (stage,) = note(node).stages
    return stage


def is_transfer(node: fx.Node) -> bool:
    """Returns whether a node is what one stage receives of the one before."""
    return isinstance(node.target, GraphOperator) and node.target.__name__ == "transfer"


def crossings(program: Program) -> list[StageCut]:
    """Returns what crosses each cut, in the order in which it is sent."""
    flags = carried(program)
    ends = reached(program, flags)
    crossed = []
    for node in program.graph.nodes:
        if is_transfer(node):
            (source,) = node.all_input_nodes
            crossed.append(StageCut(node, source, any(flags[node]) and node in ends))
    return crossed


def holders(program: Program) -> dict[str, tuple[int, ...]]:
    """Returns the stages that hold each parameter, buffer and constant, by its name."""
    nodes = program.placeholders()
    return {p.fqn: note(nodes[p.node]).stages for p in program.parameters}


def received_path(name: str) -> str:
    """Returns the path of the input that is a value received, of the transfer of that name."""
    return f"{_RECEIVED}{name}"


def received_name(path: str) -> str:
    """Returns the transfer whose value an input is; empty where it is none."""
    return path.removeprefix(_RECEIVED) if path.startswith(_RECEIVED) else ""


def is_received(node: fx.Node) -> bool:
    """Returns whether a node of a stage's program is what it receives."""
    return node.op == "placeholder" and note(node).origin == RECEIVED


def sent_name(name: str) -> str:
    """Returns the name of the output that is a value sent, of the transfer of that name."""
    return f"{_SENT}{name}"


def is_sent(output: str) -> bool:
    """Returns whether an output of that name is sent to the next stage."""
    return output.startswith(_SENT)


def is_one_stage(program: Program) -> bool:
    """Returns whether it is what one stage of a pipeline computes, or the step of that."""
    received = any(received_name(entry.path) for entry in program.inputs)
    return received or any(is_sent(output) for output in program.outputs)


def stage_program(program: Program, stage: int) -> Program:
    """Returns what one stage computes.

    Inputs of the call are those of the whole, for every stage has the batch. Outputs of the model are those that the
    stage computes, and the loss is the last stage's.

    Args:
        program: after `partition_stages`.
    """
    crossed = crossings(program)
    nodes = program.placeholders()
    parameters = tuple(p for p in program.parameters if stage in note(nodes[p.node]).stages)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    names = {p.node for p in parameters} | {i.node for i in program.inputs}
    for node in nodes.values():
        if node.name in names:
            copies[node] = _own(copy_node(graph, node, copies, node.name))
    inputs = list(program.inputs)
    for crossing in crossed:
        if crossing.receiver == stage:
            new = graph.create_node("placeholder", crossing.node.name, name=crossing.node.name)
            new.meta.update(crossing.node.meta)
            copies[crossing.node] = update(_own(new), origin=RECEIVED)
            inputs.append(Input(received_path(crossing.node.name), new.name, crossing.type, crossing.carries))
    for node in program.graph.nodes:
        if node.op == "call_function" and node not in copies and stage_of(node) == stage:
            copies[node] = _own(copy_node(graph, node, copies, node.name))
    outputs = dict(_outputs(program, copies, stage))
    outputs |= {sent_name(c.node.name): copies[c.source] for c in crossed if c.receiver == stage + 1}
    graph.output(tuple(outputs.values()))
    return replace(
        program,
        graph_module=module_of(graph),
        parameters=parameters,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        properties=program.properties - {Property.STAGES},
        constants={p.fqn: program.constants[p.fqn] for p in parameters if p.fqn in program.constants},
        loss=program.loss if program.loss in outputs else "",
    )


def _own(node: fx.Node) -> fx.Node:
    """Removes the stage from the note: of one stage alone no node says which."""
    return update(node, stages=())


def _outputs(program: Program, copies: dict[fx.Node, fx.Node], stage: int) -> Iterator[tuple[str, fx.Node]]:
    values = output_node(program.graph).args[0]
    for name, node in zip(program.outputs, values, strict=True):  # type: ignore[arg-type]
        stages = note(node).stages
        if (stage == 0 and not stages) or (stages and min(stages) == stage):
            yield name, copies[node]


@dataclass(frozen=True)
class Stage:
    """What one stage of a pipeline is.

    Attributes:
        number: of the stage.
        program: of it alone.
        received: names of the outputs of the stage before that it receives, and the placeholders that take them.
        sent: names of its outputs that the next stage receives.
        tangents: those of its outputs whose gradient it is given: of what it sends, and the loss.
        returned: of what it receives, the names of the outputs of its step that are gradients, by name of what was
            sent; without those that have none.
        trained: names of the parameters to which its backward gives a gradient, as long as they are not frozen. Of one
            that several stages hold that may be some of them: another reads it detached.
    """

    number: int
    program: Program
    received: Mapping[str, str]
    sent: tuple[str, ...]
    tangents: tuple[str, ...]
    returned: Mapping[str, str]
    trained: frozenset[str]


def stages_of(program: Program) -> list[Stage]:
    """Returns the stages of a program that was cut into them, in order."""
    crossed = crossings(program)
    flags = carried(program)
    roots = [name for name in program.outputs if not program.loss or name == program.loss]
    ends = reached(program, flags)
    placeholders = program.placeholders()
    stages = []
    for number in range(program.plan.pipeline_stages):
        staged = stage_program(program, number)
        readers = {node for node in ends if node.op == "call_function" and stage_of(node) == number}
        entering = [c for c in crossed if c.receiver == number]
        leaving = [c for c in crossed if c.receiver == number + 1]
        nodes = program.output_nodes()
        stage_roots = [name for name in roots if name in staged.outputs and any(flags[nodes[name]])]
        stages.append(
            Stage(
                number,
                staged,
                {sent_name(c.node.name): c.node.name for c in entering},
                tuple(sent_name(c.node.name) for c in leaving),
                (*stage_roots, *(sent_name(c.node.name) for c in leaving if c.carries)),
                {
                    sent_name(c.node.name): input_gradient_name(received_path(c.node.name))
                    for c in entering
                    if c.carries
                },
                frozenset(p.fqn for p in staged.parameters if not readers.isdisjoint(placeholders[p.node].users)),
            )
        )
    return stages
