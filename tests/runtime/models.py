"""Models of a few hundred weights with what small state dicts and odd calls are made of."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from fxpar import Plan

SPLIT = {"up": "column", "down": "row"}
VOCABULARY = 16


class Tiny(nn.Module):
    """A language model with a tied head, buffers that are saved and not saved, and a parameter it never uses."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, 6), nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("shift", torch.arange(6.0), persistent=False)

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.drop(functional.relu(self.up(self.norm(x))))) * self.scale + self.shift.to(x.dtype)
        return self.head(x)  # type: ignore[no-any-return]

    def forward(self, ids: Tensor, targets: Tensor | None = None, *, scaled: bool = False) -> dict[str, Tensor]:
        logits = self.logits(ids)
        logits = logits * 2 if scaled else logits
        if targets is None:
            return {"logits": logits}
        return {"logits": logits, "loss": functional.cross_entropy(logits.flatten(0, 1), targets.flatten())}


class Deep(Tiny):
    """Of four layers, with tied words: each of four stages has something of it."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__(dropout)
        self.up, self.down = nn.ModuleList(nn.Linear(6, 12) for _ in range(4)), nn.ModuleList()  # type: ignore[assignment]
        self.down.extend(nn.Linear(12, 6) for _ in range(4))  # type: ignore[operator]

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.shift.to(x.dtype)
        for up, down in zip(self.up, self.down, strict=True):  # type: ignore[call-overload]
            x = x + down(self.drop(functional.relu(up(x)))) * self.scale.to(x.dtype)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class TwoScalars(Tiny):
    """Returns two scalars of which neither is called loss; the second is made of split values."""

    def forward(self, ids: Tensor, targets: Tensor | None = None, *, scaled: bool = False) -> dict[str, Tensor]:
        hidden = self.up(self.norm(self.embed(ids)))
        found = {"penalty": hidden.square().mean(), "logits": self.logits(ids)}
        if targets is not None:
            found["task"] = functional.cross_entropy(found["logits"].flatten(0, 1), targets.flatten())
        return found


class Branching(nn.Module):
    """Takes other branches for long sequences and for a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 3 if x.shape[1] > 8 else x
        x = -x if x.shape[0] == 1 else x
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Two dropouts, in modules of their own modes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.down(self.first(self.up(x))))  # type: ignore[no-any-return]


class Auxiliary(nn.Module):
    """A head that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.down(self.up(x).relu())
        loss = x.square().mean()
        return {"loss": loss + self.head(x).square().mean() if self.training else loss}


def batch(rows: int = 4, length: int = 5) -> dict[str, Tensor]:
    """Ids and targets for `Tiny`."""
    generator = torch.Generator().manual_seed(3)
    ids, targets = torch.randint(0, VOCABULARY, (2, rows, length), generator=generator)
    return {"ids": ids, "targets": targets}


def tiny(kind: type[nn.Module] = Tiny, **options: Any) -> Any:
    """The model, the same at every call."""
    torch.manual_seed(1)
    return kind(**options)


def plan(tp: int, **options: Any) -> Plan:
    """The split of `Tiny` and its kin."""
    return Plan(tp=tp, split=SPLIT if tp > 1 else {}, **options)


def llama(**options: Any) -> nn.Module:
    """One layer, with two key and value heads, which four ranks share."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    config = transformers.LlamaConfig(**sizes, **options)
    return transformers.LlamaForCausalLM(config)


def wide_llama() -> nn.Module:
    """A llama whose vocabulary can be split: 64 words."""
    torch.manual_seed(1)
    return llama(vocab_size=64)
