"""Sums that a compiled pair keeps for its backward.

Enters: the graph of a forward and its backward. Leaves: it, with marks for PyTorch's partitioner.

Where a backward needs the sum of two values alone, as a norm behind a residual connection does, PyTorch's min-cut
keeps one of them if the other is kept anyway: as many bytes, and more to read for each kernel that adds them again.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import get_default_op_list
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten
_LISTS = get_default_op_list()


def keep_sums(graph: fx.Graph, late: str) -> None:
    """Marks sums of two values of one size of which one is read for the sum alone: they are kept in its place.

    Args:
        late: with what the names of inputs begin that the backward alone takes.
    """
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name.startswith(late) or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
        if node in backward or node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        one, other = node.args
        if not _size(node) or _size(one) != _size(node) or _size(other) != _size(node):
            continue
        if any(_is_only_for(a, node) and _is_dear(b, node) for a, b in ((one, other), (other, one))):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _size(value: Any) -> tuple[Any, ...]:
    """Shape and type of a tensor; nothing is asked of symbolic sizes, which would be a guard."""
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(tensor, Tensor):
        return ()
    return (*(size.node.expr if isinstance(size, torch.SymInt) else size for size in tensor.shape), tensor.dtype)


def _is_only_for(value: fx.Node, total: fx.Node) -> bool:
    """Whether what a value is made of, from a product or a collective on, is read for the sum alone."""
    while value.op == "call_function" and len(value.users) == 1:
        if _is_root(value):
            return True
        large = [read for read in value.all_input_nodes if _is_large(read, total)]
        if len(large) != 1:
            return False
        value = large[0]
    return False


def _is_dear(value: fx.Node, total: fx.Node) -> bool:
    """Whether a value is made of another as large as it, that cannot be computed again in passing."""
    seen: set[fx.Node] = set()
    left = [value]
    while left:
        node = left.pop()
        if _is_large(node, total) and (node.op == "placeholder" or _is_root(node)):
            return True
        left += [read for read in node.all_input_nodes if read not in seen]
        seen.update(node.all_input_nodes)
    return False


def _is_root(node: fx.Node) -> bool:
    """Whether a node is a product or what only fxpar knows, of which no kernel is a part."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace not in ("aten", "prims") or _LISTS.is_compute_intensive(node)


def _is_large(node: fx.Node, total: fx.Node) -> bool:
    """Whether a value has at least as many bytes as the sum, at the sizes of the example."""
    return _bytes(node) >= _bytes(total) > 0


def _bytes(node: fx.Node) -> int:
    tensor = node.meta.get("val")
    if not isinstance(tensor, Tensor):
        return 0
    sizes = [int(size.node.hint or 0) if isinstance(size, torch.SymInt) else size for size in tensor.shape]
    return prod(sizes) * tensor.itemsize
