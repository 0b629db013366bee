"""What the ranks of a pipeline do in tests, and the same on one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fxpar
from fxpar.pipeline.runtime import pipeline
from tests.runtime.jobs import gradients
from tests.zoo import CASES

ROWS = 4


@dataclass(frozen=True)
class Trained:
    """What became of a few steps.

    Attributes:
        losses: of each step.
        norms: of the gradients, before they were clipped.
        gradients: of the first step, whole, of what the rank holds.
        flying: the most microbatches that were between their forward and the end of their backward.
        stages: that the rank holds.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    flying: int
    stages: tuple[int, ...]


class _Counting(pipeline._PipelineStep):
    """Counts what is in flight."""

    most = 0

    def act(self, action: Any) -> None:
        super().act(action)
        _Counting.most = max(_Counting.most, len(self._flying))


def batch_of(name: str, dtype: torch.dtype, rows: int = ROWS) -> dict[str, Tensor]:
    """The example of a case with so many rows."""
    found = {}
    for key, value in CASES[name].example().items():
        more = torch.cat([value.roll(i, -1) for i in range(-(-rows // len(value)))])[:rows]
        found[key] = more.to(dtype) if value.is_floating_point() else more
    return found


def train(
    name: str, plan: dict[str, Any], microbatches: int, dtype: torch.dtype = torch.float64, rows: int = ROWS
) -> Trained:
    """Two steps with dropout, clipped; on one process the microbatches are given as a list."""
    case, chosen = CASES[name], fxpar.Plan(**plan)
    batch: Any = batch_of(name, dtype, rows)
    pipeline._PipelineStep, _Counting.most = _Counting, 0  # type: ignore[misc]
    model = fxpar.parallelize(case.model().to(dtype), chosen, batch, case.loss, timeout=60)
    if chosen.dp > 1:
        own = model.world.coordinates["dp"]
        batch = {k: torch.cat([p.chunk(chosen.dp)[own] for p in v.chunk(microbatches)]) for k, v in batch.items()}
    if chosen.microbatches == 1 and microbatches > 1:
        batch = [{k: v.chunk(microbatches)[i] for k, v in batch.items()} for i in range(microbatches)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms, first = [], [], dict[str, Tensor]()
    for step in range(2):
        optimizer.zero_grad()
        losses.append(model.train_step(batch).item())
        first = first if step else gradients(model)
        norms.append(float(model.clip_grad_norm_(1.0)))
        optimizer.step()
    return Trained(losses, norms, first, _Counting.most, model.stages)
