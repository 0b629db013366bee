"""Runs of operations on rows: what stands between a product or a collective and the next one.

Enters: nodes of one phase in order. Leaves: which of them one kernel can compute with what they read, so that a cut
between the two would have a value read again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from enum import Enum

import torch
from torch import fx

from fxpar.analysis.periods import Rows
from fxpar.ir.program import ScalarType, note, output_types
from fxpar.ops.coercions import copy_to, copy_to_shared, r_to_i
from fxpar.rules.table import rule_of
from fxpar.signatures.pointwise import pointwise_labels

aten = torch.ops.aten

_NORMS = frozenset(
    (
        aten.layer_norm.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.rms_norm.default,
    )
)
_REDUCTIONS = frozenset(
    (
        aten.amax.default,
        aten.mean.dim,
        aten.sum.dim_IntList,
        aten.var.correction,
        aten.var_mean.correction,
    )
)
# A rank has their operands as they are.
_IDENTITIES = (copy_to, r_to_i, copy_to_shared)


class _RowRole(Enum):
    """What a node is to the run in which it stands."""

    ROW = "computed row by row"
    SAME = "its operand in other words, or a part of a tuple"
    BESIDE = "a sum over rows: no kernel of rows has it, and nothing of the run waits for it"
    END = "all else"


def row_runs(nodes: Sequence[fx.Node]) -> Rows:
    """Where the runs are, and what of each one is read in it.

    An operation on rows is one on each element, a norm, or a reduction along the last dimension; none that draws, whose
    bits are kept with what drew them. A run ends at everything else but views and sums over rows.
    """
    kinds = [_kind(node) for node in nodes]
    position = {node: i for i, node in enumerate(nodes)}
    ends, end = [0] * len(nodes), len(nodes)
    for i in reversed(range(len(nodes))):
        ends[i] = end  # of the run in which what reads the node is near
        end = i if kinds[i] is _RowRole.END else end
    near = list(range(len(nodes)))
    for i, node in enumerate(nodes):
        if kinds[i] is not _RowRole.ROW:
            continue
        for read in node.all_input_nodes:
            maker = _made(read, position, kinds)
            if maker is not None and i < ends[maker]:
                near[maker] = i
    return Rows(tuple(kind is not _RowRole.END for kind in kinds), tuple(near))


def _made(value: fx.Node, position: dict[fx.Node, int], kinds: Sequence[_RowRole]) -> int | None:
    """Position of the node that makes a value, which may be a view of it; None of what is made elsewhere."""
    while value in position and kinds[position[value]] is _RowRole.SAME and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return position.get(value)


def _kind(node: fx.Node) -> _RowRole:
    noted, target = note(node), node.target
    if isinstance(noted.type, ScalarType):
        return _RowRole.SAME
    if noted.random or noted.uncaptured:
        return _RowRole.END
    is_view = isinstance(target, torch._ops.OpOverload) and target.is_view
    if is_view or target is operator.getitem or target in _IDENTITIES:
        return _RowRole.SAME
    if target in _REDUCTIONS:
        return _RowRole.ROW if _is_along_rows(node) else _RowRole.BESIDE
    rule = rule_of(target)
    is_pointwise = rule is not None and rule.labels is pointwise_labels
    return _RowRole.ROW if is_pointwise or target in _NORMS else _RowRole.END


def _is_along_rows(node: fx.Node) -> bool:
    """Whether a reduction is one along the last dimension."""
    dims = node.args[1] if len(node.args) > 1 else None
    rank = len(output_types(node.all_input_nodes[0])[0].shape)
    return isinstance(dims, (list, tuple)) and len(dims) == 1 and int(dims[0]) % max(rank, 1) == rank - 1  # type: ignore[arg-type]
