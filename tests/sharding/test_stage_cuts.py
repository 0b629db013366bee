"""The cuts of a pipeline are those that trying all of them gives: three goals, one after the other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import combinations

import pytest

from fxpar.pipeline.compiler.partition import SLACK, UnitCosts, best_cuts, stage_ends

MOST = 14
Cuts = tuple[int, ...]


def some_units(generator: random.Random, count: int) -> UnitCosts:
    """Whole numbers, so that sums are exact; small ones, so that many cuts are equally good."""

    def numbers(most: int) -> list[float]:
        return [float(generator.randint(0, most)) for _ in range(count)]

    most = generator.choice((1, 3, 400))
    crossing = [0.0, *numbers(most)[1:]]
    send = [generator.choice((0.0, size / 8)) for size in crossing]
    return UnitCosts(numbers(most), numbers(most), numbers(most), crossing, send)


def stages(units: UnitCosts, cuts: Cuts) -> list[tuple[int, int]]:
    return stage_ends(cuts, len(units.seconds))


def longest(units: UnitCosts, cuts: Cuts) -> float:
    """Seconds of the longest stage: what it computes, receives and sends."""
    send = [*units.send, 0.0]
    return max(sum(units.seconds[a:b]) + send[a] + send[b] for a, b in stages(units, cuts))


def most_bytes(units: UnitCosts, cuts: Cuts, ranks: int) -> float:
    """Bytes of the stage that has most: as many microbatches in flight as ranks follow, its own included."""
    return max(
        sum(units.state_bytes[a:b]) + (ranks - stage % ranks) * sum(units.saved_bytes[a:b])
        for stage, (a, b) in enumerate(stages(units, cuts))
    )


def crossing(units: UnitCosts, cuts: Cuts) -> float:
    return sum(units.crossing[cut] for cut in cuts)


def tried(units: UnitCosts, ranks: int, virtual: int, fixed: Mapping[int, int]) -> list[Cuts]:
    """All cuts that reach the goals, one after the other, by trying all there are."""
    places = combinations(range(1, len(units.seconds)), ranks * virtual - 1)
    found = [cuts for cuts in places if all(cuts[stage - 1] == place for stage, place in fixed.items())]
    least = min((longest(units, cuts) for cuts in found), default=0.0)
    found = [cuts for cuts in found if longest(units, cuts) <= least * (1 + SLACK)]
    least = min((most_bytes(units, cuts, ranks) for cuts in found), default=0.0)
    found = [cuts for cuts in found if most_bytes(units, cuts, ranks) <= least * (1 + SLACK)]
    least = min((crossing(units, cuts) for cuts in found), default=0.0)
    return [cuts for cuts in found if crossing(units, cuts) == least]


@pytest.mark.parametrize("seed", range(40))
def test_the_cuts_are_the_best_of_all(seed: int) -> None:
    generator = random.Random(seed)
    for ranks, virtual in ((2, 1), (3, 1), (2, 2), (4, 1), (5, 1), (3, 2), (2, 3), (4, 2)):
        count = generator.randint(ranks * virtual, MOST)
        units = some_units(generator, count)
        numbers = generator.sample(range(1, ranks * virtual), generator.randint(0, ranks * virtual - 1))
        places = sorted(generator.sample(range(1, count), len(numbers)))
        for fixed in ({}, dict(zip(sorted(numbers), places, strict=True))):
            wanted = tried(units, ranks, virtual, fixed)
            if wanted:
                assert best_cuts(units, ranks, virtual, fixed) in wanted
            else:
                with pytest.raises(ValueError, match="no cut leaves each stage a unit"):
                    best_cuts(units, ranks, virtual, fixed)


def test_as_many_stages_as_units() -> None:
    units = some_units(random.Random(0), 8)
    assert best_cuts(units, 4, 2, {}) == tuple(range(1, 8))


def test_each_goal_decides_where_those_before_do_not() -> None:
    """Twelve equal units; the first rank keeps two microbatches, and the places differ in what crosses them."""
    ones, none = [1.0] * 12, [0.0] * 12
    assert best_cuts(UnitCosts(ones, none, none, ones, none), 2, 1, {}) == (6,)
    # Of no length: what is kept decides, twice as much on the first rank.
    assert best_cuts(UnitCosts(none, none, ones, ones, none), 2, 1, {}) == (4,)
    # Of no length and no bytes: what crosses decides.
    cheap = [1.0] * 9 + [0.5] + [1.0] * 2
    assert best_cuts(UnitCosts(none, none, none, cheap, none), 2, 1, {}) == (9,)
    # A unit that takes a hundredth longer is worth what it saves, and no more.
    longer = [100.0, 1.0, 100.0]
    assert best_cuts(UnitCosts(longer, [0.0] * 3, [0.0] * 3, [0.0, 9.0, 1.0], [0.0] * 3), 2, 1, {}) == (2,)
    assert best_cuts(UnitCosts([100.0, 3.0, 97.0], [0.0] * 3, [0.0] * 3, [0.0, 9.0, 1.0], [0.0] * 3), 2, 1, {}) == (1,)
