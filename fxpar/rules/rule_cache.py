"""What rules answered before, in one check or pass: equal layers put equal questions.

Enters: a node and what its operands are. Leaves: a key that is equal for nodes to which the same rule gives the same
answer: it has all of a node that a rule is told.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from fxpar.ir.grad_flow import plain
from fxpar.ir.program import has_note, note, output_types
from fxpar.layout.layout import Layout
from fxpar.signatures.op_call import decides

# Layouts of outputs, by question and what the operands are.
Answers = dict[Hashable, tuple[Layout, ...]]


def question(node: fx.Node) -> Hashable:
    """The operation, with the types of its operands in their place."""
    args = plain((node.args, node.kwargs), lambda operand: note(operand).type if has_note(operand) else None)
    return node.target, args, output_types(node), decides(node)
