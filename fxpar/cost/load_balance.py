"""The load of experts in a step that has run.

Enters: how many rows each rank received for each of its experts. Leaves: the figures of a report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fxpar.mesh.axes import coordinates


@dataclass(frozen=True)
class ExpertLoad:
    """Rows that one layer's experts received in the last step, over all its microbatches.

    Attributes:
        module: the layer.
        experts: of each expert.
        ranks: of each rank, in the order of the mesh: ranks that split the same experts have the same rows.
        dropped: how many more went beyond the capacity of experts; None where that has no limit.
    """

    module: str
    experts: tuple[int, ...]
    ranks: tuple[int, ...]
    dropped: int | None = None

    @property
    def imbalance(self) -> tuple[float, float]:
        """The most over the mean, of experts and of ranks; 1 where all have as many, and where there are no rows."""
        return _peak(self.experts), _peak(self.ranks)


def expert_loads(
    modules: Sequence[str],
    numbers: Sequence[Sequence[Sequence[int]]],
    axes: Mapping[str, int],
    holders: Mapping[str, int],
    batch: Mapping[str, int],
    dropped: Mapping[str, int],
) -> tuple[ExpertLoad, ...]:
    """The loads of all layers.

    Args:
        modules: of each layer its name.
        numbers: of each layer, of each rank in nesting order of `axes`, the rows of each of its experts.
        axes: of the mesh, with their sizes, the outermost first.
        holders: those whose ranks hold different experts.
        batch: those whose ranks have other tokens.
        dropped: by layer, how many rows were dropped.
    """
    loads = []
    for module, by_rank in zip(modules, numbers, strict=True):
        per_rank = len(by_rank[0])
        experts = [0] * (per_rank * prod(holders.values()))
        for rank, rows in enumerate(by_rank):
            place = coordinates(axes, rank)
            if any(place[axis] for axis in axes if axis not in holders and axis not in batch):
                continue  # the same rows as on the first of the ranks that split an expert
            block = 0
            for axis, size in holders.items():
                block = block * size + place[axis]
            for index, count in enumerate(rows):
                experts[block * per_rank + index] += count
        ranks = tuple(sum(rows) for rows in by_rank)
        loads.append(ExpertLoad(module, tuple(experts), ranks, dropped.get(module)))
    return tuple(loads)


def _peak(counts: Sequence[int]) -> float:
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0
