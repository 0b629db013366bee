"""A small model with what programs of transformers have besides matrices: functions, sizes, slices, masks, constants.

Enters: nothing. Leaves: its programs, weights and inputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.ir.program import Program
from fxpar.manager import PassManager
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.verify.values import call_inputs, program_state, reference_run
from tests.verify.cases import Known


class Leaky(torch.autograd.Function):
    """Element-wise with a number of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        """x above zero, slope·x below."""
        ctx.save_for_backward(x)
        ctx.slope = slope
        return torch.where(x > 0, x, x * slope)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Its derivative."""
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, grad, grad * ctx.slope), None


class Mixed(nn.Module):
    """Words, a gated layer of one fused matrix with a function, attention with a mask and dropout, a head."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(32, 24), nn.Embedding(16, 24)
        self.norm, self.fused, self.down = nn.LayerNorm(24), nn.Linear(24, 80), nn.Linear(40, 24)
        self.q, self.kv, self.o = nn.Linear(24, 24), nn.Linear(24, 48), nn.Linear(24, 24)
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril(), persistent=False)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """[b, s]."""
        b, s = ids.shape
        x = self.words(ids) + self.places(torch.arange(s))
        gate, up = self.fused(self.norm(x)).chunk(2, -1)
        hidden = Leaky.apply(gate, 0.25) * up  # type: ignore[no-untyped-call]
        x = x + self.drop(self.down(hidden)) * self.scale / s**0.5
        q, (k, v) = self.q(x), self.kv(x).split([24, 24], -1)
        q, k, v = (y.view(b, s, 4, 6).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-1, -2) / 6**0.5).masked_fill(~self.mask[:s, :s], float("-inf"))
        x = x + self.o((self.drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(b, s, 24))
        logits = functional.linear(x, self.words.weight)
        loss = functional.cross_entropy(logits[:, :-1].reshape(-1, 32), ids[:, 1:].reshape(-1))
        return {"loss": loss + 0.01 * x.square().mean(), "logits": logits, "last": x[:, -1].sum(-1)}


@cache
def mixed() -> Known:
    """The model with its weights and a batch."""
    torch.manual_seed(3)
    model, batch = Mixed().train(), {"ids": torch.randint(0, 32, (3, 16))}
    captured = capture(model, batch)
    state, inputs = program_state(captured.program, model), call_inputs(captured, model, batch)
    return Known(captured.program, state, inputs, reference_run(captured.program, state, inputs))


@cache
def mixed_program(tp: int, sequence_parallel: bool) -> Program:
    """Its program for the ranks of a plan."""
    plan = Plan(tp=tp, sequence_parallel=sequence_parallel)
    return PassManager(DEFAULT_PASSES).run(mixed().captured.with_(plan=plan))
