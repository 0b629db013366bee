"""A layer of experts that sorts its rows itself, in the manner of torchtitan's: no operator of fxpar."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, INNER, EXPERTS = 16, 24, 32, 4


class Sorted(nn.Module):
    """Words, layers of experts with sigmoid scores, a head.

    Args:
        adds: how rows come together: `scatter_add`, `index_add`, `unsort` (put back at their pairs), `inverse` (taken
            from there).
        counts: how rows are counted: `histc`, `one_hot`, `marks`, `bincount`.
        first: whether rows are weighed before they are computed.
        choices: experts of a token.
        dtype: of the products.
        biased: whether experts have biases, and the router one that enters no weight.
        layers: how many.
    """

    def __init__(
        self,
        adds: str = "scatter_add",
        counts: str = "histc",
        first: bool = False,
        choices: int = 2,
        dtype: torch.dtype | None = None,
        biased: bool = False,
        layers: int = 1,
    ) -> None:
        super().__init__()
        self.adds, self.counts, self.first, self.k, self.dtype, self.biased = (
            adds,
            counts,
            first,
            choices,
            dtype,
            biased,
        )
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(_Layer(self) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Both [b, s]."""
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class _Layer(nn.Module):
    def __init__(self, how: Sorted) -> None:
        super().__init__()
        self.adds, self.counts, self.first, self.k, self.dtype, self.biased = (
            *(how.adds, how.counts, how.first, how.k, how.dtype, how.biased),
        )
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.2) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.2)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.register_buffer("preferred", torch.arange(EXPERTS) * 0.1)

    def counted(self, chosen: Tensor) -> Tensor:
        """[pairs] → [experts]."""
        if self.counts == "one_hot":
            return functional.one_hot(chosen, EXPERTS).sum(0)
        if self.counts == "bincount":
            return torch.bincount(chosen, minlength=EXPERTS)
        if self.counts == "marks":
            return (chosen.unsqueeze(-1) == torch.arange(EXPERTS)).sum(0)
        return torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h]."""
        x = hidden.view(-1, WIDTH)
        scores = self.gate(x).sigmoid()
        top, chosen = scores.topk(self.k, dim=1)
        if self.biased:
            chosen = (scores + self.preferred).topk(self.k, dim=1).indices
            top = scores.gather(1, chosen)
        flat = chosen.view(-1)
        experts, order = flat.sort(stable=True)
        tokens, weights = order // self.k, top.view(-1)[order].reshape(-1, 1)
        index = tokens.reshape(-1, 1).expand(-1, WIDTH)
        rows = x.gather(0, index) if self.adds == "scatter_add" else x[tokens]
        rows = rows * weights if self.first else rows
        ends = self.counted(flat).cumsum(0, dtype=torch.int32)
        kind = self.dtype or x.dtype
        rows, w1, w2, w3 = (value.to(kind) for value in (rows, self.w1, self.w2, self.w3))
        made = functional.silu(torch._grouped_mm(rows, w1.transpose(-2, -1), offs=ends))
        made = made * torch._grouped_mm(rows, w3.transpose(-2, -1), offs=ends)
        made = functional.grouped_mm(made, w2.transpose(-2, -1), offs=ends).type_as(x)
        if self.biased:
            made = made + self.bias[experts]
        made = made if self.first else made * weights
        return self.summed(x, made, order, tokens, index).view(hidden.shape)

    def summed(self, x: Tensor, made: Tensor, order: Tensor, tokens: Tensor, index: Tensor) -> Tensor:
        """Rows → tokens."""
        if self.adds == "scatter_add":
            return x.scatter_add(0, index, made)  # a residual of its own
        if self.adds == "index_add":
            return torch.zeros_like(x).index_add(0, tokens, made)
        if self.adds == "inverse":
            return made[order.argsort()].view(-1, self.k, WIDTH).sum(1)
        pairs = torch.zeros_like(made)
        pairs[order] = made
        return pairs.view(-1, self.k, WIDTH).sum(1)
