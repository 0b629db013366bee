"""What a plan says of how rows travel to their experts.

Enters: a plan. Leaves: what is wrong with it. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fxpar.errors import shown
from fxpar.plan.graphs import CudaGraphs

if TYPE_CHECKING:
    from fxpar.plan.plan import Plan

DISPATCHES = ("static", "exact")


def expert_problems(plan: Plan) -> Iterator[str]:
    """What is wrong with the dispatch of a plan."""
    if plan.dispatch not in DISPATCHES:
        yield f"dispatch={shown(plan.dispatch)} is unknown: choose one of {', '.join(DISPATCHES)}"
        return
    if plan.dispatch == "static":
        return
    if plan.ep == 1:
        yield "dispatch='exact' is of experts on several ranks, and ep=1: give ep of at least 2, or leave it out"
    if isinstance(plan.cuda_graphs, CudaGraphs) and plan.cuda_graphs.is_on:
        # What stands between graphs has fixed addresses and sizes too (`fxpar.runtime.graphs.partial`).
        yield "dispatch='exact' has sizes that no CUDA graph can hold: leave cuda_graphs out, or give dispatch='static'"
    if plan.compile:
        # Units are compiled for sizes of inputs (`fxpar.runtime.sizes`); rows would be further ones in each layer.
        yield "dispatch='exact' has sizes that the routing decides: give compile=False, or dispatch='static'"
