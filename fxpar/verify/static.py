"""The static verifiers, each with the properties under which it applies.

Enters: a program. Leaves: nothing, or the first failure. They run after every pass of the manager, and in one line from
a test: `verify_static(program)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import fx

from fxpar.errors import CheckFailed
from fxpar.ir.program import Program, describe, note, output_layouts, tensor_type
from fxpar.ir.properties import Property
from fxpar.ir.regions import inlined
from fxpar.ir.stages import Stage, is_transfer, stage_of, stages_of
from fxpar.manager import Verifier
from fxpar.rewrite.loss_reduction import COUNT
from fxpar.signatures.check_cache import facts_of
from fxpar.verify.operations import check_operations
from fxpar.verify.phases import check_buffers, check_chunks, check_step
from fxpar.verify.shapes import check_shapes
from fxpar.verify.structure import check_header, check_structure
from fxpar.verify.types import check_choice, check_types

# Stages: each node is computed by one, and reads what that stage has.


def check_stages(program: Program) -> None:
    """Checks that an operation is on one stage, reads what that has or receives, and nothing crosses twice.

    Raises:
        CheckFailed: names the node, and the cut between two stages.
    """
    count = program.plan.pipeline_stages
    received: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if len(note(node).stages) != 1 or not 0 <= stage_of(node) < count:
            noted = "+".join(map(str, note(node).stages)) or "none"
            raise CheckFailed(f"is on {noted} and not on one of {count} stages", where=describe(node))
        if is_transfer(node):
            _check_transfer(node, received)
        else:
            for read in node.all_input_nodes:
                _check_read(program, node, read)
    _check_held(program)
    nodes = program.output_nodes()
    for name, what in {program.loss: "loss", COUNT: "count of what is in the loss"}.items():
        node = nodes.get(name)
        if node is not None and node.op == "call_function" and stage_of(node) != count - 1:
            raise CheckFailed(f"the {what} is on stage {stage_of(node)}, not on the last", where=describe(node))
    check_neighbours(stages_of(program))


def _check_transfer(node: fx.Node, received: dict[tuple[fx.Node, int], fx.Node]) -> None:
    stage, (source,) = stage_of(node), node.all_input_nodes
    cut = f"the cut in front of stage {stage}"
    if source.op != "call_function":
        raise CheckFailed(
            f"%{source.name} is no result of a stage, but crosses {cut}", where=describe(node), remedy="read it itself"
        )
    if stage_of(source) != stage - 1:
        raise CheckFailed(
            f"%{source.name} of stage {stage_of(source)} crosses {cut}: a stage receives of the one before alone",
            where=describe(node),
            remedy="pass the value from stage to stage",
        )
    origin = _origin(source)
    before = received.setdefault((origin, stage), node)
    if before is not node:
        raise CheckFailed(f"%{origin.name} crosses {cut} twice, as %{before.name} too", where=describe(node))


def _origin(node: fx.Node) -> fx.Node:
    """Returns what is passed on from stage to stage."""
    while is_transfer(node):
        (node,) = node.all_input_nodes
    return node


def _check_read(program: Program, node: fx.Node, read: fx.Node) -> None:
    stage = stage_of(node)
    if read.op == "call_function" and note(read).stages != (stage,):
        other = "+".join(map(str, note(read).stages)) or "none"
        raise CheckFailed(
            f"reads %{read.name} of stage {other}, which stage {stage} never gets",
            where=describe(node),
            remedy=f"put fxpar.transfer on each cut between stages {other} and {stage}",
        )
    parameter = program.parameter(read) if read.op == "placeholder" else None
    if parameter is not None and stage not in note(read).stages:
        lost = ", so that its gradient of it is not summed" if parameter.trainable else ""
        raise CheckFailed(
            f"reads %{read.name}, which stage {stage} does not hold{lost}",
            where=describe(node),
            remedy=f"note stage {stage} on the parameter",
        )


def _check_held(program: Program) -> None:
    """Checks that parameters are held by those that read them."""
    nodes = program.placeholders()
    for parameter in program.parameters:
        node = nodes[parameter.node]
        readers = {stage_of(user) for user in node.users if user.op == "call_function"}
        stages = note(node).stages
        if stages != (tuple(sorted(readers)) or (0,)):
            holders = "+".join(map(str, stages)) or "no stage"
            raise CheckFailed(
                f"is held by {holders} and read by {'+'.join(map(str, sorted(readers))) or 'none'}",
                where=parameter.fqn,
                remedy="note the stages that read it; what nothing reads is of stage 0",
            )
    for entry in program.inputs:
        if note(nodes[entry.node]).stages:
            raise CheckFailed("every stage has the inputs of a call", where=entry.path, remedy="note no stage")


def check_neighbours(stages: Sequence[Stage]) -> None:
    """Checks that each stage receives what the one before sends, in order, and gradients come back of it.

    Args:
        stages: all of them, in order.

    Raises:
        CheckFailed: names the value and the cut.
    """
    for sender, receiver in pairwise(stages):
        cut = f"the cut in front of stage {receiver.number}"
        if sender.sent != tuple(receiver.received):
            odd = sorted({*sender.sent} ^ {*receiver.received}) or sender.sent
            raise CheckFailed(f"what is sent and what is received differ at {cut}", where=odd[0])
        entries = {entry.node: entry for entry in receiver.program.inputs}
        nodes = sender.program.output_nodes()
        for name, placeholder in receiver.received.items():
            node, received, entry = nodes[name], receiver.program.node(placeholder), entries[placeholder]
            if tensor_type(node) != entry.type or output_layouts(node) != output_layouts(received):
                raise CheckFailed(f"is another type or layout than was sent, behind {cut}", where=describe(received))
            if entry.carries != (name in sender.tangents):
                waits = name in sender.tangents
                reason = f"stage {sender.number} waits for its gradient" if waits else "its gradient goes nowhere"
                reason += f", and behind {cut} it {'is an input without one' if waits else 'has one'}"
                raise CheckFailed(reason, where=describe(received), remedy="write (gradient) on what is received of it")


STATIC: tuple[Verifier, ...] = (
    Verifier("header", frozenset(), check_header, uses_facts=True),
    Verifier("structure", frozenset(), check_structure, uses_facts=True),
    Verifier("operations", frozenset(), check_operations, of_operations=True, uses_facts=True),
    Verifier("choice", frozenset({Property.LAYOUTS}), check_choice, until=Property.COLLECTIVES, uses_facts=True),
    # Types come first: they say which coercion a wrong shape lacks.
    Verifier("types", frozenset({Property.COLLECTIVES}), check_types, of_operations=True, uses_facts=True),
    Verifier("shapes", frozenset(), check_shapes, of_operations=True, uses_facts=True),
    Verifier("stages", frozenset({Property.STAGES}), check_stages),
    Verifier("chunks", frozenset({Property.STEP}), check_chunks),
    Verifier("buffers", frozenset({Property.STEP}), check_buffers),
    Verifier("step", frozenset({Property.STEP}), check_step, of_dataflow=True),
)


def verify_static(program: Program) -> tuple[str, ...]:
    """Runs every static check whose properties hold, and returns their names.

    Raises:
        CheckFailed, LayoutError: the first failure.
        InputError: the program names an autograd function that cannot be imported.
    """
    program = inlined(program)
    facts = facts_of(program)
    applied = [verifier for verifier in STATIC if verifier.applies(program)]
    for verifier in applied:
        verifier.judge(facts)
    return tuple(verifier.name for verifier in applied)
