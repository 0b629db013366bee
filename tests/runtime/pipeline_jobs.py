"""What the ranks of a pipeline do in tests, and the same on one process for reference.

Every function runs alike in a rank and in the test's own process, where no group exists and the plan has no axes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fxpar
from fxpar.runtime.module import ParallelModule
from tests.runtime import models
from tests.runtime.jobs import Found, gradients, kept, refusal, whole

SECONDS = 30.0


def plan(microbatches: int = 2, **options: Any) -> fxpar.Plan:
    """Two stages or more on the ranks that are there; one process runs without axes."""
    if not dist.is_initialized():
        return fxpar.Plan(**{k: v for k, v in options.items() if k not in ("tp", "dp", "split", "virtual_stages")})
    return fxpar.Plan(pp=dist.get_world_size() // options.get("tp", 1), microbatches=microbatches, **options)


def tiny(kind: Any = models.Tiny, microbatches: int = 2, **options: Any) -> ParallelModule:
    """A tiny model in double precision, as if it were new."""

    def build() -> ParallelModule:
        made = models.tiny(kind).double()
        return fxpar.parallelize(made, plan(microbatches, **options), models.batch(), timeout=SECONDS)

    return kept(("pipeline", kind, microbatches, str(options)), build)


def deep(options: dict[str, Any], microbatches: int = 2) -> ParallelModule:
    """As `tiny`, of four layers."""
    return tiny(models.Deep, microbatches, **options)


def parts(batch: dict[str, Tensor], count: int = 2) -> list[dict[str, Tensor]]:
    """A batch as microbatches of equal rows."""
    cut = {name: value.chunk(count) for name, value in batch.items()}
    return [{name: chunks[index] for name, chunks in cut.items()} for index in range(count)]


def plain_calls(options: dict[str, Any]) -> Found:
    """Evaluations between training steps, in both modes; and what is refused with gradients on."""
    model, batch = tiny(**options), models.batch()
    found: Found = {"losses": [], "steps": [], "outputs": []}

    def call(**given: Any) -> None:
        with torch.no_grad():
            found["outputs"].append({name: whole(value) for name, value in model(**given).items()})
        found["steps"].append(model.step)

    call(**batch)
    for _ in range(2):
        found["losses"].append(model.train_step(parts(batch)))
        found["steps"].append(model.step)
        call(ids=batch["ids"], scaled=True)
    model.eval()
    call(**models.batch(3, 7))
    model.train()
    found["losses"].append(model.train_step(parts(batch)))
    if dist.is_initialized():
        found["refused"] = refusal(lambda: model(**batch))
        found["step after"] = model.step
    found["gradients"] = gradients(model)
    model.requires_grad_(False)
    output = model(**batch)
    model.requires_grad_(True)
    found["frozen"] = {name: whole(value).requires_grad for name, value in output.items()}
    return found
