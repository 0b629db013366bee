"""Operators that the oracle cannot call as they stand in a graph.

Enters: graph operators of fxpar, and of torch where the result is undefined or sizes are not checked. Leaves: kernels
that the oracle calls in their place, and samples of the former. Random ones are those of the runtime: without cuts for
the whole, with a rank's index for its block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpar.ops import counter, sdpa
from fxpar.ops import random as records
from fxpar.ops.attention import attention_backward, attention_forward
from fxpar.ops.counter import IndexCut
from fxpar.ops.functions import function as autograd_function
from fxpar.ops.host import item
from fxpar.ops.process_group import same
from fxpar.ops.transfers import transfer
from fxpar.ops.zeros import zeros, zeros_of
from fxpar.oracle import backward
from fxpar.oracle.checked import CHECKED
from fxpar.oracle.ranks import sample
from fxpar.oracle.samples import Draw, Samples
from fxpar.signatures.autograd_functions import resolve_function
from fxpar.signatures.randomness import SHAPED, VALUED

_IDENTITY = 17


def dropout(x: Tensor, rng: Tensor, p: float, indices: object = (), *, cuts: Sequence[IndexCut] = ()) -> Tensor:
    """`fxpar.dropout` of a node with some identity; `cuts` say which block of the whole `x` is."""
    return counter.dropout(x, rng, p, _IDENTITY, cuts)


def uniform(size: Sequence[int], rng: Tensor, dtype: torch.dtype) -> Tensor:
    """`fxpar.uniform` of a node with some identity."""
    return counter.uniform(size, rng, dtype, _IDENTITY)


def uniform_like(
    x: Tensor, rng: Tensor, dtype: torch.dtype, indices: object = (), *, cuts: Sequence[IndexCut] = ()
) -> Tensor:
    """`fxpar.uniform_like`, as `dropout`."""
    return counter.uniform_like(x, rng, dtype, _IDENTITY, cuts)


def drawn(x: Tensor, *args: Any, cuts: Sequence[IndexCut] = (), **kwargs: Any) -> Tensor:
    """Any operator of torch that draws bits for the shape of `x`, until the counter generator stands in for it."""
    return uniform_like(x, torch.tensor([3, 1, 2]), torch.float64, cuts=cuts)


def drawn_below(*args: Any, cuts: Sequence[IndexCut] = ()) -> Tensor:
    """One that draws bits for the values of its last operand, as `bernoulli` does."""
    probability = next(value for value in reversed(args) if isinstance(value, Tensor))
    return (drawn(args[0], cuts=cuts) < probability).to(args[0].dtype)


def rrelu(x: Tensor, *args: Any, cuts: Sequence[IndexCut] = ()) -> Tensor:
    """With slopes of the counter generator."""
    return torch.where(x >= 0, x, x * drawn(x, cuts=cuts))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rng: Tensor,
    p: float,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    indices: object = (),
    *,
    cuts: Sequence[IndexCut] = (),
) -> Tensor:
    """`fxpar.attention` of a node with some identity; `cuts` say which block of the whole the probabilities are."""
    return sdpa.attention_with_dropout(query, key, value, mask, rng, p, _IDENTITY, is_causal, scale, enable_gqa, cuts)


def function(*args: Any, path: str) -> Any:
    """`fxpar.function`."""
    return resolve_function(path).apply(*args)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`v * g / |v|` written out: the fused kernel reads beyond operands whose sizes do not match."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def overload(name: str) -> torch._ops.OpOverload:
    """The operator `bernoulli.p` of aten; `uniform` is `uniform.default`."""
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), which or "default")  # type: ignore[no-any-return]


KERNELS: Mapping[Any, Callable[..., Any]] = {
    attention_forward: backward.attention_forward,
    attention_backward: backward.attention_backward,
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
        """Two tensors of one shape."""
        ctx.save_for_backward(x, w)
        return x * w.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        """The gradients of both."""
        x, w = ctx.saved_tensors
        open_ = w.sigmoid()
        return grads[0] * open_, grads[0] * x * open_ * (1 - open_)


def composite(d: Draw) -> dict[str, Samples]:
    """fxpar's own operators: with and without a rank's index; attention as it comes in models."""
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
        "fxpar.zeros": [backward.undifferentiated(x)],
        "fxpar.transfer": [backward.undifferentiated(x)],
        "fxpar.item": [backward.undifferentiated(d.normal()), backward.sample(d.normal(1, 1))],
        "fxpar.function": [sample(x, d.x(h, s), path=f"{Gate.__module__}.{Gate.__name__}")],
    }
