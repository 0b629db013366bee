"""Losses that autograd functions add (`Plan.added_losses`) weigh in a step as the model's own loss does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.products import few
from tests.runtime import added_jobs
from tests.runtime.world import World


def assert_by_hand(found: dict[str, Any], reduction: str, parts: Sequence[Sequence[int]]) -> None:
    loss, gradients = added_jobs.by_hand(reduction, parts)
    assert found["loss"] == pytest.approx(loss, rel=1e-12)
    assert found["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("reduction", few(["mean", "sum", "token"], ["sum", "token"]))
def test_microbatches_of_one_process(reduction: str) -> None:
    assert_by_hand(added_jobs.train(reduction, {}), reduction, [range(4), range(4, 8)])


@pytest.mark.parametrize(
    ("reduction", "parts"),
    [
        ("mean", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        pytest.param("token", [(0, 1, 4, 5), (2, 3, 6, 7)], marks=pytest.mark.matrix),
        ("sum", [(0, 1), (2, 3), (4, 5), (6, 7)]),  # a mean of each rank's own
    ],
)
def test_microbatches_of_two_data_ranks(world2: World, reduction: str, parts: Sequence[Sequence[int]]) -> None:
    for found in world2.run(added_jobs.train, reduction, {"dp": 2}):
        assert_by_hand(found, reduction, parts)


def test_microbatches_of_two_tensor_ranks(world2: World) -> None:
    for found in world2.run(added_jobs.train, "mean", {"tp": 2}):
        assert_by_hand(found, "mean", [range(4), range(4, 8)])
