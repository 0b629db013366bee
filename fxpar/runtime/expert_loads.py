"""The load of experts in the last step: kept on the device, read when somebody asks.

Enters: what each microbatch's step says of its experts' rows. Leaves: the numbers of all ranks, after one small
collective a step; nothing waits for them before they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fxpar.cost.figures import ExpertLoad
from fxpar.ir.step import is_dropped, is_excess, is_load, module_of_load
from fxpar.mesh.axes import Cuts, coordinates
from fxpar.ops.process_group import arrived, max_over, start_gather
from fxpar.plan.plan import Plan
from fxpar.runtime.grad_buffers import Finish
from fxpar.runtime.world import World


@dataclass(frozen=True)
class Loads:
    """The load of one step.

    Attributes:
        names: of the outputs that say it.
        local_experts: experts and spare slots of a rank in each of these layers.
        dropped: of the outputs that say how many rows were dropped.
        counts: i64 [ranks, experts of a rank in all these layers, and after them what each rank dropped in each].
    """

    names: tuple[str, ...]
    local_experts: tuple[int, ...]
    dropped: tuple[str, ...]
    counts: Tensor

    def read(self, plan: Plan) -> tuple[ExpertLoad, ...]:
        """Returns the numbers; waits for the device."""
        *parts, lost = self.counts.cpu().split([*self.local_experts, len(self.dropped)], dim=1)
        names = [module_of_load(name) for name in self.names]
        layers = [part.tolist() for part in parts]
        dropped = dict(zip(map(module_of_load, self.dropped), lost.sum(0).tolist(), strict=True))
        return tuple(
            ExpertLoad(name, _by_expert(by_rank, plan), tuple(map(sum, by_rank)), dropped.get(name))
            for name, by_rank in zip(names, layers, strict=True)
        )


def _by_expert(by_rank: Sequence[Sequence[int]], plan: Plan) -> tuple[int, ...]:
    """Returns rows of each expert of a layer where it is at home.

    Args:
        by_rank: of each rank in nesting order of the plan's axes, the rows of each of its experts and spare slots.
    """
    per_rank, axes, holders = len(by_rank[0]) - plan.experts.spare_experts, plan.axes, plan.mesh.holders
    experts = [0] * (per_rank * prod(holders.values()))
    for rank, rows in enumerate(by_rank):
        place = coordinates(axes, rank)
        if any(place[axis] for axis in axes if axis not in holders and axis not in plan.axes_for(Cuts.BATCH)):
            continue  # the same rows as on the first of the ranks that split an expert
        block = 0
        for axis, size in holders.items():
            block = block * size + place[axis]
        for index, count in enumerate(rows[:per_rank]):
            experts[block * per_rank + index] += count
    return tuple(experts)


def gathered(parts: Sequence[Mapping[str, Tensor]], world: World, plan: Plan) -> Loads | None:
    """Returns the load of a step on all ranks; None where no rank holds other experts than another.

    Args:
        parts: of each microbatch what it says of rows, by name of the output.
    """
    names, dropped = (tuple(filter(which, parts[0])) if parts else () for which in (is_load, is_dropped))
    if not names:
        return None
    summed = [torch.stack([part[name].flatten() for part in parts]).sum(0) for name in (*names, *dropped)]
    group = world.groups["-".join(plan.axes)]
    counts = arrived(start_gather(torch.cat(summed), group.name, group.size))
    return Loads(names, tuple(len(load) for load in summed[: len(names)]), dropped, counts)


# Steps whose experts received more rows than their buffers have places for are run again.


Finished = Callable[[dict[str, Tensor], Hashable, Finish], Mapping[str, Tensor]]


class Overflow(Exception):
    """Rows had no place: what was computed of them is not to be used, and the step has changed nothing."""


def overflowed(rows: Sequence[Mapping[str, Tensor]], world: World, plan: Plan) -> Tensor | None:
    """Returns whether rows had no place on any rank, a bool scalar on the device. A collective call.

    Of a pipeline these are the ranks of the same stages as this one.

    Args:
        rows: what the microbatches say of rows, by name of the output.

    Returns:
        None if there are places for all rows that may come.
    """
    excess = [value.flatten() for part in rows for name, value in part.items() if is_excess(name)]
    return max_over(torch.cat(excess).amax(), world.groups["-".join(plan.axes)]) > 0 if excess else None


def check(has_overflowed: Tensor | None) -> None:
    """Waits for the device, and breaks off a step whose rows had no place.

    Args:
        has_overflowed: a bool scalar on the device; None if there are places for all rows that may come.

    Raises:
        Overflow: it is true.
    """
    if has_overflowed is not None and has_overflowed.item():
        raise Overflow


class Budget:
    """The budget of a plan's buffers.

    Attributes:
        steps: that were taken.
        repeated: of these, those that were run again.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan, self._world = plan, world
        self.steps = self.repeated = 0

    def checked(self, rows: Sequence[Mapping[str, Tensor]], finished: Finished) -> Finished:
        """Returns what makes gradients of a step that is to be used.

        Args:
            rows: of the microbatches, filled by then.
            finished: makes them.
        """

        def finish_checked(
            local_gradients: dict[str, Tensor], signature: Hashable, finish: Finish
        ) -> Mapping[str, Tensor]:
            check(overflowed(rows, self._world, self._plan))
            return finished(local_gradients, signature, finish)

        return finish_checked

    def __str__(self) -> str:
        return (
            f"Of {self.steps} steps {self.repeated} were repeated: more rows of experts came than recv_capacity_factor "
            "has places for."
        )
