"""Means over the batch as sums over counts.

Enters: an operation that takes a mean. Leaves: what stands for it. A helper of `divide_batch`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.ir.program import (
    ScalarType,
    TensorType,
    describe,
    insert_call,
    note,
    operands,
    output_types,
    replace_node,
    tensor_type,
)
from fxpar.layout.symbolic_sizes import Size, divide, names, product
from fxpar.ops.small_operators import size
from fxpar.rules import bind_arguments

# Counts of rows as values: what sums over the batch are divided by, and numbers that depend on the number of rows.

aten = torch.ops.aten

_NARROW = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which a sum is taken: half precision ends at 65,504, or has eight bits."""
    return torch.float32 if dtype in _NARROW else dtype


def scalar(node: fx.Node) -> Size:
    """Returns the size that a node is; 1 where it is a tensor."""
    kind = note(node).type
    return kind.value if isinstance(kind, ScalarType) else 1


class Counting:
    """Operations in front of one that takes a mean.

    Attributes:
        ranks: 1, or the data ranks, of whose own means the mean is to be taken.
        adds: whether that is their sum.
        mean: what took the operation's place.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node, batch: str, ranks: int = 1, adds: bool = False) -> None:
        self.graph, self.node, self.batch, self.ranks, self.adds = graph, node, batch, ranks, adds
        self.given = bind_arguments(node)
        self.mean: fx.Node | None = None

    def varies(self, size: Size) -> bool:
        """Returns whether a size depends on the batch."""
        return self.batch in names((size,))

    def call(self, suffix: str, target: Any, args: tuple[Any, ...], kind: TensorType, **kwargs: Any) -> fx.Node:
        """Adds an operation with the place of the mean."""
        noted = replace(note(self.node), type=kind, random=0)
        return insert_call(self.node, target, args, noted, f"{self.node.name}_{suffix}", **kwargs)

    def cast(self, suffix: str, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Returns `x` in a type."""
        kind = tensor_type(x)
        if kind.dtype == dtype:
            return x
        return self.call(suffix, aten._to_copy.default, (x,), TensorType(dtype, kind.shape), dtype=dtype)

    def total(self, suffix: str, x: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
        """Returns the sum of all elements; of each data rank's where their means are to be taken."""
        kind, options = tensor_type(x), {} if dtype is None else {"dtype": dtype}
        if self.ranks == 1:
            return self.call(suffix, aten.sum.default, (x,), TensorType(dtype or kind.dtype, ()), **options)
        n, size = self.ranks, product(kind.shape)
        share = divide(size, n)
        if share is None:
            remedy = "put the batch first, or take loss_reduction=mean"
            raise PlanError(f"its {size} elements are not those of {n} ranks", where=describe(self.node), remedy=remedy)
        by_rank = self.call("own", aten.view.default, (x, [n, -1]), TensorType(kind.dtype, (n, share)))
        return self.call(
            suffix, aten.sum.dim_IntList, (by_rank, [1], False), TensorType(dtype or kind.dtype, (n,)), **options
        )

    def count(self, x: fx.Node, dims: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """Returns how many elements a sum over dimensions of `x` has, counted where sizes depend on inputs."""
        shape = list(tensor_type(x).shape)
        factor = product(shape[dim] for dim in dims if isinstance(shape[dim], int))
        symbolic = [dim for dim in range(len(shape)) if dim in dims and not isinstance(shape[dim], int)]
        for dim in reversed(range(len(shape))):
            if dim not in symbolic:
                rest = tuple(size for other, size in enumerate(shape) if other != dim)
                # One element along all other dimensions: counting all of a large
                # tensor would read it for the sake of a number.
                x = self.call("row", aten.select.int, (x, dim, 0), TensorType(tensor_type(x).dtype, rest))
                shape = list(rest)
        kind = TensorType(dtype, tuple(shape))
        total = self.total("count", self.call("ones", aten.ones_like.default, (x,), kind, dtype=dtype))
        if factor != 1:
            total = self.call("elements", aten.mul.Tensor, (total, factor), tensor_type(total))
        return total

    def finish(self, total: fx.Node, count: fx.Node) -> None:
        """Puts the quotient in the place of the mean; of several ranks' the mean or the sum of theirs."""
        kind = tensor_type(total)
        if self.ranks == 1:
            kind = TensorType(kind.dtype, tensor_type(self.node).shape)
        value = self.call("quotient", aten.div.Tensor, (total, count), kind)
        if self.ranks > 1:
            whole = TensorType(kind.dtype, ())
            value = self.call("means", aten.sum.default, (value,), whole)
            value = value if self.adds else self.call("average", aten.div.Tensor, (value, self.ranks), whole)
        self.replace(value)

    def replace(self, new: fx.Node) -> None:
        """Puts a value in the place of the operation, with its name and type."""
        self.mean = self.cast("mean", new, tensor_type(self.node).dtype)
        replace_node(self.node, self.mean)


# Numbers of sizes, and what they are of counts.
_ARITHMETIC: Mapping[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
}
# Operations of a tensor and a number.
_SCALED: Mapping[Any, Any] = {
    overload: packet.Tensor
    for packet in (aten.add, aten.sub, aten.mul, aten.div)
    for overload in (packet.Tensor, packet.Scalar)
}


def count_numbers(graph: fx.Graph, batch: str) -> None:
    """Puts counts in the place of numbers that depend on the batch, where these meet values and are not sizes.

    A number that is made a tensor is one, and with it what capture makes of floating numbers (`1 / b`).
    """
    for node in list(graph.nodes):
        if node.target is aten.scalar_tensor.default:
            _count_tensor(Counting(graph, node, batch))
            continue
        if node.target not in _SCALED or not tensor_type(node).is_float:
            continue
        numbers = [x for x in node.args[:2] if isinstance(x, fx.Node) and batch in names((scalar(x),))]
        counting = Counting(graph, node, batch)
        counts = {x: count for x in numbers if (count := _count(counting, x)) is not None}
        if not counts:
            continue
        kind = tensor_type(node)
        values = [counts.get(x, x) if isinstance(x, fx.Node) else x for x in node.args[:2]]
        values = [counting.cast("wide", x, wide(kind.dtype)) if _is_tensor(x) else x for x in values]
        new = counting.call("counted", _SCALED[node.target], tuple(values), TensorType(wide(kind.dtype), kind.shape))
        new.kwargs = {k: v for k, v in node.kwargs.items() if k == "alpha"}
        counting.replace(new)


def _count_tensor(counting: Counting) -> None:
    number = counting.given["s"]
    count = _count(counting, number)
    if count is not None and count is not number:
        counting.replace(count)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, fx.Node) and isinstance(note(x).type, TensorType)


def _count(counting: Counting, number: Any) -> Any:
    """Returns a number as a count, a plain one as it is; None where it is made in another way."""
    if not isinstance(number, fx.Node) or not counting.varies(scalar(number)):
        return number
    dtype = wide(tensor_type(counting.node).dtype)
    if number.target is size:
        (source,), dim = operands(number), number.args[1]
        return counting.count(source, [dim], dtype)  # type: ignore[list-item]
    target = _ARITHMETIC.get(number.target)
    parts = [_count(counting, part) for part in number.args]
    if target is None or any(part is None for part in parts):
        return None
    if not _is_tensor(parts[0]):  # these operations take a tensor first
        if number.target not in (operator.add, operator.mul):
            return None
        parts.reverse()
    return counting.call("number", target, tuple(parts), TensorType(dtype, ()))


NONE, MEAN, SUM = 0, 1, 2


def _mean(c: Counting) -> None:
    x = operands(c.node)[0]
    shape, out = tensor_type(x).shape, tensor_type(c.node)
    dims = c.given.get("dim")
    dims = [d % len(shape) for d in dims] if dims else list(range(len(shape)))
    if not any(c.varies(shape[d]) for d in dims):
        return
    keep, dtype = bool(c.given.get("keepdim")), wide(out.dtype)
    if c.node.target is aten.mean.default:
        total = c.total("sum", x, dtype)
    elif c.ranks > 1:
        remedy = "take the mean of all its elements, or another loss_reduction"
        raise PlanError("is not a mean of the whole, so that no rank has one", where=describe(c.node), remedy=remedy)
    else:
        kind = TensorType(dtype, out.shape)
        total = c.call("sum", aten.sum.dim_IntList, (x, dims, keep), kind, dtype=dtype)
    c.finish(total, c.count(x, dims, dtype))


def _moments(c: Counting) -> None:
    """Computes variance or deviation over rows, and the mean: sums of squares about the mean of all rows."""
    x = operands(c.node)[0]
    shape, outs = tensor_type(x).shape, output_types(c.node)
    dims = c.given.get("dim")
    dims = [d % len(shape) for d in ([dims] if isinstance(dims, int) else dims)] if dims else list(range(len(shape)))
    if not any(c.varies(shape[d]) for d in dims):
        return
    if c.ranks > 1:
        remedy = "normalise within groups of rows, or take loss_reduction=mean"
        raise PlanError("is over all rows, and ranks have none of it", where=describe(c.node), remedy=remedy)
    dtype, keep, correction = wide(outs[0].dtype), bool(c.given.get("keepdim")), c.given.get("correction")
    reduced = TensorType(dtype, tuple(1 if d in dims else size for d, size in enumerate(shape)))
    scalar, full, result = TensorType(dtype, ()), TensorType(dtype, shape), TensorType(dtype, outs[0].shape)
    count = c.count(x, dims, dtype)
    total = c.call("sum", aten.sum.dim_IntList, (x, dims, True), reduced, dtype=dtype)
    mean = c.call("mean_kept", aten.div.Tensor, (total, count), reduced)
    # Squares about the mean, and not the mean of squares less the square of
    # the mean, which cancels where the mean is large.
    apart = c.call("apart", aten.sub.Tensor, (c.cast("wide", x, dtype), mean), full)
    squares = c.call("squares", aten.mul.Tensor, (apart, apart), full)
    around = c.call("around", aten.sum.dim_IntList, (squares, dims, keep), result)
    fewer = c.call("fewer", aten.sub.Tensor, (count, 1 if correction is None else correction), scalar)
    spread = c.call("variance", aten.div.Tensor, (around, fewer), result)
    if c.node.target in _DEVIATIONS:
        spread = _root(c, spread)
    if len(outs) == 1:
        c.replace(spread)
        return
    if not keep:
        mean = c.call("mean_of", aten.squeeze.dims, (mean, dims), result)
    for item in list(c.node.users):
        moment = (spread, mean)[int(item.args[1])]  # type: ignore[arg-type]
        item.replace_all_uses_with(c.cast(f"item_{item.args[1]}", moment, outs[0].dtype))
        c.graph.erase_node(item)
    c.graph.erase_node(c.node)


def _root(c: Counting, variance: fx.Node) -> fx.Node:
    """Returns the square root, whose gradient is 0 at 0, as PyTorch's of a deviation."""
    kind = tensor_type(variance)
    is_zero = c.call("is_zero", aten.eq.Scalar, (variance, 0), TensorType(torch.bool, kind.shape))
    # The inner choice keeps the root off 0, where its derivative is infinite.
    # Infinite times the outer choice's 0 would be NaN.
    positive = c.call("positive", aten.where.ScalarSelf, (is_zero, 1.0, variance), kind)
    root = c.call("root", aten.sqrt.default, (positive,), kind)
    return c.call("deviation", aten.where.ScalarSelf, (is_zero, 0.0, root), kind)


_DEVIATIONS = frozenset({aten.std.correction, aten.std_mean.correction})


def _class_loss(c: Counting) -> None:
    """Writes the mean over the targets that are not ignored, by their weights where there are some."""
    x, target = operands(c.node)[:2]
    shape = tensor_type(x).shape
    if c.given.get("reduction", MEAN) != MEAN or not any(c.varies(size) for size in shape) or len(shape) < 2:
        return
    dtype = wide(tensor_type(x).dtype)
    total = _summed(c, {"self": c.cast("wide", x, dtype)}, dtype)
    if tensor_type(target).is_float:  # probabilities: torch divides by the rows, whatever the weights
        c.finish(total, c.count(x, [dim for dim in range(len(shape)) if dim != 1], dtype))
        return
    ignored = c.given.get("ignore_index", -100)
    counted = c.call("counted", aten.ne.Scalar, (target, ignored), TensorType(torch.bool, tensor_type(target).shape))
    ones = c.cast("ones", counted, dtype)
    weight = c.given.get("weight")
    if isinstance(weight, fx.Node):
        # An ignored target such as -100 is no index of the weights: it reads weight 0, which is multiplied by 0 below.
        zero = c.call("zero", aten.zeros_like.default, (target,), tensor_type(target))
        known = c.call("known", aten.where.self, (counted, target, zero), tensor_type(target))
        kind = TensorType(tensor_type(weight).dtype, tensor_type(target).shape)
        weights = c.call("weights", aten.index.Tensor, (weight, [known]), kind)
        ones = c.call("weighed", aten.mul.Tensor, (c.cast("wide_weights", weights, dtype), ones), tensor_type(ones))
    c.finish(total, c.total("count", ones))


def _row_loss(c: Counting) -> None:
    """Writes the mean over rows, by weights or not."""
    x = operands(c.node)[0]
    shape = tensor_type(x).shape
    if c.given.get("reduction", MEAN) != MEAN or len(shape) != 2 or not c.varies(shape[0]):
        return
    dtype = wide(tensor_type(c.node).dtype)
    total = _summed(c, {}, tensor_type(c.node).dtype)
    c.finish(c.cast("wide", total, dtype), c.count(x, [0], dtype))


def _element_loss(c: Counting) -> None:
    x = operands(c.node)[0]
    shape = tensor_type(x).shape
    if c.given.get("reduction", MEAN) != MEAN or not any(c.varies(size) for size in shape):
        return
    dtype = wide(tensor_type(c.node).dtype)
    total = _summed(c, {}, tensor_type(c.node).dtype)
    c.finish(c.cast("wide", total, dtype), c.count(x, range(len(shape)), dtype))


def _summed(c: Counting, changed: Mapping[str, Any], dtype: torch.dtype) -> fx.Node:
    """Returns the loss with the sum as reduction."""
    order = c.node.target._schema.arguments  # type: ignore[union-attr]

    def loss(suffix: str, reduction: int, kind: TensorType) -> fx.Node:
        values = {**c.given, **changed, "reduction": reduction}
        named = {a.name: values[a.name] for a in order if a.kwarg_only and values[a.name] != a.default_value}
        return c.call(suffix, c.node.target, tuple(values[a.name] for a in order if not a.kwarg_only), kind, **named)

    if c.ranks == 1:
        return loss("sum", SUM, TensorType(dtype, ()))
    x, target = operands(c.node)[:2]
    is_class = c.node.target in CLASS_LOSSES
    shape = tensor_type(target if is_class and not tensor_type(target).is_float else x).shape
    if c.node.target in _ROW_LOSSES:
        shape = shape[:1]
    if is_class and tensor_type(target).is_float:
        shape = (shape[0], *shape[2:])
    return c.total("sum", loss("rows", NONE, TensorType(dtype, shape)))


CLASS_LOSSES = frozenset({aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default})

_ROW_LOSSES = frozenset({aten.multi_margin_loss.default, aten.multilabel_margin_loss.default})

MEANS: Mapping[Any, Callable[[Counting], None]] = {
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    **dict.fromkeys((*_DEVIATIONS, aten.var.correction, aten.var_mean.correction), _moments),
    **dict.fromkeys(CLASS_LOSSES, _class_loss),
    **dict.fromkeys(_ROW_LOSSES, _row_loss),
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_with_logits.default,
            aten.kl_div.default,
            aten.soft_margin_loss.default,
        ),
        _element_loss,
    ),
}
