"""What counts in a whole step, which a batch of transformers brings: its loss is divided by that number already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fxpar.errors import PlanError
from fxpar.plan.plan import Plan

STEP_COUNT = "num_items_in_batch"


def check_step_count(batch: Any, plan: Plan) -> None:
    """Refuses a batch with a step's count where the plan would divide the losses of microbatches once more.

    Raises:
        PlanError: the plan's loss_reduction is not sum.
    """
    if isinstance(batch, Mapping) and batch.get(STEP_COUNT) is not None and plan.loss_reduction != "sum":
        raise PlanError(
            "divides the loss of each microbatch by what counts in the whole step, and the losses would be averaged "
            f"once more (loss_reduction={plan.loss_reduction})",
            where=f"batch entry {STEP_COUNT}",
            remedy="take Plan(loss_reduction='sum') (--loss-reduction sum), or leave the entry out of the batch",
        )


def with_step_count(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the batch with a step's count as a tensor, which varies; a plain number would be part of the program."""
    count = batch.get(STEP_COUNT)
    return {**batch, STEP_COUNT: torch.tensor(count)} if type(count) in (int, float) else batch
