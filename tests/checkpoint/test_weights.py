"""Weights on real processes: meta models, safetensors and torch.distributed.checkpoint, each equal to one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import fxpar
from fxpar.errors import CheckpointError, InputError
from tests.checkpoint import weight_jobs
from tests.checkpoint.test_full_state import assert_equal_states
from tests.checkpoint.weight_jobs import LIMIT, SEED, meta
from tests.runtime import models
from tests.runtime.world import World


def reference(name: str) -> Any:
    return fxpar.materialize(meta(name), SEED)


@pytest.mark.parametrize(
    "name", ["tiny", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("llama", "gpt2"))]
)
def test_a_meta_model_has_the_weights_of_the_reference(world2: World, name: str) -> None:
    expected = reference(name)
    for results in world2.run(weight_jobs.initialise, name):
        assert_equal_states(results["state"], expected.state_dict())
        assert {n: b.tolist() for n, b in results["buffers"].items()} == {
            n: b.tolist() for n, b in expected.named_buffers()
        }
        torch.testing.assert_close(results["loss"], expected(**weight_jobs.batch(name))["loss"].detach())
        assert results["untouched"]


@pytest.mark.matrix
def test_four_ranks_that_share_heads_have_them_too(world4: World) -> None:
    expected = reference("llama").state_dict()
    for results in world4.run(weight_jobs.initialise, "llama"):
        assert_equal_states(results["state"], expected)


def test_sharded_checkpoints_load_under_other_plans(world2: World, world4: World, tmp_path: Path) -> None:
    expected = reference("llama").state_dict()
    kinds = world4.run(weight_jobs.save_sharded, "llama", tmp_path / "4")[0]
    layer = "model.layers.0"
    assert list(kinds) == list(expected)
    assert kinds["model.embed_tokens.weight"] == kinds["lm_head.weight"] == "(IrregularShard(S(0: 29 ~ 32)),)"
    assert kinds[f"{layer}.self_attn.k_proj.weight"] == "(IrregularShard(S(0: 8 / 2; I)),)"
    assert kinds[f"{layer}.mlp.down_proj.weight"] == "(Shard(dim=1),)"
    assert kinds["model.norm.weight"] == "whole"
    for results in world2.run(weight_jobs.load_sharded, "llama", tmp_path / "4"):
        assert_equal_states(results, expected)
    assert_equal_states(weight_jobs.load_sharded("llama", tmp_path / "4"), expected)
    world2.run(weight_jobs.save_sharded, "llama", tmp_path / "2")
    for results in world4.run(weight_jobs.load_sharded, "llama", tmp_path / "2"):
        assert_equal_states(results, expected)


def test_fused_matrices_load_on_one_process_and_back(world2: World, tmp_path: Path) -> None:
    expected = reference("gpt2").state_dict()
    kinds = world2.run(weight_jobs.save_sharded, "gpt2", tmp_path / "2")[0]
    assert kinds["transformer.h.0.attn.c_attn.weight"] == "(IrregularShard(S(1: 3 x 16)),)"
    assert_equal_states(weight_jobs.load_sharded("gpt2", tmp_path / "2"), expected)
    weight_jobs.save_sharded("gpt2", tmp_path / "1")
    for results in world2.run(weight_jobs.load_sharded, "gpt2", tmp_path / "1"):
        assert_equal_states(results, expected)


def test_a_state_dict_is_loaded_as_it_is_or_refused(world2: World) -> None:
    for results in world2.run(weight_jobs.other_states, "tiny"):
        assert_equal_states(results["loaded"], results["wanted"])
        assert_equal_states(results["whole"], results["wanted"])
        assert results["missing"][0] == "CheckpointError"
        assert results["other"][:2] == ("CheckpointError", "up.weight")
        assert results["other"][2] == "is cut tp:S(1) on 2 ranks and must be cut tp:S(0) on 2 ranks"
        assert results["tied"][:2] == ("CheckpointError", "head.weight")
        assert results["some"] == (["up.bias"], ["extra"])
        assert results["assign"][:2] == ("InputError", "load_state_dict()")
        assert results["parent"][:2] == ("InputError", "state_dict()")


def test_exports_are_read_by_transformers_and_by_other_plans(world2: World, world4: World, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    expected = reference("llama").state_dict()
    for results in world2.run(weight_jobs.export, "llama", folder, LIMIT):
        assert_equal_states(results["state"], expected)
        configurations = {"config.json", "generation_config.json"}
        assert configurations | {"model.safetensors.index.json", "model-00001-of-00009.safetensors"} <= {
            *results["files"]
        }
        # The blocks of two ranks and the whole of one tensor, and one file.
        total = sum(value.numel() * 4 for name, value in expected.items() if name != "lm_head.weight")
        assert results["peak"] <= 3 * results["largest"] + max(LIMIT, results["largest"]) < total
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(value.nbytes for value in tensors.values()) <= LIMIT
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert_equal_states(loaded.state_dict(), expected)
    for results in world4.run(weight_jobs.read_back, "llama", folder):
        assert_equal_states(results, expected)


def test_how_a_model_generates_is_exported_or_refused(tmp_path: Path) -> None:
    model = reference("gpt2")
    model.generation_config.max_new_tokens = 7
    fxpar.parallelize(model, fxpar.Plan(), weight_jobs.batch("gpt2")).save_checkpoint(tmp_path / "model")
    assert transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model").generation_config.max_new_tokens == 7
    model.generation_config.update(temperature=0.5, do_sample=False)
    refused = fxpar.parallelize(model, fxpar.Plan(), weight_jobs.batch("gpt2"))
    with pytest.raises(CheckpointError, match=r"temperature.*; mend it before parallelize"):
        refused.save_checkpoint(tmp_path / "refused")
    model.generation_config = None
    fxpar.parallelize(model, fxpar.Plan(), weight_jobs.batch("gpt2")).save_checkpoint(tmp_path / "mended")


def test_scripts_export_by_the_call_of_transformers(tmp_path: Path) -> None:
    model: Any = fxpar.parallelize(reference("gpt2"), fxpar.Plan(), weight_jobs.batch("gpt2"))
    model.save_pretrained(tmp_path / "model", max_shard_size="10KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    assert_equal_states(loaded.state_dict(), reference("gpt2").state_dict())
    with pytest.raises(InputError, match=r"save_pretrained\(safe_serialization=…\): is not supported.*leave it out"):
        model.save_pretrained(tmp_path / "other", safe_serialization=False)
    with pytest.raises(InputError, match="call save_pretrained of the whole model"):
        model.transformer.save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="push_to_hub"):
        model.push_to_hub("name")


def test_the_tokenizer_is_exported_too(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "ranks": 1, "agree": 2}
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=Tokenizer(WordLevel(words, "[UNK]")))
    model = fxpar.parallelize(reference("gpt2"), fxpar.Plan(), weight_jobs.batch("gpt2"))
    with pytest.raises(InputError, match="tokenizer: a str has no save_pretrained"):
        model.save_checkpoint(tmp_path, tokenizer="gpt2")
    model.save_checkpoint(tmp_path, tokenizer=tokenizer)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).get_vocab() == words


@pytest.mark.matrix
def test_a_checkpoint_of_transformers_is_read_by_shards(world2: World, tmp_path: Path) -> None:
    original = reference("gpt2")
    original.save_pretrained(tmp_path)
    expected = original.state_dict()
    whole = sum(value.nbytes for value in original.parameters())
    for results in world2.run(weight_jobs.from_checkpoint, "gpt2", tmp_path, "as_is", tmp_path / "again"):
        assert_equal_states(results["state"], expected)
        assert results["loading"].read < 0.7 * whole
        assert results["loading"].peak < 0.9 * whole


@pytest.mark.parametrize(
    ("saved", "precision", "dtype"),
    [
        (torch.float32, "bf16_weights", torch.bfloat16),
        pytest.param(torch.float64, "bf16_weights", torch.bfloat16, marks=pytest.mark.matrix),
        (torch.float32, "bf16", torch.float32),
        pytest.param(torch.float64, "fp16", torch.float32, marks=pytest.mark.matrix),
    ],
)
def test_a_checkpoint_is_cast_to_the_plan_s_precision(
    tmp_path: Path, saved: torch.dtype, precision: str, dtype: torch.dtype
) -> None:
    original = models.tiny(weight_jobs.Resettable).to(saved)
    state = {n: v.contiguous() for n, v in original.state_dict().items() if n != "head.weight"}
    save_file({**state, "shift": torch.zeros(6)}, tmp_path / "model.safetensors")
    results = weight_jobs.from_checkpoint("tiny", tmp_path / "model.safetensors", precision, tmp_path / "again")
    for name, value in original.state_dict().items():
        assert torch.equal(results["state"][name], value.to(torch.float32 if name == "scale" else dtype)), name
    saved_again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(value, results["state"][name]) for name, value in saved_again.items())
    assert {value.dtype for value in saved_again.values()} == {dtype, torch.float32}
    assert results["buffers"]["shift"].tolist() == list(range(6))  # not saved: the module's own


def test_one_file_is_written_where_it_is_large_enough(tmp_path: Path) -> None:
    results = weight_jobs.export("tiny", tmp_path, "5GB")
    assert results["files"] == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors").keys() == results["state"].keys() - {"head.weight"}
    model = weight_jobs.initial("tiny")
    with pytest.raises(CheckpointError, match=r"holds model\.safetensors already"):
        model.save_checkpoint(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be written"):
        model.save_checkpoint(tmp_path / "file")
    for size in ("much", "0", -1, "5 stones", True):
        with pytest.raises(fxpar.FxparError, match="must be a size"):
            model.save_checkpoint(tmp_path / "other", size)


def test_bad_checkpoints_are_refused_and_nothing_is_loaded(world2: World, tmp_path: Path) -> None:
    good = {n: torch.full_like(v, 7.0) for n, v in models.tiny().state_dict().items()}
    states: dict[str, Any] = {
        "missing": {n: v for n, v in good.items() if n != "up.bias"},
        "unknown": {**good, "extra.weight": torch.ones(2)},
        "shape": {**good, "down.bias": torch.ones(3)},
        "tied": {**good, "head.weight": good["head.weight"] + 1},
        "prefix": {f"model.{n}": v for n, v in good.items()},
        "short": {n: v for n, v in good.items() if n not in ("embed.weight", "head.weight")},
    }
    for name, state in states.items():
        save_file({n: v.clone() for n, v in state.items()}, tmp_path / f"{name}.safetensors")
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "tied.safetensors").read_bytes()[:100])
    for results in world2.run(weight_jobs.refused_checkpoints, tmp_path):
        assert results.pop("unchanged")
        assert {kind for kind, *_ in results.values()} == {"CheckpointError"}
        assert all(where and reason and remedy for _, where, reason, remedy in results.values())
        assert results["missing"][2] == "lacks up.bias"
        assert results["unknown"][2] == "has the unknown extra.weight"
        assert results["shape"][2] == "has shape [3] and must be a tensor of shape [6]"
        assert "other values" in results["tied"][2]
        assert "rename=lambda name: name.removeprefix('model.')" in results["prefix"][3]
        assert results["short"][2] == "lacks embed.weight, head.weight"
        assert "cannot be read" in results["torn"][2]
    model = weight_jobs.initial("tiny")
    model.load_checkpoint(fxpar.Checkpoint(tmp_path / "prefix.safetensors", lambda name: name.removeprefix("model.")))
    assert_equal_states(model.full_state_dict(), good)
