"""A small model with experts of its own, whose routing a test decides, and what its ranks compute of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import Captured, capture
from fxpar.compile import compile_program
from fxpar.experts.operators.expert_layer import experts
from fxpar.ir.program import Program
from fxpar.manager import PassManager
from fxpar.passes import canonicalize, recognize_experts
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Experts
from fxpar.text.parsing import parse_program
from fxpar.verify.static import STATIC
from fxpar.verify.values import ValueReport, call_inputs, program_state, verify_values

WORDS, WIDTH, INNER, EXPERTS, CHOICES, ROWS = 16, 8, 12, 4, 2, 8


class Routed(nn.Module):
    """Words, a router, experts with biases, dropout, a head.

    Args:
        routing: `learned`; `one` sends every token to the first experts; `some` none to the last ones; `ties` gives all
            experts one score.
        load: adds the squared mean load of experts to the loss, as models balance it.
        experts, choices: how many there are, and of these of each token.
    """

    def __init__(
        self, routing: str = "learned", load: bool = False, experts: int = EXPERTS, choices: int = CHOICES
    ) -> None:
        super().__init__()
        self.routing, self.load, self.experts, self.choices = routing, load, experts, choices
        self.words, self.router = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, experts)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * INNER, WIDTH))
        self.gate_up_bias = nn.Parameter(torch.randn(experts, 2 * INNER))
        self.down = nn.Parameter(torch.randn(experts, WIDTH, INNER))
        self.down_bias = nn.Parameter(torch.randn(experts, WIDTH))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(WIDTH, WORDS)
        preferred = torch.zeros(experts)
        if routing == "one":
            preferred[:2] = torch.tensor([9.0, 8.0])
        elif routing == "some":
            preferred[-1] = -99.0
        self.register_buffer("preferred", preferred)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Both [b, s]."""
        x = self.words(ids)
        shares = self.shares(x.view(-1, WIDTH))
        top = shares.topk(self.choices)
        logits = self.head(self.mixed(x, top))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.load:
            chosen = functional.one_hot(top.indices, self.experts).float().sum(1)
            loss = loss + (chosen.mean(0) * shares.mean(0)).sum()
        return loss

    def mixed(self, x: Tensor, top: Any) -> Any:
        """Adds what the experts that `top` says make of x [b, s, WIDTH]."""
        made = experts(
            x.view(-1, WIDTH),
            top.indices,
            top.values,
            self.gate_up,
            self.down,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
        )
        return x + self.drop(made.view(x.shape))

    def shares(self, tokens: Tensor) -> Any:
        """The router's, of tokens [t, WIDTH]."""
        scores = self.router(tokens) * (0.0 if self.routing == "ties" else 1.0) + self.preferred
        return scores.softmax(-1)


class ByHand(Routed):
    """Experts of one product, written out in fxpar's operators.

    Args:
        layer: from the model, rows by expert, how many each has, the order of the rows, the top-k
            and the ids, what tokens get.
    """

    def __init__(self, layer: Callable[[Any, Tensor, Tensor, Tensor, Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Both [b, s]."""
        x = self.words(ids).view(-1, WIDTH)
        top = self.router(x).topk(CHOICES)
        order, counts = torch.ops.fxpar.sort_by_expert(top.indices, EXPERTS)
        return self.layer(self, torch.ops.fxpar.moe_permute(x, order, CHOICES), counts, order, top, ids).sum()


def expert_plan(ep: int, etp: int, tp: int, dp: int, sequence: bool = False, dispatch: str = "static") -> Plan:
    """Returns a plan of that mesh, which may also cut activations over the sequence."""
    return Plan(ep=ep, etp=etp, tp=tp, dp=dp, sequence_parallel=sequence, experts=Experts(dispatch))


def check_text(text: str) -> None:
    """Runs the static checks on a program's text."""
    PassManager([], STATIC).run(parse_program(text))


def recognized(model: nn.Module, example: dict[str, Tensor]) -> Program:
    """Returns the canonical program of a model whose experts are recognised."""
    return PassManager([canonicalize, recognize_experts]).run(capture(model, example, Plan()).program)


def operators(program: Program) -> Counter[str]:
    """Counts operations, of torch and of fxpar, that have to do with rows of experts or with matrices of pairs."""
    words = "sort index gather scatter bmm einsum repeat rows moe_ expert grouped group_ put histc cumsum".split()
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return Counter(name.removesuffix(".default") for name in calls if any(word in name for word in words))


def rolled() -> dict[str, Tensor]:
    """Rows of words, and which word is beside each of them."""
    ids = torch.randint(0, WORDS, (ROWS, 5), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids.roll(1, 1)}


def batch(length: int) -> dict[str, Tensor]:
    """Rows of that length; some words do not count."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, WORDS, (ROWS, length), generator=generator) for _ in range(2))
    labels[:2, 1:] = -100
    return {"ids": ids, "labels": labels}


@cache
def captured(routing: str, load: bool, length: int) -> tuple[Routed, Captured]:
    """The model in training mode."""
    torch.manual_seed(0)
    model = Routed(routing, load).double()
    return model, capture(model, batch(length), Plan())


def dispatched(plan: Plan, routing: str = "learned", load: bool = False, length: int = 5) -> Program:
    """The program of every rank."""
    return compile_program(captured(routing, load, length)[1].program.with_(plan=plan))


def compared(
    program: Program, routing: str = "learned", load: bool = False, length: int = 5, now: int = 0
) -> ValueReport:
    """Loss and gradients on simulated ranks, against the model on one device.

    Args:
        now: the length of the rows, where it is another than that of the example.
    """
    model, own = captured(routing, load, length)
    state, inputs = program_state(own.program, model), call_inputs(own, model, batch(now or length))
    return verify_values(own.program, program, state, inputs)
