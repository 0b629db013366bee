"""Rows that nobody reads need not be written.

Enters: a lowered graph. Leaves: the operators on experts' rows whose rows that are nobody's are read by nothing, with
`fill=False` (`fxpar.ops.permute`, `grouped`).

A buffer of static size has as many places as tokens may ever need, several times what they do need. Zeros in the rest
would cost as much as rows. What takes rows by their order or by counts passes over it; what computes each row by itself
carries on what is there, which may be no number.

Which rows are somebody's an order says, -1 standing behind all of them, and so do the counts of the experts that it was
made with: such an order and such counts are of one *buffer*. Where a buffer's rows are not all in front, or an order
has rows that are not counted, nothing is left out.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

aten, fxp = torch.ops.aten, torch.ops.fxpar

# Of the operators that fill rows which are nobody's the place of the order or the counts by which these are so.
_FILLS: Mapping[object, int] = {
    fxp.moe_permute.default: 1,
    fxp.take_weighed.default: 2,
    fxp.grouped_linear.default: 2,
    fxp.swiglu_rows.default: 1,
    fxp.swiglu_gradient.default: 2,
}
# Of the operators that pass over such rows the places of the operands of which they do, and that of order or counts.
_PASSES_OVER: Mapping[object, tuple[tuple[int, ...], int]] = {
    fxp.grouped_linear.default: ((0,), 2),
    fxp.grouped_outer.default: ((0, 1), 2),
    fxp.sum_by_expert.default: ((0,), 1),
    fxp.swiglu_rows.default: ((0,), 1),
    fxp.swiglu_gradient.default: ((0, 1), 2),
    fxp.moe_unpermute.default: ((0,), 1),
    fxp.moe_combine.default: ((0,), 2),
    fxp.dot_rows.default: ((1,), 2),
}
_SAME = (aten._to_copy.default, aten.clone.default, aten.view.default, aten.reshape.default)


def leave_unread(graph: fx.Graph) -> None:
    """Has rows that nobody reads not written."""
    buffers = _buffers(graph)
    for node in graph.nodes:
        place = _FILLS.get(node.target)
        if place is None or "fill" not in [
            argument.name for argument in node.target._schema.arguments[len(node.args) :]
        ]:
            continue
        buffer = buffers.get(node.args[place])
        if buffer is not None and _is_unread(node, buffer, buffers):
            node.args = (*node.args, False)


def _buffers(graph: fx.Graph) -> dict[object, fx.Node]:
    """Of each order and each count that says which rows of a buffer are somebody's the node that stands for that."""
    buffers: dict[object, fx.Node] = {}
    for node in graph.nodes:
        if node.target is fxp.dispatch_indices.default and node.args[2] == 1:
            buffers[node] = buffers[node.args[1]] = node
        elif node.target in (fxp.received_order.default, fxp.arrived_order.default):
            for part in node.users:
                if part.target is operator.getitem:
                    buffers[part] = node
    return buffers


def _is_unread(value: fx.Node, buffer: fx.Node, buffers: Mapping[object, fx.Node]) -> bool:
    """Whether all that reads a value passes over the rows of a buffer that are nobody's."""
    for user in value.users:
        places, key = _PASSES_OVER.get(user.target, ((), 0))
        if any(user.args[i] is value for i in places):
            others = [arg for i, arg in enumerate(user.args) if i not in places]
            if value in others or buffers.get(user.args[key]) is not buffer:
                return False
        elif not _is_by_element(user) or not _is_unread(user, buffer, buffers):
            return False
    return True


def _is_by_element(node: fx.Node) -> bool:
    """Whether a node gives each element of its operand or what it computes of it alone."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in target.tags or target in _SAME
