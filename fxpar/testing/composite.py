"""Operators that the oracle cannot call as they stand in a graph.

Enters: graph operators of fxpar, and of torch where the result is undefined or sizes are not checked. Leaves: kernels
that the oracle calls in their place, and samples of the former. Random ones are those of the runtime: without cuts for
the whole, with a rank's index for its block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpar.ops import counter, sdpa
from fxpar.ops import random as records
from fxpar.ops.attention import attention_backward, attention_forward
from fxpar.ops.counter import IndexCut
from fxpar.ops.process_group import same
from fxpar.ops.small_operators import function as autograd_function
from fxpar.ops.small_operators import item, transfer, zeros, zeros_of
from fxpar.signatures.autograd_functions import resolve_function
from fxpar.signatures.pointwise import SHAPED, VALUED
from fxpar.testing import backward_samples
from fxpar.testing.ranks import sample
from fxpar.testing.samples import Draw, Samples

# Kernels of torch that read beyond operands whose sizes do not match, with their sizes and indices checked.

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
    """Calls `aten.native_layer_norm_backward`."""
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
    """Calls `aten.embedding_dense_backward`."""
    _expect(grad_output.shape[:-1], indices.shape)
    _expect_below(indices, rest[0], rest[1])
    return aten.embedding_dense_backward.default(grad_output, indices, *rest)


def _behind(target: torch._ops.OpOverload, count: int) -> Callable[..., Any]:
    """Returns a kernel whose gradient and operand may differ in so many last dimensions."""

    def kernel(grad_output: Tensor, self: Tensor, *rest: Any) -> Any:
        lead = self.dim() - count
        _expect(grad_output.shape[:lead], self.shape[:lead])
        return target(grad_output, self, *rest)

    return kernel


def _mirrored(target: torch._ops.OpOverload, count: int) -> Callable[..., Any]:
    """Returns what `_behind` does; what is mirrored about the first and last element must be there."""
    kernel = _behind(target, count)

    def checked(grad_output: Tensor, self: Tensor, padding: Sequence[int]) -> Any:
        for i, width in enumerate(padding):
            if width >= self.shape[-1 - i // 2]:
                raise RuntimeError(f"a padding of {width} is wider than what it mirrors")
        return kernel(grad_output, self, padding)

    return checked


def _nll(target: torch._ops.OpOverload, first: int) -> Callable[..., Any]:
    """Checks what a loss takes, or its gradient, whose upstream gradient comes first."""

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
    """Checks gradient, operand and the places of the last dimensions where a maximum was taken."""
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


def batch_norm_backward(grad_out: Tensor, input: Tensor, *vectors_and_rest: Any) -> Any:
    """Calls `aten.native_batch_norm_backward`."""
    _expect(grad_out.shape, input.shape)
    for vector in vectors_and_rest[:5]:  # weight, running and saved statistics
        if vector is not None:
            _expect(vector.shape, input.shape[1:2])
    return aten.native_batch_norm_backward.default(grad_out, input, *vectors_and_rest)


def convolution_backward(grad_output: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any) -> Any:
    """Calls `aten.convolution_backward`."""
    forward = aten.convolution.default(input.to("meta"), weight.to("meta"), None, *rest[:-1])
    _expect(grad_output.shape, forward.shape)
    return aten.convolution_backward.default(grad_output, input, weight, bias_sizes, *rest)


def _sampled(target: torch._ops.OpOverload) -> Callable[..., Any]:
    """Checks gradient, image and the points where it is sampled."""

    def kernel(grad_output: Tensor, input: Tensor, grid: Tensor, *rest: Any) -> Any:
        _expect(grid.shape[:1], input.shape[:1])
        _expect(grad_output.shape, (*input.shape[:2], *grid.shape[1:-1]))
        return target(grad_output, input, grid, *rest)

    return kernel


def cdist_backward(grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> Any:
    """Calls `aten._cdist_backward`."""
    _expect(x1.shape[:-2], x2.shape[:-2])
    _expect(x1.shape[-1:], x2.shape[-1:])
    for distances in (grad, cdist):
        _expect(distances.shape, (*x1.shape[:-1], x2.shape[-2]))
    return aten._cdist_backward.default(grad, x1, x2, p, cdist)


CHECKED: Mapping[Any, Callable[..., Any]] = {
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.convolution_backward.default: convolution_backward,
    **{
        target: _sampled(target)
        for target in (aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
    },
    aten._cdist_backward.default: cdist_backward,
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


_IDENTITY = 17


def dropout(x: Tensor, rng: Tensor, p: float, indices: object = (), *, cuts: Sequence[IndexCut] = ()) -> Tensor:
    """Computes `fxpar.dropout` of a node with some identity; `cuts` say which block of the whole `x` is."""
    return counter.dropout(x, rng, p, _IDENTITY, cuts)


def uniform(size: Sequence[int], rng: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes `fxpar.uniform` of a node with some identity."""
    return counter.uniform(size, rng, dtype, _IDENTITY)


def uniform_like(
    x: Tensor, rng: Tensor, dtype: torch.dtype, indices: object = (), *, cuts: Sequence[IndexCut] = ()
) -> Tensor:
    """Computes `fxpar.uniform_like`, as `dropout`."""
    return counter.uniform_like(x, rng, dtype, _IDENTITY, cuts)


def drawn(x: Tensor, *args: Any, cuts: Sequence[IndexCut] = (), **kwargs: Any) -> Tensor:
    """Stands in for operators of torch that draw bits for the shape of `x`, as the counter generator does."""
    return uniform_like(x, torch.tensor([3, 1, 2]), torch.float64, cuts=cuts)


def drawn_below(*args: Any, cuts: Sequence[IndexCut] = ()) -> Tensor:
    """Stands in for operators that draw bits for the values of their last operand, as `bernoulli` does."""
    probability = next(value for value in reversed(args) if isinstance(value, Tensor))
    return (drawn(args[0], cuts=cuts) < probability).to(args[0].dtype)


def rrelu(x: Tensor, *args: Any, cuts: Sequence[IndexCut] = ()) -> Tensor:
    """Computes rrelu with slopes of the counter generator."""
    return torch.where(x >= 0, x, x * drawn(x, cuts=cuts))


def attention(*args: Any, cuts: Sequence[IndexCut] = ()) -> Tensor:
    """Computes `fxpar.attention` of some identity; `cuts` say which block of the whole the probabilities are."""
    query, key, value, mask, rng, p, *options = args
    return sdpa.attention_with_dropout((query, key, value, mask, *options[:3]), (rng, p, _IDENTITY, cuts))


def function(*args: Any, path: str) -> Any:
    """Calls an autograd function."""
    return resolve_function(path).apply(*args)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Computes `v * g / |v|`: the fused kernel reads beyond operands whose sizes do not match."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def overload(name: str) -> torch._ops.OpOverload:
    """Returns the operator `bernoulli.p` of aten; `uniform` is `uniform.default`."""
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), which or "default")  # type: ignore[no-any-return]


KERNELS: Mapping[Any, Callable[..., Any]] = {
    attention_forward: backward_samples.attention_forward,
    attention_backward: backward_samples.attention_backward,
    zeros: zeros_of,
    item: torch.ops.fxpar.item.default,
    transfer: same,
    **CHECKED,
    records.dropout: dropout,
    records.uniform: uniform,
    records.uniform_like: uniform_like,
    records.attention: attention,
    **dict.fromkeys(map(overload, SHAPED), drawn),
    **dict.fromkeys(map(overload, VALUED), drawn_below),
    torch.ops.aten.rrelu.default: rrelu,
    autograd_function: function,
    torch.ops.aten._weight_norm.default: weight_norm,
}


_RANDOM_ARGUMENTS: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(("bernoulli.p", "geometric"), (0.4,)),
    "randint_like": (5,),
    "randint_like.low_dtype": (2, 5),
}


class Gate(torch.autograd.Function):
    """x · sigmoid(w) with a backward of its own: element-wise, as the functions of models are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """Takes two tensors of one shape."""
        ctx.save_for_backward(x, w)
        return x * w.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        """Returns the gradients of both."""
        x, w = ctx.saved_tensors
        open_ = w.sigmoid()
        return grads[0] * open_, grads[0] * x * open_ * (1 - open_)


def composite(d: Draw) -> dict[str, Samples]:
    """Samples fxpar's own operators: with and without a rank's index; attention as it comes in models."""
    h, s, t, e = (6, 6, 6, 2) if d.even else d.sizes(4)
    x, q, k, v = d.x(h, s), d.normal(h, s, e), d.normal(h, t, e), d.normal(h, t, e)
    kv = h // 2 if h % 2 == 0 else h
    few = d.normal(kv, t, e), d.normal(kv, t, e)
    state, index = torch.tensor([3, 1, 2]), [torch.tensor(0)]
    causal, grouped = (True, None, False), (False, 0.5, True)
    bias = d.normal(1, s, t)
    return {
        "fxpar.dropout": [sample(x, state, 0.4), sample(d.x(h, s, t), state, 0.4, index)],
        "fxpar.uniform": [sample([h, s], state, torch.float64)],
        "fxpar.uniform_like": [sample(x, state, torch.float64), sample(x, state, torch.float64, index)],
        **{name: [sample(x, *_RANDOM_ARGUMENTS.get(name, ()))] for name in SHAPED},
        "bernoulli": [sample(x)],
        "bernoulli.Tensor": [sample(x, d.x(h, s)), sample(x, d.x(s))],
        "normal.Tensor_float": [sample(x)],
        "rrelu": [sample(d.normal(h, s), 0.1, 0.3, True)],
        "fxpar.attention": [
            sample(q, k, v, None, state, 0.4, False, None, False),
            sample(q, k, v, None, state, 0.4, *causal, index),
            sample(q, *few, None, state, 0.4, *grouped, index),
            sample(q, k, v, bias, state, 0.4, False, None, False, index),
            # A query that all rows of a batch share: the probabilities have a dimension that it has not.
            sample(q[:1], k, v, None, state, 0.4, False, None, False),
            sample(d.normal(s, e), k, v, None, state, 0.4, False, None, False, index),
        ],
        "fxpar.zeros": [backward_samples.undifferentiated(x)],
        "fxpar.transfer": [backward_samples.undifferentiated(x)],
        "fxpar.item": [
            backward_samples.undifferentiated(d.normal()),
            backward_samples.undifferentiated(d.normal(1, 1)),
        ],
        "fxpar.function": [sample(x, d.x(h, s), path=f"{Gate.__module__}.{Gate.__name__}")],
    }
