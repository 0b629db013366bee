"""Replicas of hot experts: the plan is that of plain loops, and renumbered choices are undone to the router's."""

from __future__ import annotations

import pytest
import torch

from fxpar.experts.operators.replicas import plan_replicas

# Loads of 8 experts on 4 ranks with one slot each: the expert in each slot, and how many pairs go there.
VECTORS = [
    pytest.param([100, 20, 30, 10, 10, 10, 10, 10], [-1, 0, 0, 0], [0, 10, 30, 30], id="hot"),
    pytest.param([120, 80, 40, 40, 20, 20, 10, 30], [-1, 0, 0, 0], [0, 10, 50, 50], id="hot-rank"),
    pytest.param([10] * 8, [-1] * 4, [0] * 4, id="balanced"),
]


@pytest.mark.parametrize(("loads", "home", "moved"), VECTORS)
def test_vectors(loads: list[int], home: list[int], moved: list[int]) -> None:
    counts = torch.zeros(4, 8, dtype=torch.int64)
    counts[2] = torch.tensor(loads)
    slots, pairs = plan_replicas(counts, 1, 0.0)
    assert slots.tolist() == home
    assert pairs.tolist() == [[0] * 4, [0] * 4, moved, [0] * 4]
