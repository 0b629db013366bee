"""What a plan says of what the backward computes again.

Enters: a plan. Leaves: what is wrong with it. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fxpar.errors import shown

if TYPE_CHECKING:
    from fxpar.plan.plan import Plan

RECOMPUTES = ("none", "selective", "full")


def recompute_problems(plan: Plan) -> Iterator[str]:
    """What is wrong with the recomputation of a plan."""
    budget = plan.activation_budget
    if budget is None:
        return
    if type(budget) not in (int, float) or not 0 <= budget < 2**63 or (budget > 1 and budget != int(budget)):
        yield f"activation_budget={shown(budget)} is neither a part from 0 to 1 nor a number of bytes: give one"
    elif plan.recompute != "selective":
        yield f"activation_budget={shown(budget)} is of recompute='selective': choose that, or leave it out"
