"""Which values of a graph are made from parameters alone, and which are a parameter whose gradients are summed.

Enters: a graph and its parameters; a node. Leaves: the values, which depend on no input; the node that owns a value.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from fxpar.program.operators import GraphOperator
from fxpar.program.program import TensorType, note, operands


def weights_of(graph: fx.Graph, owned: Iterable[fx.Node]) -> set[fx.Node]:
    """The placeholders `owned` and all values that are made from them alone."""
    weights = set(owned)
    for node in graph.nodes:
        if node.op == "call_function" and operands(node) and all(other in weights for other in operands(node)):
            weights.add(node)
    return weights


def owner_of(node: fx.Node) -> fx.Node:
    """What `node` is the same value as, before sums of gradients over one axis after the other; without any, itself."""
    source = summed(node)
    return node if source is None else owner_of(source)


def summed(node: fx.Node) -> fx.Node | None:
    """What a sum of gradients, or an item of a bucket of them, gives again; None where a node is neither."""
    source, index = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
    if not isinstance(source, fx.Node) or not isinstance(index, int):
        return None
    is_sum = isinstance(source.target, GraphOperator) and source.target.sums_gradients
    is_item = source is not node or (is_sum and isinstance(note(node).type, TensorType))
    return operands(source)[index] if is_sum and is_item else None
