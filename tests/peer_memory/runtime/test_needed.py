"""Tokens travel to those ranks alone that hold experts they chose: values are those of one device, rows are counted.

What was read is overwritten at once, so that nothing that was not sent is read.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxpar.plan.plan_options import Experts
from tests.peer_memory.runtime import needed_jobs
from tests.runtime.world import World

TWO, FOUR = {"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}
# Plan, routing, experts, choices, length of rows, what is copied besides, and rows.
CASES: list[Any] = [
    (FOUR, "learned", 8, 2, 5, "some", 8),
    (TWO, "learned", 8, 1, 7, "all", 8),
]
MORE: list[Any] = [
    (TWO, "learned", 8, 2, 5, "some", 8),
    (FOUR, "learned", 8, 1, 3, "all", 8),
    (FOUR, "one", 8, 2, 5, "some", 8),
    (FOUR, "some", 8, 1, 5, "some", 8),
    (FOUR, "ties", 8, 2, 5, "all", 8),
    (TWO, "one", 8, 1, 5, "all", 8),
    (FOUR, "learned", 8, 1, 1, "all", 8),  # two tokens of each rank
    (TWO, "learned", 8, 1, 1, "some", 4),
    ({"dp": 4, "ep": 2}, "learned", 8, 1, 5, "all", 8),
    ({**TWO, "compile": True}, "learned", 8, 1, 5, "all", 8),
    ({**FOUR, "experts": Experts(recv_capacity_factor=3, dispatch="allgather")}, "learned", 8, 1, 5, "some", 8),
]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.matrix) for case in MORE)], ids=str)
def test_values_are_those_of_one_device_and_no_row_travels_in_vain(request: pytest.FixtureRequest, case: Any) -> None:
    plan, routing, experts, choices, length, cost, rows = case
    world = request.getfixturevalue(f"world{plan['dp']}")
    given = plan, routing, experts, choices, length, cost, rows
    for loss, gradients, sent, wanted in world.run(needed_jobs.differences, *given):
        assert loss < 1e-9
        assert gradients < 1e-9
        assert sent == wanted


@pytest.mark.matrix
@pytest.mark.parametrize("limit", [{"recv_capacity_factor": 3}, {"capacity_factor": 1.25}], ids=str)
def test_a_limit_drops_the_same_rows(world4: World, limit: dict[str, Any]) -> None:
    for loss, gradients in world4.run(needed_jobs.beside_nccl, {**FOUR, "experts": Experts("allgather", **limit)}):
        assert loss < 1e-9
        assert gradients < 1e-9


WAYS: list[Any] = [(torch.float64, (), 5, 2), (torch.bfloat16, (1, 2), 3, 1)]


@pytest.mark.parametrize("given", WAYS, ids=str)
def test_both_ways_are_those_of_the_process_group(world2: World, given: Any) -> None:
    assert world2.run(needed_jobs.each_way, *given) == [[], []]


@pytest.mark.parametrize("given", [(torch.float64, (2,), 4, 3), (torch.float32, (), 1, 1)], ids=str)
def test_both_ways_on_four_ranks(world4: World, given: Any) -> None:
    assert world4.run(needed_jobs.each_way, *given) == [[]] * 4
