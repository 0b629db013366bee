"""What a plan says of its pipeline: which stages there are, and in what order they run.

Enters: a plan. Leaves: what is wrong with it. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fxpar.errors import shown
from fxpar.plan.graphs import CudaGraphs

if TYPE_CHECKING:
    from fxpar.plan.plan import Plan

# More ranks than one axis ever had, more stages and microbatches: beyond them there is only a slip of the keyboard.
MOST_RANKS = 4096


def pipeline_problems(plan: Plan) -> Iterator[str]:
    """What is wrong with the stages of a plan, and with its schedule."""
    virtual = plan.virtual_stages
    if type(virtual) is not int or not 1 <= virtual <= MOST_RANKS:
        yield f"virtual_stages={shown(virtual)} is no number of stages: give one of at least 1"
        return
    if type(plan.pp) is not int or plan.pp < 1:
        return
    count = plan.pp * virtual
    if plan.pp == 1 and virtual > 1:
        yield f"virtual_stages={virtual} without a pipeline, pp={plan.pp}: give pp of at least 2, or leave them out"
    stages = plan.stages
    if isinstance(stages, Mapping):
        for name, number in stages.items():
            if not isinstance(name, str) or not name:
                yield f"stages has the key {shown(name)}: write the name of a module"
            elif type(number) is not int or not 0 < number < count:
                yield f"stages[{name!r}]={shown(number)} is none of the stages 1 to {count - 1}: give one of these"
        if len({*map(repr, stages.values())}) != len(stages):
            yield "stages gives two modules one stage: each begins once"
    elif not isinstance(stages, (tuple, list)) or any(type(n) is not int or n < 1 for n in stages):
        yield f"stages={shown(stages)} is neither a mapping from modules to stages nor numbers of layers: write one"
    elif stages and len(stages) != count:
        yield f"stages={shown(stages)} has {len(stages)} numbers of layers for {count} stages: give one for each"
    yield from _wrong_schedule(plan)


def _wrong_schedule(plan: Plan) -> Iterator[str]:
    if type(plan.microbatches) is not int or not 1 <= plan.microbatches <= MOST_RANKS:
        yield f"microbatches={shown(plan.microbatches)} is no number of them: give one of at least 1"
    if type(plan.schedule) is not str:
        yield f"schedule={shown(plan.schedule)} is no text: write a name, or a file"
    elif plan.schedule and plan.pp == 1:
        yield f"schedule={shown(plan.schedule)} is of a pipeline, and pp=1: give pp of at least 2, or leave it out"
    if plan.group_size is not None and (type(plan.group_size) is not int or plan.group_size < 1):
        yield f"group_size={shown(plan.group_size)} is no number of microbatches: give one of at least 1"
    elif plan.group_size is not None and plan.virtual_stages == 1:
        yield f"group_size={plan.group_size} is of several stages a rank: give virtual_stages, or leave it out"
    if plan.pp > 1 and isinstance(plan.cuda_graphs, CudaGraphs) and plan.cuda_graphs.is_on:
        yield "cuda_graphs: stages of a pipeline are not captured yet: leave it out, or pp=1"
