"""Sample calls of the operations that derivatives are made of.

Enters: a `Draw` of random sizes and values. Leaves: samples by overload name. No operand carries a gradient: of a
backward nothing is differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpar.ops import sdpa
from fxpar.ops.counter import IndexCut
from fxpar.oracle.ranks import Sample, tensors_of
from fxpar.oracle.ranks import sample as differentiated
from fxpar.oracle.samples import Draw, Samples

_IDENTITY = 17


def undifferentiated(*args: Any, **kwargs: Any) -> Sample:
    """A call of which nothing is differentiated."""
    count = len(tensors_of([*args, *kwargs.values()]))
    return differentiated(*args, fixed=tuple(range(count)), **kwargs)


def element_wise(d: Draw) -> dict[str, Samples]:
    """Gradients of operations on one tensor, of losses, and what these save."""
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
    """Losses of classes, forward and backward; layer norm; the table of an embedding."""
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
    """Sums at indices, scatters, and gradients of padding and pooling."""
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
    """Convolutions as autograd writes them, one gradient at a time; sums of threefold products."""
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


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    rng: Tensor | None = None,
    p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    indices: object = (),
    *,
    cuts: tuple[IndexCut, ...] = (),
) -> tuple[Tensor, Tensor]:
    """`fxpar.attention_forward` of a node with some identity; `cuts` say which block the probabilities are."""
    drops = None if rng is None else sdpa.Drops(rng, p, _IDENTITY, cuts)
    return sdpa.forward(query, key, value, mask, drops, sdpa.SdpaOptions(is_causal, scale, enable_gqa))


def attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    out: Tensor,
    log_sum: Tensor,
    mask: Tensor | None = None,
    rng: Tensor | None = None,
    p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    indices: object = (),
    of_mask: bool = False,
    *,
    cuts: tuple[IndexCut, ...] = (),
) -> tuple[Tensor, ...]:
    """`fxpar.attention_backward`, likewise."""
    drops = None if rng is None else sdpa.Drops(rng, p, _IDENTITY, cuts)
    options = sdpa.SdpaOptions(is_causal, scale, enable_gqa)
    return sdpa.backward(query, key, value, gradient, out, log_sum, mask, drops, options, of_mask)


def attention(d: Draw) -> dict[str, Samples]:
    """Attention that saves, and its gradients: plain, causal, grouped, masked, with dropout."""
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
