"""Loops over experts each of which computes all tokens, or picks its own: no operator of fxpar, and no sort."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, INNER, EXPERTS, CHOICES = 16, 8, 12, 4, 2


class Expert(nn.Module):
    """An MLP with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[…, h] → […, h]."""
        return self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Looped(nn.Module):
    """Words, a layer of experts with biases and a shared one, dropout, a head.

    Args:
        form: one of `FORMS` or of mutants.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.drop = {**FORMS, **MUTANTS, **PICKED_MUTANTS}[form], nn.Dropout(0.2)
        self.words, self.router, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 7)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH))
        self.gate_up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.scale, self.shared = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Both [b, s]."""
        x = self.words(ids)
        made = self.drop(self.form(self, x).view(x.shape))
        return functional.cross_entropy(self.head(x + made).flatten(0, 1), labels.flatten() % 7)

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [T, h], their experts [T, K] and the weights of these."""
        tokens = x.view(-1, WIDTH)
        top = self.router(tokens).softmax(-1).topk(CHOICES)
        return tokens, top.indices, top.values

    def expert(self, e: int, x: Tensor) -> Tensor:
        """[T, h] → [T, h], of slices."""
        gate, up = functional.linear(x, self.gate_up[e], self.gate_up_bias[e]).chunk(2, dim=-1)
        return (functional.silu(gate) * up) @ self.down[e] + self.down_bias[e]


def _scattered(model: Looped, x: Tensor) -> Tensor:
    """Slices; a table of all experts' weights; on top of a shared expert."""
    tokens, ids, weights = model.routed(x)
    table = torch.zeros(tokens.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, weights)
    total = model.shared(tokens)
    for e in range(EXPERTS):
        total = total + table[:, e, None] * (model.expert(e, tokens) * model.scale)
    return total  # type: ignore[no-any-return]


def _masked(model: Looped, x: Tensor) -> Tensor:
    """A module for each expert; masks; in place."""
    tokens, ids, weights = model.routed(x)
    total = torch.zeros_like(tokens)
    for e, expert in enumerate(model.experts):
        total += (weights * (ids == e)).sum(-1, keepdim=True) * expert(tokens)
    return total


def _by_row(model: Looped, x: Tensor) -> Any:
    """Tokens keep rows of the batch apart; the last expert first; matrices turned and cast."""
    top = model.router(x).topk(CHOICES)
    weights = top.values.softmax(-1)
    mask = functional.one_hot(top.indices, EXPERTS).permute(3, 0, 1, 2)
    parts = []
    for e in reversed(range(EXPERTS)):
        inner = x.bfloat16() @ model.gate_up[e].bfloat16().t()
        inner = inner.float() + model.gate_up_bias[e]
        made = (inner[..., :INNER].relu() * inner[..., INNER:]) @ model.down[e]
        column = (weights * mask[e]).sum(-1) if e else torch.where(top.indices == e, weights, 0.0).sum(-1)
        parts.append(made * column.unsqueeze(-1))
    return sum(parts)


def _stacked(model: Looped, x: Tensor) -> Tensor:
    """Results stand side by side before they are added up; all matrices come from one `unbind`."""
    tokens, ids, weights = model.routed(x)
    table = torch.zeros(tokens.shape[0], EXPERTS, dtype=x.dtype).scatter(-1, ids, weights)
    matrices = zip(model.gate_up.unbind(0), model.down.unbind(0), strict=True)
    made = [(tokens @ up.t()).chunk(2, -1)[0].tanh() @ down for up, down in matrices]
    return torch.stack([made[e] * table[:, e : e + 1] for e in range(EXPERTS)]).sum(0)


def _mixtral(model: Looped, x: Tensor) -> Tensor:
    """Each expert, a module, picks its tokens, as Mixtral's block did."""
    tokens, ids, weights = model.routed(x)
    total = torch.zeros_like(tokens)
    mask = functional.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for e, expert in enumerate(model.experts):
        places, rows = torch.where(mask[e])
        made = expert(tokens[None, rows].reshape(-1, WIDTH)) * weights[rows, places, None]
        total.index_add_(0, rows, made.to(x.dtype))
    return total


def _picked(model: Looped, x: Tensor) -> Tensor:
    """The same of slices, on top of a shared expert."""
    tokens, ids, weights = model.routed(x)
    total = model.shared(tokens)
    for e in reversed(range(EXPERTS)):
        rows, places = torch.where(ids == e)
        made = model.expert(e, tokens.index_select(0, rows)) * model.scale
        total = total.index_add(0, rows, weights[rows, places].unsqueeze(-1) * made)
    return total  # type: ignore[no-any-return]


def _nonzero(model: Looped, x: Tensor) -> Tensor:
    """Rows of a mask that are no zeros, of modules."""
    tokens, ids, weights = model.routed(x)
    total = torch.zeros_like(tokens)
    for e, expert in enumerate(model.experts):
        rows, places = (ids == e).nonzero(as_tuple=True)
        total.index_add_(0, rows, expert(tokens[rows]) * weights[rows, places].unsqueeze(1))
    return total


FORMS: Mapping[str, Callable[[Looped, Tensor], Tensor]] = {
    "mixtral": _mixtral,
    "picked": _picked,
    "nonzero": _nonzero,
    "scattered": _scattered,
    "masked": _masked,
    "by_row": _by_row,
    "stacked": _stacked,
}


def _all(
    model: Looped,
    x: Tensor,
    of: Callable[[int], int] = lambda e: e,
    mark: Callable[[Tensor, int], Tensor] = lambda ids, e: ids == e,
    experts: range = range(EXPERTS),
    inside: Callable[[Tensor, int], Tensor] = lambda made, e: made,
) -> Tensor:
    tokens, ids, weights = model.routed(x)
    total = torch.zeros_like(tokens)
    for e in experts:
        total = total + (weights * mark(ids, e)).sum(-1)[:, None] * inside(model.expert(of(e), tokens), e)
    return total


def _sorted_weights(model: Looped, x: Tensor) -> Tensor:
    """A table that is no table of zeros beside the weights."""
    tokens, ids, weights = model.routed(x)
    table = torch.full((tokens.shape[0], EXPERTS), 0.1, dtype=x.dtype).scatter(1, ids, weights)
    return sum(table[:, e, None] * model.expert(e, tokens) for e in range(EXPERTS))  # type: ignore[return-value]


def _not_masked(model: Looped, x: Tensor) -> Tensor:
    """Other pairs have a small weight, or this one has none."""
    tokens, ids, weights = model.routed(x)
    made = [model.expert(e, tokens) for e in range(EXPERTS)]
    some = [torch.where(ids == e, weights, 0.1).sum(-1)[:, None] * made[e] for e in range(EXPERTS)]
    others = [
        torch.where(ids == e, torch.zeros_like(weights), weights).sum(-1)[:, None] * m for e, m in enumerate(made)
    ]
    return sum(some) + sum(others)  # type: ignore[return-value]


def _other_rows(model: Looped, x: Tensor) -> Tensor:
    """A table of another choice than the one whose weights it has, by twos."""
    tokens, ids, weights = model.routed(x)
    table = torch.zeros(tokens.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids[:, :1], weights[:, 1:])
    return sum(table[:, e, None] * model.expert(e, tokens) for e in range(EXPERTS))  # type: ignore[return-value]


def _cut_off(model: Looped, x: Tensor) -> Tensor:
    """Integers are added up."""
    tokens, ids, weights = model.routed(x)
    total = torch.zeros_like(tokens).long()
    for e in range(EXPERTS):
        total = total + ((weights * (ids == e)).sum(-1)[:, None] * (9 * model.expert(e, tokens))).long()
    return total.to(x.dtype) * tokens


def _loop(
    model: Looped,
    x: Tensor,
    of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda rows, places: (rows, places),
    to: Callable[[Tensor], Tensor] = lambda rows: rows,
    source: Callable[[Tensor], Tensor] = lambda tokens: tokens,
    mark: Callable[[Tensor, int], Tensor] = lambda ids, e: ids == e,
    inside: Callable[[Tensor], Tensor] = lambda made: made,
) -> Tensor:
    tokens, ids, weights = model.routed(x)
    total = torch.zeros_like(tokens)
    for e, expert in enumerate(model.experts):
        rows, places = torch.where(mark(ids, e))
        made = inside(expert(source(tokens)[rows])) * weights[of(rows, places)].unsqueeze(-1)
        total = total.index_add(0, to(rows), made)
    return total


# What resembles a loop that picks rows and is another one.
PICKED_MUTANTS: Mapping[str, Callable[[Looped, Tensor], Tensor]] = {
    "other_weights": lambda model, x: _loop(model, x, of=lambda rows, places: (rows, 1 - places)),
    "other_tokens": lambda model, x: _loop(model, x, of=lambda rows, places: (rows.flip(0), places)),
    "put_elsewhere": lambda model, x: _loop(model, x, to=lambda rows: rows.flip(0)),
    "by_place": lambda model, x: _loop(model, x, mark=lambda ids, e: ids[:, :1] == e),
    "shifted": lambda model, x: _loop(model, x, mark=lambda ids, e: (ids + 1) % EXPERTS == e),
    "not_own": lambda model, x: _loop(model, x, mark=lambda ids, e: ids != e),
    "mixed_rows": lambda model, x: _loop(model, x, inside=lambda made: made - made.mean(0)),
    "dropped": lambda model, x: _loop(model, x, inside=lambda made: functional.dropout(made, 0.3)),
    "cumulated": lambda model, x: _loop(model, x, inside=lambda made: made.cumsum(0)),
}


# What resembles such a loop and is another one.
MUTANTS: Mapping[str, Callable[[Looped, Tensor], Tensor]] = {
    "next": lambda model, x: _all(model, x, of=lambda e: (e + 1) % EXPERTS),
    "one_twice": lambda model, x: _all(model, x, of=lambda e: max(e, 1)),
    "last_left_out": lambda model, x: _all(model, x, experts=range(EXPERTS - 1)),
    "at_least": lambda model, x: _all(model, x, mark=lambda ids, e: ids >= e),
    "differing": lambda model, x: _all(model, x, inside=lambda made, e: made * (1.0 + e)),
    "other_function": lambda model, x: _all(model, x, inside=lambda made, e: made.relu() if e else made),
    "dropout": lambda model, x: _all(model, x, inside=lambda made, e: functional.dropout(made, 0.3)),
    "mixed": lambda model, x: _all(model, x, inside=lambda made, e: made.cumsum(-1)),
    "not_zero": _sorted_weights,
    "cut_off": _cut_off,
    "not_masked": _not_masked,
    "other_rows": _other_rows,
}
