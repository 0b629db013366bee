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


def assert_equal_states(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("llama", "bert", "nanogpt"))]
)
def test_the_full_state_dict_is_that_of_the_unsplit_model(world2: World, name: str) -> None:
    wanted = CASES[name].model().state_dict()
    for found in world2.run(jobs.state_of, name):
        assert_equal_states(found, wanted)


def test_names_are_the_author_s_and_shards_are_local(world2: World) -> None:
    original = models.tiny()
    for found in world2.run(jobs.tiny_state):
        assert_equal_states(found["state"], original.state_dict())
        assert "shift" not in found["state"]
        assert found["state"]["head.weight"] is found["state"]["embed.weight"]
        assert found["parameters"] == [n for n, _ in original.named_parameters()]
        assert found["buffers"] == [n for n, _ in original.named_buffers()]
        assert found["modules"] == [n for n, _ in original.named_modules()]
        assert found["sizes"] == {n: tuple(p.shape) for n, p in original.named_parameters()}
        assert found["parts"]["up.weight"] == found["parts"]["down.weight"][::-1] == (6, 6)
        assert found["parts"]["up.bias"] == found["parts"]["down.bias"] == (6,)


def test_a_full_state_dict_loads_again(world2: World) -> None:
    state = {name: torch.randn_like(value) for name, value in models.tiny().state_dict().items()}
    state["head.weight"] = state["embed.weight"]
    for found in world2.run(jobs.reload, state):
        assert_equal_states(found, state)
    del state["embed.weight"]
    found = jobs.reload({name: value.double() for name, value in state.items()})
    assert torch.equal(found["embed.weight"], state["head.weight"])


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
    for found in world2.run(jobs.refused_states, states):
        assert {kind for kind, *_ in (found[name] for name in states)} == {"CheckpointError"}
        assert all(where and reason and remedy for _, where, reason, remedy in (found[n] for n in states))
        assert found["missing"][2] == "lacks norm.weight, up.bias"
        assert found["unknown"][2] == "has the unknown extra.weight"
        assert found["shape"][1:3] == ("down.bias", "has shape [3] and must be a tensor of shape [6]")
        assert found["tied shape"][1] == "head.weight"
        assert "other values" in found["tied values"][2]
        assert found["type"][1:3] == ("scale", "has the type float and must be a tensor of shape []")
        assert found["unchanged"]


def test_frozen_parameters_stay_and_cannot_be_thawed(world2: World) -> None:
    wanted, original = jobs.frozen(), models.tiny().state_dict()
    for found in world2.run(jobs.frozen):
        assert_same(found["gradients"], wanted["gradients"])
        assert_same(found["state"], wanted["state"])
        for name in ("norm.weight", "up.weight", "scale"):
            assert torch.equal(found["state"][name], original[name])
        assert not torch.equal(found["state"]["up.bias"], original["up.bias"])
        assert found["thawed"][:2] == ("InputError", "norm.weight")
    assert not {"norm.weight", "up.weight"} & wanted["gradients"].keys()


def test_extra_state_is_refused() -> None:
    class Extra(models.Tiny):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 1}

    model = fxpar.parallelize(models.tiny(Extra), fxpar.Plan(), models.batch())
    with pytest.raises(CheckpointError, match="no parameter or buffer"):
        model.full_state_dict()
