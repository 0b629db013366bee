"""The table of coercions: which of them converts one placement to another (SPEC section 2.1).

Enters: the records of `fxpar.ops.coercions`. Leaves: the row of each, by kinds of placement and by operator, and the
row between two placements on one axis, of values and of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxpar.layout.layout import Placement
from fxpar.ops.coercions import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_to,
    gather,
    keep_first,
    mask_first,
    pad,
    pad_part,
    reduce_from,
    reduce_scatter,
    settle,
    share,
    split,
    sum_shared,
    take,
    take_part,
)
from fxpar.ops.operator import Operator
from fxpar.program.placements import is_finer, unsettled


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


_PLAIN = (copy_to, reduce_from, all_gather, reduce_scatter, split, gather, take, all_reduce, settle, keep_first)
COERCIONS: Mapping[tuple[str, str], Coercion] = {
    (row.source, row.target): row for row in map(_row, (*_PLAIN, mask_first, all_to_all))
}
# Of shards whose blocks several ranks hold (SPEC section 2.2): I → R and R → S on the inner factor of the axis.
_SHARE, _TAKE_PART = _row(share), _row(take_part)

# Conversions of gradients alone.
_PAD, _PAD_PART, _SUM_SHARED = _row(pad), _row(pad_part), _row(sum_shared)
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
    if source.settled or target.settled:
        return _SHARE if source.settled and unsettled(source) == target else None
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
