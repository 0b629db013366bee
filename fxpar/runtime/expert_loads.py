"""The load of experts in the last step: kept on the device, read when somebody asks.

Enters: what each microbatch's step says of its experts' rows. Leaves: the numbers of all ranks, after one small
collective a step; nothing waits for them before they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fxpar.cost.figures import ExpertLoad
from fxpar.ir.step import dropped_name, is_dropped, is_excess, is_load, is_routed, module_of_load, routed_name
from fxpar.mesh.axes import Cuts, coordinates
from fxpar.ops.process_group import arrived, max_over, start_gather
from fxpar.plan.plan import Plan
from fxpar.runtime.grad_buffers import Finish
from fxpar.runtime.world import World


@dataclass(frozen=True)
class Loads:
    """The load of one step.

    Attributes:
        sizes: of the outputs that say it, by name, how many numbers a rank has.
        counts: i64 [ranks, those of all outputs, and of each layer how many of a rank's spare slots had an expert].
    """

    sizes: Mapping[str, int]
    counts: Tensor

    def read(self, plan: Plan) -> tuple[ExpertLoad, ...]:
        """Returns the numbers; waits for the device."""
        layers = list(filter(is_load, self.sizes))
        sizes = list(self.sizes.values())
        *parts, slots = self.counts.cpu().split([*sizes, self.counts.shape[1] - sum(sizes)], dim=1)
        rows = {name: part.tolist() for name, part in zip(self.sizes, parts, strict=True)}
        filled = slots[_once(plan, {*plan.mesh.holders, *plan.axes_for(Cuts.BATCH)})].sum(0).tolist()
        loads = []
        for layer, replicas in zip(layers, filled or [0] * len(layers), strict=True):
            routed, dropped = rows.get(routed_name(layer)), rows.get(dropped_name(layer))
            lost = None if dropped is None else sum(map(sum, dropped))
            ranks, before = tuple(map(sum, rows[layer])), None
            if routed is None:
                experts = _by_expert(rows[layer], plan)
            else:
                experts, before = _before(routed, plan)
            loads.append(ExpertLoad(module_of_load(layer), experts, ranks, lost, before, replicas))
        return tuple(loads)


def _once(plan: Plan, axes: Collection[str]) -> list[int]:
    """Returns the ranks that differ on some axes alone: others have the same rows."""
    places = [coordinates(plan.axes, rank) for rank in range(prod(plan.axes.values()))]
    return [rank for rank, place in enumerate(places) if not any(place[axis] for axis in place if axis not in axes)]


def _block(plan: Plan, rank: int) -> int:
    """Returns which of the holders of different experts a rank is."""
    place, block = coordinates(plan.axes, rank), 0
    for axis, size in plan.mesh.holders.items():
        block = block * size + place[axis]
    return block


def _by_expert(by_rank: Sequence[Sequence[int]], plan: Plan) -> tuple[int, ...]:
    """Returns rows of each expert of a layer.

    Args:
        by_rank: of each rank in nesting order of the plan's axes, the rows of each of its experts.
    """
    per_rank, holders = len(by_rank[0]), plan.mesh.holders
    experts = [0] * (per_rank * prod(holders.values()))
    for rank in _once(plan, {*holders, *plan.axes_for(Cuts.BATCH)}):
        for index, count in enumerate(by_rank[rank], _block(plan, rank) * per_rank):
            experts[index] += count
    return tuple(experts)


def _before(routed: Sequence[Sequence[int]], plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns rows of each expert of a layer, and what ranks would have without replicas.

    Args:
        routed: of each rank in nesting order of the plan's axes, rows for each expert of the ranks that plan with it.
    """
    per_rank = len(routed[0]) // prod(plan.mesh.holders.values())
    apart = _once(plan, plan.axes_for(Cuts.BATCH).keys() - plan.mesh.holders.keys())
    firsts = [_block(plan, rank) * per_rank for rank in range(len(routed))]
    before = tuple(sum(rows[first : first + per_rank]) for rows, first in zip(routed, firsts, strict=True))
    return tuple(map(sum, zip(*(routed[rank] for rank in apart), strict=True))), before


def gathered(parts: Sequence[Mapping[str, Tensor]], world: World, plan: Plan) -> Loads | None:
    """Returns the load of a step on all ranks; None where no rank holds other experts than another.

    Args:
        parts: of each microbatch what it says of rows, by name of the output.
    """
    names = [name for which in (is_load, is_dropped, is_routed) for name in (parts[0] if parts else ()) if which(name)]
    if not names:
        return None
    by_part = {name: torch.stack([part[name].flatten() for part in parts]) for name in names}
    slots, layers = plan.experts.slots, list(filter(is_load, names))
    # An empty slot has no rows.
    filled = [(by_part[layer][:, -slots:] > 0).sum().view(1) for layer in layers] if slots else []
    group = world.groups["-".join(plan.axes)]
    counts = torch.cat([*(by_part[name].sum(0) for name in names), *filled])
    sizes = {name: by_part[name].shape[1] for name in names}
    return Loads(sizes, arrived(start_gather(counts, group.name, group.size)))


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
