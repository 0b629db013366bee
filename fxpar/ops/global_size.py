"""Sizes of the whole that a rank reads off its part.

Enters: nothing. Leaves: the record of `fxpar.size`. A number in a program is that of the whole, the same on every rank,
and inputs are cut over their rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.program import operands, output_layouts
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import LoweredCall, OnShapes, Operator
from fxpar.signatures.op_call import bind_arguments


def _ranks(node: fx.Node, axes: Mapping[str, int]) -> int:
    """How many ranks cut the dimension.

    Raises:
        ValueError: they do not hold equal parts of it.
    """
    (source,), dim = operands(node), bind_arguments(node)["dim"]
    cuts = [(axis, p) for layout in output_layouts(source) for axis, p in layout if p.is_shard and p.dim == dim]
    if any(not piece.is_plain for axis, placement in cuts if axis in axes for piece in placement.pieces):
        raise ValueError(f"the ranks hold other parts of dimension {dim} than equal ones")
    return prod(axes[axis] for axis, _ in cuts if axis in axes)


def _shape(call: OnShapes) -> int:
    x, dim = call.args
    if not isinstance(x, Tensor) or not isinstance(dim, int) or not 0 <= dim < x.dim():
        raise IndexError(f"there is no dimension {dim}")
    return int(x.shape[dim]) * _ranks(call.node, call.axes)


def _own(x: Tensor, dim: int, ranks: int) -> Any:
    return torch.ops.aten.sym_size.int(x, dim) * ranks


def _lower(node: fx.Node, rank: OnRank) -> LoweredCall:
    x, dim = node.args
    return LoweredCall(_own, (x, dim, _ranks(node, rank.program.axes)))


@partial(Operator, shape=_shape, lower=_lower)
def size(x: Any, dim: int) -> Any:
    """Size of a dimension of the whole: what a rank has of it, times the ranks that share it out.

    Args:
        x: the values, any shape.
        dim: the dimension, counted from the first.
    """
