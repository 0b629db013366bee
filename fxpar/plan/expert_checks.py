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

DISPATCHES = ("static", "allgather", "alltoall", "exact")
DROP_POLICIES = ("probs", "position")


def expert_problems(plan: Plan) -> Iterator[str]:
    """What is wrong with the dispatch of a plan."""
    if plan.dispatch not in DISPATCHES:
        return
    yield from _wrong_budget(plan)
    yield from _wrong_capacity(plan)
    if plan.dispatch == "static":
        return
    if plan.ep == 1:
        yield f"dispatch={plan.dispatch!r} is of experts on several ranks, and ep=1: give ep of at least 2"
    if plan.dispatch != "exact":
        return
    if isinstance(plan.cuda_graphs, CudaGraphs) and plan.cuda_graphs.is_on:
        # What stands between graphs has fixed addresses and sizes too (`fxpar.runtime.graphs.partial`).
        yield "dispatch='exact' has sizes that no CUDA graph can hold: leave cuda_graphs out, or give dispatch='static'"
    if plan.compile:
        # Units are compiled for sizes of inputs (`fxpar.runtime.sizes`); rows would be further ones in each layer.
        yield "dispatch='exact' has sizes that the routing decides: give compile=False, or dispatch='static'"


def _wrong_budget(plan: Plan) -> Iterator[str]:
    budget, graphs = plan.receive_budget, plan.cuda_graphs
    if budget is None:
        return
    if type(budget) not in (int, float) or not 1 <= budget < 2**16:
        yield f"receive_budget={shown(budget)} is no multiple of a balanced load: give a number of at least 1"
    elif plan.ep == 1 or plan.dispatch == "exact":
        yield f"receive_budget={budget} is of dispatch='static' with ep of at least 2: choose these, or leave it out"
    if plan.pp > 1:
        # A stage has sent gradients on before the last one knows that rows were too many.
        yield "receive_budget repeats steps, and those of a pipeline are not repeated yet: leave it out, or pp=1"
    if isinstance(graphs, CudaGraphs) and graphs.impl not in ("none", "partial"):
        yield (
            f"receive_budget is asked for on the host in each step, which CudaGraphs({graphs.impl!r}) cannot: "
            "leave it out, or give CudaGraphs('partial')"
        )


def _wrong_capacity(plan: Plan) -> Iterator[str]:
    factor, budget = plan.capacity_factor, plan.receive_budget
    if type(plan.pad_to_capacity) is not bool:
        yield f"pad_to_capacity={shown(plan.pad_to_capacity)} is neither True nor False: write one of them"
    if factor is None:
        options = {"drop_policy": plan.drop_policy != DROP_POLICIES[0], "pad_to_capacity": plan.pad_to_capacity is True}
        for name in (name for name, is_given in options.items() if is_given):
            yield f"{name} is of a capacity_factor: give one, or leave {name} out"
        return
    if type(factor) not in (int, float) or not 0 < factor < 2**16:
        yield f"capacity_factor={shown(factor)} is no multiple of a balanced load: give a number above 0"
        return
    if plan.pad_to_capacity is True and plan.dispatch == "exact":
        yield "dispatch='exact' sends rows alone, and pad_to_capacity others too: leave it out, or dispatch='static'"
    if plan.pad_to_capacity is True and plan.dispatch == "allgather":
        yield "dispatch='allgather' sends tokens, and pad_to_capacity rows: leave it out, or give dispatch='static'"
    if budget is None or type(budget) not in (int, float):
        return
    if plan.pad_to_capacity is True:
        yield "receive_budget and pad_to_capacity both say how many places a buffer has: leave one of them out"
    elif budget >= factor:
        yield (
            f"receive_budget={budget} is no less than capacity_factor={factor}, by which every row that is kept has a "
            "place: leave receive_budget out"
        )
