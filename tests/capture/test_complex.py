"""Complex numbers in a model: rotary embeddings as Meta's Llama has them, and complex parameters."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.plan.plan import Plan
from fxpar.verification import expect, verify
from tests.products import few

VOCABULARY, WIDTH, HEADS = 29, 32, 4
HEAD = WIDTH // HEADS


def paired(x: Tensor) -> Tensor:
    """[…, head] → […, head/2] of complex numbers."""
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


def single(x: Tensor) -> Tensor:
    """The inverse of `paired`."""
    return torch.view_as_real(x).flatten(-2)


def turned(model: "Rotated", x: Tensor, f: Tensor) -> Tensor:
    return single(paired(x) * f)


def turned_back(model: "Rotated", x: Tensor, f: Tensor) -> Tensor:
    return single(paired(x) * f.conj())


def in_parts(model: "Rotated", x: Tensor, f: Tensor) -> Tensor:
    z = paired(x) * f
    return torch.cat([z.abs() + z.angle().cos(), z.real * z.imag], -1)


def learnt(model: "Rotated", x: Tensor, f: Tensor) -> Tensor:
    return single(paired(x) * f * model.mixed * torch.polar(model.radius.exp(), model.angle))


def by_numbers(model: "Rotated", x: Tensor, f: Tensor) -> Tensor:
    z = paired(x)
    return single(0.5j * (z * f * 1j + (0.25 - 2j)) - z / (1 + 1j))


class Rotated(nn.Module):
    """One layer whose queries and keys are turned by complex numbers."""

    turns: Tensor

    def __init__(self, turn: Callable[["Rotated", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.turn = turn
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        steps = torch.outer(torch.arange(16.0), 0.1 ** torch.arange(0, 1, 2 / HEAD))
        self.register_buffer("turns", torch.polar(torch.ones_like(steps), steps), persistent=False)
        if turn is learnt:
            self.mixed = nn.Parameter(torch.randn(HEADS, HEAD // 2, dtype=torch.complex64))
            self.radius, self.angle = (nn.Parameter(torch.randn(HEAD // 2) / math.pi) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s] → []."""
        x = self.embedding(ids)
        b, s, _ = x.shape
        q, k, v = (layer(x).view(b, s, HEADS, HEAD) for layer in (self.q, self.k, self.v))
        turns = self.turns[:s].unsqueeze(1)
        q, k = self.turn(self, q, turns), self.turn(self, k, turns)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, WIDTH))
        result: Tensor = x + self.down(functional.silu(self.up(x)))
        return result.square().mean()


PLANS = (
    Plan(tp=2, sequence_parallel=True),
    Plan(tp=2),
    Plan(dp=2, tp=2),
    Plan(tp=4, sequence_parallel=True),
)


TURNS = (turned, turned_back, in_parts, learnt, by_numbers)
EVERY_TIME = [(turned_back, PLANS[0]), (learnt, PLANS[0])]


@pytest.mark.parametrize(("turn", "plan"), few(itertools.product(TURNS, PLANS), EVERY_TIME))
def test_queries_and_keys_turned_by_complex_numbers(
    turn: Callable[["Rotated", Tensor, Tensor], Tensor], plan: Plan
) -> None:
    torch.manual_seed(0)
    proof = expect(verify(Rotated(turn), {"ids": torch.randint(0, VOCABULARY, (4, 8))}, plan))
    assert proof.split_flops == 1
