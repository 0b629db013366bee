"""Modules of experts whose loop over experts depends on the routing: what `Plan(experts=…)` names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, INNER, EXPERTS, CHOICES = 16, 8, 12, 4, 2


class Looped(nn.Module):
    """A loop over the experts that are hit, as transformers' modules have it.

    Args:
        turned: whether matrices stand [E, in, out].
        biased: whether there are biases.
        inner: inner features of an expert.
    """

    def __init__(self, turned: bool = False, biased: bool = True, inner: int = INNER) -> None:
        super().__init__()
        self.turned, self.biased = turned, biased
        shapes = {"gate_up_proj": (2 * inner, WIDTH), "down_proj": (WIDTH, inner)}
        for name, (outs, ins) in shapes.items():
            self.register_parameter(name, _weight(EXPERTS, *((ins, outs) if turned else (outs, ins))))
            self.register_parameter(f"{name}_bias", _weight(EXPERTS, outs) if biased else None)

    def product(self, name: str, e: Any, x: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        made = x @ (getattr(self, name)[e] if self.turned else getattr(self, name)[e].T)
        return made + getattr(self, f"{name}_bias")[e] if self.biased else made  # type: ignore[no-any-return]

    def activated(self, inner: Tensor) -> Tensor:
        """[…, 2 m] → […, m]."""
        gate, up = inner.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, h], [T, K] and [T, K] → [T, h]."""
        total = torch.zeros_like(hidden_states)
        mask = functional.one_hot(top_k_index, num_classes=EXPERTS).permute(2, 1, 0)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            e = hit[0]
            places, tokens = torch.where(mask[e])
            made = self.activated(self.product("gate_up_proj", e, hidden_states[tokens]))
            made = self.product("down_proj", e, made) * top_k_weights[tokens, places, None]
            total.index_add_(0, tokens, made.to(total.dtype))
        return total


class Gated(Looped):
    """A gate of its own, whose columns alternate, with limits, as gpt-oss has it."""

    def _apply_gate(self, inner: Tensor) -> Tensor:
        gate, up = inner[..., ::2].clamp(max=7.0), inner[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)

    def activated(self, inner: Tensor) -> Tensor:
        return self._apply_gate(inner)


class Plain(Looped):
    """No gate, and an activation of its own."""

    def __init__(self) -> None:
        super().__init__(inner=2 * INNER)
        self.up_proj, self.up_proj_bias = _weight(EXPERTS, 2 * INNER, WIDTH), _weight(EXPERTS, 2 * INNER)
        self.gate_up_proj = self.gate_up_proj_bias = None
        self.act_fn = nn.GELU()

    def product(self, name: str, e: Any, x: Tensor) -> Tensor:
        return super().product("up_proj" if name == "gate_up_proj" else name, e, x)

    def activated(self, inner: Tensor) -> Tensor:
        return self.act_fn(inner)  # type: ignore[no-any-return]


class Expert(nn.Module):
    """An MLP as Mixtral's were."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.w2, self.act_fn = nn.Linear(INNER, WIDTH), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[…, h] → […, h]."""
        return self.w2(self.act_fn(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Listed(nn.ModuleList):
    """A module for each expert."""

    def __init__(self) -> None:
        super().__init__(Expert() for _ in range(EXPERTS))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for e, expert in enumerate(self):
            tokens, places = torch.where(chosen == e)
            total.index_add_(0, tokens, expert(hidden[tokens]) * weights[tokens, places, None])
        return total


class Routed(nn.Module):
    """A router and a module of experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), experts

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h]."""
        tokens = x.view(-1, WIDTH)
        top = self.router(tokens).softmax(-1).topk(CHOICES)
        made: Tensor = self.experts(tokens, top.indices, top.values)
        return made.view(x.shape)


class Named(nn.Module):
    """Words, layers of experts with dropout behind, a head.

    Args:
        layers: modules of experts.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.words, self.head, self.drop = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), nn.Dropout(0.2)
        self.layers = nn.ModuleList(map(Routed, layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Both [b, s]."""
        x = self.words(ids)
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.5)
