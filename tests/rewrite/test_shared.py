"""One value as several operands of an operation has a gradient as each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.plan.plan import Plan
from fxpar.verification import expect, verify

CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "query and key": lambda q, v: functional.scaled_dot_product_attention(q, q, v),
    "key and value": lambda q, v: functional.scaled_dot_product_attention(q, v, v),
    "query and value": lambda q, v: functional.scaled_dot_product_attention(q, v, q),
    "all": lambda q, v: functional.scaled_dot_product_attention(q, q, q, is_causal=True) + v,
    "dropout": lambda q, v: functional.scaled_dot_product_attention(q, q, v, dropout_p=0.3),
    "product": lambda q, v: q @ q.transpose(2, 3) @ v,
    "chosen": lambda q, v: torch.where(v > 0, q, q) * q,
    "joined": lambda q, v: torch.cat([q, v, q], -1)[..., 2:6],
}


class Sharing(nn.Module):
    """Two projections to heads, and a call that takes one of them more than once."""

    def __init__(self, call: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.v, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, v = (layer(x).view(b, n, 4, 4).transpose(1, 2) for layer in (self.q, self.v))
        found: Tensor = self.out(self.call(q, v).transpose(1, 2).reshape(b, n, 16))
        return found.square().mean()


@pytest.mark.parametrize("name", CALLS)
def test_a_value_that_is_several_operands(name: str) -> None:
    torch.manual_seed(0)
    expect(verify(Sharing(CALLS[name]), torch.randn(2, 5, 16), Plan(tp=2)))
