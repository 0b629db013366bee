"""Stages of a pipeline that are replayed: the same bits, in as many slots as the schedule has in flight."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import pytest

from tests.cudagraphs import stages
from tests.runtime.world import World

SPLIT = {"pp": 2, "schedule": "zb_h1"}
INTERLEAVED = {"pp": 2, "virtual_stages": 2, "microbatches": 4}
# By rank how many graphs a slot has: a forward, and a backward in one part or in two. No stage waits for the gradient
# of the first one's input, so that its backward is of one part.
PLANS: list[tuple[dict[str, Any], tuple[int, int]]] = [({"pp": 2}, (2, 2)), (INTERLEAVED, (2, 2)), (SPLIT, (2, 3))]


@pytest.mark.parametrize(
    "counts", [(2, 2, 4, 8, 4), pytest.param((2, 2, 4, 8, 8, 16, 64, 4), marks=pytest.mark.matrix)], ids=len
)
@pytest.mark.parametrize(("plan", "parts"), PLANS, ids=["1f1b", "interleaved_1f1b", "zb_h1"])
def test_stages_have_graphs_for_each_slot_of_the_schedule(
    world2: World, counts: tuple[int, ...], plan: dict[str, Any], parts: tuple[int, int]
) -> None:
    for compared, graphs in zip(world2.run(stages.compare, counts, plan), parts, strict=True):
        assert compared.is_equal
        # What a step lacks is there at its end, and past the ramp no further microbatch lacks any.
        assert compared.graphs == [graphs * slots for slots in accumulate(compared.slots, max)]
        assert len(set(compared.slots[2:])) == 1
        assert compared.figures.variants == 1
        assert compared.figures.slots == max(compared.slots)


def test_a_slot_has_a_graph_for_each_region(world2: World) -> None:
    job = partial(stages.compare, build=stages.Reading)
    first, second = world2.run(job, (4, 4, 4), {"pp": 2})
    assert first.is_equal
    assert second.is_equal
    assert first.graphs == [3 * slots for slots in first.slots]  # two of the forward
    assert second.graphs == [2 * slots for slots in second.slots]


def test_shapes_of_microbatches_and_evaluations_are_variants_of_slots(world2: World) -> None:
    for compared in world2.run(partial(stages.compare, evaluate=3), (4, 6, 4, 8), INTERLEAVED, (5, 7)):
        assert compared.is_equal
        assert compared.figures.variants == 3


MORE: list[dict[str, Any]] = [
    {**SPLIT, "virtual_stages": 2, "microbatches": 4},
    {"pp": 2, "virtual_stages": 2, "schedule": "zbv"},
    {"pp": 2, "virtual_stages": 2, "schedule": "gpipe"},
    {**INTERLEAVED, "compile": True},
    {**SPLIT, "precision": "bf16"},
    {"pp": 2, "inside": True},
    {"pp": 2, "every": 2, "set_to_none": False},
]


@pytest.mark.matrix
@pytest.mark.parametrize("options", MORE, ids=str)
def test_schedules_and_options_change_no_bit(world2: World, options: dict[str, Any]) -> None:
    training = {name: options[name] for name in ("inside", "every", "set_to_none") if name in options}
    plan = {name: option for name, option in options.items() if name not in training}
    for compared in world2.run(partial(stages.compare, evaluate=3, **training), (4, 4, 6, 8), plan):
        assert compared.is_equal
        assert compared.graphs[0] >= 2 * compared.slots[0]


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{"tp": 2}, {"dp": 2}, {"tp": 2, "schedule": "zb_h1"}], ids=str)
def test_ranks_that_share_a_stage_replay_together(world4: World, options: dict[str, Any]) -> None:
    for compared in world4.run(stages.compare, (4, 4, 4), {"pp": 2, **options}):
        assert compared.is_equal
        assert compared.graphs[0] >= 2 * compared.slots[0]


@pytest.mark.parametrize("plan", [{"pp": 2}, pytest.param(SPLIT, marks=pytest.mark.matrix)])
def test_slots_that_share_memory_are_seen(world2: World, plan: dict[str, Any]) -> None:
    # The first rank has two microbatches in flight, and the loss is the same on all.
    for compared in world2.run(partial(stages.compare, alike=True), (4, 4, 4), plan):
        assert not compared.is_equal


def test_shapes_that_are_too_many_are_refused_in_front_of_the_schedule(world2: World) -> None:
    for text, is_equal in world2.run(stages.refused, 4):
        assert "has 1 variants of graphs" in text
        assert is_equal


@pytest.mark.parametrize("odd", [0, 1])
def test_a_stage_that_cannot_be_recorded_ends_the_next_call_of_all_ranks(world2: World, odd: int) -> None:
    said = world2.run(stages.broken_recording, odd)
    ended = f"RankError: rank {odd}, train_step: an earlier call failed: cuda_graphs: a graph cannot hold"
    assert said[odd][0].startswith("InputError: cuda_graphs: a graph cannot hold")
    assert said[1 - odd][0].startswith("loss ")  # it had ended its step by then
    for texts in said:
        assert all(text.startswith(ended) for text in texts[1:])
