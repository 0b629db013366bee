"""LoRA adapters of peft on real ranks: what is written, peft and transformers read; trainings stop and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fxpar
from fxpar.errors import CheckpointError, InputError
from tests.adapters import ATTENTION, batch, tiny_llama, with_lora
from tests.checkpoint import adapter_jobs
from tests.checkpoint.test_full_state import assert_equal_states
from tests.runtime.world import World

SIZES: dict[str, dict[str, Any]] = {
    "alone": {},
    "tp2": {"tp": 2},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "dp2-shared": {"dp": 2, "shard": "parameters"},
}
KINDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "dora": {"use_dora": True, "use_rslora": True},
    "head": {"modules_to_save": ["lm_head"], "target_modules": ATTENTION},
    "some-words": {"trainable_token_indices": [1, 5], "target_modules": ATTENTION},
}
EVERY_TIME = [*(("usual", mesh) for mesh in SIZES), ("head", "pp2"), ("some-words", "alone")]


def run(world2: World, mesh: str, job: Any, *args: Any) -> list[Any]:
    """Runs a job on the ranks of a mesh."""
    return world2.run(job, SIZES[mesh], *args) if SIZES[mesh] else [job({}, *args)]


def unsplit(state: dict[str, Tensor], options: dict[str, Any]) -> Any:
    model = with_lora(tiny_llama(), **options)
    model.load_state_dict(state)
    return model.eval()


def text(model: nn.Module) -> list[list[int]]:
    """Words that follow on three prompts, each the most probable one."""
    generate: Any = model.generate
    found: Tensor = generate(input_ids=batch(9)["input_ids"][:3], max_new_tokens=12, do_sample=False)
    return found.tolist()


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param(kind, mesh, marks=[] if (kind, mesh) in EVERY_TIME else [pytest.mark.matrix])
        for kind in KINDS
        for mesh in SIZES
    ],
)
def test_peft_and_transformers_read_what_ranks_write(world2: World, tmp_path: Path, kind: str, mesh: str) -> None:
    """Tensors are those of the ranks bit for bit, and what peft itself would merge."""
    results = run(world2, mesh, adapter_jobs.saved, KINDS[kind], tmp_path)
    state = results[0]["state"]
    for found in results:
        assert_equal_states(found["state"], state)
        assert_equal_states(found["again"], state)
        assert found["with_state"] == found["with_gradient"] == found["trained"]
    expected = unsplit(state, KINDS[kind])
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    keys = set(peft.get_peft_model_state_dict(expected))
    assert set(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == keys
    assert not any(".default" in key for key in keys)
    again: Any = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapter")
    again.eval()
    assert_equal_states(dict(again.state_dict()), dict(expected.state_dict()))
    assert len(list((tmp_path / "merged").glob("model-*.safetensors"))) > 1
    merged: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    merged.eval()
    written = text(expected)
    assert text(again) == written
    assert text(merged) == written
    assert_equal_states(merged.state_dict(), expected.merge_and_unload().state_dict())


def test_adapters_load_under_other_plans(world2: World, tmp_path: Path) -> None:
    """A folder that peft has written."""
    expected = with_lora(tiny_llama())
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.mul_(2.0 if "lora" in name else 1.0)
    expected.save_pretrained(tmp_path)
    for mesh in ("tp2", "pp2"):
        for state in run(world2, mesh, adapter_jobs.loaded, {}, tmp_path):
            assert_equal_states(state, dict(expected.state_dict()))


@pytest.mark.parametrize("mesh", ["tp2", pytest.param("pp2", marks=pytest.mark.matrix)])
def test_a_base_that_no_process_holds_gets_an_adapter(world2: World, tmp_path: Path, mesh: str) -> None:
    """The base's weights are read from its own folder. The adapter begins as peft's does, and changes nothing."""
    base = tiny_llama()
    base.save_pretrained(tmp_path / "base")
    doubled = {name: 2 * value for name, value in base.state_dict().items()}
    options = {"modules_to_save": ["lm_head"], "target_modules": ["embed_tokens", *ATTENTION]}
    names = {name: with_lora_name(name) for name in doubled}
    for folder, state in (("base", base.state_dict()), ("other", doubled)):
        (tmp_path / folder).mkdir(exist_ok=True)
        save_file({name: value.clone() for name, value in state.items()}, tmp_path / folder / "model.safetensors")
    for found in run(world2, mesh, adapter_jobs.from_base, options, tmp_path):
        before, after = found["before"], found["after"]
        copied = "base_model.model.lm_head.modules_to_save.default.weight"
        for name, value in base.state_dict().items():
            assert torch.equal(before[names[name]], value), name
            assert torch.equal(after[names[name]], doubled[name]), name
        assert torch.equal(before[copied], base.lm_head.weight)
        adapters = [name for name in before if ".lora_" in name]
        assert len(adapters) == 2 * 9
        for name in adapters:
            assert torch.equal(before[name], after[name])
            is_zero = ".lora_B." in name or ".lora_embedding_A." in name
            assert bool((before[name] == 0).all()) == is_zero
            if ".lora_A." in name:
                assert 0.15 < before[name].abs().max() <= before[name].shape[1] ** -0.5
        assert found["loss"] == pytest.approx(base(**batch()).loss.item(), rel=1e-5)


def with_lora_name(name: str) -> str:
    """The name that a tensor of the base has in the model with adapters."""
    path, _, leaf = f"base_model.model.{name}".rpartition(".")
    part = path.rpartition(".")[2]
    inside = "base_layer." if part in (*ATTENTION, "embed_tokens") else "original_module." if part == "lm_head" else ""
    return f"{path}.{inside}{leaf}"


def test_adapters_that_are_made_of_values_need_values() -> None:
    with torch.device("meta"):
        model: Any = with_lora(tiny_llama())
    model.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(InputError, match=r"'pissa': is made of the base's weights.*init_lora_weights=True"):
        fxpar.materialize(model)


@pytest.mark.parametrize("mesh", ["tp2", pytest.param("pp2", marks=pytest.mark.matrix), "dp2-shared"])
def test_trainings_of_adapters_stop_and_go_on(world2: World, tmp_path: Path, mesh: str) -> None:
    """A save holds the frozen base too, and state of what is trained alone; transformers finds no model there."""
    for found in run(world2, mesh, adapter_jobs.stopped, {}, tmp_path):
        assert found["again"] == found["after"]
        assert found["position"] == 2
    trained = {name for name, p in with_lora(tiny_llama()).named_parameters() if p.requires_grad}
    assert set(load_file(found["path"] / "optimizer.exp_avg.safetensors")) == trained
    assert set(load_file(found["path"] / "model.safetensors")) == set(with_lora(tiny_llama()).state_dict())
    assert not (found["path"] / "config.json").exists()


@pytest.mark.parametrize("mesh", ["alone", "tp2"])
def test_peft_merges_nothing_that_ranks_run(world2: World, mesh: str) -> None:
    """It would change the base's weights, and programs would add the adapter once more."""
    for found in run(world2, mesh, adapter_jobs.unmerged):
        for action in ("merge_adapter", "merge_and_unload", "merge"):
            kind, where, _, remedy = found[action]
            assert (kind, where) == ("InputError", "base_model.model.model.layers.0.self_attn.q_proj")
            assert "save_checkpoint(folder, merged=True)" in remedy
        assert found["save_pretrained"][1] == "save_pretrained(selected_adapters=…)"
        assert found["same"]
        counted: Any = with_lora(tiny_llama())
        assert found["counts"] == counted.get_nb_trainable_parameters()


def alone(model: nn.Module) -> fxpar.ParallelModule:
    return fxpar.parallelize(model, fxpar.Plan(), batch())


def test_what_cannot_be_merged_is_saved_by_itself(tmp_path: Path) -> None:
    plain = alone(tiny_llama())
    with pytest.raises(InputError, match=r"merged=True: the model has no adapter of peft; leave it out"):
        plain.save_checkpoint(tmp_path / "plain", merged=True)
    with pytest.raises(InputError, match=r"merged='yes': must be a bool"):
        plain.save_checkpoint(tmp_path / "plain", merged="yes")  # type: ignore[arg-type]
    base = tiny_llama()
    base.lm_head.weight = base.model.embed_tokens.weight
    tied = alone(with_lora(base, target_modules=["embed_tokens", "q_proj"]))
    with pytest.raises(InputError, match=r"embed_tokens.*is tied to base_model.model.lm_head.weight"):
        tied.save_checkpoint(tmp_path / "tied", merged=True)
    biased = alone(with_lora(tiny_llama(), lora_bias=True))
    with pytest.raises(InputError, match=r"q_proj: peft cannot merge its adapter: .*bias"):
        biased.save_checkpoint(tmp_path / "biased", merged=True)
    assert not any((tmp_path / name).exists() for name in ("plain", "tied", "biased"))
    biased.save_checkpoint(tmp_path / "biased")
    assert (tmp_path / "biased" / "adapter_model.safetensors").is_file()
    with pytest.raises(CheckpointError, match=r"the folder holds adapter_model.safetensors already"):
        biased.save_checkpoint(tmp_path / "biased")


def test_adapters_of_another_meaning_are_refused(tmp_path: Path) -> None:
    """Tensors fit, and would be scaled otherwise."""
    model = alone(with_lora(tiny_llama()))
    before = model.full_state_dict()
    with_lora(tiny_llama(), lora_alpha=7).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"lora_alpha=7, and the model's adapter 5; .*PeftConfig"):
        model.load_checkpoint(tmp_path / "other")
    with_lora(tiny_llama(), r=2).save_pretrained(tmp_path / "shape")
    with pytest.raises(CheckpointError, match=r"has shape \[2, 42\] and must be a tensor of shape \[3, 42\]"):
        model.load_checkpoint(tmp_path / "shape")
    with_lora(tiny_llama(), target_modules=["q_proj"]).save_pretrained(tmp_path / "fewer")
    with pytest.raises(CheckpointError, match=r"lacks .*lora_"):
        model.load_checkpoint(tmp_path / "fewer")
    for text in ("[]", "3", "[" * 100000):
        (tmp_path / "fewer" / "adapter_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"adapter_config.json: cannot be read"):
            model.load_checkpoint(tmp_path / "fewer")
    (tmp_path / "fewer" / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config.json: cannot be read"):
        model.load_checkpoint(tmp_path / "fewer")
    assert_equal_states(model.full_state_dict(), before)


def test_adapters_of_other_tokens_are_refused(tmp_path: Path) -> None:
    """Tensors fit, and would change other words."""
    with_lora(tiny_llama(), trainable_token_indices=[1, 5]).save_pretrained(tmp_path)
    alone(with_lora(tiny_llama(), trainable_token_indices=[1, 5])).load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"trainable_token_indices=\[1, 5\], and the model's adapter \[2, 6\]"):
        alone(with_lora(tiny_llama(), trainable_token_indices=[2, 6])).load_checkpoint(tmp_path)


def test_trainings_of_adapters_of_another_meaning_are_refused(tmp_path: Path) -> None:
    """Tensors fit, and would be scaled otherwise: in a resume, and where weights alone are loaded."""
    model = alone(with_lora(tiny_llama()))
    path = model.save_training(tmp_path, fxpar.Optimizer(model, "adamw", lr=1e-2))
    other = alone(with_lora(tiny_llama(), lora_alpha=7))
    message = r"adapter_config.json: has lora_alpha=5, and the model's adapter 7; .*PeftConfig"
    with pytest.raises(CheckpointError, match=message):
        other.resume_training(tmp_path, fxpar.Optimizer(other, "adamw", lr=1e-2))
    for place in (path, path / "model.safetensors"):
        with pytest.raises(CheckpointError, match=message):
            other.load_checkpoint(place)
    model.load_checkpoint(path)


def test_the_configuration_is_for_inference_and_names_the_base(tmp_path: Path) -> None:
    base = tiny_llama()
    base.name_or_path = "some/base"
    model = with_lora(base, task_type=None)
    alone(model).save_checkpoint(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["inference_mode"], config["base_model_name_or_path"]) == (True, "some/base")
    assert config["auto_mapping"] == {
        "base_model_class": "LlamaForCausalLM",
        "parent_library": "transformers.models.llama.modeling_llama",
    }
    assert not model.peft_config["default"].inference_mode
