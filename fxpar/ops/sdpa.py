"""Attention and its gradient on local tensors: fused kernels where the device has one, else the plain form.

Enters: a rank's heads of query, key and value. Leaves: the result with the logarithms of the sums of exponentials, of
which the backward makes the probabilities again; and the gradients.

Source: Dao et al., "FlashAttention" (arXiv 2205.14135), section 3.1 and appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpar.ops.counter import IndexCut, dropout
from fxpar.ops.dropped_attention import drawn_probabilities, dropped_attention, dropped_attention_gradient, places
from fxpar.ops.fused_attention import SdpaCall, kernel


@dataclass(frozen=True)
class SdpaOptions:
    """How scores are made.

    Attributes:
        is_causal: whether a query sees keys up to its own position.
        scale: of the scores; None for one over the root of the head size.
        enable_gqa: whether neighbouring heads share those of key and value.
    """

    is_causal: bool
    scale: float | None
    enable_gqa: bool


@dataclass(frozen=True)
class Drops:
    """Which probabilities are dropped (`fxpar.ops.counter.dropout`)."""

    rng: Tensor
    p: float
    origin: int | Tensor
    cuts: Sequence[IndexCut]

    def __call__(self, x: Tensor) -> Tensor:
        """The values with their dropped elements, the others scaled."""
        return dropout(x, self.rng, self.p, self.origin, self.cuts)

    def fused(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: SdpaOptions
    ) -> tuple[Any, ...] | None:
        """What the operators of `fxpar.ops.dropped_attention` take behind their tensors, if there is a kernel."""
        placed = places(query, key, value, self.p, self.cuts)
        if placed is None:
            return None
        identity, origin = (self.origin, 0) if isinstance(self.origin, Tensor) else (None, self.origin)
        sizes = (*query.shape[:3], key.shape[2])
        draw = (self.rng, identity, placed.rows_before, placed.heads_before, sizes, origin, placed.heads)
        words = drawn_probabilities(*draw, self.p, options.is_causal)
        return _added(mask, query), words, self.p, options.is_causal, _scale(query, options)


def _call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: SdpaOptions) -> SdpaCall:
    return SdpaCall(query, key, value, _added(mask, query), options.is_causal, options.scale, options.enable_gqa)


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, drops: Drops | None, options: SdpaOptions
) -> tuple[Tensor, Tensor]:
    """The result [..., s, v], and for each row of scores the logarithm of its sum of exponentials [..., s].

    A row whose mask allows nothing gives zeros, as PyTorch's operator does.
    """
    if drops is None:
        call = _call(query, key, value, mask, options)
        fused = kernel(call)
        if fused is not None:
            return fused.forward(call)
    key, value = (_repeated(x, query, options) for x in (key, value))
    dropping = None if drops is None else drops.fused(query, key, value, mask, options)
    if dropping is not None:
        outputs: tuple[Tensor, Tensor] = dropped_attention(query, key, value, *dropping)
        return outputs
    scores, nothing = _scores(query, key, mask, options)
    log_sum = _wide(scores).logsumexp(-1)
    probabilities = scores.softmax(-1)
    if nothing is not None:
        probabilities = probabilities.masked_fill(nothing, 0.0)
    dropped = probabilities if drops is None else drops(probabilities)
    return dropped @ value, log_sum


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    out: Tensor,
    log_sum: Tensor,
    mask: Tensor | None,
    drops: Drops | None,
    options: SdpaOptions,
    of_mask: bool,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, and of a mask that is added.

    Args:
        of_mask: whether the mask's gradient is wanted.
    """
    if drops is None and not of_mask:
        call = _call(query, key, value, mask, options)
        fused = kernel(call)
        if fused is not None:
            return fused.backward(call, gradient, out, log_sum)
    keys, values = (_repeated(x, query, options) for x in (key, value))
    dropping = None if drops is None or of_mask else drops.fused(query, keys, values, mask, options)
    if dropping is not None:
        of_query, of_keys, of_values = dropped_attention_gradient(
            query, keys, values, gradient, out, log_sum, *dropping
        )
        return of_query, _summed(of_keys, key, options), _summed(of_values, value, options)
    scores, nothing = _scores(query, keys, mask, options)
    probabilities = (_wide(scores) - log_sum.unsqueeze(-1)).exp().to(scores.dtype)
    if nothing is not None:
        probabilities = probabilities.masked_fill(nothing, 0.0)
    dropped = probabilities if drops is None else drops(probabilities)
    of_dropped = gradient @ values.transpose(-2, -1)
    of_probabilities = of_dropped if drops is None else drops(of_dropped)
    total = (gradient * out).sum(-1, keepdim=True)
    of_scores = probabilities * (of_probabilities - total)
    scale = _scale(query, options)
    of_query = (of_scores @ keys).sum_to_size(query.shape) * scale
    of_key = _summed(of_scores.transpose(-2, -1) @ query, key, options) * scale
    of_value = _summed(dropped.transpose(-2, -1) @ gradient, value, options)
    gradients = (of_query, of_key, of_value)
    return (*gradients, of_scores.sum_to_size(mask.shape)) if of_mask and mask is not None else gradients


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rng: Tensor,
    p: float,
    origin: int | Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    cuts: Sequence[IndexCut],
) -> Tensor:
    """The result alone of attention with dropout, arguments as of `Drops` and `SdpaOptions`."""
    options = SdpaOptions(is_causal, scale, enable_gqa)
    return forward(query, key, value, mask, Drops(rng, p, origin, cuts), options)[0]


def _scale(query: Tensor, options: SdpaOptions) -> float:
    return float(query.shape[-1] ** -0.5 if options.scale is None else options.scale)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as it is added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(~mask, float("-inf"))


def _repeated(x: Tensor, query: Tensor, options: SdpaOptions) -> Tensor:
    """Key or value with a head for each of the query's."""
    if not options.enable_gqa or query.shape[-3] == x.shape[-3]:
        return x
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)


def _summed(gradient: Tensor, x: Tensor, options: SdpaOptions) -> Tensor:
    """The gradient of a key or value, of those of its repetitions."""
    if options.enable_gqa and gradient.shape[-3] != x.shape[-3]:
        gradient = gradient.unflatten(-3, (x.shape[-3], -1)).sum(-3)
    return gradient.sum_to_size(x.shape)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, options: SdpaOptions) -> tuple[Tensor, Tensor | None]:
    """Scores, and the rows of them that see nothing, whose scores are zero."""
    scores = query @ key.transpose(-2, -1) * _scale(query, options)
    if options.is_causal:
        rows = torch.arange(scores.shape[-2], device=scores.device)
        mask = rows.unsqueeze(1) >= torch.arange(scores.shape[-1], device=scores.device)
    if mask is None:
        return scores, None
    infinity = torch.full((), float("-inf"), dtype=scores.dtype, device=scores.device)
    scores = torch.where(mask, scores, infinity) if mask.dtype == torch.bool else scores + mask
    nothing = (scores == infinity).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0), nothing
