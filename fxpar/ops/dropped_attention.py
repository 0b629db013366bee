"""Attention with dropout as one operator, where the device has a kernel that draws the counter generator's bits.

Enters: a rank's heads of query, key and value, and how probabilities are dropped (`fxpar.ops.sdpa.Drops`). Leaves:
whether there is a kernel, and the operators that call it; on the meta device they are shapes alone, and stand
for those of a GPU that this machine has not. For what it computes see `fxpar.ops.dropped_launches`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpar.errors import InputError
from fxpar.ops.counter import IndexCut
from fxpar.ops.torch_operators import torch_operator

_TYPES = (torch.float16, torch.bfloat16)
_COLUMNS = 256  # of a head, the most of which tiles fit
_OTHERS = ("cuda", "meta")


@dataclass(frozen=True)
class Places:
    """Which heads a rank holds of all that there are.

    Attributes:
        heads: of all ranks.
        rows_before: rows of the batch on the ranks before this one, an i64 scalar; None for none.
        heads_before: heads on them.
    """

    heads: int
    rows_before: Tensor | None
    heads_before: Tensor | None


def places(query: Tensor, key: Tensor, value: Tensor, p: float, cuts: Sequence[IndexCut]) -> Places | None:
    """Where a rank's heads stand, for a call that there is a kernel for; None where the plain form is to be computed.

    There is one for half precision, four dimensions, heads of up to 256, and cuts of the batch and of whole heads.

    Args:
        query: [b, h, s, d], and so `key` and `value`, with as many heads.
        p: probability of a zero.
        cuts: of the probabilities.

    Raises:
        InputError: there is one, and Triton is not installed.
    """
    if query.device.type not in _OTHERS or query.dtype not in _TYPES or p >= 1.0:
        return None
    if any(x.dim() != 4 or x.shape[:2] != query.shape[:2] or x.shape[-1] > _COLUMNS for x in (query, key, value)):
        return None
    rows_before = heads_before = None
    heads = query.shape[1]
    for cut in cuts:
        if cut.outer != 1 or cut.dim not in (0, 1) or (cut.dim == 0 and rows_before is not None):
            return None
        if cut.dim == 0:
            rows_before = cut.before * (query.shape[0] // cut.own)
        elif heads_before is not None or cut.own != 1 or not isinstance(cut.total, int):
            return None
        else:
            heads, heads_before = cut.total * heads, cut.before * heads
    if query.device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise InputError(
            "dropout on a GPU is a Triton kernel, and Triton is not installed",
            where="attention",
            remedy="pip install triton, or run on the CPU",
        )
    return Places(heads, rows_before, heads_before)


@torch_operator("drawn_probabilities")
def drawn_probabilities(
    rng: Tensor,
    identity: Tensor | None,
    rows_before: Tensor | None,
    heads_before: Tensor | None,
    sizes: Sequence[int],
    origin: int,
    heads: int,
    p: float,
    is_causal: bool,
) -> Tensor:
    """Which probabilities stay, a bit each: i32[b, h, ceil(t / 32), s].

    Forward and backward call it alike. Compiled together they have it once, and the words are kept.

    Args:
        rng: i64[3], (seed, step, microbatch).
        identity: of the draw, an i64 scalar, or None for `origin`.
        rows_before: as of `Places`, and so `heads_before` and `heads`.
        sizes: b, h, s and t, of this rank.
        p: probability of a zero.
        is_causal: whether a query sees keys up to its own position; bits of others are anything.
    """
    from fxpar.ops import dropped_launches as launches

    drawn = launches.Bits(rng, origin if identity is None else identity, p, heads, rows_before, heads_before)
    batch, local_heads, height, width = sizes
    return launches.draw(drawn, batch, local_heads, height, width, is_causal)


@drawn_probabilities.register_fake
def _words_shape(
    rng: Tensor, identity: Any, rows_before: Any, heads_before: Any, sizes: Sequence[int], *_: Any
) -> Tensor:
    batch, heads, height, width = sizes
    return rng.new_empty(batch, heads, -(-width // 32), height, dtype=torch.int32)


@torch_operator("dropped_attention")
def dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    words: Tensor,
    p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The result [b, h, s, v], in memory [b, s, h, v], and the logarithms of the sums of exponentials [b, h, s].

    Args:
        query: [b, h, s, d], and so `key` [b, h, t, d] and `value` [b, h, t, v].
        mask: what is added to the scores, broadcast to [b, h, s, t].
        words: of `drawn_probabilities`.
        p: probability of a zero.
        is_causal: whether a query sees keys up to its own position.
        scale: of the scores.
    """
    from fxpar.ops import dropped_launches as launches

    return launches.forward(query, key, value, mask, words, p, is_causal, scale)


@dropped_attention.register_fake
def _shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _d = query.shape
    out = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(batch, heads, rows, dtype=torch.float32)


@torch_operator("dropped_attention_gradient")
def dropped_attention_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    out: Tensor,
    log_sum: Tensor,
    mask: Tensor | None,
    words: Tensor,
    p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, each in memory [b, s, h, d], of that of the result.

    Args:
        query: as of `dropped_attention`, and so all others but these.
        gradient: of the result.
        out: the result.
        log_sum: the second result.
    """
    from fxpar.ops import dropped_launches as launches

    return launches.backward(query, key, value, gradient, out, log_sum, mask, words, p, is_causal, scale)


@dropped_attention_gradient.register_fake
def _gradient_shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    gradients = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (query, key, value))
    of_query, of_key, of_value = gradients
    return of_query, of_key, of_value
