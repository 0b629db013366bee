"""Small modules whose stages fit on a page, and helpers to cut them and to look at what crosses."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import Captured, capture
from fxpar.compile import compile_program
from fxpar.ir.program import Program
from fxpar.ir.stages import crossings
from fxpar.plan.plan import Plan
from fxpar.text.printing import print_program
from fxpar.verify.values import ValueReport, call_inputs, program_state, verify_values

WORDS, WIDTH, HIDDEN, ROWS, LENGTH = 16, 8, 32, 4, 6


class Block(nn.Module):
    """norm, up, gelu, down, dropout, added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, WIDTH]."""
        h: Tensor = self.drop(self.down(functional.gelu(self.up(self.norm(x)))))
        return x + h


class Model(nn.Module):
    """Words, layers, a head of its own or tied; what each layer takes besides is computed from inputs and buffers."""

    frequencies: Tensor

    def __init__(self, count: int = 4, *, tied: bool = False, skip: bool = False, tables: bool = False) -> None:
        super().__init__()
        self.tied, self.skip, self.tables = tied, skip, tables
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(count))
        self.head = None if tied else nn.Linear(WIDTH, WORDS)
        self.register_buffer("frequencies", torch.rand(WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Both [b, s]."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.words(ids) + self.places(places)
        first = x
        table, kept = (places[:, None] * self.frequencies).cos(), (ids != 0)[..., None]
        for layer in self.layers:
            x = layer(x * table * kept if self.tables else x)
        if self.skip:
            x = x + first
        logits = functional.linear(x, self.words.weight) if self.head is None else self.head(x)
        return {"loss": functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1)), "logits": logits}


class Tied(nn.Module):
    """Words that are the head too, and two matrices between."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Both [b, s]."""
        x = self.words(ids)
        x = x + self.down(functional.gelu(self.up(x)))
        logits = functional.linear(x, self.words.weight)
        return functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


def batch() -> dict[str, Tensor]:
    """Ids and labels."""
    generator = torch.Generator().manual_seed(2)
    ids, labels = (torch.randint(WORDS, (ROWS, LENGTH), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels}


@functools.cache
def built(kind: Callable[..., nn.Module], options: tuple[tuple[str, Any], ...]) -> tuple[nn.Module, Captured]:
    """A module in training mode and its capture."""
    torch.manual_seed(1)
    module = kind(**dict(options)).train()
    return module, capture(module, batch(), Plan(tp=2))


def staged(plan: Plan, kind: Callable[..., nn.Module] = Model, **options: Any) -> Program:
    """The program of a module, cut into stages and statically checked."""
    return compile_program(built(kind, tuple(options.items()))[1].program.with_(plan=plan))


def compared(program: Program, kind: Callable[..., nn.Module] = Model, **options: Any) -> ValueReport:
    """What the stages give, compared with one device."""
    module, captured = built(kind, tuple(options.items()))
    inputs = call_inputs(captured, module, batch())
    return verify_values(captured.program, program, program_state(captured.program, module), inputs)


def sent(program: Program) -> list[tuple[str, int, bool]]:
    """What crosses: the value that was sent first, the stage that receives it, and whether its gradient comes back."""
    return [(re.sub(r"(_on_\d+)+$", "", c.node.name), c.receiver, c.carries) for c in crossings(program)]


def lines(program: Program) -> Mapping[str, str]:
    """Lines of the text by name of the node, without places in files."""
    body = [re.sub(r"  # .*$", "", line) for line in print_program(program).splitlines() if line.startswith("%")]
    return {line[1:].partition(" ")[0]: line for line in body}
