"""Replicas of hot experts in graphs: slots follow the routing of each replay, and steps are the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from fxpar import Experts
from tests.cudagraphs.graphed import equal_with_replicas, mixtral_with_hot_experts, small_with_hot_experts
from tests.runtime.world import World

matrix = pytest.mark.matrix


@pytest.mark.parametrize(
    ("build", "impl", "dispatch", "plan", "graphs"),
    [
        (small_with_hot_experts, "full_iteration", "static", {}, 2),
        # Two more than without replicas: both weights of experts are sent again in the backward.
        (small_with_hot_experts, "partial", "dropless", {}, 9),
        pytest.param(mixtral_with_hot_experts, "full_iteration", "static", {}, 2, marks=matrix),
        pytest.param(mixtral_with_hot_experts, "partial", "dropless", {}, 9, marks=matrix),
        pytest.param(mixtral_with_hot_experts, "full_iteration", "alltoall", {}, 2, marks=matrix),
        pytest.param(mixtral_with_hot_experts, "full_iteration", "static", {"inside": True}, 2, marks=matrix),
        pytest.param(mixtral_with_hot_experts, "partial", "static", {}, 3, marks=matrix),
    ],
)
def test_a_training_is_the_same_to_the_bit(
    world2: World, build: Callable[[], nn.Module], impl: str, dispatch: str, plan: dict[str, Any], graphs: int
) -> None:
    plan = {"experts": Experts(dispatch, spare_experts=1, min_gain=0), **plan}
    for same, figures, loads in world2.run(equal_with_replicas, build, impl, plan):
        assert same
        assert figures.graphs == graphs
        assert len(loads) == 6
        for step, load in enumerate(loads):
            cold, hot = sorted((load.experts[:2], load.experts[2:]), key=sum)
            assert load.before == (sum(load.experts[:2]), sum(load.experts[2:]))
            assert hot == (load.experts[:2], load.experts[2:])[step % 2]
            assert sum(load.ranks) // 2 == load.ranks[0] > 2 * sum(cold)
