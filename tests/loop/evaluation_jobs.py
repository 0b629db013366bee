"""What ranks evaluate, and the same text beside them without fxpar."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from tests.runtime.jobs import kept
from tests.zoo import CASES, VOCABULARY

WINDOW, OVERLAP = 16, 5


def text(length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))


def rows() -> dict[str, Tensor]:
    """A batch to train on."""
    ids = text(4 * WINDOW).reshape(4, WINDOW)
    return {"input_ids": ids, "labels": ids}


def model_of(name: str) -> nn.Module:
    """A model of the zoo that is sure of some words: its weights are wide."""
    model = CASES[name].model().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model


@torch.no_grad()
def predicted(model: Any, ids: Tensor) -> Tensor:
    """Log-probabilities of the word after a text."""
    return model(input_ids=ids.unsqueeze(0)).logits[0, -1].double().log_softmax(0)  # type: ignore[no-any-return]


def examples(model: nn.Module) -> list[tuple[list[int], list[int]]]:
    """Contexts of many lengths with last words of one to three tokens, most of which the model predicts."""
    model.eval()
    pairs = []
    for number in range(7):
        context = text(3 + 2 * number)
        ids = context
        for _ in range(1 + number % 3):
            ids = torch.cat([ids, predicted(model, ids).argmax().reshape(1)])
        word = ids[len(context) :].tolist()
        if number in (1, 5):  # the last token alone is another, and the first alone
            word[-1 if number == 1 else 0] ^= 1
        pairs.append((context.tolist(), word))
    return pairs


def perplexity_by_token(model: nn.Module, ids: Tensor, window: int, overlap: int, words: int) -> float:
    """Token by token, without a batch: what a token is predicted from is the window that first covers it."""
    model.eval()
    total, stride = 0.0, window - overlap
    for place in range(1, len(ids)):
        start = 0
        while start + window < place:
            start += stride
        total -= float(predicted(model, ids[start:place])[ids[place]])
    return math.exp(total / words)


def module(name: str, plan: fxpar.Plan) -> ParallelModule:
    batch = rows()
    return kept((name, str(plan)), lambda: fxpar.parallelize(model_of(name), plan, batch))


def evaluated(name: str, plan: fxpar.Plan, cases: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Perplexities of (length, overlap, batch size), an accuracy, and whether a step afterwards is as one before."""
    model = module(name, plan)
    batch = fxpar.shard_batch(rows(), model)
    before = model.train_step(batch).item()
    model.zero_grad()
    model.step = 0
    perplexities = [
        fxpar.perplexity(model, text(n), window=WINDOW, overlap=overlap, batch_size=size, words=n // 2)
        for n, overlap, size in cases
    ]
    accuracy = fxpar.cloze_accuracy(model, examples(model_of(name)), batch_size=4)
    has_gradients = any(p.grad is not None for p in model.parameters())
    after = model.train_step(batch).item()
    return {"perplexities": perplexities, "accuracy": accuracy, "steps": (before, after), "grads": has_gradients}
