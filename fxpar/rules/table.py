"""The table of rules, by operator.

Enters: rules of operations of torch (`fxpar.signatures`), records of fxpar's operators (`fxpar.ops`), and users'
`register_rule` calls. Leaves: `rule_of`. The table is the one piece of state of this package that grows after import: a
user's operator must be known to every pass, verifier and command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxpar.errors import InputError, shown
from fxpar.ir.operators import GraphOperator
from fxpar.layout.layout import Placement
from fxpar.ops import COMPOSITE_OF, OPERATORS, Operator
from fxpar.signatures.along import along_rules
from fxpar.signatures.autograd_functions import nonlinearity
from fxpar.signatures.batchwise_rule import ROW_WISE
from fxpar.signatures.complexes import complex_rules
from fxpar.signatures.contraction import contraction_rules
from fxpar.signatures.engine import infer, seed_signature
from fxpar.signatures.gradients import gradient_rules
from fxpar.signatures.indexing import indexing_rules
from fxpar.signatures.matmul import formula, matmul_rules
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import pointwise_labels, pointwise_rules
from fxpar.signatures.randomness import random_rules
from fxpar.signatures.reduce import reduction_rules
from fxpar.signatures.routed import routed_rules
from fxpar.signatures.rule import Refusal, Rule, Signature
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
    **routed_rules(),
}


def key_of(target: Any) -> str:
    """Name of an operator in the table: `aten.linear.default`, `fxpar.dropout`."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(target) if isinstance(target, GraphOperator) else getattr(target, "__name__", str(target))


def rule_of(target: Any) -> Rule | None:
    """The operator's rule, None where it has none."""
    return target.rule if isinstance(target, Operator) else _RULES.get(key_of(target))


def rule_for(call: OpCall) -> Rule | None:
    """The rule of a call: its operator's, or that of what the plan declares row-wise."""
    return rule_of(call.target) if call.rows is None else ROW_WISE


def seeded(call: OpCall, index: int, placement: Placement) -> tuple[Signature | Refusal, bool]:
    """The signature that makes operand `index` a shard as given, and whether it is that of a composite operator."""
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
    """As `infer` with the operation's rule.

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
    """All rules by operator name (a copy)."""
    return {**_RULES, **{str(record): record.rule for record in OPERATORS.values() if record.rule is not None}}


def register_rule(
    target: torch._ops.OpOverload, labels: str | None = None, *, partial: tuple[tuple[str, ...], ...] = ()
) -> None:
    """Tells fxpar how an operator of yours treats layouts.

    Args:
        target: the overload, for example `torch.ops.mylib.gated.default`.
        labels: one part for each tensor argument and output, for example `"... h, h -> ... h"`: equal letters are
            cut together, `_` cannot be cut, a letter that no output has is summed. None: element-wise.
        partial: groups of argument names in which the operator is linear (see `Rule`).

    Raises:
        InputError: the operator has a rule already, or the labels do not match its schema.
    """
    if not isinstance(target, torch._ops.OpOverload):
        raise InputError("is no overload of an operator", where=shown(target), remedy="write torch.ops.mylib.f.default")
    if labels is not None and not isinstance(labels, str):
        raise InputError(f"{shown(labels)} are no labels", where=str(target), remedy="write '... h, h -> ... h'")
    key = key_of(target)
    if key in _RULES:
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
