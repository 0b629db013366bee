"""Which activations are written to memory.

Enters: a program. Leaves: the nodes whose results a compiled program would store and read again. Others are computed on
the fly inside a kernel; counting each of them would make a norm that is spelt out dearer than the same norm as one
operation.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx

from fxpar.ir.program import Program, output_types
from fxpar.ops import COMPOSITE_OF

aten = torch.ops.aten

# Operations that a compiler does not merge with their neighbours besides matrix products.
_KERNELS: Set[object] = frozenset(
    {
        aten.layer_norm.default,
        aten.native_layer_norm.default,
        aten.rms_norm.default,
        aten.group_norm.default,
        aten.dropout.default,
        *COMPOSITE_OF,
    }
)
_VIEWS: Set[object] = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
    }
)


def materialised(program: Program, products: Set[fx.Node], weights: Set[fx.Node]) -> set[fx.Node]:
    """Nodes whose values are stored: results and operands of products, norms, dropout, lookups and losses, and what
    several operations read (residual streams).

    Args:
        products: matrix products and attention.
        weights: values made from parameters alone; they are none of these.
    """
    stored = set()
    for node in program.graph.nodes:
        if node.op != "call_function" or node in weights or node.target in _VIEWS:
            continue
        if not any(kind.is_float for kind in output_types(node)):
            continue
        readers = _readers(node)
        kernels = [other for other in (node, *readers) if other in products or other.target in _KERNELS]
        if kernels or len(readers) > 1:
            stored.add(node)
    return stored


def _readers(node: fx.Node) -> set[fx.Node]:
    """The operations that read a value, also through views of it."""
    readers, pending = set(), list(node.users)
    for user in pending:
        if user.target in _VIEWS:
            pending.extend(user.users)
        elif user.op == "call_function":
            readers.add(user)
    return readers
