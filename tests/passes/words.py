"""A lookup and a loss, which vocabulary and sequence parallelism take apart."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.compile import compile_program
from fxpar.ir.program import Program
from fxpar.plan.plan import Plan


class Words(nn.Module):
    """A vocabulary of 15 words, looked up and predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(15, 6), nn.LayerNorm(6)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(6, 15, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """[b, s] twice."""
        logits: Tensor = self.head(self.norm(self.drop(self.words(ids))))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(length: int = 4) -> dict[str, Tensor]:
    """Three samples."""
    ids = torch.randint(0, 15, (3, length), generator=torch.Generator().manual_seed(2))
    return {"ids": ids, "labels": ids.clone()}


@cache
def captured(tp: int = 2, sequence: bool = True) -> Program:
    return capture(Words().train(), batch(), Plan(tp=tp, sequence_parallel=sequence)).program


def until(name: str) -> Program:
    return compile_program(captured(), until=name)
