"""Copies of nodes, which every pass and check begins with.

Enters: a node and what stands for its operands in another graph. Leaves: its copy there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

from torch import fx
from torch.fx.node import map_arg

_NUMBERED = re.compile(r"([a-zA-Z_][0-9a-zA-Z_]*?)(?:_(\d+))?")  # as fx takes names apart


def copy_node(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], name: str) -> fx.Node:
    """Copies a node to a graph's insertion point, under a name that is free there.

    Most of what `fx.Graph.node_copy` takes is a search of the arguments for symbolic integers, which no program has,
    and one for a name.

    Args:
        copies: what stands there for its operands.
    """
    args = map_arg(node.args, copies.__getitem__)
    kwargs = map_arg(node.kwargs, copies.__getitem__) if node.kwargs else node.kwargs
    new = fx.Node(graph, name, node.op, node.target, args, kwargs, node.type)
    _enter(graph, new, name)
    new.meta.update(node.meta)
    return new


def take_name(graph: Any, name: str) -> None:
    """Makes new nodes of a graph get other names, as if a node had this one."""
    base, number = _taken_apart(name)
    names = graph._graph_namespace
    names._used_names.add(name)
    names._base_count[base] = names._base_count.get(base, 0) if number is None else number


def _enter(graph: Any, new: fx.Node, name: str) -> None:
    """What `fx.Graph.create_node` does with a node that it has made; later names are as behind that."""
    take_name(graph, name)
    graph._graph_namespace.associate_name_with_obj(name, new)
    graph._insert(new)
    graph._find_nodes_lookup_table.insert(new)
    graph._len += 1


@lru_cache(maxsize=65536)
def _taken_apart(name: str) -> tuple[str, int | None]:
    """A name without its number, and that."""
    match = _NUMBERED.fullmatch(name)
    base, number = match.groups() if match is not None else (name, None)
    return base, None if number is None else int(number)


_Record = TypeVar("_Record")


def changed(record: _Record, **changes: Any) -> _Record:
    """A note with other fields, as `dataclasses.replace` gives it, in a fifth of the time: passes ask for thousands.

    Raises:
        TypeError: it has no such field.
    """
    if not changes.keys() <= record.__dict__.keys():
        raise TypeError(f"a note has no {', '.join(changes.keys() - record.__dict__.keys())}")
    new = object.__new__(type(record))
    new.__dict__.update(record.__dict__, **changes)
    return new
