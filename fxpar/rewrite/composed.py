"""Operations written with others where autograd ends in an operator that has no function of shapes, or takes a size.

Enters: an overload. Leaves: a function of the same arguments that computes the same, and that autograd differentiates
on symbolic shapes into operations that have rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxpar.signatures.op_call import RESAMPLED
from fxpar.torch_internals import decomposition_table

# Fourier transforms by the operators that PyTorch differentiates on symbolic shapes.

aten = torch.ops.aten

_NONE, _BY_ROOT, _BY_COUNT = 0, 1, 2  # how PyTorch's operators scale


def _scale(norm: str | None, forward: bool) -> int:
    if norm == "ortho":
        return _BY_ROOT
    return _BY_COUNT if forward == (norm == "forward") else _NONE


def _complex(x: Tensor) -> Tensor:
    return x if x.is_complex() else x.to(x.dtype.to_complex())


def _full(x: Tensor, sizes: Sequence[Any] | None, dims: Sequence[int]) -> bool:
    """Returns whether a transform takes all that is there along its dimensions."""
    pairs = zip(sizes or (), dims, strict=False)
    return all((isinstance(n, int) and n == -1) or statically_known_true(x.shape[dim] == n) for n, dim in pairs)


def _dims(x: Tensor, sizes: Sequence[Any] | None, dims: Sequence[int] | None) -> list[int]:
    count = x.dim() if sizes is None else len(sizes)
    return list(range(x.dim() - count, x.dim())) if dims is None else [dim % x.dim() for dim in dims]


def several(
    x: Tensor,
    s: Sequence[Any] | None = None,
    dim: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    operator: Callable[..., Tensor],
    forward: bool,
) -> Tensor:
    """Transforms complex numbers to complex ones, over several dimensions."""
    dims = _dims(x, s, dim)
    if not _full(x, s, dims):
        return operator(x, s, dim, norm)
    return aten._fft_c2c.default(_complex(x), dims, _scale(norm, forward), forward)  # type: ignore[no-any-return]


def one(
    x: Tensor,
    n: Any = None,
    dim: int = -1,
    norm: str | None = None,
    *,
    operator: Callable[..., Tensor],
    forward: bool,
) -> Tensor:
    """Transforms complex numbers to complex ones, over one dimension."""
    if not _full(x, None if n is None else [n], [dim]):
        return operator(x, n, dim, norm)
    dims = [dim % x.dim()]
    return aten._fft_c2c.default(_complex(x), dims, _scale(norm, forward), forward)  # type: ignore[no-any-return]


def of_real(x: Tensor, n: Any = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """Transforms real numbers to the half of their transform that determines the rest."""
    if not _full(x, None if n is None else [n], [dim]):
        return aten.fft_rfft.default(x, n, dim, norm)  # type: ignore[no-any-return]
    return aten._fft_r2c.default(x, [dim % x.dim()], _scale(norm, True), True)  # type: ignore[no-any-return]


def to_real(x: Tensor, n: Any = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """Transforms that half back to real numbers, of which there are n."""
    count = 2 * (x.shape[dim] - 1) if n is None else n
    if not statically_known_true(x.shape[dim] == count // 2 + 1):
        return aten.fft_irfft.default(x, n, dim, norm)  # type: ignore[no-any-return]
    scale = _scale(norm, False)
    return aten._fft_c2r.default(_complex(x), [dim % x.dim()], scale, count)  # type: ignore[no-any-return]


TRANSFORMS: Mapping[Any, Callable[..., Any]] = {
    aten.fft_fft.default: partial(one, operator=aten.fft_fft.default, forward=True),
    aten.fft_ifft.default: partial(one, operator=aten.fft_ifft.default, forward=False),
    aten.fft_fftn.default: partial(several, operator=aten.fft_fftn.default, forward=True),
    aten.fft_ifftn.default: partial(several, operator=aten.fft_ifftn.default, forward=False),
    aten.fft_rfft.default: of_real,
    aten.fft_irfft.default: to_real,
}


def _reduced(values: Tensor, reduction: int) -> Tensor:
    """Returns all values, their mean or their sum, as of PyTorch's losses."""
    return values if reduction == 0 else values.mean() if reduction == 1 else values.sum()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `x @ weight.T + bias`, all rows in one matrix: PyTorch's own asks symbolic shapes for numbers (2.11)."""
    if x.dim() == 1:
        return (weight @ x) if bias is None else (weight @ x) + bias
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.dim() > 2 else x
    product = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
    return product.reshape(*x.shape[:-1], weight.shape[0]) if x.dim() > 2 else product


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns `a @ b`: rows in one matrix where a factor is one, else batches of one shape; why, see `linear`."""
    if a.dim() <= 2 and b.dim() <= 2:
        return aten.matmul.default(a, b)  # type: ignore[no-any-return]
    if b.dim() <= 2:
        rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
        return aten.matmul.default(rows, b).reshape(*a.shape[:-1], *b.shape[1:])  # type: ignore[no-any-return]
    if a.dim() == 1:
        return matmul(b.mT, a)
    if a.dim() == 2:
        return matmul(b.mT, a.t()).mT
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:]) for x in (a, b))
    return torch.bmm(left, right).reshape(*batch, a.shape[-2], b.shape[-1])


def power(x: Tensor, exponent: Any) -> Tensor:
    """Returns `x ** exponent`, where the exponent is a size: PyTorch's gradient compares it with numbers."""
    if isinstance(exponent, torch.SymInt):
        return torch.pow(x, x.new_full((), exponent))  # type: ignore[arg-type]
    return aten.pow.Tensor_Scalar(x, exponent)  # type: ignore[no-any-return]


def power_of(base: Any, exponent: Tensor) -> Tensor:
    """Returns `base ** exponent`, where the base is a size; why, see `power`."""
    if isinstance(base, torch.SymInt):
        return torch.pow(exponent.new_full((), base), exponent)  # type: ignore[arg-type]
    return aten.pow.Scalar(base, exponent)  # type: ignore[no-any-return]


def pad(x: Tensor, pads: list[Any], mode: str = "constant", value: float | None = None) -> Tensor:
    """Returns a number around the values: PyTorch's gradient of it holds for one size alone."""
    if mode == "circular":
        return _wrapped(x, pads)
    if mode != "constant" or any(isinstance(amount, int) and amount < 0 for amount in pads):
        return aten.pad.default(x, pads, mode, value)  # type: ignore[no-any-return]
    for i in range(len(pads) // 2):
        dim, parts = x.dim() - 1 - i, [x]
        for place, width in ((0, pads[2 * i]), (2, pads[2 * i + 1])):
            if isinstance(width, int) and width == 0:
                continue
            around = x.new_full((*x.shape[:dim], width, *x.shape[dim + 1 :]), value or 0)
            parts.insert(place, around)
        x = torch.cat(parts, dim) if len(parts) > 1 else x
    return x


def _wrapped(x: Tensor, pads: list[Any]) -> Tensor:
    """Returns what stands at the other end around the values: PyTorch's own writes it into a tensor that it makes."""
    for i in range(len(pads) // 2):
        dim, (before, behind) = x.dim() - 1 - i, pads[2 * i : 2 * i + 2]
        size = x.shape[dim]
        x = torch.cat([x.narrow(dim, size - before, before), x, x.narrow(dim, 0, behind)], dim)
    return x


def constant_pad(x: Tensor, pads: list[Any], value: float = 0) -> Tensor:
    """Does as `pad`, with a constant."""
    return pad(x, pads, "constant", value)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Returns `v * g / |v|`, the norm over all dimensions but one; over all of them where `dim` is -1.

    The fused kernel and its gradient keep the norms in a form of their own.
    """
    others = [i for i in range(v.dim()) if dim == -1 or i != dim % v.dim()]
    norms: Tensor = torch.linalg.vector_norm(v, 2, others, keepdim=bool(dim != -1))
    return v * (g / norms)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Returns the norm of each group of channels, [n, c, …]; PyTorch's operator takes the number of rows."""
    groups = x.reshape(x.shape[0], num_groups, -1)
    normalised = torch.nn.functional.layer_norm(groups, [groups.shape[2]], None, None, eps).reshape(x.shape)
    channels = [-1, *[1] * (x.dim() - 2)]
    if weight is not None:
        normalised = normalised * weight.reshape(channels)
    return normalised if bias is None else normalised + bias.reshape(channels)


def multi_margin_loss(
    x: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """Sums for each row `Σ_i max(0, margin - x[y] + x[i])^p / C` over classes i other than y, times the weight of y.

    Args:
        x: values of C classes in each row, [n, C] or [C].
        target: y of each row.
        p: 1 or 2.
        weight: of each class.
    """
    rows = x if x.dim() > 1 else x.unsqueeze(0)
    labels = target.reshape(-1, 1)
    hinge = (margin - rows.gather(1, labels) + rows).clamp_min(0)
    terms = hinge if p == 1 else hinge * hinge
    if weight is not None:
        terms = terms * weight.index_select(0, target.reshape(-1)).unsqueeze(1)
    classes = torch.arange(rows.shape[1], device=x.device)
    losses = torch.where(classes == labels, 0.0, terms).sum(1) / rows.shape[1]
    return _reduced(losses if x.dim() > 1 else losses.squeeze(0), reduction)


def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Sums for each row `Σ_j Σ_i max(0, 1 - x[y_j] + x[i]) / C` over its classes y_j and all other classes i.

    Args:
        x: values of C classes in each row, [n, C] or [C].
        target: the classes of each row, which end before the first -1; of the shape of `x`.
    """
    rows, members = (x, target) if x.dim() > 1 else (x.unsqueeze(0), target.unsqueeze(0))
    is_member = (members < 0).cumsum(1) == 0
    known = torch.where(is_member, members, 0)
    classes = torch.arange(rows.shape[1], device=x.device)
    is_class = ((known.unsqueeze(2) == classes) & is_member.unsqueeze(2)).any(1)
    hinge = (1 - rows.gather(1, known).unsqueeze(2) + rows.unsqueeze(1)).clamp_min(0)
    terms = torch.where(is_member.unsqueeze(2) & ~is_class.unsqueeze(1), hinge, 0.0)
    losses = terms.sum([1, 2]) / rows.shape[1]
    return _reduced(losses if x.dim() > 1 else losses.squeeze(0), reduction)


def _moments(x: Tensor, dim: Any, correction: Any, keepdim: bool) -> tuple[Tensor, Tensor] | None:
    """Returns variance and mean over dimensions; None where no size is symbolic, which PyTorch differentiates."""
    dims = [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)] if dim else list(range(x.dim()))
    sizes: list[Any] = [x.shape[d] for d in dims]
    less: Any = 1 if correction is None else int(correction)
    if not any(isinstance(size, torch.SymInt) for size in sizes) or less != (1 if correction is None else correction):
        return None
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(dims, keepdim=True)
    variance: Tensor = (wide - mean).square().sum(dims, keepdim=keepdim) / (math.prod(sizes) - less)
    return variance, mean if keepdim else mean.squeeze(dims)


def _root(variance: Tensor) -> Tensor:
    """Returns the square root, whose gradient is 0 at 0 as PyTorch's of a deviation."""
    is_zero = variance == 0
    # The inner where keeps the gradient of the root finite at 0. The outer
    # one would multiply infinity by 0, which is NaN.
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, variance).sqrt())


def _of_moments(operator: Any, outputs: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Returns an operator over dimensions of symbolic sizes, whose gradient PyTorch divides by a number of sizes.

    Args:
        outputs: the operator's results by variance and mean.
    """

    def composed(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        moments = _moments(x, dim, correction, keepdim)
        if moments is None:
            return operator(x, dim, correction=correction, keepdim=keepdim)
        results = tuple(moment.to(x.dtype) for moment in outputs(*moments))
        return results if len(results) > 1 else results[0]

    return composed


_OF_MOMENTS: Mapping[Any, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    aten.var.correction: lambda variance, mean: (variance,),
    aten.std.correction: lambda variance, mean: (_root(variance),),
    aten.var_mean.correction: lambda variance, mean: (variance, mean),
    aten.std_mean.correction: lambda variance, mean: (_root(variance), mean),
}


def instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any) -> Tensor:
    """Returns the norm of each channel of each row, [n, c, …]; PyTorch's joins rows and channels to a batch norm's.

    Args:
        options: PyTorch's others: running mean and variance, whether the input's are used, momentum, eps and cudnn.
    """
    return group_norm(x, x.shape[1], weight, bias, eps=options[4])


def unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Puts windows of a dimension in a last one; the gradient of PyTorch's own takes the whole shape as an argument."""
    dim = dimension % x.dim()
    count = (x.shape[dim] - size) // step + 1
    places = torch.arange(count, device=x.device).unsqueeze(1) * step + torch.arange(size, device=x.device)
    windows: Tensor = x.index_select(dim, places.reshape(-1)).unflatten(dim, (count, size))
    return windows.movedim(dim + 1, -1)


def _resampled_to(name: str) -> Callable[..., Tensor]:
    """Resamples by sizes, or by indices if sizes are symbolic: few gradients of PyTorch have a function of shapes."""
    operator = getattr(aten, name).default

    def resample(x: Tensor, size: Any, *more: Any, **named: Any) -> Tensor:
        is_symbolic = any(isinstance(length, torch.SymInt) for length in x.shape)
        decomposition = decomposition_table.get(operator) if is_symbolic and name not in _WITH_SHAPES else None
        return operator(x, size, *more, **named) if decomposition is None else decomposition(x, size, *more, **named)  # type: ignore[no-any-return]

    return resample


# Whose gradients PyTorch has functions of symbolic shapes for.
_WITH_SHAPES = ("upsample_nearest2d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa")


def _resampled(name: str) -> Callable[..., Tensor]:
    """Returns resampling by sizes or scales as the operator of sizes: PyTorch's own reads numbers off the shape."""
    sized = _resampled_to(name)

    def resample(x: Tensor, size: Any, *more: Any, **named: Any) -> Tensor:
        *options, scales = (*more, *named.values())
        if scales is None:
            return sized(x, size, *options)
        sizes: list[Any] = [_scaled(length, scale) for length, scale in zip(x.shape[2:], scales, strict=True)]
        return sized(x, sizes, *options, *scales)

    return resample


def _scaled(length: Any, scale: float) -> Any:
    if scale == int(scale):
        return length * int(scale)
    return torch.sym_int(torch.sym_float(length) * scale)


COMPOSED: Mapping[Any, Callable[..., Any]] = {
    aten.linear.default: linear,
    aten.matmul.default: matmul,
    aten.pow.Tensor_Scalar: power,
    aten.pow.Scalar: power_of,
    aten.pad.default: pad,
    aten.constant_pad_nd.default: constant_pad,
    aten._weight_norm.default: weight_norm,
    aten.group_norm.default: group_norm,
    aten.instance_norm.default: instance_norm,
    aten.unfold.default: unfold,
    **{getattr(aten, name).vec: _resampled(name) for name in RESAMPLED},
    **{getattr(aten, name).default: _resampled_to(name) for name in RESAMPLED},
    **{operator: _of_moments(operator, outputs) for operator, outputs in _OF_MOMENTS.items()},
    aten.multi_margin_loss.default: multi_margin_loss,
    aten.multilabel_margin_loss.default: multilabel_margin_loss,
    **TRANSFORMS,
}
