"""Files with the names and shapes of published checkpoints are read by shards, and become what transformers makes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

import fxpar
from fxpar.checkpoint.model_names import open_for
from fxpar.checkpoint.tensor_pieces import Entry, concatenated, divided, stacked
from fxpar.errors import CheckpointError
from fxpar.layout.layout import Layout
from tests.checkpoint import published
from tests.checkpoint.published import build
from tests.checkpoint.test_full_state import assert_equal_states
from tests.runtime.world import World


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "vit"])
def test_published_names_become_those_of_the_model(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() != model.state_dict().keys()
    opened = open_for(model, tmp_path, list(model.state_dict()))
    assert opened.shapes == {key: tuple(value.shape) for key, value in model.state_dict().items()}
    with opened.reading() as reader:
        for key, value in model.state_dict().items():
            torch.testing.assert_close(reader.part(key, Layout(), {}, {}), value, rtol=0, atol=0)


@pytest.mark.parametrize("axes", [pytest.param({"tp": 2}, marks=pytest.mark.matrix), {"dp": 2, "ep": 2}])
def test_ranks_read_their_parts_of_stacked_experts(world2: World, axes: dict[str, int], tmp_path: Path) -> None:
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    total = sum(value.nbytes for value in load_file(tmp_path / "model.safetensors").values())
    for results in world2.run(published.read, axes, tmp_path):
        assert_equal_states(results["state"], model.state_dict())
        assert results["read"] < 0.8 * total
        assert results["besides"] < 0.3 * total


def test_what_ranks_cannot_do_for_their_part_is_refused(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"] = torch.zeros(3, 32)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts.gate_up_proj: is made of .*\[1, 16, 32\] and .*\[1, 3, 32\]"):
        open_for(model, tmp_path, list(model.state_dict()))
    del tensors["model.layers.0.mlp.experts.1.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts.gate_up_proj: is made of .*\[4, 16, 32\] and .*\[3, 16, 32\]"):
        open_for(model, tmp_path, list(model.state_dict()))


def test_another_change_of_transformers_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    turned = WeightConverter("lm_head.weight", "lm_head.weight", [Transpose(0, 1)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [turned])
    with pytest.raises(CheckpointError, match=r"lm_head.weight: transformers makes it of .*Transpose.*from_pretrained"):
        open_for(model, tmp_path, list(model.state_dict()))


def test_pieces_are_those_of_torch(tmp_path: Path) -> None:
    tensors = {f"{name}": torch.randn(3, 4) for name in "abcd"}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    a, b, c, d = (fxpar.Checkpoint(tmp_path).entries[name] for name in "abcd")
    left, right = stacked([a, b], ""), stacked([c, d], "")
    joined = concatenated([left, right], 1, "")
    expected = torch.cat([torch.stack([tensors["a"], tensors["b"]]), torch.stack([tensors["c"], tensors["d"]])], 1)
    made: dict[str, Entry] = {"joined": joined}
    made |= {f"part {i}": part for i, part in enumerate(divided(joined, 1, 4))}
    made |= {f"column {i}": part for i, part in enumerate(divided(a, -1, 3))}
    checkpoint = fxpar.Checkpoint(tmp_path).with_entries(made)
    assert checkpoint.digest != fxpar.Checkpoint(tmp_path).digest
    parts = [*expected.chunk(4, 1), *tensors["a"].chunk(3, -1)]
    with checkpoint.reading() as reader:
        for name, value in zip(made, [expected, *parts], strict=False):
            torch.testing.assert_close(reader.part(name, Layout(), {}, {}), value)
