"""Models named on the command line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxpar.cli.models import LoadedModel, load_model
from fxpar.errors import InputError


def load(spec: str, batch: int | None = None, seq: int | None = None, seed: int = 0, train: bool = True) -> LoadedModel:
    return load_model(spec, batch, seq, seed, train)


def config(loaded: LoadedModel) -> Any:
    return loaded.model.config


@pytest.mark.parametrize(
    ("spec", "experts"),
    [
        ("hf:kimi_linear", 32),
        ("hf:qwen3_moe", 32),
        ("hf:qwen3_moe,num_experts=8", 8),
        ("hf:qwen3_moe,num_experts_per_tok=40", 128),
        ("hf:mixtral", 8),
    ],
)
def test_experts_are_few_and_more_than_a_token_takes(spec: str, experts: int) -> None:
    sizes = [size for name, size in shapes(load(spec).model).items() if name.endswith("gate_up_proj")]
    assert {size[0] for size in sizes} == {experts}


def shapes(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in model.named_parameters()}


def test_gpt2_is_small_and_its_sizes_differ() -> None:
    loaded = load("hf:gpt2")
    found = shapes(loaded.model)
    assert type(loaded.model).__name__ == "GPT2LMHeadModel"
    assert found["transformer.wte.weight"] == [259, 96]
    assert found["transformer.wpe.weight"] == [64, 96]
    assert found["transformer.h.1.mlp.c_fc.weight"] == [96, 160]
    assert not any(name.startswith("transformer.h.2") for name in found)
    assert {name: list(t.shape) for name, t in loaded.batch.items()} == {"input_ids": [3, 16], "labels": [3, 16]}
    assert loaded.loss is None
    assert loaded.name == "hf:gpt2"


@pytest.mark.parametrize(
    ("spec", "name", "parameter", "shape"),
    [
        ("hf:bert", "BertForMaskedLM", "bert.encoder.layer.0.intermediate.dense.weight", [160, 96]),
        ("hf:llama", "LlamaForCausalLM", "model.layers.0.self_attn.k_proj.weight", [48, 96]),
        ("hf:bloom", "BloomForCausalLM", "transformer.h.0.self_attention.query_key_value.weight", [288, 96]),
        ("hf:vit", "ViTForImageClassification", "classifier.weight", [7, 96]),
        ("hf:qwen3", "Qwen3ForCausalLM", "model.layers.0.self_attn.q_norm.weight", [12]),
        ("hf:gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.layers.1.mlp.dense_h_to_4h.weight", [160, 96]),
        ("hf:t5", "T5ForConditionalGeneration", "decoder.block.1.layer.2.DenseReluDense.wi.weight", [160, 96]),
        ("hf:opt", "OPTForCausalLM", "model.decoder.layers.1.fc1.weight", [160, 96]),
        ("hf:gptj", "GPTJForCausalLM", "transformer.h.1.mlp.fc_in.weight", [160, 96]),
        ("hf:bert,is_decoder=true", "BertLMHeadModel", "cls.predictions.bias", [259]),
    ],
)
def test_architectures_take_their_own_field_names(spec: str, name: str, parameter: str, shape: list[int]) -> None:
    model = load(spec).model
    assert type(model).__name__ == name
    assert shapes(model)[parameter] == shape


@pytest.mark.parametrize("spec", ["hf:gpt2", "hf:llama", "hf:gpt_neox", "hf:t5", "hf:vit"])
def test_examples_run_and_give_a_loss(spec: str) -> None:
    loaded = load(spec)
    loss = loaded.model(**loaded.batch).loss
    assert loss.shape == ()
    assert loss.isfinite()


def test_a_model_without_a_loss_gets_one() -> None:
    loaded = load("hf:clip_text_model")
    assert set(loaded.batch) == {"input_ids"}
    assert callable(loaded.loss)
    assert loaded.loss(loaded.model(**loaded.batch), loaded.batch).isfinite()


def test_biases_and_norm_weights_are_neither_zero_nor_one() -> None:
    model = load("hf:bert").model
    vectors = {name: p for name, p in model.named_parameters() if p.dim() == 1}
    assert vectors
    assert all(((p != 0) & (p != 1)).all() for p in vectors.values())


def test_dropout_is_on_in_training_and_caches_are_off() -> None:
    llama = config(load("hf:llama"))
    assert llama.attention_dropout == 0.1
    assert llama.use_cache is False
    assert config(load("hf:gpt2")).resid_pdrop == 0.1
    assert config(load("hf:opt")).layerdrop == 0


def test_keys_are_fields_or_names_of_the_attribute_map() -> None:
    found = shapes(load("hf:gpt2,num_hidden_layers=1,hidden_size=48,vocab_size=5").model)
    assert found["transformer.wte.weight"] == [5, 48]
    assert not any(name.startswith("transformer.h.1.") for name in found)


def test_a_key_may_hold_a_mapping() -> None:
    spec = "hf:llama,rope_parameters={rope_type: default, rope_theta: 1e3},rms_norm_eps=1e-4"
    found = config(load(spec))
    assert found.rope_parameters["rope_theta"] == 1000
    assert found.rms_norm_eps == 1e-4


def test_sizes_of_the_example_are_options() -> None:
    loaded = load("hf:gpt2", batch=5, seq=70)
    assert list(loaded.batch["labels"].shape) == [5, 70]
    assert config(loaded).n_positions == 70


def test_the_seed_decides_weights_and_example_and_nothing_else() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, same, other = load("hf:gpt2,n_layer=1"), load("hf:gpt2,n_layer=1"), load("hf:gpt2,n_layer=1", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [next(x.model.parameters()) for x in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(first.batch["input_ids"], same.batch["input_ids"])
    assert not torch.equal(first.batch["input_ids"], other.batch["input_ids"])


def test_large_models_have_no_memory() -> None:
    loaded = load("hf:llama,hidden_size=4096,num_attention_heads=32,intermediate_size=11008,num_hidden_layers=8")
    assert not loaded.has_memory
    assert all(p.is_meta for p in loaded.model.parameters())
    assert loaded.batch["input_ids"].is_meta
    assert load("hf:gpt2,n_layer=1").has_memory


def test_the_mode_is_chosen() -> None:
    assert load("hf:gpt2,n_layer=1").model.training
    assert not load("hf:gpt2,n_layer=1", train=False).model.training


def test_a_file_gives_model_batch_and_loss(small: str) -> None:
    loaded = load(f"{small}:build", seed=3)
    assert shapes(loaded.model)["fc.weight"] == [20, 12]
    assert set(loaded.batch) == {"x", "target"}
    assert callable(loaded.loss)
    assert loaded.model.training
    assert torch.equal(loaded.batch["x"], load(f"{small}:build", seed=3).batch["x"])
    assert load(f"{small}:without_loss").loss is None


def test_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    source = "import torch\n\ndef build():\n    return torch.nn.Linear({n}, 1), (torch.ones(2, {n}),)\n"
    widths = []
    for n in (3, 4):
        (tmp_path / str(n)).mkdir()
        path = tmp_path / str(n) / "fxpar_twin.py"
        path.write_text(source.format(n=n))
        widths.append(load(f"{path}:build").model.in_features)
    assert widths == [3, 4]


def test_a_file_finds_its_neighbours_while_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "fxpar_neighbour.py").write_text("WIDTH = 7\n")
    (tmp_path / "fxpar_main_model.py").write_text(
        "import torch\nfrom fxpar_neighbour import WIDTH\n\n"
        "def build():\n    return torch.nn.Linear(WIDTH, 1), (torch.ones(2, WIDTH),)\n"
    )
    assert load(f"{tmp_path}/fxpar_main_model.py:build").model.in_features == 7


def test_a_module_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fxpar_path_model.py").write_text(
        "import torch\n\ndef build():\n    return torch.nn.Linear(5, 1), (torch.ones(2, 5),)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load("fxpar_path_model:build").model.in_features == 5


def test_a_model_of_ones_own_has_its_own_sizes(small: str) -> None:
    with pytest.raises(InputError, match="--seq sizes the example of hf: models only"):
        load(f"{small}:build", seq=4)
