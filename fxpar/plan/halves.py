"""What a plan says of half batches.

Enters: a plan. Leaves: what is wrong with it. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fxpar.errors import shown

if TYPE_CHECKING:
    from fxpar.plan.plan import Plan

# Options with which halves are not supported, and what they are without.
_USUAL = {"pp": 1, "ep": 1, "capacity_factor": None, "receive_budget": None}


def halves_problems(plan: Plan) -> Iterator[str]:
    """What is wrong with halves, and with what else the plan asks for beside them."""
    if plan.half not in (1, 2) or (plan.half == 2 and plan.interleave_halves is not True):
        yield f"half={shown(plan.half)} is of programs under way: leave it out, and give interleave_halves=True"
    if plan.interleave_halves is True:
        for name in (name for name, value in _USUAL.items() if getattr(plan, name) != value):
            yield f"interleave_halves with {name}={shown(getattr(plan, name))} is not supported: leave one out"
