"""Values that a trace knows although it computes none: those that follow from sizes alone.

Enters: a tensor of a trace that is under way. Leaves: its elements as formulas (`fxpar.elements`), and what a branch on
it does for every size. Positions that the author counts by `arange` and compares with each other are such values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fxpar.elements import FALSE, TRUE, Element, elements
from fxpar.layout.symbolic_sizes import Size, simplify, symbol
from fxpar.program.program import Note, ScalarType, TensorType, set_note

# Operands of which more is asked for nothing: positions are made in a few steps.
_MOST = 200


def branch(func: Any, args: tuple[Any, ...]) -> bool | None:
    """What a branch on a tensor does, where that is known."""
    if func not in (Tensor.__bool__, Tensor.item) or args[0].dtype != torch.bool or args[0].numel() != 1:
        return None
    element = known(args[0])
    return True if element == TRUE else False if element == FALSE else None


def known(value: Tensor) -> Element | None:
    """The elements of a tensor of the trace that is under way; None where they depend on more than sizes."""
    mode = get_proxy_mode()
    if mode is None or value not in mode.tracer.tensor_tracker:
        return None
    node = mode.tracer.tensor_tracker[value].proxy.node
    above = _above(node)
    if above is None or _is_written(node.graph, above):
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for source in above:
        copies[source] = set_note(_copied(graph, source, copies), Note(_kind(source)))
    return elements(None, copies.values()).get(copies[node])


def _above(node: fx.Node) -> list[fx.Node] | None:
    """A node and all that it is computed from, in the order of the graph; None where that is much."""
    above, waiting = {node}, [node]
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand not in above:
                above.add(operand)
                if isinstance(operand.meta.get("val"), Tensor):
                    waiting.append(operand)
        if len(above) > _MOST:
            return None
    return sorted(above)


def _copied(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    is_operator = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    if is_operator and all(operand in copies for operand in node.all_input_nodes):
        return graph.node_copy(node, copies.__getitem__)
    return graph.placeholder(node.name)


def _kind(node: fx.Node) -> TensorType | ScalarType | None:
    value: Any = node.meta.get("val")
    if isinstance(value, Tensor):
        return TensorType(value.dtype, tuple(_size(size) for size in value.shape))
    return ScalarType(_size(value)) if type(value) in (int, torch.SymInt) else None


def _size(size: int | torch.SymInt) -> Size:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return simplify(expression.subs({variable: symbol(variable.name) for variable in expression.free_symbols}))


def _is_written(graph: fx.Graph, above: list[fx.Node]) -> bool:
    """Whether an operator writes into the memory of one of them, be it through a view."""
    memories = {_memory(node) for node in above} - {None}
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and any(_memory(x) in memories for x in node.all_input_nodes):
            return True
    return False


def _memory(node: fx.Node) -> int | None:
    """What tensors have in common that share memory; None of what is no single tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None
