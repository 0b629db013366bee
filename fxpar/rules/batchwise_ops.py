"""Which operators the plan declares row-wise.

Enters: the globs of `Plan(row_wise=…)`. Leaves: for a node and an axis that cuts the batch, the number of rows that it
computes apart, which gives the node's call the rule of `fxpar.signatures.batchwise_rule`. Only an operator that no rule
knows can be declared so; what the plan does not say no note can.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import fx

from fxpar.errors import PlanError
from fxpar.ir.program import Program, operands, output_types
from fxpar.layout.symbolic_sizes import Size
from fxpar.ops import Operator
from fxpar.ops.functions import function
from fxpar.rules.table import key_of, rule_of
from fxpar.signatures.op_call import call_of


def name_of(node: fx.Node) -> str:
    """What `row_wise` calls the operator of a node: its name in the text form, or an autograd function's path."""
    return str(node.kwargs.get("path")) if node.target is function else key_of(node.target)


def lacks_rule(node: fx.Node) -> bool:
    """Whether no rule says what an operation does to parts of its operands: it could be declared row-wise."""
    if node.op != "call_function" or not operands(node) or not output_types(node):
        return False
    if isinstance(node.target, Operator):
        return node.target.whole is not None and bool(node.target.whole(call_of(node, 2)))
    return node.target is not operator.getitem and rule_of(node.target) is None


@dataclass(frozen=True)
class RowWise:
    """What the plan declares.

    Attributes:
        globs: on the names of operators (`name_of`).
        rows: by axis that cuts the batch, the number of rows as the axis sees it.
    """

    globs: Sequence[str] = ()
    rows: Mapping[str, Size] = field(default_factory=dict)

    def of(self, node: fx.Node, axis: str) -> Size | None:
        """The number of rows that a node computes apart on an axis; None where nothing declares that it does."""
        return self.rows[axis] if axis in self.rows and self.names(node) else None

    def names(self, node: fx.Node) -> bool:
        """Whether a glob declares the operator of a node, which no rule knows."""
        # The proof that a function is element-wise takes longest, and few plans have globs.
        return node.op == "call_function" and any(_matches(node, glob) for glob in self.globs) and lacks_rule(node)


def _matches(node: fx.Node, glob: str) -> bool:
    return fnmatchcase(name_of(node), glob)


def check_declared(program: Program) -> None:
    """Every glob of the plan's `row_wise` names an operator that no rule knows.

    Raises:
        PlanError: one names none.
    """
    for glob in program.plan.row_wise:
        nodes = [node for node in program.graph.nodes if node.op == "call_function" and _matches(node, glob)]
        if any(lacks_rule(node) for node in nodes):
            continue
        free = sorted({name_of(node) for node in program.graph.nodes if lacks_rule(node)})
        remedy = (
            f"operators without a rule are {', '.join(free[:6])}" if free else "leave it out: all operators have rules"
        )
        reason = "names operators whose rules say what they do to rows" if nodes else "matches no operator"
        raise PlanError(reason, where=f"row_wise: {glob!r}", remedy=remedy)
