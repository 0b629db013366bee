"""A captured step in which more rows of experts come than there are places for is repeated, and has changed nothing."""

from __future__ import annotations

from typing import Any

import pytest

import fxpar
from tests.cudagraphs import overflowing
from tests.runtime.world import World

EXACT = {"experts": fxpar.Experts()}


@pytest.mark.parametrize(
    ("model", "steps", "overflows", "micro", "options"),
    [
        # A step and one that adds to its gradients are two graphs: both overflow when they are recorded, and later.
        ("mixtral", 12, (2, 4, 5, 9), 1, {"every": 2}),
        ("biased", 8, (2, 3, 5, 6), 2, {"every": 2, "inside": False}),
        pytest.param("mixtral", 7, (0, 2, 4), 2, {}, marks=pytest.mark.matrix),
        pytest.param("mixtral", 12, (2, 4, 5, 9), 1, {"every": 2, "optimizer": "sgd"}, marks=pytest.mark.matrix),
        pytest.param("mixtral", 7, (2, 4), 1, {"inside": False, "precision": "bf16"}, marks=pytest.mark.matrix),
        pytest.param("mixtral", 7, (3, 4), 1, {"tp": 2, "dp": 1, "etp": 1}, marks=pytest.mark.matrix),
        pytest.param("biased", 7, (3, 4), 1, {}, marks=pytest.mark.matrix),
        pytest.param("biased", 7, (3, 4), 1, {"compile": True}, marks=pytest.mark.matrix),
    ],
)
def test_a_training_whose_rows_are_too_many_is_the_same_to_the_bit(
    world2: World, model: str, steps: int, overflows: tuple[int, ...], micro: int, options: dict[str, Any]
) -> None:
    for is_equal, (note, number), graphs in world2.run(overflowing.compared, model, steps, overflows, micro, options):
        assert is_equal
        assert number == steps + 1  # what is repeated draws the same bits
        assert note.startswith(f"Of {steps + 1} steps {len(overflows)} were repeated")
        assert graphs == (2 if "every" in options else 1)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("biased", {}),
        pytest.param("biased", {"inside": False}, marks=pytest.mark.matrix),
        pytest.param("deepseek", {}, marks=pytest.mark.matrix),
        pytest.param("mixtral", {}, marks=pytest.mark.matrix),
    ],
)
def test_steps_with_places_for_all_rows_count_once(world2: World, model: str, options: dict[str, Any]) -> None:
    """Neither a step before the recording nor the recording counts rows, or moves biases, a second time."""
    for is_equal, _, graphs in world2.run(overflowing.compared, model, 5, (), 2, {**EXACT, **options}):
        assert is_equal
        assert graphs == 1


@pytest.mark.parametrize("name", ["Adam", pytest.param("RMSprop", marks=pytest.mark.matrix)])
def test_an_optimizer_that_cannot_skip_a_step_on_the_device_is_refused(world2: World, name: str) -> None:
    for kind, where, reason, remedy in world2.run(overflowing.refused, name):
        assert (kind, where) == ("InputError", name)
        assert "cannot skip a step on the device" in reason
        assert "step it after train_step" in remedy
