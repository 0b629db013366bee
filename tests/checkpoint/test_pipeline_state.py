"""State of a pipeline: what its ranks hold together is saved and loaded as the whole model, under any other plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpar
from tests.checkpoint import pipeline_jobs as jobs
from tests.pipeline.runtime.pipeline_jobs import deep
from tests.runtime import models
from tests.runtime.jobs import Found
from tests.runtime.world import World

SPLIT = {"up.*": "column", "down.*": "row"}
TENSOR_PARALLEL: dict[str, Any] = {"tp": 2, "split": SPLIT}

assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


def assert_goes_on(results: Found, expected: Found) -> None:
    assert_close(results["losses"], expected["losses"])
    assert results["state"].keys() == expected["state"].keys()
    assert_close(results["state"], expected["state"])
    assert results["position"] == {"batch": 2}
    assert results["step"] == expected["step"] == 4


def test_a_training_goes_on_under_other_plans(world2: World, world4: World, tmp_path: Path) -> None:
    expected = jobs.saved(tmp_path / "one", {})
    for world, folder, options in ((world2, "two", {}), (world4, "four", TENSOR_PARALLEL)):
        for results in world.run(jobs.saved, tmp_path / folder, options):
            assert_close(results["state"], expected["state"])
            assert results["path"].parent == tmp_path / folder
    for folder in ("one", "two", "four"):
        assert_goes_on(jobs.resumed(tmp_path / folder, {}), expected)
        for results in world2.run(jobs.resumed, tmp_path / folder, {}):
            assert_goes_on(results, expected)
        for results in world4.run(jobs.resumed, tmp_path / folder, TENSOR_PARALLEL):
            assert_goes_on(results, expected)


@pytest.mark.matrix
def test_several_stages_a_rank_go_on_from_one_each(world2: World, tmp_path: Path) -> None:
    expected = jobs.saved(tmp_path, {})
    for results in world2.run(jobs.resumed, tmp_path, {"virtual_stages": 2}):
        assert_goes_on(results, expected)


def check(ranks: list[Found]) -> None:
    state = deep({}).full_state_dict()
    names = {"embed.weight", "head.weight"}
    assert set().union(*(results["own"] for results in ranks)) == state.keys()
    assert set.intersection(*(set(results["own"]) for results in ranks)) == names | {"scale"}
    for results in ranks:
        assert results["state"].keys() == state.keys()
        assert_close(results["state"], state, atol=0)
        # Tied words are saved once.
        assert results["files"].keys() == state.keys() - {"head.weight"}
        assert_close(results["files"], {n: v for n, v in state.items() if n != "head.weight"}, atol=0)
        # What other ranks hold is no module's own name here.
        assert len(results["names"]) < len(state) - 2
        assert results["is spoilt"]
        assert all(results[way] for way in ("safetensors", "parts", "whole as parts", "full"))
        assert results["misfits"] == []
        assert results["lacking"][:3] == ("CheckpointError", "state dict", "lacks up.0.bias")
        for way in ("odd", "odd parts"):
            assert results[way][:3] == ("CheckpointError", "state dict", "has the unknown odd")
        assert results["shape"][:3] == (
            "CheckpointError",
            "up.0.bias",
            "has shape [3] and must be a tensor of shape [12]",
        )


def test_state_dicts_and_checkpoints_are_the_whole_models_on_every_rank(world2: World, tmp_path: Path) -> None:
    check(world2.run(jobs.checkpoints, tmp_path, {}))
    with torch.device("meta"):
        empty = models.Deep().double()
    torch.manual_seed(4)
    empty.unused = torch.nn.Parameter(torch.randn(3, dtype=torch.float64))
    empty.scale, empty.shift = torch.tensor(0.5, dtype=torch.float64), torch.arange(6.0, dtype=torch.float64)
    initial = fxpar.materialize(empty).state_dict()
    for results in world2.run(jobs.made, tmp_path / "whole", {}):
        assert_close(results["initial"], initial, atol=0)
        assert_close(results["read"], deep({}).full_state_dict(), atol=0)
        # A rank makes and reads what it holds, and nothing else.
        assert results["held"][0] == results["held"][1]
        assert results["bytes read"][0] == results["bytes read"][1]


@pytest.mark.matrix
def test_cut_parameters_are_saved_by_the_stages_that_hold_them(world4: World, tmp_path: Path) -> None:
    check(world4.run(jobs.checkpoints, tmp_path, TENSOR_PARALLEL))
