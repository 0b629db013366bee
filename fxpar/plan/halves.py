"""What a plan says of half batches.

Enters: a plan. Leaves: what is wrong with it. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fxpar.errors import shown

if TYPE_CHECKING:
    from fxpar.plan.plan import Plan

# The value of `Plan.interleave_halves` by which cost decides.
AUTO = "auto"
# Options with which halves are not supported, and what they are without.
_USUAL = {"pp": 1, "ep": 1, "capacity_factor": None, "receive_budget": None}


def halves_problems(plan: Plan) -> Iterator[str]:
    """What is wrong with halves, and with what else the plan asks for beside them."""
    asked = plan.interleave_halves
    if type(asked) is not bool and asked != AUTO:
        yield f"interleave_halves={shown(asked)} is unknown: choose one of True, False, {AUTO!r}"
    if plan.half not in (1, 2) or (plan.half == 2 and asked is not True):
        yield f"half={shown(plan.half)} is of programs under way: leave it out, and give interleave_halves=True"
    if asked is True:
        for name in unsupported(plan):
            yield f"interleave_halves with {name}={shown(getattr(plan, name))} is not supported: leave one out"


def unsupported(plan: Plan) -> list[str]:
    """The plan's options with which halves are not supported; with these `auto` computes the batch whole."""
    return [name for name, value in _USUAL.items() if getattr(plan, name) != value]
