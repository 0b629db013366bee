"""Copies of nodes, which every pass and check begins with.

Enters: a node and what stands for its operands in another graph. Leaves: its copy there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.fx.node import map_arg

_node: Any = fx.Node


def copy_node(graph: fx.Graph, node: fx.Node, made: Mapping[fx.Node, fx.Node], name: str) -> fx.Node:
    """Copies a node to a graph's insertion point, under a name that is free there.

    Half of what `fx.Graph.node_copy` takes is a search of the arguments for symbolic integers, which no program has.

    Args:
        made: what stands there for its operands.
    """
    new = graph.create_node(node.op, node.target, name=name, type_expr=node.type)
    # By the properties themselves: whatever is assigned, a node leaves the table of its graph and enters it again.
    _node.args.__set__(new, map_arg(node.args, made.__getitem__))
    if node.kwargs:
        _node.kwargs.__set__(new, map_arg(node.kwargs, made.__getitem__))
    new.meta.update(node.meta)
    if new.name != name:
        new.name = name
    return new
