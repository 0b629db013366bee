"""A small model whose experts have a capacity, as a loop over tokens that drops what goes beyond it, and by fxpar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fxpar.capture.capture import Captured, capture
from fxpar.experts.operators.expert_layer import experts
from fxpar.ir.program import Program
from fxpar.plan.plan import Plan
from fxpar.verify.simulate_ranks import SimulationResult
from fxpar.verify.values import ValueReport, call_inputs, program_state, verify_values
from tests.passes.experts import EXPERTS, ROWS, WIDTH, Routed, batch

# Tokens of each source; None is padding.
Sources = Sequence[Sequence[int | None]]


class Plain(Routed):
    """Words, a router, experts, a head; without dropout, of which a loop would draw other bits.

    Args:
        routing: as there.
        choices: experts of a token.
    """

    def __init__(self, routing: str, choices: int) -> None:
        super().__init__(routing)
        self.choices = choices

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        """Both [b, s]."""
        tokens = self.words(ids).view(-1, WIDTH)
        scores = self.router(tokens) * (0.0 if self.routing == "ties" else 1.0) + self.preferred
        shares = scores.softmax(-1)
        top = shares.topk(self.choices)
        logits = self.head(tokens + self.summed(tokens, top.indices, top.values))
        # The load of all choices, those that are dropped too.
        chosen = functional.one_hot(top.indices, EXPERTS).double().sum(1)
        return functional.cross_entropy(logits, labels.flatten()) + (chosen.mean(0) * shares.mean(0)).sum()

    def summed(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """[tokens, h], [tokens, K] twice → [tokens, h]."""
        biases = self.gate_up_bias, self.down_bias
        return experts(tokens, indices, weights, self.gate_up, self.down, gate_up_bias=biases[0], down_bias=biases[1])


class Dropping(Plain):
    """The same by a loop, in which each source fills places of its own.

    Attributes:
        sources: tokens of each.
        plan: how many places there are, and who gets them.
        dropped: pairs that got none, of the last call.
    """

    sources: Sources
    plan: Plan
    dropped: int

    def summed(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        rows: list[list[Tensor]] = [[] for _ in tokens]
        self.dropped = 0
        for source in self.sources:
            capacity = math.ceil(len(source) * self.choices / EXPERTS * self.plan.experts.capacity_factor)  # type: ignore[operator]
            for e in range(EXPERTS):
                pairs = [(t, k) for t in source if t is not None for k in range(self.choices) if indices[t, k] == e]
                if self.plan.experts.drop_policy == "probs":
                    pairs.sort(key=lambda pair: -weights[pair].item())
                self.dropped += len(pairs[capacity:])
                for t, k in pairs[:capacity]:
                    gate, up = functional.linear(tokens[t], self.gate_up[e], self.gate_up_bias[e]).chunk(2)
                    made = functional.linear(functional.silu(gate) * up, self.down[e], self.down_bias[e])
                    rows[t].append(made * weights[t, k])
        nothing = tokens.new_zeros(WIDTH)
        return torch.stack([torch.stack([nothing, *found]).sum(0) for found in rows])


def sources(plan: Plan, length: int) -> Sources:
    """Data ranks share out rows, and tensor ranks the sequence where experts lie on several ranks."""
    cuts, own = plan.tp if plan.ep > 1 else 1, ROWS // plan.dp
    part = math.ceil(length / cuts)
    return [
        [row * length + s if s < length else None for row in range(d * own, (d + 1) * own) for s in places]
        for d in range(plan.dp)
        for places in (range(c * part, (c + 1) * part) for c in range(cuts))
    ]


@cache
def captured(routing: str, choices: int, length: int) -> tuple[Plain, Captured]:
    """The model in training mode."""
    torch.manual_seed(0)
    model = Plain(routing, choices).double()
    return model, capture(model, batch(length), Plan())


@cache
def looped(plan: Plan, routing: str, choices: int, length: int) -> tuple[SimulationResult, int]:
    """Loss and gradients of the loop, and how many pairs it dropped."""
    torch.manual_seed(0)
    model = Dropping(routing, choices).double()
    model.sources, model.plan = sources(plan, length), plan
    loss = model(**batch(length))
    loss.backward()
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return SimulationResult({"output": loss.detach()}, own), model.dropped


def compared(
    program: Program, routing: str = "learned", choices: int = 2, length: int = 5, now: int = 0
) -> tuple[ValueReport, int]:
    """Simulated ranks against the loop, and how many pairs that dropped; arguments as of `tests.passes.experts`."""
    model, own = captured(routing, choices, length)
    reference, dropped = looped(program.plan, routing, choices, now or length)
    state, inputs = program_state(own.program, model), call_inputs(own, model, batch(now or length))
    return verify_values(own.program, program, state, inputs, reference=reference), dropped
