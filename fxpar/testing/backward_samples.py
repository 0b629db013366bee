"""Sample calls of the operations that derivatives are made of.

Enters: a `Draw` of random sizes and values. Leaves: samples by overload name. No operand carries a gradient: of a
backward nothing is differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpar.experts.operators.permute import sort_by_expert
from fxpar.experts.operators.replicas import plan_replicas
from fxpar.ops import sdpa
from fxpar.ops.counter import IndexCut
from fxpar.testing.ranks import Sample, sample, tensors_of
from fxpar.testing.ranks import sample as differentiated
from fxpar.testing.samples import Draw, Samples, words

_IDENTITY = 17


def undifferentiated(*args: Any, **kwargs: Any) -> Sample:
    """Returns a call of which nothing is differentiated."""
    count = len(tensors_of([*args, *kwargs.values()]))
    return differentiated(*args, fixed=tuple(range(count)), **kwargs)


def element_wise(d: Draw) -> dict[str, Samples]:
    """Samples gradients of operations on one tensor, of losses, and what these save."""
    a, b, c = d.sizes(3)
    g, x = d.normal(a, b, c), d.normal(a, b, c)
    samples = {
        f"{name}_backward": [undifferentiated(g, x)]
        for name in ("gelu", "silu", "sigmoid", "tanh", "hardsigmoid", "hardswish", "mish")
    }
    numbers: dict[str, tuple[Any, ...]] = {
        **{"threshold": (0.3,), "hardtanh": (-1, 1), "leaky_relu": (0.2, False), "softplus": (2, 20)},
        **{"softshrink": (0.4,), "hardshrink": (0.4,)},
    }
    samples |= {f"{name}_backward": [undifferentiated(g, x, *rest)] for name, rest in numbers.items()}
    two, chances, row = (d.normal(a, b), d.normal(a, b)), (d.x(a, b), d.x(a, b)), d.x(b)
    for name, rest in (("mse", ()), ("smooth_l1", (1.0,)), ("huber", (1.0,)), ("soft_margin", ())):
        upstream = (d.normal(a, b), d.normal(), d.normal())
        samples[f"{name}_loss_backward"] = [undifferentiated(upstream[how], *two, how, *rest) for how in (0, 1, 2)]
    samples["binary_cross_entropy_backward"] = [
        *(undifferentiated(upstream[how], *chances, None, how) for how in (0, 1, 2)),
        undifferentiated(upstream[0], *chances, row, 0),
    ]
    mask, channel = d.mask(a, b), d.x(1, b, 1)
    softmax = torch.softmax(x, 1)
    return samples | {
        "elu_backward": [undifferentiated(g, 1.0, 1.0, 1.0, False, x)],
        "logit_backward": [undifferentiated(g, d.x(a, b, c))],
        "log_sigmoid_forward": [undifferentiated(x)],
        "log_sigmoid_backward": [undifferentiated(g, x, (-x.abs()).exp())],
        "native_dropout_backward": [undifferentiated(two[0], mask, 2.0)],
        "_prelu_kernel": [undifferentiated(x, channel)],
        "_prelu_kernel_backward": [undifferentiated(g, x, channel)],
        "_softmax_backward_data": [undifferentiated(g, softmax, 1, torch.float64)],
        "_log_softmax_backward_data": [undifferentiated(g, softmax.log(), -2, torch.float64)],
        "cumprod": [undifferentiated(x, 1)],
    }


def losses_and_norms(d: Draw) -> dict[str, Samples]:
    """Samples losses of classes, forward and backward; layer norm; the table of an embedding."""
    n, c, s = d.sizes(3)
    scores, image, weight = d.normal(n, c), d.normal(n, c, s, 2), d.x(c)
    target, of_image = d.i(c, n), d.i(c, n, s, 2)
    samples: dict[str, Samples] = {
        name: [undifferentiated(x, t, None if how else weight, how, -100) for how in (0, 1, 2)]
        for name, x, t in (("nll_loss_forward", scores, target), ("nll_loss2d_forward", image, of_image))
    }
    for name, x, t in (("nll_loss_backward", scores, target), ("nll_loss2d_backward", image, of_image)):
        total = d.x()
        upstream = d.normal(*t.shape)
        samples[name] = [
            undifferentiated(d.normal() if how else upstream, x, t, None if how else weight, how, -100, total)
            for how in (0, 1, 2)
        ]
    x, g = d.normal(n, 2, c), d.normal(n, 2, c)
    mean, rstd = x.mean(-1, keepdim=True), x.std(-1, keepdim=True).reciprocal()
    samples["native_layer_norm_backward"] = [
        undifferentiated(g, x, [c], mean, rstd, weight, d.x(c), [True, True, True]),
        undifferentiated(g, x, [c], mean, rstd, weight, None, [True, True, False]),
        undifferentiated(g, x, [c], mean, rstd, None, None, [True, False, False]),
    ]
    x, g = d.normal(n, c, 2), d.normal(n, c, 2)
    mean, rstd = x.mean((0, 2)), x.std((0, 2), correction=0).reciprocal()
    samples["native_batch_norm_backward"] = [
        undifferentiated(g, x, d.x(c), None, None, mean, rstd, True, 1e-5, [True, True, True]),
        undifferentiated(g, x, None, None, None, mean, rstd, True, 1e-5, [True, False, False]),
    ]
    words = d.i(5, n, s)
    samples["embedding_dense_backward"] = [
        undifferentiated(d.normal(n, s, c), words, 5, 2, False),
        undifferentiated(d.normal(n, s, c), words, 5, -1, True),
    ]
    return samples


def places(d: Draw) -> dict[str, Samples]:
    """Samples sums at indices, scatters, and gradients of padding and pooling."""
    a, b, c = d.sizes(3)
    x, index = d.x(a, b), d.i(a, c, b)
    once = torch.stack([torch.randperm(a, generator=torch.Generator().manual_seed(i))[: min(a, c)] for i in range(b)])
    into = [
        undifferentiated(x, [d.i(a, c)], d.x(c, b), True),
        undifferentiated(x, [None, d.i(b, c)], d.x(a, c), True),
        undifferentiated(x, [d.i(a, c, 2), d.i(b, 2)], d.x(c, 2), True),
    ]
    image, grown = d.x(a, b, 4, 6), d.x(a, b, 6, 9)
    pads = {}
    for name in ("reflection", "replication"):
        pads[f"{name}_pad1d_backward"] = [undifferentiated(d.x(a, b, 5), d.x(a, b, 3), [1, 1])]
        pads[f"{name}_pad2d_backward"] = [undifferentiated(grown, image, [1, 2, 1, 1])]
        pads[f"{name}_pad3d_backward"] = [undifferentiated(d.x(a, b, 4, 3, 4), d.x(a, b, 2, 2, 2), [1, 1, 1, 0, 1, 1])]
    return pads | {
        "scatter.src": [undifferentiated(x, 0, once.t().contiguous(), d.x(min(a, c), b))],
        "scatter.value": [undifferentiated(x, 0, once.t().contiguous(), 0.5)],
        "scatter_add": [undifferentiated(x, 0, index, d.x(c, b)), undifferentiated(x, 1, d.i(b, a, c), d.x(a, c))],
        "index_add": [undifferentiated(x, 0, d.i(a, c), d.x(c, b)), undifferentiated(x, 1, d.i(b, c), d.x(a, c))],
        "index_put": into,
        "_unsafe_index_put": into,
        "diagonal": [undifferentiated(d.x(a, b, a), 0, 0, 2), undifferentiated(x, 1)],
        "diag_embed": [undifferentiated(x), undifferentiated(d.x(a, b, c), 0, 0, 2)],
        "_adaptive_avg_pool2d_backward": [undifferentiated(d.x(a, b, 2, 3), image)],
    }


def convolutions(d: Draw) -> dict[str, Samples]:
    """Samples convolutions as autograd writes them, one gradient at a time; sums of threefold products."""
    n, c, o = (6, 6, 12) if d.even else d.sizes(3)
    x, kernel, g = d.x(n, c, 5), d.x(o, c, 3), d.x(n, o, 3)
    options = ([1], [0], [1], False, [0], 1)
    groups = ([1], [2], [1], False, [0], c)
    across = ([1], [0], [1], True, [0], 1)
    masks = ([True, False, False], [False, True, False])
    k = 2
    return {
        "convolution": [
            undifferentiated(x, kernel, None, *options),
            undifferentiated(x, kernel, d.x(o), *options),
            undifferentiated(x, d.x(c, 1, 3), None, *groups),
            undifferentiated(x, d.x(c, o, 3), None, *across),
        ],
        "convolution_backward": [
            *(undifferentiated(g, x, kernel, None, *options, mask) for mask in masks),
            *(undifferentiated(d.x(n, c, 7), x, d.x(c, 1, 3), None, *groups, mask) for mask in masks),
            *(undifferentiated(d.x(n, o, 7), x, d.x(c, o, 3), None, *across, mask) for mask in masks),
        ],
        "_trilinear": [
            undifferentiated(d.x(n, c), d.x(o, c, k), d.x(n, k), [1, 3], [0], [1, 2], [2, 3]),
            undifferentiated(d.x(n, o), d.x(n, c), d.x(n, k), [2, 3], [1, 3], [1, 2], [0]),
        ],
    }


# ---------------------------------------------------------------------- fxpar's own


def attention_forward(*args: Any, cuts: tuple[IndexCut, ...] = ()) -> tuple[Tensor, Tensor]:
    """Computes `fxpar.attention_forward` of some identity; `cuts` say which block the probabilities are."""
    query, key, value, mask, rng, p, *options = args
    drops = None if rng is None else sdpa.Drops(rng, p, _IDENTITY, cuts)
    return sdpa.forward(sdpa.SdpaCall(query, key, value, mask, *options[:3]), drops)


def attention_backward(*args: Any, cuts: tuple[IndexCut, ...] = ()) -> tuple[Tensor, ...]:
    """Computes `fxpar.attention_backward`, likewise."""
    query, key, value, gradient, out, log_sum, mask, rng, p, *options, _, of_mask = args
    drops = None if rng is None else sdpa.Drops(rng, p, _IDENTITY, cuts)
    return sdpa.backward(sdpa.SdpaCall(query, key, value, mask, *options), gradient, out, log_sum, drops, of_mask)


def attention(d: Draw) -> dict[str, Samples]:
    """Samples attention that saves, and its gradients: plain, causal, grouped, masked, with dropout."""
    h, s, t = (6, 6, 6) if d.even else d.sizes(3)
    e = 2
    kv = h // 2 if h % 2 == 0 else h
    state, index = torch.tensor([3, 1, 2]), [torch.tensor(0)]
    whole = d.normal(h, s, e), d.normal(h, t, e), d.normal(h, t, 4)
    few = d.normal(h, s, e), d.normal(kv, t, e), d.normal(kv, t, e)
    mask = d.normal(h, s, t)
    calls: list[tuple[tuple[Tensor, ...], Tensor | None, tuple[Any, ...], bool]] = [
        (whole, None, (None, 0.0, True, 0.3, False), False),
        (few, None, (None, 0.0, False, None, True), False),
        (whole, mask, (None, 0.0, False, None, False), True),
        (whole, None, (state, 0.4, False, None, False, index), False),
    ]
    forward, backward = list[Sample](), list[Sample]()
    for values, added, options, of_mask in calls:
        forward.append(undifferentiated(*values, added, *options))
        query, key, value = values
        out, log_sum = attention_forward(query, key, value, added, *options)
        all_options = options if len(options) > 5 else (*options, ())
        backward.append(undifferentiated(*values, d.normal(*out.shape), out, log_sum, added, *all_options, of_mask))
    return {"fxpar.attention_forward": forward, "fxpar.attention_backward": backward}


# Sample calls of operations that run along some dimensions, and of what their derivatives are made of.

aten = torch.ops.aten

_ELEMENTS = words("""
digamma i0 lgamma sinc special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri
deg2rad rad2deg
""")
_PAIRS = words("copysign.Tensor fmax fmin hypot logaddexp logaddexp2 clamp_max.Tensor clamp_min.Tensor")


def elements(d: Draw) -> dict[str, Samples]:
    """Samples element-wise functions that few models call."""
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
    """Samples order statistics and moments: one value in place of a dimension."""
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
    """Samples what keeps a dimension and mixes it: running extrema, orders, turns, windows, repetition."""
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
    """Samples pooling and resampling of the last dimensions, with their gradients."""
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
    """Samples images that are read at points, and windows of them."""
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
    """Samples matrices of a batch, distances of rows, and elements replaced at places."""
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


# Sample calls of the operators of routed rows, alone and in groups.


def _sorted(d: Draw, experts: int, *lead: int) -> tuple[Tensor, Tensor]:
    """Returns an order of rows, and how many each expert has."""
    return sort_by_expert(d.i(experts, *lead, 4, 2), experts)


def _choices(d: Draw, *lead: int) -> tuple[Tensor, ...]:
    """Returns choices of four experts on two ranks, the experts in two slots, and how many pairs go there."""
    indices = d.i(5, *lead, 4, 2)
    counts = torch.stack([sort_by_expert(indices, 4)[1], d.i(3, *lead, 4)], -2)
    home, moved = plan_replicas(counts, 1, 0.0)
    return indices, home, moved[..., 0, :].contiguous()


def routed(d: Draw) -> dict[str, Samples]:
    """Samples rows and experts' matrices: one group, groups with their experts, and groups that share them."""
    a, b, i, o = (6, 6, 6, 12) if d.even else d.sizes(4)
    experts, rows, tokens, k = 3, 7, 4, 2
    order = torch.stack([torch.tensor([5, 0, -1, 7, 2, 3, 6]).roll(shift) for shift in range(a * b)]).view(a, b, rows)
    counts = (d.i(3, a, b, experts) + torch.tensor([0, 1, 0])).clamp_max(2)
    one = torch.tensor([2, 0, 3])
    x, y = d.normal(a, b, rows, i), d.normal(a, b, rows, o)
    by_name: dict[str, Samples] = {
        "sort_by_expert": [sample(d.i(experts, tokens, k), experts), sample(d.i(experts, a, b, tokens, k), experts)],
        "moe_permute": [
            sample(d.normal(tokens, i), order[0, 0], k),
            sample(d.normal(a, tokens, i), order[:, 0], k),
            sample(d.normal(tokens, i), torch.tensor([5, 0, -1, 7, 2, 3]), k),
        ],
        "moe_unpermute": [
            sample(x[0, 0], order[0, 0], tokens, k),
            sample(x[:, 0], order[:, 0], tokens, k),
            sample(d.normal(6, i), torch.tensor([5, 0, -1, 7, 2, 3]), tokens, k),
        ],
        "moe_combine": [
            sample(x[0, 0], d.normal(tokens, k), order[0, 0], torch.float64),
            sample(x[:, 0], d.normal(a, tokens, k), order[:, 0], torch.float64),
        ],
        "take_weighed": [
            sample(d.normal(tokens, i), d.normal(tokens, k), order[0, 0], torch.float64),
            sample(d.normal(a, tokens, i), d.normal(a, tokens, k), order[:, 0], torch.float64),
            sample(d.normal(tokens, i), d.normal(tokens, k), torch.tensor([5, 0, -1, 7, 2, 3]), torch.float64),
        ],
        "dot_rows": [
            sample(d.normal(tokens, i), x[0, 0], order[0, 0], k, torch.float64),
            sample(d.normal(a, tokens, i), x[:, 0], order[:, 0], k, torch.float64),
        ],
        "swiglu_rows": [sample(d.normal(rows, 2, i), one), sample(d.normal(a, b, rows, 2, i), counts)],
        "swiglu_gradient": [sample(x[0, 0], d.normal(rows, 2, i), one), sample(x, d.normal(a, b, rows, 2, i), counts)],
        "grouped_linear": [
            sample(x[0, 0], d.normal(experts, o, i), one, False),
            sample(x[0, 0], d.normal(experts, i, o), one, True),
            sample(x[:, 0], d.normal(experts, o, i), counts[:, 0], False),
            sample(x, d.normal(b, experts, i, o), counts, True),
        ],
        "grouped_outer": [
            sample(y[0, 0], x[0, 0], one, 0),
            sample(y[:, 0], x[:, 0], counts[:, 0], 0),
            sample(y, x, counts, 1),
        ],
        "expand_by_expert": [
            sample(d.normal(experts, o), one, rows),
            sample(d.normal(experts, o), counts[:, 0], rows),
            sample(d.normal(b, experts, o), counts, rows),
        ],
        "sum_by_expert": [sample(y[0, 0], one, 0), sample(y[:, 0], counts[:, 0], 0), sample(y, counts, 1)],
        "drop_by_position": [
            sample(d.i(experts, tokens, k), experts, 2),
            sample(d.i(experts, a, b, tokens, k), experts, 2),
        ],
        "drop_by_probability": [
            sample(d.i(experts, tokens, k), d.normal(tokens, k), experts, 2),
            sample(d.i(experts, a, b, tokens, k), d.normal(a, b, tokens, k), experts, 2),
        ],
        "group_sizes": [sample(one.cumsum(0)), sample(counts.cumsum(-1))],
        "dispatch_indices": [sample(*_sorted(d, experts + 1, a), 2, 7), sample(*_sorted(d, experts + 1, a, b), 2, 7)],
        "plan_replicas": [sample(d.i(9, a, 2, 4), 2, 0.0), sample(d.i(9, a, b, 3, 6), 1, 0.25)],
        "reroute": [sample(*_choices(d, a), 4, 1), sample(*_choices(d, a, b), 4, 1)],
        "block_excess": [sample(d.i(5, a, 4), 2, 3), sample(d.i(5, a, b, 4), 2, 3)],
        "received_order": [sample(d.i(3, a, 2, experts), 7), sample(d.i(3, a, b, 2, experts), 7)],
        "arrived_order": [sample(d.i(3, a, 2, experts), 14), sample(d.i(3, a, b, 2, experts), 14)],
        "resize_rows": [sample(x, rows + 2, 0), sample(x, rows - 3, 0), sample(x[0, 0], rows + 1, 0)],
    }
    return {f"fxpar.{name}.default": samples for name, samples in by_name.items()}
