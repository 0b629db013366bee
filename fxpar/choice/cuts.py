"""Where a pipeline's stages end: exact over the places at which a program may be cut.

Enters: what each unit between two places costs, and what crosses each place. Leaves: the places. Stages are first as
equally long as they can be, then hold as equally much, then send as little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# Stages may be so much longer than the shortest longest one, and hold so much more than the least most, for the sake of
# what is asked for next.
SLACK = 0.01


@dataclass(frozen=True)
class UnitCosts:
    """The units of a program in order; place i stands in front of unit i.

    Attributes:
        seconds: of each unit, forward and backward.
        state_bytes: bytes of parameters, gradients and optimizer state of each.
        saved_bytes: bytes that each keeps of a microbatch for its backward.
        crossing: bytes that cross each place, that in front of the first unit, where nothing does, included.
        send: seconds that crossing takes, likewise.
    """

    seconds: Sequence[float]
    state_bytes: Sequence[float]
    saved_bytes: Sequence[float]
    crossing: Sequence[float]
    send: Sequence[float]


def best_cuts(units: UnitCosts, ranks: int, virtual: int, fixed: Mapping[int, int]) -> tuple[int, ...]:
    """The places of the cuts, ascending; `ranks · virtual` stages.

    Args:
        units: at least as many as stages.
        ranks: of the pipeline; stage k lies on rank k modulo that, and keeps `ranks` − that microbatches at once.
        virtual: stages of each rank.
        fixed: places that are asked for, by number of the stage that begins there.

    Raises:
        ValueError: no cut satisfies `fixed`.
    """
    cutting = _Cutting(units, ranks, ranks * virtual, fixed)
    longest = cutting.least(cutting.length, max) * (1 + SLACK)
    most = cutting.least(cutting.bytes, max, ((cutting.length, longest),)) * (1 + SLACK)
    return cutting.best(cutting.crossing, _sum, ((cutting.length, longest), (cutting.bytes, most)))


@dataclass(frozen=True)
class Goals:
    """What cuts are chosen by, in this order.

    Attributes:
        longest: seconds of a microbatch of the longest stage: what is computed, received and sent.
        most: bytes of the stage that has most.
        crossing: bytes that cross all cuts.
        stages: seconds and bytes of each stage.
    """

    longest: float
    most: float
    crossing: float
    stages: tuple[tuple[float, float], ...]


def goals_of(units: UnitCosts, ranks: int, cuts: Sequence[int]) -> Goals:
    """What some cuts reach."""
    cutting = _Cutting(units, ranks, len(cuts) + 1, {})
    ends = stage_ends(cuts, len(units.seconds))
    stages = tuple((cutting.length(i, a, b), cutting.bytes(i, a, b)) for i, (a, b) in enumerate(ends))
    seconds, memory = zip(*stages, strict=True)
    return Goals(max(seconds), max(memory), sum(units.crossing[cut] for cut in cuts), stages)


Measure = Callable[[int, int, int], float]
_INFINITE = float("inf")


def _sum(before: float, added: float) -> float:
    return before + added


class _Cutting:
    """Dynamic programming over (stage, place of its end).

    A *measure* is a number of a stage, of its number and the places at which it begins and ends.
    """

    def __init__(self, units: UnitCosts, ranks: int, stages: int, fixed: Mapping[int, int]) -> None:
        self._units, self._ranks, self._stages, self._fixed = units, ranks, stages, fixed
        self._count = len(units.seconds)
        sums = (units.seconds, units.state_bytes, units.saved_bytes)
        self._seconds, self._held, self._kept = ([0.0, *accumulate(values)] for values in sums)

    def length(self, stage: int, start: int, end: int) -> float:
        """Seconds of a microbatch: what is computed, received and sent."""
        sent = self._units.send[end] if end < self._count else 0.0
        return self._seconds[end] - self._seconds[start] + self._units.send[start] + sent

    def bytes(self, stage: int, start: int, end: int) -> float:
        """Of the stage's weights, and of what its microbatches in flight keep."""
        in_flight = self._ranks - stage % self._ranks
        return self._held[end] - self._held[start] + in_flight * (self._kept[end] - self._kept[start])

    def crossing(self, stage: int, start: int, end: int) -> float:
        """Bytes that the stage receives."""
        return self._units.crossing[start]

    def least(
        self, measure: Measure, join: Callable[[float, float], float], within: Sequence[tuple[Measure, float]] = ()
    ) -> float:
        """The least of a measure, joined over all stages, where others stay within bounds."""
        return self._table(measure, join, within)[-1][self._count][0]

    def best(
        self, measure: Measure, join: Callable[[float, float], float], within: Sequence[tuple[Measure, float]]
    ) -> tuple[int, ...]:
        """The cuts of `least`; of several the earliest."""
        table = self._table(measure, join, within)
        place, cuts = self._count, []
        for stage in range(self._stages - 1, 0, -1):
            place = table[stage][place][1]
            cuts.append(place)
        return tuple(cuts[::-1])

    def _table(
        self, measure: Measure, join: Callable[[float, float], float], within: Sequence[tuple[Measure, float]]
    ) -> list[dict[int, tuple[float, int]]]:
        """By stage and place of its end: the least of the stages up to it, and where it begins."""
        rows: list[dict[int, tuple[float, int]]] = []
        before: dict[int, tuple[float, int]] = {0: (0.0, 0)}
        for stage in range(self._stages):
            row: dict[int, tuple[float, int]] = {}
            for end in self._ends(stage):
                for start, (value, _) in before.items():
                    if start >= end or any(other(stage, start, end) > bound for other, bound in within):
                        continue
                    joined = join(value, measure(stage, start, end))
                    if joined < row.get(end, (_INFINITE, 0))[0]:
                        row[end] = joined, start
            rows.append(row)
            before = row
        if self._count not in rows[-1]:
            raise ValueError("no cut leaves each stage a unit")
        return rows

    def _ends(self, stage: int) -> Sequence[int]:
        """Where a stage may end, so that those behind it have a unit each."""
        if stage == self._stages - 1:
            return (self._count,)
        if stage + 1 in self._fixed:
            return (self._fixed[stage + 1],)
        return range(stage + 1, self._count - (self._stages - 1 - stage) + 1)


def stage_ends(cuts: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Where each stage begins and ends."""
    return list(pairwise((0, *cuts, count)))
