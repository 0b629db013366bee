"""Whole state dicts of split modules: equal to the unsplit model's, and nothing else is taken."""

from typing import Any

import pytest
import torch

import fxpar
from fxpar.errors import CheckpointError
from tests.runtime import jobs, models
from tests.runtime.test_training import assert_same
from tests.runtime.world import World
from tests.zoo import CASES


def assert_equal_states(results: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(results) == list(expected)
    for name, value in expected.items():
        assert results[name].dtype == value.dtype
        assert torch.equal(results[name], value), name


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("llama", "bert", "nanogpt"))]
)
def test_the_full_state_dict_is_that_of_the_unsplit_model(world2: World, name: str) -> None:
    expected = CASES[name].model().state_dict()
    for results in world2.run(jobs.state_of, name):
        assert_equal_states(results, expected)


def test_names_are_the_author_s_and_shards_are_local(world2: World) -> None:
    original = models.tiny()
    for results in world2.run(jobs.tiny_state):
        assert_equal_states(results["state"], original.state_dict())
        assert "shift" not in results["state"]
        assert results["state"]["head.weight"] is results["state"]["embed.weight"]
        assert results["parameters"] == [n for n, _ in original.named_parameters()]
        assert results["buffers"] == [n for n, _ in original.named_buffers()]
        assert results["modules"] == [n for n, _ in original.named_modules()]
        assert results["sizes"] == {n: tuple(p.shape) for n, p in original.named_parameters()}
        assert results["parts"]["up.weight"] == results["parts"]["down.weight"][::-1] == (6, 6)
        assert results["parts"]["up.bias"] == results["parts"]["down.bias"] == (6,)


def test_a_full_state_dict_loads_again(world2: World) -> None:
    state = {name: torch.randn_like(value) for name, value in models.tiny().state_dict().items()}
    state["head.weight"] = state["embed.weight"]
    for results in world2.run(jobs.reload, state):
        assert_equal_states(results, state)
    del state["embed.weight"]
    results = jobs.reload({name: value.double() for name, value in state.items()})
    assert torch.equal(results["embed.weight"], state["head.weight"])


def test_bad_state_dicts_are_refused_and_nothing_is_loaded(world2: World) -> None:
    good = {name: torch.full_like(value, 7.0) for name, value in models.tiny().state_dict().items()}
    states: dict[str, Any] = {
        "missing": {n: v for n, v in good.items() if n not in ("up.bias", "norm.weight")},
        "unknown": {**good, "extra.weight": torch.ones(2)},
        "shape": {**good, "down.bias": torch.ones(3)},
        "tied shape": {**good, "head.weight": torch.ones(3)},
        "tied values": {**good, "head.weight": good["head.weight"] + 1},
        "type": {**good, "scale": 0.5},
    }
    for results in world2.run(jobs.refused_states, states):
        assert {kind for kind, *_ in (results[name] for name in states)} == {"CheckpointError"}
        assert all(where and reason and remedy for _, where, reason, remedy in (results[n] for n in states))
        assert results["missing"][2] == "lacks norm.weight, up.bias"
        assert results["unknown"][2] == "has the unknown extra.weight"
        assert results["shape"][1:3] == ("down.bias", "has shape [3] and must be a tensor of shape [6]")
        assert results["tied shape"][1] == "head.weight"
        assert "other values" in results["tied values"][2]
        assert results["type"][1:3] == ("scale", "has the type float and must be a tensor of shape []")
        assert results["unchanged"]


def test_frozen_parameters_stay_and_cannot_be_thawed(world2: World) -> None:
    expected, original = jobs.frozen(), models.tiny().state_dict()
    for results in world2.run(jobs.frozen):
        assert_same(results["gradients"], expected["gradients"])
        assert_same(results["state"], expected["state"])
        for name in ("norm.weight", "up.weight", "scale"):
            assert torch.equal(results["state"][name], original[name])
        assert not torch.equal(results["state"]["up.bias"], original["up.bias"])
        assert results["thawed"][:2] == ("InputError", "norm.weight")
    assert not {"norm.weight", "up.weight"} & expected["gradients"].keys()


def test_extra_state_is_refused() -> None:
    class Extra(models.Tiny):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 1}

    model = fxpar.parallelize(models.tiny(Extra), fxpar.Plan(), models.batch())
    with pytest.raises(CheckpointError, match="must be a parameter or buffer"):
        model.full_state_dict()
