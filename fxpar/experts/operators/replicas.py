"""Replicas of experts: which of them stand in the spare slots of other ranks, and which pairs go there.

Enters: how many pairs each rank has for each expert. Leaves: operators of torch that plan an even load and renumber
choices. They consist of integers and depend on no order of threads, so that all ranks plan the same; nothing is read
on the host. Torch's operations, 55 launches for a plan and 33 to renumber sorted pairs, are the reference of the two
kernels that GPUs run.

Terms: E experts stand on n ranks, as many on each and in order; each rank has `slots` spare slots after its experts.
The *even load* is that of all pairs over n, rounded down. What a rank has beyond is its *spill*, what it lacks is its
*room*. Sizes are *matched on a line*: those of either side stand end to end, and what overlaps goes together. Of equal
sizes the lower number comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from fxpar.experts.operators.permute import flat_groups, kernels_on_device, sort_by_expert
from fxpar.ops.operator import torch_operator
from fxpar.signatures.engine import Rule
from fxpar.signatures.matmul import formula

# The unit of `min_gain`: a comparison of integers is the same on all ranks.
_MILLION = 1_000_000


def _planned_shapes(counts: Tensor, slots: int, min_gain: float) -> tuple[Tensor, Tensor]:
    *lead, ranks, experts = counts.shape
    if experts % ranks or not 0 < slots <= experts // ranks:
        raise ValueError(f"{experts} experts on {ranks} ranks cannot have {slots} spare slots on each")
    if not 0 <= min_gain < float("inf"):
        raise ValueError(f"min_gain must be a share of the even load, got {min_gain}")
    return counts.new_empty((*lead, ranks * slots)), counts.new_empty((*lead, ranks, ranks * slots))


@torch_operator("plan_replicas", fake=_planned_shapes, rule=Rule(formula("... _ _ -> ... _, ... _ _", "counts")))
def plan_replicas(counts: Tensor, slots: int, min_gain: float) -> tuple[Tensor, Tensor]:
    """Plans which experts stand in spare slots, and how many pairs go there, so that ranks have an even load.

    1. The spill of a rank is what its experts have beyond the even load: in ascending order of their loads those that
       come last.
    2. Experts' spills and ranks' rooms, both in descending order, are matched on a line. A rank takes the `slots`
       largest entries; what else would go there stays at home.
    3. Each source gives a slot its share of the expert's pairs, rounded down. What is missing then comes from the
       sources in the order of ranks, for slots in order.

    Args:
        counts: i64[..., n, E], of each source the pairs for each expert; equal on all ranks.
        slots: spare slots of a rank, at most E / n.
        min_gain: share of the even load, in millionths: a rank whose spill is less keeps it.

    Returns:
        `home`, i64[..., n * slots]: the expert in each slot, -1 for none. Slot s is on rank s // slots. A rank's slots
        have the largest entry first, of equal ones the lower expert, and none of the rank's experts. And `moved`,
        i64[..., n, n * slots]: how many pairs of each source go to each slot.

    Raises:
        ValueError: the ranks do not divide the experts, or a rank has more slots than experts, or none.
    """
    home, moved = _planned_shapes(counts, slots, min_gain)
    module = _kernels_for(counts, *counts.shape[-2:])
    if module is not None:
        module.plan(flat_groups(counts, 2), flat_groups(home, 1), flat_groups(moved, 2), _in_millionths(min_gain))
        return home, moved
    spill, room = spill_and_room(counts, min_gain)
    entries = overlaps(_ends_by_size(room), room, _ends_by_size(spill), spill)
    # Not topk, which takes any of equal entries.
    largest, home = entries.sort(dim=-1, descending=True, stable=True)
    largest, home = largest[..., :slots], home[..., :slots]
    pairs = pairs_of_sources(counts, torch.zeros_like(entries).scatter(-1, home, largest))
    moved = pairs.gather(-1, home.unsqueeze(-3).expand(*pairs.shape[:-1], slots))
    return torch.where(largest > 0, home, -1).flatten(-2), moved.flatten(-2)


def _kernels_for(x: Tensor, ranks: int, experts: int) -> ModuleType | None:
    """Returns the module of kernels for so many ranks and experts on a tensor's device; None where there is none."""
    module = kernels_on_device(x)
    return module if module is not None and ranks <= module.MOST_RANKS and experts <= module.MOST_EXPERTS else None


def spill_and_room(counts: Tensor, min_gain: float) -> tuple[Tensor, Tensor]:
    """Returns what each expert has beyond its rank's even load, i64[..., E], and what each rank lacks, i64[..., n].

    Args:
        counts, min_gain: as `plan_replicas` takes them.
    """
    ranks = counts.shape[-2]
    loads = counts.sum(-2).unflatten(-1, (ranks, -1))
    load = loads.sum(-1)
    even = load.sum(-1, keepdim=True) // ranks
    ascending, order = loads.sort(dim=-1, stable=True)
    beyond = (ascending.cumsum(-1) - even.unsqueeze(-1)).clamp_min(0)
    spill = beyond.diff(dim=-1, prepend=torch.zeros_like(beyond[..., :1]))
    stays = (load - even) * _MILLION < even * _in_millionths(min_gain)
    spill = torch.empty_like(spill).scatter(-1, order, spill.masked_fill(stays.unsqueeze(-1), 0))
    return spill.flatten(-2), (even - load).clamp_min(0)


def _in_millionths(min_gain: float) -> int:
    return round(min_gain * _MILLION)


def _ends_by_size(sizes: Tensor) -> Tensor:
    """Returns where each size ends, if all stand on a line in descending order; of equal ones the first is first."""
    descending, order = sizes.sort(dim=-1, descending=True, stable=True)
    return torch.empty_like(sizes).scatter(-1, order, descending.cumsum(-1))


def overlaps(row_ends: Tensor, rows: Tensor, column_ends: Tensor, columns: Tensor) -> Tensor:
    """Returns how much each of some sizes has in common with each of others on a line, i64[..., rows, columns].

    Args:
        row_ends, column_ends: i64[..., rows] and i64[..., columns], where each size ends.
        rows, columns: likewise, the sizes.
    """
    end = torch.minimum(row_ends.unsqueeze(-1), column_ends.unsqueeze(-2))
    start = torch.maximum((row_ends - rows).unsqueeze(-1), (column_ends - columns).unsqueeze(-2))
    return (end - start).clamp_min(0)


def pairs_of_sources(counts: Tensor, capacity: Tensor) -> Tensor:
    """Returns how many pairs each source gives to each rank's replica of an expert, i64[..., sources, ranks, E].

    Args:
        counts: i64[..., sources, E].
        capacity: i64[..., ranks, E], of the replicas; of an expert at most what all sources have.
    """
    # An expert without pairs has no replica.
    total = counts.sum(-2, keepdim=True).clamp_min(1)
    share = counts.unsqueeze(-2) * capacity.unsqueeze(-3) // total.unsqueeze(-2)
    left, missing = (counts - share.sum(-2)).mT, (capacity - share.sum(-3)).mT
    # A line for each expert: sources in order, and replicas in order.
    fill = overlaps(left.cumsum(-1), left, missing.cumsum(-1), missing)
    return share + fill.movedim(-3, -1)


def _like_indices(indices: Tensor, home: Tensor, moved: Tensor, experts: int, slots: int) -> Tensor:
    if home.shape != moved.shape or home.shape[:-1] != indices.shape[:-2] or home.shape[-1] % slots:
        raise ValueError(f"slots {list(home.shape)}, of {list(moved.shape)} pairs, for choices {list(indices.shape)}")
    return torch.empty_like(indices, memory_format=torch.contiguous_format)


@torch_operator(
    "reroute",
    fake=_like_indices,
    rule=Rule(formula("... _ _, ... _, ... _ -> ... _ _", "indices", "home", "moved")),
)
def reroute(indices: Tensor, home: Tensor, moved: Tensor, experts: int, slots: int) -> Tensor:
    """Renumbers choices: of an expert's pairs the first go to its replicas, slot after slot, and the others home.

    A rank's experts and its slots after them are neighbours: it has E / n + slots numbers. A value that is not an
    expert's number becomes the number after all of these. `router_choices` undoes it.

    Args:
        indices: the experts of a source's tokens, int[..., T, K].
        home: i64[..., n * slots], the expert in each slot as `plan_replicas` returns it, for each source.
        moved: i64[..., n * slots], how many of the source's pairs go to each slot: its row of what `plan_replicas`
            returns.
        experts: their number, E.
        slots: spare slots of a rank.

    Returns:
        As `indices`.
    """
    renumbered = _like_indices(indices, home, moved, experts, slots)
    order, counts = sort_by_expert(indices, experts)
    module = _kernels_for(indices, home.shape[-1] // slots, experts)
    if module is not None:
        operands = (flat_groups(x, 1) for x in (order, counts, home, moved))
        module.renumber(*operands, slots, flat_groups(renumbered, 2).flatten(1))
        return renumbered
    ends, numbers = _runs(home, moved, counts, slots)
    place = torch.arange(order.shape[-1], device=order.device).expand(order.shape).contiguous()
    rerouted = numbers.gather(-1, torch.searchsorted(ends, place, right=True)).to(indices.dtype)
    return torch.empty_like(rerouted).scatter(-1, order, rerouted).view(indices.shape)


def _runs(home: Tensor, moved: Tensor, counts: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Returns where the pairs end, sorted by expert, that go to one place, and that place's number.

    An expert has n + 1 runs: its replica on each rank, then its home.

    Returns:
        i64[..., E * (n + 1)], ascending; and i64[..., E * (n + 1) + 1], the last of which is nobody's number.
    """
    *lead, experts = counts.shape
    ranks = home.shape[-1] // slots
    per_rank = experts // ranks
    slot, expert = (torch.arange(count, device=home.device) for count in (ranks * slots, experts))
    # Slots without an expert write behind nobody's number, where it is cut off.
    behind = experts * (ranks + 1) + ranks
    runs = torch.where(home < 0, behind, home * (ranks + 1) + slot // slots)
    size = home.new_zeros((*lead, (experts + 1) * (ranks + 1))).scatter(-1, runs, moved)
    filled = size.unflatten(-1, (experts + 1, ranks + 1))[..., :-1, :].cumsum(-1)
    # A plan of other counts would move more than there is, into the next expert's pairs.
    filled = torch.minimum(filled, counts.unsqueeze(-1))
    filled[..., -1] = counts
    ends = filled + (counts.cumsum(-1) - counts).unsqueeze(-1)
    at_home = expert // per_rank * (per_rank + slots) + expert % per_rank
    table = at_home.repeat_interleave(ranks + 1, output_size=experts * (ranks + 1))
    table = torch.nn.functional.pad(table, (0, ranks + 1), value=experts + ranks * slots)
    number = slot // slots * (per_rank + slots) + per_rank + slot % slots
    numbers = table.expand(*lead, -1).scatter(-1, runs, number.expand(home.shape))
    return ends.flatten(-2), numbers[..., : experts * (ranks + 1) + 1]


def router_choices(rerouted: Tensor, home: Tensor, experts: int, slots: int) -> Tensor:
    """Returns the choices that `reroute` renumbered: the expert of each number, E for nobody's.

    Args:
        rerouted: int[..., T, K].
        home, experts, slots: as `reroute` took them.
    """
    ranks = home.shape[-1] // slots
    local = torch.arange(experts, device=home.device).view(ranks, -1)
    numbers = torch.cat((local.expand(*home.shape[:-1], -1, -1), home.unflatten(-1, (ranks, slots))), -1).flatten(-2)
    flat = rerouted.flatten(-2)
    table = torch.nn.functional.pad(numbers, (0, 1), value=experts)
    return table.gather(-1, flat.long()).to(rerouted.dtype).view(rerouted.shape)


@dataclass(frozen=True)
class ReplicaFigures:
    """What replicas of one layer's experts do to the load of ranks.

    Attributes:
        before: pairs of each rank's experts, without replicas.
        after: likewise, with them.
        slots: how many have an expert.
        bytes: of the weights that are sent there.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    slots: int
    bytes: int


def simulate_replicas(counts: Tensor, slots: int, min_gain: float, expert_bytes: int) -> ReplicaFigures:
    """Returns what a plan does, on the host.

    Args:
        counts: i64[n, E], and slots, min_gain: as `plan_replicas` takes them.
        expert_bytes: of the weights of one expert.
    """
    ranks, experts = counts.shape
    home, moved = plan_replicas(counts, slots, min_gain)
    before, pairs = counts.sum(0).view(ranks, -1).sum(-1), moved.sum(0)
    # No pairs leave the rank that -1 is taken for.
    left = before.index_add(0, home.clamp_min(0) // (experts // ranks), -pairs)
    after, used = left + pairs.view(ranks, slots).sum(-1), int((home >= 0).sum())
    return ReplicaFigures(tuple(before.tolist()), tuple(after.tolist()), used, used * expert_bytes)
