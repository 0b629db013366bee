"""Batch and instance norms as operations that say what they change.

Enters: an exported graph. Leaves: one without `batch_norm`, nor an `instance_norm` that keeps statistics, for torch's
operators change these without a word in their schema. What norms a batch by its own statistics gives them beside its
result; the buffers are changed by operations of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.capture.places import module_of, source_of

aten = torch.ops.aten
_NARROW = (torch.float16, torch.bfloat16)


def normed_batches(graph: fx.Graph, prefix: str) -> tuple[str, ...]:
    """The modules, each with its line, that norm by statistics of the batch that is given.

    Args:
        prefix: what module paths begin with besides the author's names.
    """
    nodes = [node for node in graph.nodes if node.target is aten.batch_norm.default and node.args[5]]
    places = ((module_of(node).removeprefix(prefix), source_of(node)) for node in nodes)
    return tuple(", ".join(filter(None, place)) or f"%{n.name}" for place, n in zip(places, nodes, strict=True))


def changes_statistics(node: fx.Node) -> bool:
    """Whether a node is a norm that may change statistics that its module keeps."""
    return node.target in (aten.batch_norm.default, aten.instance_norm.default)


def write_norms(graph: fx.Graph) -> None:
    """Puts simpler operations in the place of the norms."""
    sizes = _ElementCounts(graph)
    for node in list(graph.nodes):
        if node.target is aten.batch_norm.default:
            result = _by_batch(_NormEmitter(node, sizes)) if node.args[5] else _by_constants(_NormEmitter(node, sizes))
        elif node.target is aten.instance_norm.default and node.args[5] and isinstance(node.args[3], fx.Node):
            result = _by_instance(_NormEmitter(node, sizes))
        else:
            continue
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _value(node: Any) -> Tensor:
    tensor: Tensor = node.meta["val"]
    return tensor


class _ElementCounts:
    """Numbers of elements, each made once: sizes are read off inputs where one has them."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._made = graph, dict[Any, fx.Node]()

    def product(self, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> Any:
        """The number of elements of `x` over some dimensions, in front of `node`."""
        number: Any = 1
        rest: list[fx.Node] = []
        for dim in dims:
            size = _value(x).shape[dim]
            if isinstance(size, torch.SymInt):
                rest.append(self._size(node, x, dim))
            else:
                number *= size
        for factor in rest:
            is_one = isinstance(number, int) and number == 1
            number = factor if is_one else self.made(node, operator.mul, factor, number)
        return number

    def made(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A number in front of `node`; the same one as before where it was made."""
        key = (target, args)
        if key not in self._made:
            with self._graph.inserting_before(node):
                new = self._graph.call_function(target, args)
            values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
            new.meta = {**node.meta, "val": target(*values)}
            self._made[key] = new
        return self._made[key]

    def _size(self, node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
        length: Any = _value(x).shape[dim]
        expression = length.node.expr
        for place in self._graph.find_nodes(op="placeholder"):
            value = place.meta.get("val")
            for index, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr == expression:
                    return self.made(node, aten.sym_size.int, place, index)
        return self.made(node, aten.sym_size.int, x, dim)


class _NormEmitter:
    """Operations in the place of a norm.

    Attributes:
        dtype: in which statistics are computed.
    """

    def __init__(self, node: fx.Node, sizes: _ElementCounts) -> None:
        self.node, self.sizes = node, sizes
        args: tuple[Any, ...] = node.args
        self.x, self.weight, self.bias, self.mean, self.variance, _, self.momentum, self.epsilon, _ = args
        types = {_value(operand).dtype for operand in (self.x, self.mean) if isinstance(operand, fx.Node)} - {*_NARROW}
        self.dtype = torch.float64 if torch.float64 in types else torch.float32
        self._rank = _value(self.x).dim()

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """An operation."""
        with self.node.graph.inserting_before(self.node):
            new = self.node.graph.call_function(target, args, kwargs)
        new.meta = dict(self.node.meta)
        values, options = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        new.meta["val"] = target(*values, **options)
        return new

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`x` in a type."""
        return x if _value(x).dtype == dtype else self(aten._to_copy.default, x, dtype=dtype)

    def along(self, value: Any) -> Any:
        """What is of channels, the last dimension, beside a value with dimensions behind these."""
        behind = self._rank - 2
        if behind > 0 and _value(value).dim() == 1:
            return self(aten.view.default, value, [-1, *[1] * behind])
        for _ in range(behind):
            value = self(aten.unsqueeze.default, value, -1)
        return value

    def moments(self, dims: Sequence[int]) -> tuple[fx.Node, fx.Node, fx.Node, Any]:
        """What deviates from the mean, the mean, the sum of squares of what deviates, and how many elements there are.

        A mean is a sum over a number, so that ranks that share out what is counted sum both.
        """
        x, count = self.cast(self.x, self.dtype), self.sizes.product(self.node, self.x, dims)
        mean = self(aten.div.Tensor, self(aten.sum.dim_IntList, x, [*dims]), count)
        centered = self(aten.sub.Tensor, x, self.along(mean))
        squares = self(aten.sum.dim_IntList, self(aten.mul.Tensor, centered, centered), [*dims])
        return centered, mean, squares, count

    def scaled(self, centered: fx.Node, variance: Any) -> fx.Node:
        """The norm of what deviates from a mean."""
        scale = self(aten.rsqrt.default, self(aten.add.Tensor, variance, self.epsilon))
        if self.weight is not None:
            scale = self(aten.mul.Tensor, scale, self.weight)
        result = self(aten.mul.Tensor, centered, self.along(scale))
        if self.bias is not None:
            result = self(aten.add.Tensor, result, self.along(self.bias))
        return self.cast(result, _value(self.node).dtype)

    def update(self, mean: fx.Node, variance: fx.Node) -> None:
        """Moves the statistics that are kept towards these, `[C]` each."""
        for statistic, new in ((self.mean, mean), (self.variance, variance)):
            if statistic is not None:
                share = self(aten.mul.Tensor, self(aten.detach.default, new), self.momentum)
                old = self(aten.mul.Tensor, self.cast(statistic, self.dtype), 1 - self.momentum)
                self(aten.copy_.default, statistic, self(aten.add.Tensor, old, share))

    def unbiased(self, squares: fx.Node, count: Any) -> fx.Node:
        """The variance of a sample."""
        less = count - 1 if isinstance(count, int) else self.sizes.made(self.node, operator.sub, count, 1)
        return self(aten.div.Tensor, squares, less)


def _by_batch(call: _NormEmitter) -> fx.Node:
    x, affine = call.x, [call.weight, call.bias]
    if _value(x).dtype in _NARROW:  # statistics are of the weights' type
        x = x if any(affine) else call.cast(x, call.dtype)
        affine = [None if parameter is None else call.cast(parameter, call.dtype) for parameter in affine]
    norm = call(aten._native_batch_norm_legit.no_stats, x, *affine, True, 0.0, call.epsilon)
    result, mean, scale = (call(operator.getitem, norm, index) for index in range(3))
    if call.mean is not None:
        dims = [dim for dim in range(_value(call.x).dim()) if dim != 1]
        count = call.sizes.product(call.node, call.x, dims)
        moment = call(aten.reciprocal.default, call(aten.mul.Tensor, scale, scale))
        squares = call(aten.mul.Tensor, call(aten.sub.Tensor, moment, call.epsilon), count)
        call.update(mean, call.unbiased(squares, count))
    return call.cast(result, _value(call.node).dtype)


def _by_constants(call: _NormEmitter) -> fx.Node:
    """With the statistics that are kept: a product and a sum for each channel."""
    x = call.cast(call.x, _value(call.mean).dtype)
    return call.scaled(call(aten.sub.Tensor, x, call.along(call.mean)), call.variance)


def _by_instance(call: _NormEmitter) -> fx.Node:
    """Each row by itself; the statistics that are kept move towards the mean over rows."""
    centered, mean, squares, count = call.moments(range(2, _value(call.x).dim()))
    rows = call.sizes.product(call.node, call.x, [0])
    means = [
        call(aten.div.Tensor, call(aten.sum.dim_IntList, value, [0]), rows)
        for value in (mean, call.unbiased(squares, count))
    ]
    call.update(*means)
    return call.scaled(centered, call(aten.div.Tensor, squares, count))
