"""Attention with masks that authors write, by what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.ir.program import Program
from fxpar.passes import canonicalize
from fxpar.plan.plan import Plan
from tests.passes.modules import only

# Of queries [b, 2, s, 4] and keys [b, 2, t, 4].
Mask = Callable[[Tensor, Tensor], Tensor]
MINIMUM, INFINITY = torch.finfo(torch.float32).min, float("-inf")
WINDOW = 5


def heads(x: Tensor) -> Tensor:
    """[b, s, 8] → [b, 2, s, 4]."""
    return x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)


class SelfAttention(nn.Module):
    """As many keys as queries; one attention for each mask."""

    def __init__(self, masks: Mapping[str, Mask], **options: Any) -> None:
        super().__init__()
        self.masks, self.options = masks, options

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        q, attend = heads(x), functional.scaled_dot_product_attention
        return {name: attend(q, q.cos(), q.sin(), mask(q, q), **self.options) for name, mask in self.masks.items()}


class CrossAttention(nn.Module):
    """Keys of a length of their own."""

    def __init__(self, masks: Mapping[str, Mask]) -> None:
        super().__init__()
        self.masks = masks

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        q, k, attend = heads(x), heads(y), functional.scaled_dot_product_attention
        return {name: attend(q, k.cos(), k.sin(), mask(q, k)) for name, mask in self.masks.items()}


class Given(nn.Module):
    """Masks that a caller gives, and one that the module keeps as older language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("triangle", torch.ones(64, 64, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: Tensor, allowed: Tensor) -> dict[str, Tensor]:
        q, attend, s = heads(x), functional.scaled_dot_product_attention, x.shape[1]
        own = causal(q, q)
        masks = {"own": self.triangle[:s, :s], "given": allowed, "both": allowed & own}  # type: ignore[index]
        return {name: attend(q, q, q, mask) for name, mask in masks.items()}


def rows(q: Tensor) -> Tensor:
    """[s, 1]."""
    return torch.arange(q.shape[-2])[:, None]


def cols(k: Tensor) -> Tensor:
    """[1, t]."""
    return torch.arange(k.shape[-2])[None]


def ones(q: Tensor, k: Tensor) -> Tensor:
    """[s, t]."""
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)


def causal(q: Tensor, k: Tensor) -> Tensor:
    """[s, t]."""
    return cols(k) <= rows(q)


def window(q: Tensor, k: Tensor) -> Tensor:
    """[s, t]."""
    return (cols(k) > rows(q) - WINDOW) & causal(q, k)


def floating(mask: Mask, low: float) -> Mask:
    """0 where the mask is true, `low` elsewhere."""
    return lambda q, k: torch.zeros(q.shape[-2], k.shape[-2]).masked_fill(~mask(q, k), low)


def packed(q: Tensor, k: Tensor) -> Tensor:
    """Transformers': what belongs to one sequence is told by jumps in the positions."""
    positions = torch.arange(q.shape[-2]).expand(q.shape[0], -1)
    number = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(q.shape[0])[:, None, None, None]
    own, other = rows(q)[None, None], cols(k)[None, None]
    mask = batch.new_ones((), dtype=torch.bool) & (number[batch, own] == number[batch, other])
    return (mask & (positions[batch, other] <= positions[batch, own])).expand(q.shape[0], -1, -1, -1)


NONE: dict[str, Mask] = {
    "all true": ones,
    "all rows from 0 on": lambda q, k: (rows(q) >= 0).expand(q.shape[0], 1, q.shape[-2], k.shape[-2]),
    "one row for all": lambda q, k: cols(k) < k.shape[-2],
    "zeros": lambda q, k: torch.zeros(1, 2, q.shape[-2], k.shape[-2]),
    "zeros where true": floating(ones, MINIMUM),
    "sizes of an input": lambda q, k: torch.zeros_like(q[..., :1]),
    "either half": lambda q, k: causal(q, k) | (cols(k) > rows(q)),
}
CAUSAL: dict[str, Mask] = {
    "columns up to the row": causal,
    "rows from the column on": lambda q, k: rows(q) >= cols(k),
    "before the next row": lambda q, k: cols(k) < (rows(q) + 1),
    "tril": lambda q, k: ones(q, k).tril(),
    "not triu": lambda q, k: ~ones(q, k).triu(1),
    "packed": packed,
    "transposed": lambda q, k: (rows(q) <= cols(k)).transpose(0, 1),
    "flat positions": lambda q, k: cols(k).view(1, 1, 1, -1) <= rows(q).reshape(1, 1, -1, 1),
    "counted": lambda q, k: ones(q, k).cumsum(-1) <= ones(q, k).long().cumsum(0),
    "two parts": lambda q, k: (cols(k) < rows(q)) | (cols(k) == rows(q)),
    "-inf": floating(causal, INFINITY),
    "float's minimum": floating(causal, MINIMUM),
    "full and triu": lambda q, k: torch.full((q.shape[-2], k.shape[-2]), INFINITY).triu(1),
    "one minus": lambda q, k: (1.0 - causal(q, k).float()) * MINIMUM,
    "where": lambda q, k: torch.where(causal(q, k), 0.0, INFINITY),
    "all and causal": lambda q, k: torch.logical_and(ones(q, k), causal(q, k)),
}
WINDOWED: dict[str, Mask] = {
    "window": window,
    "band": lambda q, k: ones(q, k).tril().triu(1 - WINDOW),
    "float window": floating(window, MINIMUM),
    "distance": lambda q, k: (rows(q) - cols(k) >= 0) & (rows(q) - cols(k) < WINDOW),
}
KEPT: dict[str, Mask] = {
    "the next column too": lambda q, k: ones(q, k).tril(1),
    "the first instead of the own": lambda q, k: ones(q, k).tril(-1) | (cols(k) == 0),
    "no earlier column": lambda q, k: cols(k) >= rows(q),
    "both sides": lambda q, k: (rows(q) - cols(k)).abs() < WINDOW,
    "both sides, written out": lambda q, k: (rows(q) - cols(k) < WINDOW) & (cols(k) - rows(q) < WINDOW),
    "chunks": lambda q, k: (cols(k) // 4 == rows(q) // 4) & causal(q, k),
    "prefix": lambda q, k: causal(q, k) | (cols(k) < 3),
    "a small penalty": floating(causal, -10000.0),
    "a bias": lambda q, k: (cols(k) - rows(q)).float(),
    "nothing": lambda q, k: ones(q, k) & (rows(q) < 0),
    "values of the query": lambda q, k: causal(q, k) & (q[:, :1, :, :1] < 100),
}
GROUPS = {"none": NONE, "causal": CAUSAL, "window": WINDOWED, "kept": KEPT}


def inputs(b: int = 3, s: int = 16) -> dict[str, Tensor]:
    """Activations of self-attention."""
    return {"x": torch.randn(b, s, 8, generator=torch.Generator().manual_seed(3))}


def canonical(module: nn.Module, **batch: Tensor) -> Program:
    """The module's program before masks are folded."""
    return only(capture(module, {**inputs(), **batch}, Plan()).program, canonicalize)


@cache
def program(group: str) -> Program:
    """The attentions of one of the tables above."""
    return canonical(SelfAttention(GROUPS[group]))
