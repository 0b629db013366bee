"""The table of rules, by operator.

Enters: rules of operations of torch (`fxpar.signatures`), records of fxpar's operators (`fxpar.ops`), and users'
`register_rule` calls; the globs of `Operators(batchwise_ops=…)`. Leaves: `rule_of`, and the rule of what computes the
rows of a batch apart, which only an operator without a rule can be declared to do. The table is the one piece of state
of this package that grows after import: a user's operator must be known to every pass, verifier and command.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from fxpar.errors import InputError, PlanError, shown
from fxpar.ir.grad_flow import plain
from fxpar.ir.operators import GraphOperator
from fxpar.ir.program import Program, TensorType, has_note, note, operands, output_types
from fxpar.layout.layout import Layout, Placement, R, shard
from fxpar.layout.symbolic_sizes import Size, divide, names
from fxpar.ops.operator import TORCH_OPERATORS, Operator
from fxpar.ops.registry import COMPOSITE_OF, OPERATORS
from fxpar.ops.small_operators import function
from fxpar.signatures.autograd_functions import nonlinearity
from fxpar.signatures.engine import Refusal, Rule, Signature, infer, seed_signature
from fxpar.signatures.indexing import along_rules, indexing_rules
from fxpar.signatures.matmul import contraction_rules, formula, matmul_rules
from fxpar.signatures.op_call import OpCall, call_of, decides
from fxpar.signatures.pointwise import complex_rules, pointwise_labels, pointwise_rules, random_rules
from fxpar.signatures.reduce import gradient_rules, reduction_rules
from fxpar.signatures.views import view_rules

_RULES: dict[str, Rule] = {
    **pointwise_rules(),
    **random_rules(),
    **matmul_rules(),
    **contraction_rules(),
    **view_rules(),
    **indexing_rules(),
    **complex_rules(),
    **reduction_rules(),
    **gradient_rules(),
    **along_rules(),
}


def key_of(target: Any) -> str:
    """Returns the name of an operator in the table: `aten.linear.default`, `fxpar.dropout`."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(target) if isinstance(target, GraphOperator) else getattr(target, "__name__", str(target))


def rule_of(target: Any) -> Rule | None:
    """Returns the operator's rule; None where it has none."""
    record = target if isinstance(target, Operator) else TORCH_OPERATORS.get(target)
    return _RULES.get(key_of(target)) if record is None or record.rule is None else record.rule


def rule_for(call: OpCall) -> Rule | None:
    """Returns the rule of a call: its operator's, or that of what the plan's batchwise_ops name."""
    return rule_of(call.target) if call.rows is None else ROW_WISE


def seeded(call: OpCall, index: int, placement: Placement) -> tuple[Signature | Refusal, bool]:
    """Returns the signature that makes operand `index` a shard as given, and whether it is a composite operator's."""
    rule = rule_for(call)
    if rule is None:
        return Refusal("no rule says how the operation treats shards"), False
    signature = seed_signature(rule, call, index, placement)
    if isinstance(signature, Refusal) and call.target in COMPOSITE_OF:
        other = COMPOSITE_OF[call.target]
        answer = seed_signature(_composite_rule(other), replace(call, target=other), index, placement)
        if not isinstance(answer, Refusal):
            return answer, True
    return signature, False


def inferred(
    call: OpCall, placements: Sequence[Placement], carries: Sequence[bool], *, composite: bool
) -> tuple[Placement, ...] | Refusal:
    """Does as `infer` with the operation's rule.

    Args:
        composite: an operation that its own rule refuses stands for its composite operator.
    """
    summands = {p.kind for p, carried in zip(placements, carries, strict=True) if carried} == {"R"}
    if summands and not any(p.is_shard for p in placements):
        reason = nonlinearity(call, rule_of)
        if reason:
            return Refusal(f"{reason}, and replicated (R) operands have partial gradients: keep them invariant (I)")
    outputs = infer(rule_for(call), call, placements, carries)
    if isinstance(outputs, Refusal) and composite and call.target in COMPOSITE_OF:
        other = COMPOSITE_OF[call.target]
        answer = infer(_composite_rule(other), replace(call, target=other), placements, carries)
        return outputs if isinstance(answer, Refusal) else answer
    return outputs


def _composite_rule(record: Operator) -> Rule:
    assert record.rule is not None, f"{record} stands for another operator and has no rule"
    return record.rule


def rules() -> Mapping[str, Rule]:
    """Returns all rules by operator name (a copy)."""
    declared = {str(target): record.rule for target, record in TORCH_OPERATORS.items()}
    declared |= {str(record): record.rule for record in OPERATORS.values()}
    return {**_RULES, **{name: rule for name, rule in declared.items() if rule is not None}}


def register_rule(
    target: torch._ops.OpOverload, labels: str | None = None, *, partial: tuple[tuple[str, ...], ...] = ()
) -> None:
    """Tells fxpar how an operator of yours treats layouts.

    Example:
        ```python
        # Columns of weight and output are cut together. Features are summed: ranks that cut them have summands.
        fxpar.register_rule(torch.ops.mylib.product.default, "... k, k h -> ... h")
        ```

    Args:
        target: the overload, for example `torch.ops.mylib.gated.default`.
        labels: one part for each tensor argument and output, for example `"... h, h -> ... h"`. Equal letters are cut
            together, `_` cannot be cut, and a letter that no output has is summed. None means element-wise.
        partial: groups of argument names in which the operator is linear (see `Rule`).

    Raises:
        InputError: the operator has a rule already, or the labels do not match its schema.
    """
    if not isinstance(target, torch._ops.OpOverload):
        raise InputError("is no overload of an operator", where=shown(target), remedy="write torch.ops.mylib.f.default")
    if labels is not None and not isinstance(labels, str):
        raise InputError(f"{shown(labels)} are no labels", where=str(target), remedy="write '... h, h -> ... h'")
    key = key_of(target)
    if rule_of(target) is not None:
        raise InputError("the operator has a rule already", where=key, remedy="unregister_rule takes back one of yours")
    if labels is None:
        _RULES[key] = Rule(pointwise_labels, partial)
        return
    names = [a.name for a in target._schema.arguments if "Tensor" in str(a.type)]
    left, arrow, _ = labels.partition("->")
    if not arrow or len(left.split(",")) != len(names):
        raise InputError(
            f"'{labels}' does not name {len(names)} tensor arguments ({', '.join(names)}) and '->'",
            where=key,
            remedy="write one part for each argument and result, such as '... h, h -> ... h'",
        )
    _RULES[key] = Rule(formula(labels, *names), partial)


def unregister_rule(target: torch._ops.OpOverload) -> None:
    """Removes a rule that `register_rule` added."""
    _RULES.pop(key_of(target), None)


# Layouts of outputs, by question and what the operands are.
Answers = dict[Hashable, tuple[Layout, ...]]


def question(node: fx.Node) -> Hashable:
    """Returns the operation, with the types of its operands in their place."""
    args = plain((node.args, node.kwargs), lambda operand: note(operand).type if has_note(operand) else None)
    return node.target, args, output_types(node), decides(node)


def has_rows(kind: TensorType, rows: Size) -> bool:
    """Returns whether dimension 0 is rows of the batch: a multiple that does not depend on the batch again."""
    times = divide(kind.shape[0], rows) if kind.shape else None
    return times is not None and names((times,)).isdisjoint(names((rows,)))


def _apart(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    rows = call.rows
    assert rows is not None, "the call of an operator that nothing declares row-wise"
    kind = call.operands[index]
    if not has_rows(kind, rows) or placement != shard(0, kind.shape[0]):
        return Refusal(f"{call.names[index]} is {placement}, and the rows of a row-wise operator are dimension 0")
    bare = next((output for output in call.outputs if not has_rows(output, rows)), None)
    if bare is not None:
        return Refusal(f"the output {bare} of a row-wise operator has no row for each row of the batch")

    def placed(kinds: Sequence[TensorType]) -> tuple[Placement, ...]:
        return tuple(shard(0, other.shape[0]) if has_rows(other, rows) else R for other in kinds)

    return Signature(placed(call.operands), placed(call.outputs))


ROW_WISE = Rule(seed=_apart)


# ---------------------------------------------------------------------- row-wise operators


def name_of(node: fx.Node) -> str:
    """Returns what `batchwise_ops` calls an operator: its name in the text form, or an autograd function's path."""
    return str(node.kwargs.get("path")) if node.target is function else key_of(node.target)


def lacks_rule(node: fx.Node) -> bool:
    """Returns whether no rule says what an operation does to parts of its operands: it could be declared row-wise."""
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
        """Returns the number of rows that a node computes apart on an axis; None where nothing declares it."""
        return self.rows[axis] if axis in self.rows and self.names(node) else None

    def names(self, node: fx.Node) -> bool:
        """Returns whether a glob declares the operator of a node, which no rule knows."""
        # The proof that a function is element-wise takes longest, and few plans have globs.
        return node.op == "call_function" and any(_matches(node, glob) for glob in self.globs) and lacks_rule(node)


def _matches(node: fx.Node, glob: str) -> bool:
    return fnmatchcase(name_of(node), glob)


def check_declared(program: Program) -> None:
    """Checks that every glob of the plan's `batchwise_ops` names an operator that no rule knows.

    Raises:
        PlanError: one names none.
    """
    for glob in program.plan.operators.batchwise_ops:
        nodes = [node for node in program.graph.nodes if node.op == "call_function" and _matches(node, glob)]
        if any(lacks_rule(node) for node in nodes):
            continue
        free = sorted({name_of(node) for node in program.graph.nodes if lacks_rule(node)})
        remedy = (
            f"operators without a rule are {', '.join(free[:6])}" if free else "leave it out: all operators have rules"
        )
        reason = "names operators whose rules say what they do to rows" if nodes else "matches no operator"
        raise PlanError(reason, where=f"operators.batchwise_ops: {glob!r}", remedy=remedy)
