"""Layers of experts that take a matrix for each pair of token and expert: no operator of fxpar, and no sort."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, INNER, EXPERTS, CHOICES = 16, 8, 12, 4, 2


class Chosen(nn.Module):
    """Words, a layer of experts with biases, a head.

    Args:
        form: one of `FORMS` or of `MUTANTS`.
        drop: what is dropped of what experts have inside.
    """

    def __init__(self, form: str, drop: float = 0.0) -> None:
        super().__init__()
        self.form, self.drop = {**FORMS, **MUTANTS}[form], nn.Dropout(drop)
        self.words, self.router, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 7)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH))
        self.gate_up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.scale = nn.Parameter(torch.randn(EXPERTS))
        self.norm = nn.LayerNorm(INNER)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Both [b, s]."""
        x = self.words(ids)
        out = self.form(self, x).view(x.shape)
        return functional.cross_entropy(self.head(x + out).flatten(0, 1), labels.flatten() % 7)

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [T, h], their experts [T, K] and the weights of these."""
        tokens = x.view(-1, WIDTH)
        top = self.router(tokens).softmax(-1).topk(CHOICES)
        return tokens, top.indices, top.values

    def gated(self, inner: Tensor) -> Tensor:
        """[…, 2 m] → […, m]."""
        gate, up = inner.chunk(2, dim=-1)
        return self.drop(functional.silu(gate) * up)  # type: ignore[no-any-return]


def _batched(model: Chosen, x: Tensor) -> Tensor:
    """As `batched_mm_experts_forward` of transformers."""
    tokens, ids, weights = model.routed(x)
    rows, flat = tokens.repeat_interleave(CHOICES, dim=0), ids.reshape(-1)
    out = torch.bmm(model.gate_up[flat], rows.unsqueeze(-1)).squeeze(-1)
    out.add_(model.gate_up_bias[flat])
    out = torch.bmm(model.down[flat], model.gated(out).unsqueeze(-1)).squeeze(-1)
    out.add_(model.down_bias[flat])
    out = out * weights.reshape(-1).unsqueeze(-1)
    return out.view(tokens.shape[0], CHOICES, WIDTH).sum(dim=1)


def _einsum(model: Chosen, x: Tensor) -> Tensor:
    """As the body of gpt-oss, whose gate and up columns alternate."""
    tokens, ids, weights = model.routed(x)
    out = torch.einsum("beck,bk->bec", model.gate_up[ids, ...], tokens) + model.gate_up_bias[ids, ...]
    gate, up = out[..., ::2].clamp(max=7.0), out[..., 1::2].clamp(-7.0, 7.0)
    out = model.drop(gate * torch.sigmoid(gate * 1.7) * (up + 1))
    out = torch.einsum("beck,bek->bec", model.down[ids, ...], out) + model.down_bias[ids, ...]
    return torch.einsum("bec,be->bc", out, weights)


def _by_token(model: Chosen, x: Tensor) -> Tensor:
    """Tokens keep rows of the batch apart; matrices stand the other way round; one scale for each expert."""
    top = model.router(x).topk(CHOICES)
    ids, weights = top.indices, top.values.softmax(-1)
    out = x[:, :, None, None, :] @ model.gate_up[ids].transpose(-1, -2)
    out = model.gated(out.squeeze(-2) + model.gate_up_bias[ids])
    out = out.unsqueeze(-2) @ model.down.transpose(1, 2)[ids]
    out = (out.squeeze(-2) + model.down_bias[ids]) * model.scale[ids].unsqueeze(-1)
    return (out * weights.unsqueeze(-1)).sum(-2)  # type: ignore[no-any-return]


def _first(model: Chosen, x: Tensor) -> Tensor:
    """Tokens are weighed before their experts compute, in a narrower type, and added up in a product."""
    tokens, ids, weights = model.routed(x)
    rows = tokens[:, None, :].expand(-1, CHOICES, -1).reshape(-1, WIDTH) * weights.view(-1, 1)
    flat, kind = ids.flatten(), torch.bfloat16
    out = model.gated(torch.bmm(rows.to(kind).unsqueeze(1), model.gate_up.to(kind)[flat].mT).squeeze(1))
    out = torch.bmm(model.down[flat].to(kind), out.unsqueeze(2)).squeeze(2).to(x.dtype)
    return (out + model.down_bias.index_select(0, flat)).view(-1, 1, CHOICES, WIDTH).sum((2,)).squeeze(1)


def _normed(model: Chosen, x: Tensor) -> Tensor:
    """A norm inside of each expert, which nobody takes for one of rows."""
    tokens, ids, weights = model.routed(x)
    out = torch.einsum("ti,tkoi->tko", tokens, model.gate_up[ids]) + model.gate_up_bias[ids]
    out = model.norm(model.gated(out)) + tokens.mean(-1)[:, None, None]
    out = torch.einsum("tki,tkhi->tkh", out, model.down[ids])
    return torch.bmm(weights.unsqueeze(1), out).squeeze(1) + out.detach().amax(1)


def _masked(model: Chosen, x: Tensor) -> Tensor:
    """Some pairs count nothing, some of their numbers neither."""
    tokens, ids, weights = model.routed(x)
    is_counted = weights > 0.3
    out = torch.einsum("tkoi,ti->tko", model.gate_up[ids], tokens) + model.gate_up_bias[ids]
    out = torch.einsum("tkhi,tki->tkh", model.down[ids], model.gated(out)) + model.down_bias[ids]
    out = torch.where(is_counted.unsqueeze(-1), out, 0.0).masked_fill((ids == 1).unsqueeze(-1), 0.5)
    return (out * (weights * is_counted).unsqueeze(-1)).sum(1)


FORMS: Mapping[str, Callable[[Chosen, Tensor], Tensor]] = {
    "batched": _batched,
    "einsum": _einsum,
    "by_token": _by_token,
    "first": _first,
    "normed": _normed,
    "masked": _masked,
}


def _computed(model: Chosen, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.einsum("tkoi,ti->tko", model.gate_up[ids], tokens) + model.gate_up_bias[ids]
    out = torch.einsum("tkhi,tki->tkh", model.down[ids], model.gated(out)) + model.down_bias[ids]
    return (out * weights.unsqueeze(-1)).sum(1)


def _next(model: Chosen, x: Tensor) -> Tensor:
    """Other experts than the chosen ones."""
    tokens, ids, weights = model.routed(x)
    return _computed(model, tokens, (ids + 1) % EXPERTS, weights)


def _twice(model: Chosen, x: Tensor) -> Tensor:
    """The first expert of a token twice."""
    tokens, ids, weights = model.routed(x)
    return _computed(model, tokens, ids[:, :1].expand(-1, CHOICES), weights)


def _fewer(model: Chosen, x: Tensor) -> Tensor:
    """A top-k over fewer experts than there are matrices."""
    tokens = x.view(-1, WIDTH)
    top = model.router(tokens)[:, :-1].softmax(-1).topk(CHOICES)
    return _computed(model, tokens, top.indices, top.values)


def _of_tokens(model: Chosen, x: Tensor) -> Tensor:
    """Experts that choose their tokens: a top-k over the first dimension."""
    tokens, _, _ = model.routed(x)
    top = model.router(tokens).softmax(-1)[:EXPERTS].topk(CHOICES, dim=0)
    return tokens + _computed(model, tokens[:CHOICES], top.indices[:, :CHOICES], top.values[:, :CHOICES]).sum()


def _other_order(model: Chosen, x: Tensor) -> Tensor:
    """Pairs of which all first ones come first."""
    tokens, ids, weights = model.routed(x)
    flat = ids.t().reshape(-1)
    out = torch.bmm(model.gate_up[flat], tokens.repeat(CHOICES, 1).unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(model.down[flat], model.gated(out).unsqueeze(-1)).squeeze(-1) * weights.t().reshape(-1, 1)
    return out.view(CHOICES, -1, WIDTH).sum(0)


MUTANTS: Mapping[str, Callable[[Chosen, Tensor], Tensor]] = {
    "next": _next,
    "twice": _twice,
    "fewer": _fewer,
    "of_tokens": _of_tokens,
    "other_order": _other_order,
}
