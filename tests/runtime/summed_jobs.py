"""What the ranks of a test world do with a loss that its author divided by what counts in the whole step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from tests.runtime.jobs import gradients, refusal

WORDS = 37
Found = dict[str, Any]


class Summed(nn.Module):
    """A language model whose loss is that of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 16)
        self.up, self.down, self.head = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, WORDS)

    def forward(self, ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        """Loss and logits of ids: [b, s]."""
        x = self.embed(ids)
        logits = self.head(x + self.down(torch.tanh(self.up(x))))
        how = "mean" if num_items_in_batch is None else "sum"
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=how)
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        return {"loss": loss, "logits": logits}


def batch(as_tensor: bool = True) -> dict[str, Any]:
    """Eight rows, of one of which nothing counts."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, WORDS, (2, 8, 5), generator=generator)
    labels[0, :3] = labels[5] = -100
    count = (labels != -100).sum()
    return {"ids": ids, "labels": labels, "num_items_in_batch": count if as_tensor else int(count)}


def rows(whole: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    return {k: v[first:last] if isinstance(v, Tensor) and v.dim() else v for k, v in whole.items()}


def train(options: dict[str, Any], as_tensor: bool) -> Found:
    """Losses and gradients of the batch cut by the plan, of a list of parts, and where ranks bring other rows."""
    whole = batch(as_tensor)
    model = fxpar.parallelize(Summed().double(), fxpar.Plan(loss_reduction="sum", **options), whole)
    own = fxpar.shard_batch(whole, model)
    found: Found = {"count": int(own["num_items_in_batch"]), "cut": (model.train_step(own), gradients(model))}
    model.zero_grad()
    parts = [fxpar.shard_batch(rows(whole, *span), model) for span in ((0, 4), (4, 8))]
    found["list"] = model.train_step(parts), gradients(model)
    model.zero_grad()
    places = {(0, 0): ((0, 3), (4, 5)), (1, 0): ((3, 4), (5, 8))}
    spans = places[model.world.coordinates.get("dp", 0), 0] if "dp" in options else ((0, 3), (3, 8))
    found["uneven"] = model.train_step([rows(whole, *span) for span in spans]), gradients(model)
    found["programs"] = len(list(model._programs))
    other = {**own, "num_items_in_batch": own["num_items_in_batch"] + 1}
    model.train_step(other)
    found["of another count"] = len(list(model._programs)) - found["programs"]
    return found


def refused(reduction: str) -> tuple[str, str, str, str]:
    """A plan that would average what is divided already, for a batch that the example does not tell of."""
    whole = batch()
    example = {name: whole[name] for name in ("ids", "labels")}
    plan = fxpar.Plan(loss_reduction=reduction, microbatches=2)
    model = fxpar.parallelize(Summed(), plan, example)
    return refusal(lambda: model.train_step(whole))
