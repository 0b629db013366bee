"""A model whose routers' losses are added by an autograd function, on ranks and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from tests.runtime.jobs import gradients

WORDS = 37
FACTOR = 0.1
NAME = f"{__name__}.AddLoss"
Found = dict[str, Any]


class AddLoss(torch.autograd.Function):
    """Passes a value through, and gives a scalar loss its gradient."""

    factor = FACTOR

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        """Returns x."""
        ctx.save_for_backward(loss)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Hands the gradient on."""
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss) * AddLoss.factor


class Routed(nn.Module):
    """A language model with two gated layers, the z-losses of whose gates are added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.gates = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(16, 24) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(24, 16) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of ids: [b, s]."""
        x = self.embed(ids)
        for gate, up, down in zip(self.gates, self.up, self.down, strict=True):
            scores = gate(x)
            x = AddLoss.apply(x, scores.logsumexp(-1).square().mean())  # type: ignore[no-untyped-call]
            x = x + down(torch.tanh(up(x))) * scores.softmax(-1)[..., :1]
        return {"loss": functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def batch() -> dict[str, Tensor]:
    """Eight rows, of two of which less counts."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, WORDS, (2, 8, 5), generator=generator)
    labels[0], labels[5, :2] = -100, -100
    return {"ids": ids, "labels": labels}


def by_hand(reduction: str, parts: Sequence[Sequence[int]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step whose losses are those of some rows each."""
    model, whole = Routed().double(), batch()
    own = [{key: value[list(rows)] for key, value in whole.items()} for rows in parts]
    counts = [int((part["labels"] != -100).sum()) for part in own]
    weights = {"mean": [1 / len(own)] * len(own), "sum": [1.0] * len(own), "token": [c / sum(counts) for c in counts]}
    total = 0.0
    for part, weight in zip(own, weights[reduction], strict=True):
        AddLoss.factor = FACTOR * weight  # as a loop by hand must set it
        loss = model(**part)["loss"] * weight
        loss.backward()
        total += loss.item()
    AddLoss.factor = FACTOR
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train(reduction: str, options: dict[str, Any]) -> Found:
    """A step of two microbatches."""
    plan = fxpar.Plan(
        microbatches=2, loss_reduction=reduction, operators=fxpar.Operators(added_losses=(NAME,)), **options
    )
    model = fxpar.parallelize(Routed().double(), plan, batch())
    loss = model.train_step(fxpar.shard_batch(batch(), model))
    return {"loss": loss.item(), "gradients": gradients(model)}
