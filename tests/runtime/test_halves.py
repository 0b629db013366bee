"""Two half batches in turn on ranks: what whole batches give, where rows are odd too, and ranks bring other numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime import halves_jobs
from tests.runtime.world import ANSWER_SECONDS, World

PLANS: list[Any] = [
    {"tp": 2, "exchange": "copy"},
]
MORE_PLANS: list[Any] = [
    {"dp": 2},
    {"tp": 2, "exchange": "copy", "compile": True},
    {"tp": 2, "sequence_parallel": True, "exchange": "copy"},
    {"tp": 2, "recompute": "full"},
    {"tp": 2, "cuda_graphs": {"impl": "full_iteration"}},
]


@pytest.mark.parametrize("plan", [*PLANS, *(pytest.param(p, marks=pytest.mark.matrix) for p in MORE_PLANS)], ids=str)
def test_training_is_that_of_whole_batches(request: pytest.FixtureRequest, plan: dict[str, Any]) -> None:
    world: World = request.getfixturevalue("world2")
    seconds = 480.0 if "compile" in plan else ANSWER_SECONDS  # two minutes where nothing else runs and no cache is warm
    for losses, gradients, kinds in world.run(halves_jobs.differences, plan, seconds=seconds):
        assert losses < 1e-6  # transformers computes them in float32
        assert gradients < 1e-6
        assert kinds == [True, False]  # one program for even batches, and one for odd ones


@pytest.mark.parametrize(("rows", "kinds"), [(4, [True, False]), (3, [False])])
def test_what_cost_says_of_the_example_holds_of_all_steps(world2: World, rows: int, kinds: list[bool]) -> None:
    assert world2.run(halves_jobs.chosen, rows) == [("auto", kinds)] * 2
