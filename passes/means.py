"""Means over the batch as sums over counts.

Enters: an operation that takes a mean. Leaves: what stands for it. A helper of `divide_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.passes.counts import Counting, wide
from fxpar.program.program import TensorType, describe, operands, output_types, tensor_type

aten = torch.ops.aten

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
        raise PlanError("is no mean of the whole, so that ranks have none of it", where=describe(c.node), remedy=remedy)
    else:
        kind = TensorType(dtype, out.shape)
        total = c.call("sum", aten.sum.dim_IntList, (x, dims, keep), kind, dtype=dtype)
    c.finish(total, c.count(x, dims, dtype))


def _moments(c: Counting) -> None:
    """Variance or deviation over rows, and with them the mean: sums of squares about the mean of all rows."""
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
    """The square root, whose gradient is 0 at 0, as PyTorch's of a deviation."""
    kind = tensor_type(variance)
    is_zero = c.call("is_zero", aten.eq.Scalar, (variance, 0), TensorType(torch.bool, kind.shape))
    positive = c.call("positive", aten.where.ScalarSelf, (is_zero, 1.0, variance), kind)
    root = c.call("root", aten.sqrt.default, (positive,), kind)
    return c.call("deviation", aten.where.ScalarSelf, (is_zero, 0.0, root), kind)


_DEVIATIONS = frozenset({aten.std.correction, aten.std_mean.correction})


def _class_loss(c: Counting) -> None:
    """The mean over the targets that are not ignored, by their weights where there are some."""
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
        zero = c.call("zero", aten.zeros_like.default, (target,), tensor_type(target))
        known = c.call("known", aten.where.self, (counted, target, zero), tensor_type(target))
        kind = TensorType(tensor_type(weight).dtype, tensor_type(target).shape)
        weights = c.call("weights", aten.index.Tensor, (weight, [known]), kind)
        ones = c.call("weighed", aten.mul.Tensor, (c.cast("wide_weights", weights, dtype), ones), tensor_type(ones))
    c.finish(total, c.total("count", ones))


def _row_loss(c: Counting) -> None:
    """The mean over rows, by weights or not."""
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
    """The loss with the sum as reduction."""
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
