"""What the ranks of a test world do with models that need a program for each length, and one process with the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.errors import FxparError
from fxpar.runtime.sharded import whole_of

Found = dict[str, Any]
WIDTH = 6


class Chunked(nn.Module):
    """Each quarter of the tokens has a weight of its own; targets of -100 do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mixed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.mixed(self.words(ids)))
        x = torch.cat([chunk * (i + 1) for i, chunk in enumerate(x.chunk(4, 1))], 1)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model() -> nn.Module:
    torch.manual_seed(0)
    return Chunked().double()


def batch(length: int, rows: int = 4) -> dict[str, Tensor]:
    """Rows of so many tokens."""
    ids = torch.randint(11, (2, rows, length), generator=torch.Generator().manual_seed(length))
    return {"ids": ids[0], "labels": ids[1]}


def mine(whole: dict[str, Tensor], lengths: tuple[int, int]) -> dict[str, Tensor]:
    """What a data rank brings of a batch: its rows, cut to its length."""
    rank = dist.get_rank()
    return {key: value.chunk(2)[rank][:, : lengths[rank]].clone() for key, value in whole.items()}


def eager(parts: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and gradients of the model itself."""
    own = model()
    loss = torch.stack([own(**part) for part in parts]).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


def steps(tp: int) -> Found:
    """Steps of microbatches of two lengths, evaluation at others, and one length too many.

    Of two data ranks the second brings shorter sequences.
    """
    is_dp = tp == 1
    plan = fxpar.Plan(tp=tp, dp=2 // tp, size_programs=2)

    def part(length: int) -> Any:
        whole = batch(length)
        return mine(whole, (length, length)) if is_dp else whole

    module = fxpar.parallelize(model(), plan, part(12))
    worst = 0.0
    for lengths in ((12, 8), (8, 8)):
        module.zero_grad()
        loss = module.train_step([part(n) for n in lengths]).item()
        wanted, gradients = eager([batch(n) for n in lengths])
        worst = max(worst, abs(loss - wanted), _worst(module, gradients))
    if is_dp:
        module.zero_grad()
        loss = module.train_step(mine(batch(12), (12, 9))).item()
        whole = batch(12)
        whole["labels"][2:, 9:] = -100
        wanted, gradients = eager([whole])
        worst = max(worst, abs(loss - wanted), _worst(module, gradients))
    found: Found = {"worst": worst, "report": str(module.report())}
    try:
        module.train_step(part(16))
    except FxparError as error:
        found["refused"] = str(error)
    module.zero_grad()
    module.train_step(part(8))  # what is there still runs
    return found


def _worst(module: Any, gradients: dict[str, Tensor]) -> float:
    pairs = ((whole_of(p.grad), gradients[name]) for name, p in module.named_parameters())
    return max(float((own - wanted).abs().max()) for own, wanted in pairs)
