"""The rule of operators that the plan declares row-wise: they compute the rows of the batch apart.

Enters: a call with `rows`, the size of the batch. Leaves: its signatures. Dimension 0 of an operand or output is rows
where its size is a multiple of the batch (b rows, or the b·s tokens of b rows); an operand without rows is needed whole
by each row, and its gradient is a sum over them. That an operator does so is checked when a model is captured
(`fxpar.capture.rowwise`): no rule could tell.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.ir.program import TensorType
from fxpar.layout.layout import Placement, R, shard
from fxpar.layout.symbolic_sizes import Size, divide, names
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.rule import Refusal, Rule, Signature


def has_rows(kind: TensorType, rows: Size) -> bool:
    """Whether dimension 0 is rows of the batch: a multiple of it that does not depend on the batch again."""
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
