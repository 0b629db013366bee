"""Products in which one operand is repeated over the batches of the other, heads and rows cut at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar import Plan
from fxpar.verification import expect, verify


class Products(nn.Module):
    """Each head's features times a matrix of its own, which batches share, or rows of positions times a head's."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.heads = nn.Parameter(torch.randn(4, 1, 6) if turned else torch.randn(1, 4, 6, 6))

    def forward(self, x: Tensor) -> Any:
        b, s, _ = x.shape
        heads = self.up(x).view(b, s, 4, 6).transpose(1, 2)
        if self.turned:
            mixed = (self.heads @ heads.mT).squeeze(2).mT.reshape(b, s, 4).repeat(1, 1, 6)
        else:
            mixed = (heads @ self.heads).transpose(1, 2).reshape(b, s, 24)
        return self.down(mixed.tanh()).square().mean()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("tp", [2, pytest.param(1, marks=pytest.mark.matrix)])
def test_what_batches_share_gets_the_gradient_of_all_of_them(turned: bool, tp: int) -> None:
    torch.manual_seed(0)
    expect(verify(Products(turned), {"x": torch.randn(4, 7, 12)}, Plan(dp=2, tp=tp)))
