"""Small models that are unusual to cut into stages, and a step of one on the ranks of a pipeline or on one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from tests.runtime.jobs import gradients

WIDTH = 16


class _Layers(nn.Module):
    """Layers in a row, with a mean square as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Transposed(_Layers):
    """The last stage reads the weight of the first transposed, so that its gradient lies transposed in memory."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.hidden(x) @ self.layers[0].weight, y)  # type: ignore[operator]


class Detached(_Layers):
    """The last stage reads the weight of the first, and gives it no gradient."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(functional.linear(self.hidden(x), self.layers[0].weight.detach()), y)  # type: ignore[operator]


MODELS: dict[str, type[nn.Module]] = {model.__name__: model for model in (Transposed, Detached)}


@dataclass(frozen=True)
class Stepped:
    """What a step leaves on a rank."""

    loss: float
    gradients: dict[str, Tensor]


def step(name: str, plan: dict[str, Any]) -> Stepped:
    """One step of a model with its seeded weights and batch."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    batch = {key: torch.randn(4, WIDTH, dtype=torch.float64) for key in ("x", "y")}
    parallel = fxpar.parallelize(model, fxpar.Plan(**plan), batch, timeout=20)
    loss = parallel.train_step(batch).item()
    return Stepped(loss, gradients(parallel))
