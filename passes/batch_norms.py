"""Norms of a batch that ranks share out, as sums and counts.

Enters: a program whose batch is divided. Leaves: one whose norms take their statistics of the rows of all ranks, by the
rules of sums. A helper of `divide_batch`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from fxpar.passes.counts import Counting, wide
from fxpar.program.program import TensorType, operands, output_types, tensor_type

aten = torch.ops.aten
_NORM = aten._native_batch_norm_legit.no_stats


def divide_norms(graph: fx.Graph, batch: str) -> None:
    """Writes each norm of the batch by sums and counts; those of what has no rows stay.

    Args:
        batch: the symbol that is the number of rows.
    """
    for node in list(graph.nodes):
        if node.target is not _NORM:
            continue
        counting, shape = Counting(graph, node, batch), tensor_type(operands(node)[0]).shape
        if any(counting.varies(size) for dim, size in enumerate(shape) if dim != 1):
            _replace_norm(node, _Norm(counting).values())


def _replace_norm(node: fx.Node, values: Mapping[int, fx.Node]) -> None:
    for user in list(node.users):
        assert user.target is operator.getitem, "a norm gives three values"
        value, name = values[int(user.args[1])], user.name  # type: ignore[arg-type]
        user.replace_all_uses_with(value)
        node.graph.erase_node(user)
        value.name = name
    node.graph.erase_node(node)


class _Norm:
    """One norm, `[_, C, …]`."""

    def __init__(self, counting: Counting) -> None:
        self._c = counting
        self._x: fx.Node = counting.given["input"]
        self._weight, self._bias = counting.given["weight"], counting.given["bias"]
        self._result, self._kind, _ = output_types(counting.node)
        self._rank = len(self._result.shape)

    def values(self) -> dict[int, fx.Node]:
        """The result, the means, and one over the standard deviations."""
        c, kind = self._c, self._kind
        x = c.cast("wide", self._x, wide(self._result.dtype))
        full = tensor_type(x)
        count = self._count(x)
        mean = c.call("mean", aten.div.Tensor, (self._sum("sum", x), count), kind)
        centered = c.call("centered", aten.sub.Tensor, (x, self._along("means", mean)), full)
        squares = self._sum("squares", c.call("square", aten.mul.Tensor, (centered, centered), full))
        variance = c.call("variance", aten.div.Tensor, (squares, count), kind)
        positive = c.call("positive", aten.add.Tensor, (variance, c.given["eps"]), kind)
        inverse = c.call("inverse", aten.rsqrt.default, (positive,), kind)
        scale = inverse
        if self._weight is not None:
            scale = c.call("scale", aten.mul.Tensor, (inverse, c.cast("weight", self._weight, kind.dtype)), kind)
        result = c.call("scaled", aten.mul.Tensor, (centered, self._along("scales", scale)), full)
        if self._bias is not None:
            bias = self._along("biases", c.cast("bias", self._bias, kind.dtype))
            result = c.call("moved", aten.add.Tensor, (result, bias), full)
        return {0: c.cast("result", result, self._result.dtype), 1: mean, 2: inverse}

    def _sum(self, suffix: str, x: fx.Node) -> fx.Node:
        dims = [dim for dim in range(len(tensor_type(x).shape)) if dim != 1]
        return self._c.call(suffix, aten.sum.dim_IntList, (x, dims), self._kind)

    def _count(self, x: fx.Node) -> fx.Node:
        """How many elements a channel has, for each: of dimensions of known sizes one element is looked at."""
        factor = 1
        for dim in reversed(range(2, self._rank)):
            kind = tensor_type(x)
            if isinstance(kind.shape[dim], int):
                factor *= kind.shape[dim]
                shape = (*kind.shape[:dim], *kind.shape[dim + 1 :])
                x = self._c.call("row", aten.select.int, (x, dim, 0), TensorType(kind.dtype, shape))
        kind = TensorType(self._kind.dtype, tensor_type(x).shape)
        ones = self._c.call("ones", aten.ones_like.default, (x,), kind, dtype=kind.dtype)
        total = self._sum("count", ones)
        return total if factor == 1 else self._c.call("elements", aten.mul.Tensor, (total, factor), self._kind)

    def _along(self, suffix: str, value: fx.Node) -> fx.Node:
        """What is of channels, beside a value with dimensions behind these."""
        if self._rank <= 2:
            return value
        kind = tensor_type(value)
        shape = [-1, *[1] * (self._rank - 2)]
        return self._c.call(
            suffix, aten.view.default, (value, shape), TensorType(kind.dtype, (*kind.shape, *shape[1:]))
        )
