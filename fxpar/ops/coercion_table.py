"""The table of coercions: which of them converts one placement to another (SPEC section 2.1).

Enters: the records of `fxpar.ops.coercions`. Leaves: the row of each, by kinds of placement and by operator, and the
row between two placements on one axis, of values and of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxpar.ir.operators import is_finer, pending
from fxpar.layout.layout import Placement
from fxpar.ops.coercions import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_to,
    copy_to_shared,
    i_to_p,
    i_to_s,
    pad_shared,
    r_to_i,
    r_to_p,
    r_to_s,
    reduce_from,
    reduce_from_shared,
    reduce_scatter,
    s_to_i,
    s_to_p,
    split_shared,
)
from fxpar.ops.operator import Operator


@dataclass(frozen=True)
class Coercion:
    """One row of the table: from and to (kinds), and the collective of each direction ("" where it is local)."""

    source: str
    target: str
    operator: Operator
    forward: str
    backward: str


def _row(operator: Operator) -> Coercion:
    assert operator.kinds is not None
    return Coercion(*operator.kinds, operator, *operator.sends)


_PLAIN = (copy_to, reduce_from, all_gather, reduce_scatter, i_to_s, s_to_i, r_to_s, all_reduce, r_to_i, i_to_p)
COERCIONS: Mapping[tuple[str, str], Coercion] = {
    (row.source, row.target): row for row in map(_row, (*_PLAIN, r_to_p, all_to_all))
}
# Of shards whose blocks several ranks hold (SPEC section 2.2): I → R and R → S on the inner factor of the axis.
_SHARE, _TAKE_PART = _row(copy_to_shared), _row(split_shared)

# Conversions of gradients alone.
_PAD, _PAD_PART, _SUM_SHARED = _row(s_to_p), _row(pad_shared), _row(reduce_from_shared)
_OF_GRADIENTS = (_PAD, _PAD_PART, _SUM_SHARED)

COERCION_OF: Mapping[Any, Coercion] = {
    row.operator: row for row in (*COERCIONS.values(), _SHARE, _TAKE_PART, *_OF_GRADIENTS)
}


def coercion(source: Placement, target: Placement) -> Coercion | None:
    """The row that converts `source` to `target`; None where nothing does, or where they are the same.

    What is lowered takes blocks in the order of the ranks: nothing converts others.
    """
    if source == target or not (source.in_rank_order and target.in_rank_order):
        return None
    if source.plain != source or target.plain != target:
        return None
    if source.reduced or target.reduced:
        return _SHARE if source.reduced and pending(source) == target else None
    if not source.is_shared and not target.is_shared:
        return COERCIONS.get((source.kind, target.kind))
    return _TAKE_PART if is_finer(source, target) else None


def gradient_coercion(source: Placement, target: Placement) -> Coercion | None:
    """As `coercion`, of gradients: I and R are one there, shared blocks may be summands, and padding zero.

    Of what all ranks hold each takes its block, of shared ones too: the backward is not differentiated.
    """
    if source.partial and source.plain == target:
        return _SUM_SHARED
    if target.partial:
        return _PAD_PART if source.is_shard and is_finer(target.plain, source.plain) else None
    if source.is_shard and target.kind == "P":
        return None if source.is_shared else _PAD
    if source.kind in "IR" and target.is_shared and target.plain == target and target.in_rank_order:
        return COERCIONS[("R", "S")]
    return None if source.partial else coercion(source.plain, target.plain)
