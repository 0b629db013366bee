"""Fourier transforms by the operators that PyTorch differentiates on symbolic shapes.

Enters: an overload of `torch.fft`. Leaves: a function of the same arguments that computes the same. What PyTorch itself
calls for them takes sizes for numbers. Transforms that cut or fill up dimensions stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

_NONE, _BY_ROOT, _BY_COUNT = 0, 1, 2  # how PyTorch's operators scale


def _scale(norm: str | None, forward: bool) -> int:
    if norm == "ortho":
        return _BY_ROOT
    return _BY_COUNT if forward == (norm == "forward") else _NONE


def _complex(x: Tensor) -> Tensor:
    return x if x.is_complex() else x.to(x.dtype.to_complex())


def _full(x: Tensor, sizes: Sequence[Any] | None, dims: Sequence[int]) -> bool:
    """Whether a transform takes all that is there along its dimensions."""
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
    """From complex to complex numbers, over several dimensions."""
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
    """From complex to complex numbers, over one dimension."""
    if not _full(x, None if n is None else [n], [dim]):
        return operator(x, n, dim, norm)
    dims = [dim % x.dim()]
    return aten._fft_c2c.default(_complex(x), dims, _scale(norm, forward), forward)  # type: ignore[no-any-return]


def of_real(x: Tensor, n: Any = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """From real numbers to the half of their transform that determines the rest."""
    if not _full(x, None if n is None else [n], [dim]):
        return aten.fft_rfft.default(x, n, dim, norm)  # type: ignore[no-any-return]
    return aten._fft_r2c.default(x, [dim % x.dim()], _scale(norm, True), True)  # type: ignore[no-any-return]


def to_real(x: Tensor, n: Any = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """From that half to real numbers, of which there are n."""
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
