"""Kernels of torch that read beyond operands whose sizes do not match, with their sizes and indices checked.

Enters: nothing. Leaves: what the oracle calls in place of such operators, where a rank's parts may fit badly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _expect(sizes: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(sizes) != tuple(expected):
        raise ValueError(f"sizes {list(sizes)} do not match {list(expected)}")


def _expect_below(indices: Tensor, size: int, ignored: int) -> None:
    if indices.numel() and not bool(((indices == ignored) | ((indices >= 0) & (indices < size))).all()):
        raise IndexError(f"indices that are none of {size}")


def layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Any:
    """`aten.native_layer_norm_backward`."""
    count = len(normalized_shape)
    _expect(grad_out.shape, input.shape)
    _expect(input.shape[-count:], normalized_shape)
    for statistic in (mean, rstd):
        _expect(statistic.shape, (*input.shape[:-count], *[1] * count))
    for affine in (weight, bias):
        if affine is not None:
            _expect(affine.shape, normalized_shape)
    args = (grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask)
    return aten.native_layer_norm_backward.default(*args)


def embedding_backward(grad_output: Tensor, indices: Tensor, *rest: Any) -> Any:
    """`aten.embedding_dense_backward`."""
    _expect(grad_output.shape[:-1], indices.shape)
    _expect_below(indices, rest[0], rest[1])
    return aten.embedding_dense_backward.default(grad_output, indices, *rest)


def _behind(target: torch._ops.OpOverload, count: int) -> Callable[..., Any]:
    """Gradient and operand may differ in so many last dimensions."""

    def kernel(grad_output: Tensor, self: Tensor, *rest: Any) -> Any:
        lead = self.dim() - count
        _expect(grad_output.shape[:lead], self.shape[:lead])
        return target(grad_output, self, *rest)

    return kernel


def _mirrored(target: torch._ops.OpOverload, count: int) -> Callable[..., Any]:
    """As `_behind`; what is mirrored about the first and last element must be there."""
    kernel = _behind(target, count)

    def checked(grad_output: Tensor, self: Tensor, padding: Sequence[int]) -> Any:
        for i, width in enumerate(padding):
            if width >= self.shape[-1 - i // 2]:
                raise RuntimeError(f"a padding of {width} is wider than what it mirrors")
        return kernel(grad_output, self, padding)

    return checked


def _nll(target: torch._ops.OpOverload, first: int) -> Callable[..., Any]:
    """Log-probabilities, targets and weights of a loss, or of its gradient, whose upstream gradient comes first."""

    def kernel(*args: Any) -> Any:
        self, targets, weight, reduction, ignored = args[first : first + 5]
        _expect(targets.shape, (self.shape[0], *self.shape[2:]))
        _expect_below(targets, self.shape[1], ignored)
        if weight is not None:
            _expect(weight.shape, self.shape[1:2])
        if first:
            _expect(args[0].shape, targets.shape if reduction == 0 else ())
        return target(*args)

    return kernel


def _pooled(target: torch._ops.OpOverload, count: int) -> Callable[..., Any]:
    """Gradient, operand and, where a maximum was taken, the places of the last dimensions that it was taken from."""
    is_average = "avg" in target._schema.name
    kernel = _behind(target, count)

    def checked(grad_output: Tensor, self: Tensor, *rest: Any) -> Any:
        if is_average and rest:  # the kernel reads as many gradients as the operand has windows
            forward = getattr(aten, target._schema.name.removeprefix("aten::").removesuffix("_backward")).default
            _expect(grad_output.shape, forward(self, *rest).shape)
        for places in rest[-1:] if not is_average else ():
            _expect(places.shape, grad_output.shape)
            _expect_below(places, math.prod(self.shape[-count:]), 0)
        return kernel(grad_output, self, *rest)

    return checked


CHECKED: Mapping[Any, Callable[..., Any]] = {
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten.embedding_dense_backward.default: embedding_backward,
    aten._softmax_backward_data.default: _behind(aten._softmax_backward_data.default, 0),
    aten._log_softmax_backward_data.default: _behind(aten._log_softmax_backward_data.default, 0),
    aten._adaptive_avg_pool2d_backward.default: _behind(aten._adaptive_avg_pool2d_backward.default, 2),
    **{
        overload: _pooled(overload, int(name[name.index("pool") + 4]))
        for name in (
            *("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
            *("max_pool2d_with_indices", "max_pool3d_with_indices"),
        )
        for overload in [getattr(aten, f"{name}_backward").default]
    },
    **{
        overload: kernel_of(overload, count)
        for name, kernel_of in (("reflection", _mirrored), ("replication", _behind))
        for count, overload in ((count, getattr(aten, f"{name}_pad{count}d_backward").default) for count in (1, 2, 3))
    },
    **{
        overload: _nll(overload, first)
        for name in ("nll_loss", "nll_loss2d")
        for first, overload in (
            (0, getattr(aten, f"{name}_forward").default),
            (1, getattr(aten, f"{name}_backward").default),
        )
    },
}
