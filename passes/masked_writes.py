"""Values that are written where a mask is true, as a choice between two values.

Enters: a program. Leaves: its graph without `x[mask] = v` where `v` is the same at all true places. How many places are
true depends on values, and the backward of the write has as many rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fxpar.program.program import Program, TensorType, note, set_note, tensor_type
from fxpar.rules import bind_arguments

aten = torch.ops.aten


def choose_by_masks(program: Program) -> None:
    """Rewrites the writes, in place.

    Before::

        %put = aten.index_put.default(%x, [%mask], %v) : f32[b, s, 96]

    After::

        %at = aten.unsqueeze.default(%mask, 2) : bool[b, s, 1]
        %put = aten.where.self(%at, %v, %x) : f32[b, s, 96]
    """
    writes = list(program.graph.find_nodes(op="call_function", target=aten.index_put.default))
    for node in writes:
        arguments = bind_arguments(node)
        x, values, mask = arguments["self"], arguments["values"], _mask(node)
        if mask is None:
            continue
        before = next(dim for dim, entry in enumerate(arguments["indices"]) if entry is not None)
        behind = len(tensor_type(x).shape) - before - len(tensor_type(mask).shape)
        if len(tensor_type(values).shape) > behind and tensor_type(values).shape[-behind - 1] != 1:
            continue  # a value for each true place
        graph = program.graph
        with graph.inserting_before(node):
            for _ in range(behind):
                mask = _with_dimension(graph, node, mask, len(tensor_type(mask).shape))
            for _ in range(len(tensor_type(mask).shape) - behind - 1 if len(tensor_type(values).shape) > behind else 0):
                values = _with_dimension(graph, node, values, len(tensor_type(values).shape) - behind)
            if arguments.get("accumulate", False):
                added = graph.call_function(aten.add.Tensor, (x, values))
                values = set_note(added, note(node))
        node.target, node.args, node.kwargs = aten.where.self, (mask, values, x), {}


def _mask(node: fx.Node) -> fx.Node | None:
    """Returns the mask of a write whose only index it is, with dimensions of `x` before and behind it or without."""
    entries = [entry for entry in bind_arguments(node)["indices"] if entry is not None]
    if len(entries) != 1 or not isinstance(entries[0], fx.Node) or tensor_type(entries[0]).dtype != torch.bool:
        return None
    return entries[0]


def _with_dimension(graph: fx.Graph, node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
    kind = tensor_type(x)
    shape = (*kind.shape[:dim], 1, *kind.shape[dim:])
    new = graph.call_function(aten.unsqueeze.default, (x, dim))
    return set_note(new, replace(note(node), type=TensorType(kind.dtype, shape), random=0))
