"""Numbers of sizes that each phase makes for itself.

Enters: a step. Leaves: the step, in which no number is made in one phase and read in another. A helper of
`outline_layers`: a call gives tensors alone, so that a layer whose backward read its numbers would be no call.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxpar.program.program import Program, ScalarType, note, set_note
from fxpar.program.step import PHASES


def numbers_by_phase(program: Program) -> None:
    """Copies each number that another phase reads, in front of its first reader there.

    Numbers of the inputs' sizes stay: they come before all phases.
    """
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    order = {node: i for i, node in enumerate(calls)}
    # Behind its readers, so that what a copy reads is copied after it.
    for node in [node for node in reversed(calls) if _is_inner(node)]:
        for phase in PHASES:
            readers = [user for user in node.users if user.op == "call_function" and note(user).phase == phase]
            if phase == note(node).phase or not readers:
                continue
            first = min(readers, key=order.__getitem__)
            with program.graph.inserting_before(first):
                copied = program.graph.node_copy(node)
            set_note(copied, replace(note(node), phase=phase))
            order[copied] = order[first]
            for reader in readers:
                reader.replace_input_with(node, copied)


def _is_inner(node: fx.Node) -> bool:
    """Whether a node is a number of what the program makes."""
    if not isinstance(note(node).type, ScalarType):
        return False
    pending = list(node.all_input_nodes)
    while pending:
        read = pending.pop()
        if read.op == "placeholder":
            continue
        if not isinstance(note(read).type, ScalarType):
            return True
        pending += read.all_input_nodes
    return False
