"""Sample calls of operations that run along some dimensions, and of what their derivatives are made of.

Enters: a `Draw` of random sizes and values. Leaves: samples by overload name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.oracle.backward import undifferentiated
from fxpar.oracle.ranks import sample
from fxpar.oracle.samples import Draw, Samples, words

aten = torch.ops.aten

_ELEMENTS = words("""
digamma i0 lgamma sinc special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri
deg2rad rad2deg
""")
_PAIRS = words("copysign.Tensor fmax fmin hypot logaddexp logaddexp2 clamp_max.Tensor clamp_min.Tensor")


def elements(d: Draw) -> dict[str, Samples]:
    """Element-wise functions that few models call."""
    a, b, _ = d.sizes(3)
    x, row, column = d.x(a, b), d.x(b), d.x(a, 1)
    samples = {name: [sample(x)] for name in _ELEMENTS}
    samples |= {name: [sample(x, row), sample(x, column)] for name in _PAIRS}
    samples |= {name: [undifferentiated(d.normal(a, b))] for name in ("isneginf", "isposinf", "signbit")}
    return samples | {
        "polygamma": [sample(1, x)],
        "copysign.Scalar": [sample(x, -1.0)],
        "heaviside": [undifferentiated(d.normal(a, b), row)],
        "nextafter": [undifferentiated(x, row)],
        "special_xlog1py": [sample(x, row)],
        "special_zeta": [undifferentiated(1 + x, 1 + row)],
        "ldexp.Tensor": [sample(x, d.i(3, b)), sample(x, d.i(3, a, 1))],
        "bucketize.Tensor": [undifferentiated(x, torch.linspace(0, 1, 4, dtype=torch.float64))],
        "isin.Tensor_Tensor": [undifferentiated(d.i(4, a, b), torch.tensor([0, 2]))],
    }


def reduced(d: Draw) -> dict[str, Samples]:
    """Order statistics and moments: one value in place of a dimension."""
    a, b, c = d.sizes(3)
    x, y = d.normal(a, b, c), d.normal(a, b)
    samples = {f"{name}.dim": [sample(x, -1, True), sample(y, 0)] for name in ("median", "nanmedian")}
    samples |= {f"{name}.default": [sample(y)] for name in ("median", "nanmedian")}
    return samples | {
        "mode": [undifferentiated(d.i(3, a, b).double())],
        "kthvalue": [sample(x, 2), sample(y, 1, 0, True)],
        "std_mean.correction": [sample(x, [-1], keepdim=True), sample(y, [0], correction=0)],
        "nansum": [sample(x, [-1], True), sample(y)],
        "count_nonzero.dim_IntList": [undifferentiated(d.i(2, a, b, c).double(), [1])],
        "count_nonzero": [undifferentiated(d.i(2, a, b).double())],
    }


def scans(d: Draw) -> dict[str, Samples]:
    """What keeps a dimension and mixes it: running extrema, orders, turns, windows, repetition."""
    a, b, c = d.sizes(3)
    x, y, even = d.normal(a, b, c), d.normal(a, b), d.normal(a, b, 6)
    samples = {name: [sample(x, 1), sample(y, -1)] for name in ("cummax", "cummin")}
    sorted_rows, one = y.sort(-1).values, d.normal(b).sort().values
    return samples | {
        "argsort": [undifferentiated(y, 1), undifferentiated(y, 0, True)],
        "argsort.stable": [undifferentiated(y, stable=True, dim=1)],
        "sort.stable": [sample(x, stable=True, dim=-1)],
        "rot90": [sample(x, 1, [1, 2]), sample(x, 2, [0, 1])],
        "renorm": [sample(y, 2, 0, 1.0), sample(y, 2, 1, 0.5)],
        "glu": [sample(even, -1)],
        "glu_backward": [undifferentiated(d.normal(a, b, 3), even, -1)],
        "unfold": [sample(even, 2, 3, 1), sample(even, 2, 2, 2)],
        "repeat_interleave.self_int": [sample(x, 3, 1), sample(y, 2), sample(y, 2, 0)],
        "searchsorted.Tensor": [
            undifferentiated(sorted_rows, d.normal(a, c)),
            undifferentiated(one, y),
            undifferentiated(sorted_rows, y),
        ],
    }


def pooled(d: Draw) -> dict[str, Samples]:
    """Pooling and resampling of the last dimensions, with their gradients."""
    a, b, _ = d.sizes(3)
    line, image, solid = d.normal(a, b, 4), d.normal(a, b, 4, 6), d.normal(a, b, 4, 2, 4)
    samples: dict[str, Samples] = {
        "avg_pool2d": [sample(image, [2, 3]), sample(image, [3, 3], [1, 1], [1, 1], True, False)],
        "avg_pool3d": [sample(solid, [2, 1, 2])],
        "_adaptive_avg_pool3d": [sample(solid, [2, 1, 2])],
        "avg_pool2d_backward": [
            undifferentiated(d.normal(a, b, 2, 2), image, [2, 3], [2, 3], [0, 0], False, True, None)
        ],
        "avg_pool3d_backward": [
            undifferentiated(d.normal(a, b, 2, 2, 2), solid, [2, 1, 2], [2, 1, 2], [0, 0, 0], False, True, None)
        ],
        "_adaptive_avg_pool3d_backward": [undifferentiated(d.normal(a, b, 2, 1, 2), solid)],
    }
    for name, x, size in (("2d", image, [2, 3]), ("3d", solid, [2, 1, 2])):
        forward = getattr(aten, f"max_pool{name}_with_indices").default
        out, places = forward(x, size)
        dims = len(size)
        options = (size, size, [0] * dims, [1] * dims, False)
        samples[f"max_pool{name}_with_indices"] = [sample(x, size)]
        samples[f"max_pool{name}_with_indices_backward"] = [undifferentiated(d.normal(*out.shape), x, *options, places)]
        out, places = getattr(aten, f"adaptive_max_pool{name}").default(x, size)
        samples[f"adaptive_max_pool{name}"] = [sample(x, size)]
        samples[f"adaptive_max_pool{name}_backward"] = [undifferentiated(d.normal(*out.shape), x, places)]
    resampled: list[tuple[str, Tensor, tuple[bool, ...]]] = [
        *((f"{name}1d", line, ()) for name in ("upsample_nearest", "_upsample_nearest_exact")),
        *((f"{name}2d", image, ()) for name in ("upsample_nearest", "_upsample_nearest_exact")),
        *((f"{name}3d", solid, ()) for name in ("upsample_nearest", "_upsample_nearest_exact")),
        ("upsample_linear1d", line, (False,)),
        ("upsample_trilinear3d", solid, (True,)),
        *((f"upsample_{name}2d", image, (False,)) for name in ("bilinear", "bicubic")),
        *((f"_upsample_{name}2d_aa", image, (False,)) for name in ("bilinear", "bicubic")),
    ]
    for name, x, flags in resampled:
        size = [3, 5, 7][: x.dim() - 2]
        samples[name] = [sample(x, size, *flags)]
        samples[f"{name}.vec"] = [sample(x, None, *flags, [1.5, 2.0, 2.5][: x.dim() - 2])]
        samples[f"{name}_backward"] = [undifferentiated(d.normal(a, b, *size), size, list(x.shape), *flags)]
    return samples


def sampled(d: Draw) -> dict[str, Samples]:
    """Images that are read at points, and windows of them."""
    n, c, _ = d.sizes(3)
    image, solid = d.normal(n, c, 4, 3), d.normal(n, c, 2, 3, 2)
    grid, far = d.normal(n, 2, 3, 2).tanh(), d.normal(n, 2, 1, 2, 3).tanh()
    windows = ([2, 2], [1, 1], [0, 0], [1, 1])
    return {
        "grid_sampler_2d": [sample(image, grid, 0, 0, False)],
        "grid_sampler_3d": [sample(solid, far, 0, 1, True)],
        "grid_sampler_2d_backward": [undifferentiated(d.normal(n, c, 2, 3), image, grid, 0, 0, False, [True, True])],
        "grid_sampler_3d_backward": [undifferentiated(d.normal(n, c, 2, 1, 2), solid, far, 0, 1, True, [True, True])],
        "im2col": [sample(image, *windows)],
        "col2im": [sample(d.normal(n, 4 * c, 6), [4, 3], *windows)],
        "instance_norm": [
            sample(image, None, None, None, None, True, 0.1, 1e-5, False),
            sample(image, d.x(c), d.x(c), None, None, True, 0.1, 1e-5, False),
        ],
    }


def algebra(d: Draw) -> dict[str, Samples]:
    """Matrices of a batch, distances of rows, and elements replaced at places."""
    a, b, c = d.sizes(3)
    k = 3
    x = d.normal(a, b, k, k)
    square = x @ x.mT + torch.eye(k, dtype=torch.float64)
    right, factor = d.normal(a, b, k, c), torch.linalg.cholesky(square)
    alone = d.x(a, b, 1, 1)  # positive definite in any order of its elements
    one = ("linalg_inv", "linalg_inv_ex", "linalg_cholesky_ex")
    samples: dict[str, Samples] = {name: [sample(square)] for name in one}
    p, q = d.normal(a, b, k), d.normal(a, c, k)
    return samples | {
        "linalg_cholesky": [sample(alone)],
        "cholesky_inverse": [sample(alone)],
        "linalg_solve_triangular": [
            sample(factor, right, upper=False),
            sample(factor[0], right, upper=False, unitriangular=True),
            sample(factor, d.normal(a, b, c, k), upper=False, left=False),
        ],
        "linalg_cross": [sample(d.normal(a, 3, b), d.normal(a, 3, b), dim=1), sample(d.normal(a, 3), d.normal(1, 3))],
        "_cdist_forward": [sample(p, q, 2.0, None), sample(p, d.normal(c, k), 1.0, None)],
        "_euclidean_dist": [sample(p, q)],
        "_cdist_backward": [undifferentiated(d.normal(a, b, c), p, q, 2.0, torch.cdist(p, q))],
        "_unsafe_index.Tensor": [sample(right[0], [None, d.i(k, c)]), sample(right[0], [d.i(b, c, 1), d.i(k, b)])],
        "scatter_reduce.two": [
            sample(d.normal(a, 3), 1, d.i(3, a, b), d.normal(a, b), how) for how in ("sum", "mean", "amax")
        ],
    }
