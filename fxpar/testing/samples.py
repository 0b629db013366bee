"""Sample calls of the operations that compute: element-wise ones, products, attention, reductions, losses.

Enters: a `Draw` of random sizes and values. Leaves: samples by overload name (`add.Tensor`; `relu` is `relu.default`).

Tensors are as small as the cuts allow. Values keep away from the edges of an operation's domain, because a NaN or an
infinity on both sides would look like agreement.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import torch

from fxpar.testing.ranks import Sample, sample

Samples = list[Sample]


class Draw:
    """Random sizes and tensors.

    Args:
        seed: of all that is drawn.
        even: sizes are multiples of 6, so that 2 and 3 divide them; else any from 2 to 10, pairwise distinct.
    """

    def __init__(self, seed: int, even: bool) -> None:
        self.even = even
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def sizes(self, count: int) -> list[int]:
        """Returns sizes of `count` dimensions: distinct where there are enough."""
        if not self.even:
            return self._random.sample(range(2, 11), count)
        return self._random.sample((6, 6, 6, 12, 12) if count > 2 else (6, 12, 18), count)

    def x(self, *shape: int) -> torch.Tensor:
        """Returns values between 0.2 and 0.8."""
        return 0.2 + 0.6 * torch.rand(shape, generator=self._generator, dtype=torch.float64)

    def normal(self, *shape: int) -> torch.Tensor:
        """Returns values of both signs."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def z(self, *shape: int) -> torch.Tensor:
        """Returns complex values."""
        return torch.complex(self.normal(*shape), self.normal(*shape))

    def i(self, high: int, *shape: int) -> torch.Tensor:
        """Draws integers below `high`."""
        return torch.randint(0, high, shape, generator=self._generator)

    def mask(self, *shape: int) -> torch.Tensor:
        """Draws booleans, of both kinds where there are several."""
        mask = torch.rand(shape, generator=self._generator) < 0.5
        mask.view(-1)[-1] = False
        mask.view(-1)[0] = True
        return mask


Build = Callable[[Draw], Mapping[str, Samples]]


def words(text: str) -> tuple[str, ...]:
    """Returns the words of a text."""
    return tuple(text.split())


_UNARY = words("""
abs acos asin asinh atan atanh ceil celu cos cosh elu erf erfc erfinv exp exp2 expm1 floor frac gelu hardshrink
hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu log log10 log1p log2 log_sigmoid logit mish neg
reciprocal relu relu6 round rsqrt selu sgn sigmoid sign silu sin sinh softplus softshrink sqrt square tan tanh
trunc clone detach alias contiguous lift_fresh_copy zeros_like ones_like
""")
_COMPARE = words("eq ne le lt ge gt")


def unary(d: Draw) -> dict[str, Samples]:
    """Samples operations on one tensor, element by element."""
    a, b, c = d.sizes(3)
    x = d.x(a, b, c)
    samples = {name: [sample(x)] for name in _UNARY}
    samples |= {f"{name}.Scalar": [sample(d.i(3, a, b), 1)] for name in _COMPARE}
    return samples | {
        "acosh": [sample(1.2 + x)],
        "gelu": [sample(d.normal(a, b)), sample(d.normal(a, b), approximate="tanh")],
        "logical_not": [sample(d.mask(a, b))],
        "bitwise_not": [sample(d.mask(a, b)), sample(d.i(9, a, b))],
        "threshold": [sample(x, 0.5, 0.1)],
        "full_like": [sample(x, 3.0)],
        "fill.Scalar": [sample(x, 3.0)],
        "fill.Tensor": [sample(x, d.x())],
        "pow.Tensor_Scalar": [sample(x, 2), sample(x, 0.5)],
        "pow.Scalar": [sample(2.0, x)],
        **{f"{name}.Scalar": [sample(x, 2.5)] for name in words("mul div add sub rsub")},
        **{f"{name}.Scalar": [sample(d.normal(a, b), 0.3)] for name in words("remainder fmod")},
        "floor_divide.Scalar": [sample(d.i(50, a, b), 7)],
        "div.Scalar_mode": [sample(d.normal(a, b), 0.3, rounding_mode="floor")],
        **{f"{name}.Scalar": [sample(d.i(9, a, b), 3)] for name in words("bitwise_and bitwise_or __and__ __or__")},
        "clamp": [sample(d.normal(a, b), -0.5, 0.5)],
        "clamp_max": [sample(d.normal(a, b), 0.5)],
        "clamp_min": [sample(d.normal(a, b), -0.5)],
        "nan_to_num": [sample(x)],
        **{name: [sample(x, 0.5, False)] for name in words("native_dropout dropout")},
        "where.Scalar": [sample(d.mask(a, b), 1.0, 2.0)],
        "_to_copy": [
            sample(x, dtype=torch.float32),
            sample(d.i(9, a), dtype=torch.float64),
            sample(9 * x, dtype=torch.int64),
        ],
        "to.dtype": [sample(x, torch.float32)],
        "to.device": [sample(x, torch.device("cpu"), dtype) for dtype in (torch.float32, torch.int64)],
    }


def complexes(d: Draw) -> dict[str, Samples]:
    """Samples complex numbers, their parts, and products of them: rotations of queries and keys."""
    a, b, c = d.sizes(3)
    x, z = d.normal(a, b), d.z(a, b, c)
    samples = {name: [sample(z), sample(x)] for name in words("resolve_conj resolve_neg angle real")}
    samples |= {
        name: [sample(z)] for name in words("_conj _conj_physical conj_physical imag view_as_real abs clone neg sgn")
    }
    return samples | {
        "view_as_complex": [sample(d.normal(a, b, 2))],
        "complex": [sample(x, d.normal(a, b)), sample(x, d.normal(b))],
        "polar": [sample(x, d.normal(a, b)), sample(x, d.normal(b))],
        "mul.Tensor": [sample(z, d.z(c)), sample(z, d.z(1, b, 1)), sample(z, d.x(c)), sample(d.x(a, 1, c), z)],
        "add.Tensor": [sample(z, d.z(c)), sample(z, d.x(c))],
        "sum.dim_IntList": [sample(z, [-1], True), sample(z, [0, 1])],
        "_to_copy": [sample(z, dtype=torch.complex64), sample(x, dtype=torch.complex128)],
    }


def binary(d: Draw) -> dict[str, Samples]:
    """Samples operations on several tensors, element by element, with broadcasting."""
    a, b, c = d.sizes(3)
    x, y = d.x(a, b, c), d.x(a, b, c)
    pairs = [sample(x, y), sample(d.x(a, b), d.x(b)), sample(d.x(a, 1), d.x(1, b)), sample(d.x(b), d.x(a, 1))]
    row, column = d.i(50, 1, b), d.i(50, a, 1)
    bits = [sample(d.mask(a, b), d.mask(b))]
    samples = {f"{name}.Tensor": [*pairs, sample(x, 2.0)] for name in ("add", "sub", "mul", "div")}
    samples |= {f"{name}.Tensor": [sample(column, row), sample(d.i(50, a, b), row)] for name in _COMPARE[2:]}
    samples |= {
        f"{name}.Tensor": [sample(d.i(3, a, 1), d.i(3, 1, b)), sample(d.i(3, a, b), d.i(3, b))] for name in _COMPARE[:2]
    }
    samples |= dict.fromkeys(("logical_and", "logical_or", "logical_xor"), bits)
    samples |= {
        f"{name}.Tensor": bits for name in ("__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor")
    }
    samples |= dict.fromkeys(
        ("maximum", "minimum", "max.other", "min.other", "atan2", "pow.Tensor_Tensor", "xlogy.Tensor"), pairs[1:]
    )
    samples |= {f"{name}.Tensor": pairs[1:2] for name in ("fmod", "remainder", "rsub")}
    return samples | {
        "add.Tensor": [*pairs, sample(x, 2.0), sample(x, y, alpha=2), sample(d.i(9, a), d.x(a))],
        "mul.Tensor": [*pairs, sample(x, 2.0), sample(d.x(a, b), d.mask(b)), sample(d.i(9, a), d.x(a))],
        "floor_divide": [sample(d.i(50, a, b), 1 + d.i(7, b))],
        "div.Tensor_mode": [sample(x, y, rounding_mode="trunc")],
        "clamp.Tensor": [sample(d.normal(a, b), d.x(b) - 1, d.x(b))],
        "broadcast_tensors": [sample([x, d.x(c)]), sample([d.x(a, 1), d.i(9, 1, b), d.x(b)]), sample([d.x(a, b)])],
        "prelu": [sample(d.normal(a, b, c), d.x(b)), sample(d.normal(a, b), d.x(1))],
        "lerp.Scalar": [sample(d.x(a, b), d.x(b), 0.3)],
        **{name: [sample(d.x(a, b), d.x(b), d.x(a, b))] for name in words("lerp.Tensor addcmul addcdiv")},
        "where.self": [sample(d.mask(a, b), d.x(a, b), d.x(b)), sample(d.mask(b), d.x(a, b), d.x(a, 1))],
        "where.ScalarOther": [sample(d.mask(a, b), d.x(a, b), other) for other in (1.5, 0.0)],
        "where.ScalarSelf": [sample(d.mask(a, b), value, d.x(a, b)) for value in (1.5, 0.0)],
        "masked_fill.Scalar": [sample(d.x(a, b), d.mask(b), value) for value in (-3.0, 0.0)],
        "masked_fill.Tensor": [sample(d.x(a, b), d.mask(b), torch.tensor(-3.0, dtype=torch.float64))],
    }


def products(d: Draw) -> dict[str, Samples]:
    """Samples matrix products and convolutions."""
    b, m, k, n = (6, 6, 12, 6) if d.even else d.sizes(4)
    image, kernel = d.x(b, m, 5, 4), d.x(n, m, 3, 2)
    return {
        "linear": [
            sample(d.x(b, m, k), d.x(n, k)),
            sample(d.x(m, k), d.x(n, k), d.x(n)),
            sample(d.x(b, m, k), d.x(n, k), d.x(n)),
        ],
        "addmm": [sample(d.x(n), d.x(m, k), d.x(k, n)), sample(d.x(m, n), d.x(m, k), d.x(k, n))],
        "mm": [sample(d.x(m, k), d.x(k, n))],
        "bmm": [sample(d.x(b, m, k), d.x(b, k, n))],
        "baddbmm": [
            sample(d.x(b, m, n), d.x(b, m, k), d.x(b, k, n)),
            sample(d.x(b, 1, n), d.x(b, m, k), d.x(b, k, n), beta=0.5, alpha=2.0),
        ],
        "mv": [sample(d.x(m, k), d.x(k))],
        "dot": [sample(d.x(k), d.x(k))],
        "matmul": [
            sample(d.x(b, m, k), d.x(b, k, n)),
            sample(d.x(b, m, k), d.x(k, n)),
            sample(d.x(m, k), d.x(b, k, n)),
            sample(d.x(m, k), d.x(k)),
            sample(d.x(k), d.x(b, k, n)),
            sample(d.x(2, 1, m, k), d.x(n, k, 2)),
        ],
        "conv1d": [
            sample(d.x(b, m, 5), d.x(n, m, 3), d.x(n), [1], [1]),
            sample(d.x(b, m, 5), d.x(m, 1, 3), None, [1], [2], [1], m),
        ],
        "conv2d": [sample(image, kernel), sample(image, kernel, d.x(n), [2, 2], [1, 1])],
        "conv3d": [sample(d.x(b, m, 3, 3, 4), d.x(n, m, 2, 2, 2))],
        "conv1d.padding": [sample(d.x(b, m, 5), d.x(n, m, 3), d.x(n), [1], "same")],
        "conv2d.padding": [sample(image, kernel, None, [1, 1], "valid")],
        "conv3d.padding": [sample(d.x(b, m, 3, 2, 3), d.x(n, m, 2, 2, 2), None, [1, 1, 1], "same")],
    }


_EQUATIONS = words("""
bmk,kn->bmn ...k,nk->...n bkm,bkn->bmn ...km,...kn->...mn bm,bk,bn->mkn mk,bk,nk->mbn kk->k kk kkm,km->m bm->mb b...->b
bm,b,m ...m->m m,k ,mk->k ...,...->... mKn,Kb m...k,k...n->m...n bm,bm->bm mk,bn-> bkm,mnk->bn
""")


def contractions(d: Draw) -> dict[str, Samples]:
    """Samples products whose labels stand in the call: batched, broadcast, diagonal, of one operand and of many."""
    size = dict(zip("bmkn", (6, 6, 12, 6) if d.even else d.sizes(4), strict=True))
    size |= {"K": size["m"]}

    def operand(labels: str, dots: tuple[int, ...]) -> torch.Tensor:
        before, _, behind = labels.partition("...")
        return d.x(*(size[c] for c in before), *(dots if "..." in labels else ()), *(size[c] for c in behind))

    equations = []
    for equation in _EQUATIONS:
        left = equation.partition("->")[0].split(",")
        few = len(left) < 3
        shown = equation.replace(",", " , ").replace("->", " -> ") if few else equation
        dots = [(2,), (1, 2)] if few else [(), ()]
        equations.append(sample(shown, [operand(labels, dots[i % 2]) for i, labels in enumerate(left)]))
    b, m, k, n = (size[c] for c in "bmkn")
    one = [sample("mk,mk->m", [d.x(m, k), d.x(1, k)]), sample("mk,k->m", [d.x(m, k), d.x(1)])]
    path = sample("bm,mk,kn->bn", [d.x(b, m), d.x(m, 2), d.x(2, n)], path=[1, 2, 0, 1])
    return {
        "einsum": [*equations, *one, path],
        "tensordot": [
            sample(d.x(b, 2, k), d.x(k, n), [-1], [0]),
            sample(d.x(m, 2, k), d.x(2, m, n), [0, 1], [1, 0]),
            sample(d.x(b, 1), d.x(m, n), [1], [0]),
            sample(d.x(m), d.x(n), [], []),
        ],
        "inner": [sample(d.x(b, 2, k), d.x(m, k)), sample(d.x(k), d.x(k)), sample(d.x(), d.x(m))],
        "outer": [sample(d.x(m), d.x(n))],
        "bilinear": [sample(d.x(2, b, m), d.x(2, b, k), d.x(n, m, k)), sample(d.x(m), d.x(k), d.x(n, m, k), d.x(n))],
    }


def attention(d: Draw) -> dict[str, Samples]:
    """Samples scaled dot-product attention: plain, causal, grouped, multi-query, masked, of unlike lengths."""
    b, h, s, t = (6, 12, 6, 6) if d.even else d.sizes(4)
    e, v = 2, 6 if d.even else d.sizes(1)[0]
    q, k, value = d.normal(b, h, s, e), d.normal(b, h, t, e), d.normal(b, h, t, v)
    kv = h // 2 if h % 2 == 0 else h
    mask = torch.arange(s * t).view(s, t) != 1  # one false: no order of its elements masks a whole row
    few, many = (d.normal(b, kv, t, e), d.normal(b, kv, t, v)), (d.normal(b, 1, t, e), d.normal(b, 1, t, v))
    return {
        "scaled_dot_product_attention": [
            sample(q, k, value),
            sample(q, d.normal(b, h, s, e), d.normal(b, h, s, v), is_causal=True),
            sample(q, *few, enable_gqa=True),
            sample(q, *many, enable_gqa=True),
            sample(q[0], k[0], value[0], mask, scale=0.3),
            sample(q[0], k[0], value[0], d.normal(1, 1, t)),
        ]
    }


def masked_attention(d: Draw) -> dict[str, Samples]:
    """Samples attention on four dimensions with a mask that is broadcast over the heads."""
    b, h, s = (6, 6, 6) if d.even else d.sizes(3)
    q, k, v = (d.normal(b, h, s, 2) for _ in range(3))
    return {
        "scaled_dot_product_attention": [sample(q, k, v, d.normal(b, 1, s, s)), sample(q, k, v, d.normal(1, h, 1, s))]
    }


def reductions(d: Draw) -> dict[str, Samples]:
    """Samples reductions, softmax and norms."""
    a, b, c = d.sizes(3)
    x, y, weight = d.normal(a, b, c), d.normal(a, b), (d.x(c), d.x(c))
    samples = {
        f"{name}.{overload}": [sample(x, [-1], True), sample(x, [0, 1]), sample(y, [0])]
        for name, overload in (("mean", "dim"), ("sum", "dim_IntList"))
    }
    samples |= {name: [sample(x, -1), sample(y, 0)] for name in ("softmax.int", "log_softmax.int", "cumsum")}
    samples["cumsum"].append(sample(5 * x, 0, dtype=torch.int64, fixed=(0,)))
    samples |= {name: [sample(x, -1, False)] for name in ("_softmax", "_log_softmax")}
    samples |= {name: [sample(x, [-1], True), sample(y, [0])] for name in ("amax", "amin", "logsumexp")}
    samples |= {
        f"{name}.correction": [sample(x, [-1], keepdim=True), sample(y, [0])] for name in ("var", "std", "var_mean")
    }
    samples |= {
        name: [sample(x, -1, True), sample(y, 0)] for name in ("argmax", "argmin", "max.dim", "min.dim", "prod.dim_int")
    }
    first = torch.zeros(a, b, dtype=torch.bool)
    first[0, 0] = True
    samples |= {
        f"{name}.{over}": [sample(m, *dim)]
        for name, m in (("any", first), ("all", ~first))
        for over, dim in (("dim", (1, True)), ("default", ()))
    }
    samples |= {f"{name}.default": [sample(y)] for name in ("mean", "max", "min", "prod")}
    return samples | {
        "any.dims": [sample(first, [0, 1])],
        "sum.default": [sample(y), sample(d.mask(a, b)), sample(9 * d.x(a, b), dtype=torch.int64, fixed=(0,))],
        "sum.dim_IntList": [
            *samples["sum.dim_IntList"],
            sample(d.mask(a, b), [1]),
            sample(9 * d.x(a, b), [1], dtype=torch.int64, fixed=(0,)),
        ],
        "norm.ScalarOpt_dim": [sample(x, 2.0, [-1], True), sample(y, 3, [0])],
        "linalg_vector_norm": [sample(x, 2, [-1], True), sample(y, 3, [0]), sample(y)],
        "_weight_norm": [sample(y, d.x(a, 1)), sample(x, d.x(1, 1, c), 2), sample(y, d.x(), -1)],
        "sort": [sample(x), sample(y, 0, True)],
        "topk": [sample(x, 2), sample(y, 2, 0)],
        "layer_norm": [sample(x, [c], *weight), sample(x, [c]), sample(x, [c], weight[0]), sample(y, [a, b])],
        "native_layer_norm": [sample(x, [c], *weight, 1e-5)],
        "rms_norm": [sample(x, [c], weight[0]), sample(x, [c])],
        "_native_batch_norm_legit.no_stats": [
            sample(d.normal(a, 6, c), d.x(6), d.x(6), True, 0.0, 1e-5),
            sample(d.normal(a, 6), None, None, True, 0.0, 1e-5),
        ],
        "group_norm": [sample(d.normal(a, 6, c), 3, d.x(6), d.x(6))],
    }


def losses(d: Draw) -> dict[str, Samples]:
    """Samples losses: all reductions, ignored targets, smoothing, class weights, further dimensions."""
    n, c, s = d.sizes(3)
    logits, target = d.normal(n, c), d.i(c, n)
    ignored = torch.where(d.mask(n), target, -100)
    ignored[0] = 0
    two = (d.normal(n, s), d.x(n, s))
    samples = {
        f"{name}": [sample(*two, how) for how in (0, 1, 2)]
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")
    }
    samples["soft_margin_loss"] = [sample(*two, how, fixed=(1,)) for how in (0, 1, 2)]
    members = torch.full((n, c), -1)  # the classes of a row, -1 after the last
    members[:, 0] = target
    samples["multi_margin_loss"] = [
        *(sample(logits, target, 1, 0.7, None, how) for how in (0, 1, 2)),
        sample(logits, target, 2, 1.0, d.x(c), 2, fixed=(2,)),
    ]
    samples["multilabel_margin_loss"] = [sample(logits, members, how) for how in (0, 1, 2)]
    weights = d.x(s).abs()
    samples["binary_cross_entropy_with_logits"] = [
        *(sample(*two, None, None, how) for how in (0, 1, 2)),
        sample(*two, None, weights, 2, fixed=(2,)),
        sample(*two, weights, None, 0, fixed=(2,)),
    ]
    chances = tuple(value.sigmoid() for value in two)
    samples["binary_cross_entropy"] = [
        *(sample(*chances, None, how, fixed=(1,)) for how in (0, 1, 2)),
        sample(*chances, weights, 2, fixed=(1, 2)),
    ]
    return samples | {
        "cross_entropy_loss": [
            *(sample(logits, ignored, None, how) for how in (0, 1, 2)),
            sample(logits, target),
            sample(logits, target, d.x(c), 2, 1, 0.1, fixed=(2,)),
            sample(d.normal(n, c, s), d.i(c, n, s), None, 2),
            *(sample(logits, torch.softmax(d.normal(n, c), -1), None, how) for how in (0, 1, 2)),
            sample(logits, torch.softmax(d.normal(n, c), -1), d.x(c), 2, -100, 0.1, fixed=(2,)),
            sample(d.normal(n, c, s), torch.softmax(d.normal(n, c, s), 1), None, 2),
            sample(d.normal(c), d.i(c)),
        ],
        "nll_loss": [sample(logits, ignored, None, how) for how in (0, 1, 2)],
        "nll_loss_nd": [sample(logits, ignored, None, how) for how in (0, 2)],
    }


# Sample calls of the operations that move elements: views, slices, concatenations, indexing.


def views(d: Draw) -> dict[str, Samples]:
    """Samples views and permutations: split and merged heads, fused projections, flat batches, squeezes."""
    a, b, c = d.sizes(3)
    x = d.x(a, b, c)
    merged = [
        sample(x, [a, b * c]),
        sample(x, [a * b, c]),
        sample(x, [-1]),
        sample(d.x(a, b * c), [a, b, c]),
        sample(d.x(a * b, c), [a, b, c]),
        sample(d.x(a, 3 * b), [a, 3, b]),
        sample(d.x(a, 3, b), [a, 3 * b], segments=((b, b, b),)),
        sample(d.x(a, b, 2), [b, a, 2]),
        sample(x, [a, 1, b, c]),
        sample(d.x(a, 3 * b), [3 * a, b], segments=((2 * b, b),)),
        sample(d.x(a, 4 * b), [a, 4 * b // 2, 2], segments=((2 * b, b, b),)),
        sample(d.x(4 * b, 2), [8 * b], segments=((2 * b, b, b), (4 * b, 2 * b, 2 * b))),
    ]
    squeezed = d.x(a, 1, b)
    return {
        **dict.fromkeys(("view", "_unsafe_view", "reshape"), merged),
        "flatten.using_ints": [sample(x, 1), sample(x, 0, 1)],
        "unflatten.int": [sample(d.x(a, b * c), 1, [b, c])],
        "unsqueeze": [sample(d.x(a, b), 0), sample(d.x(a, b), -1)],
        "squeeze.dim": [sample(squeezed, 1), sample(d.x(a, b), 0), sample(d.x(2, 3), 0), sample(d.x(2, 3), 1)],
        "squeeze.dims": [sample(squeezed, [1, 2]), sample(d.x(2, 1, 3), [0, 1])],
        "squeeze": [sample(squeezed), sample(d.x(2, 1, 3))],
        "transpose.int": [sample(x, 1, 2), sample(x, 0, -1)],
        "permute": [sample(x, [2, 0, 1]), sample(x, [0, -1, 1])],
        "t": [sample(d.x(a, b)), sample(d.x(a))],
        "expand": [sample(d.x(a, 1, b), [-1, c, -1]), sample(d.x(b), [a, b]), sample(d.x(1, b), [a, 1, b])],
        "repeat": [sample(d.x(a, b), [1, 2]), sample(d.x(a, b), [2, 1, 1])],
        "tile": [sample(d.x(a, b), [3])],
        "diff": [
            sample(x),
            sample(d.x(a, b), 1, 0),
            sample(d.i(9, a, b), 1, -1, d.i(9, a, 1)),
            sample(d.x(a, b), 2, 1, d.x(a, 1), d.x(a, 3)),
            sample(d.mask(a, b)),
        ],
        "flip": [sample(x, [1]), sample(d.x(a, b), [0, 1])],
        "roll": [sample(x, [1], [1]), sample(d.x(a, b), [1])],
        "pixel_shuffle": [sample(d.x(a, 4 * b, 2, 3), 2)],
        "adaptive_avg_pool1d": [sample(x, [2])],
        **{name: [sample(d.x(a, b, 4, 6), [2, 3])] for name in words("adaptive_avg_pool2d _adaptive_avg_pool2d")},
        "pixel_unshuffle": [sample(d.x(a, b, 4, 6), 2)],
        **{name: [sample(x), sample(d.x(a, b), 1)] for name in words("tril triu")},
        "pad": [
            sample(x, [1, 1]),
            sample(x, [0, 0, 1, 0]),
            sample(x, [1, 1], "constant", 2.0),
            sample(x, [1, 0], "reflect"),
        ],
        "slice_scatter": [
            sample(x, d.x(*x.shape[:-1], 1), x.dim() - 1, 0, 1),
            sample(d.x(a, b), d.x(a, 1), 1, 1, 2),
            sample(d.x(a, b), d.x(a, b), 0, 0, 2**40),
        ],
        "select_scatter": [sample(d.x(a, b), d.x(a), 1, 0), sample(d.x(a, b), d.x(b), 0, 1)],
        "constant_pad_nd": [sample(x, [1, 1]), sample(x, [1, -1], 2.0)],
    }


def parts(d: Draw) -> dict[str, Samples]:
    """Samples slices, splits and concatenations, with fused dimensions of several segments."""
    a, b, c = d.sizes(3)
    x = d.x(a, b)
    fused, equal = d.x(a, 2 * b + 2 * c), d.x(a, 3 * b)
    cuts, thirds = ((2 * b, c, c),), ((b, b, b),)
    slices = [
        sample(x, 1, 0, b - 1),
        sample(x, 1, 1),
        sample(x, 0, 0, 2**63 - 1),
        sample(x, -1, -1),
        sample(equal, 1, b, 2 * b, segments=thirds),
        sample(fused, 1, 2 * b, 2 * b + c, segments=cuts),
        sample(equal, 1, 0, b // 2),
        sample(d.x(a, 2 * b), 1, 0, 2**63 - 1, 2),
        sample(d.x(a, 2 * b), 1, 1, 2**63 - 1, 2),
        sample(d.x(a, 3 * b), 1, 1, 3 * b - 1, 3, segments=((2 * b, b),)),
        sample(d.x(a, 2 * b), 1, b, 2 * b, 2),
    ]
    return {
        "slice.Tensor": slices,
        "select.int": [sample(x, 0, 1), sample(x, -1, -1)],
        "split.Tensor": [sample(equal, b, -1, segments=thirds), sample(x, a, 0), sample(x, 4, 1)],
        "split_with_sizes": [
            sample(fused, [2 * b, c, c], 1, segments=cuts),
            sample(equal, [b, 2 * b], -1, segments=thirds),
        ],
        "split.sizes": [sample(fused, [2 * b, c, c], 1, segments=cuts)],
        "chunk": [sample(equal, 3, 1, segments=thirds), sample(x, 2, 0)],
        "unbind.int": [sample(d.x(2, a)), sample(d.x(a, 3, b), 1)],
        "cat": [
            sample([d.x(a, b), d.x(a, c)], -1, segments=((b, c),)),
            sample([d.x(a, b), d.x(a, b)], 0),
            sample([d.x(2 * a), d.x(b), d.x(b)], segments=((2 * a, b, b), (a, a))),
        ],
        "stack": [sample([d.x(a, b), d.x(a, b)], -1), sample([d.x(a, b)] * 2)],
    }


def indexing(d: Draw) -> dict[str, Samples]:
    """Samples operations that pick elements by integer tensors."""
    a, b, c = d.sizes(3)
    x = d.x(a, b)
    return {
        "index.Tensor": [
            sample(x, [d.i(a, c)]),
            sample(x, [None, d.i(b, c)]),
            sample(x, [d.i(a, c, 1), d.i(b, b)]),
            sample(d.x(a, b, c), [d.i(a, b, 1), d.i(b, 1, a)]),
            sample(d.x(a, b), [d.i(a, c, b)]),
        ],
        "gather": [
            sample(x, 1, d.i(b, a, c)),
            sample(x, 0, d.i(a, c, b)),
            sample(x, 1, d.i(b, 1, c)),
            sample(d.x(2 * a, b), 1, d.i(b, a, c)),
        ],
        "index_select": [sample(x, 0, d.i(a, c)), sample(x, 1, d.i(b, c))],
        "histc": [sample(d.i(3, a, b).double(), 4, 0, 3), sample(x, 3, -1, 2)],
        "one_hot": [sample(d.i(3, a, b), 3), sample(d.i(3, a), 3)],
        "embedding": [
            sample(x, d.i(a, c)),
            sample(x, d.i(a, c, b)),
            sample(x, d.i(a, c), 0),
            sample(x, d.i(2, 2 * c), -1, True),
        ],
    }


def creation(d: Draw) -> dict[str, Samples]:
    """Samples tensors made in the element type of another."""
    a, b, c = d.sizes(3)
    x = d.x(a, b)
    return {
        "new_ones": [sample(x, [c])],
        "new_zeros": [sample(x, [c, a])],
        "new_full": [sample(x, [b], 2.0)],
    }
