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
        ("biased", 12, (2, 4, 5, 9), 1, {"every": 2}),
        ("biased", 8, (2, 3, 5, 6), 2, {"every": 2, "inside": False}),
        pytest.param("mixtral", 12, (2, 4, 5, 9), 1, {"every": 2}, marks=pytest.mark.matrix),
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


COPY: dict[str, Any] = {"communication": fxpar.Communication("copy")}
IMPLS = ("partial", "full_iteration")
# Of two layers the one on the first or on the last stage has too few places, so that the ranks must tell each other.
# With `partial` a rank of the first stages and of the last has so many graphs: half of them have places for all rows.
PIPELINES: dict[str, tuple[str, tuple[str, ...], tuple[int, int], dict[str, Any]]] = {
    "1f1b": ("last", IMPLS, (8, 4), {"every": 2, **COPY}),
    "zb_h1": ("first", IMPLS, (8, 12), {"schedule": "zb_h1", "every": 2, "inside": False}),
    "interleaved": ("first", IMPLS, (24, 16), {"virtual_stages": 2, "microbatches": 4, "evaluate": True, **COPY}),
    "gpipe": ("last", IMPLS, (16, 16), {"schedule": "gpipe", "every": 2, "optimizer": "sgd", "evaluate": True}),
    "compiled": ("last", IMPLS, (8, 4), {"compile": True}),
    "bf16": ("first", IMPLS, (8, 4), {"precision": "bf16", "every": 2, "inside": False}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "1f1b" else pytest.mark.matrix) for name in PIPELINES]
)
def test_a_pipeline_whose_rows_are_too_many_runs_as_with_places_for_all(world4: World, name: str) -> None:
    model, impls, graphs, options = PIPELINES[name]
    stages = fxpar.Pipeline({"layers.1": options.get("virtual_stages", 1)})
    job = overflowing.compared_with_places
    found = world4.run(
        job, model, 7, (0, 2, 5), ("none", *impls), {"pp": 2, "pipeline": stages, **options}, seconds=540
    )
    for rank, (none, partial, *full) in enumerate(found):
        for is_equal, (note, number), _ in (none, partial, *full):
            assert is_equal
            assert number == 8
            assert note.startswith("Of 8 steps 3 were repeated")
        assert partial[2] == graphs[rank // 2]
        assert all(count == (2 if "every" in options else 1) for _, _, count in full)


def test_a_repeat_that_would_be_a_variant_too_many_is_refused_in_front_of_the_schedule(world4: World) -> None:
    for reason, is_equal in world4.run(overflowing.refused_variant):
        assert "has 1 variants of graphs" in reason
        assert is_equal
