"""Models of three layers and more that tests of repeated layers share, with how they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.zoo import VOCABULARY, NanoGPT, encoder_batch, encoder_loss, nano_batch, pixels, tokens

LAYERS = 3
_SIZES = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80, "num_hidden_layers": LAYERS}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_TWO = {**_GROUPED, "num_hidden_layers": 2}


def _lm(kind: str, **options: Any) -> Callable[[], nn.Module]:
    config = getattr(transformers, f"{kind}Config")
    names = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM", "Albert": "AlbertForMaskedLM"}
    model = getattr(transformers, names.get(kind, f"{kind.removesuffix('Text')}ForCausalLM"))
    common = {"vocab_size": VOCABULARY, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return lambda: model(config(**common, **options))


def _t5() -> nn.Module:
    config: Any = transformers.T5Config
    config = config(
        d_model=48,
        d_kv=12,
        d_ff=80,
        num_layers=LAYERS,
        num_decoder_layers=LAYERS,
        num_heads=4,
        vocab_size=VOCABULARY,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _gpt2() -> nn.Module:
    return _lm("GPT2", n_layer=LAYERS, n_embd=48, n_head=4)()


def checkpointed() -> nn.Module:
    """Each layer is a region that the author has computed again."""
    model: Any = _gpt2()
    model.gradient_checkpointing_enable()
    return model  # type: ignore[no-any-return]


def _vit() -> nn.Module:
    config: Any = transformers.ViTConfig
    return transformers.ViTForImageClassification(config(**_SIZES, image_size=32, patch_size=8, num_labels=7))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(96, 8, 160, dropout=0.1)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


# By name: how the model is made, its batch, a loss of its own.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any]] = {
    "gpt2": (_gpt2, tokens, None),
    "gpt2 scaled by its index": (
        _lm("GPT2", n_layer=LAYERS, n_embd=48, n_head=4, scale_attn_by_inverse_layer_idx=True),
        tokens,
        None,
    ),
    "gpt2 checkpointed": (checkpointed, tokens, None),
    "gpt2 eager": (_lm("GPT2", n_layer=LAYERS, n_embd=48, n_head=4, attn_implementation="eager"), tokens, None),
    "llama": (_lm("Llama", **_GROUPED, attention_dropout=0.1), tokens, None),
    "bert": (_lm("Bert", **_SIZES), tokens, None),
    "t5": (_t5, tokens, None),
    "bloom": (_lm("Bloom", n_layer=LAYERS, hidden_size=48, n_head=4, hidden_dropout=0.1), tokens, None),
    "gemma3": (
        _lm("Gemma3Text", **{**_GROUPED, "num_hidden_layers": 12}, head_dim=12, sliding_window=8),
        tokens,
        None,
    ),
    "mixtral": (_lm("Mixtral", **_TWO, num_local_experts=4, output_router_logits=False), tokens, None),
    "mixtral with router logits": (
        _lm("Mixtral", **_GROUPED, num_local_experts=4, output_router_logits=True),
        tokens,
        None,
    ),
    "neox": (_lm("GPTNeoX", **_SIZES, hidden_dropout=0.1), tokens, None),
    "falcon": (_lm("Falcon", num_hidden_layers=LAYERS, hidden_size=48, num_attention_heads=4), tokens, None),
    "qwen3": (_lm("Qwen3", **_GROUPED, head_dim=12), tokens, None),
    "albert": (_lm("Albert", **_SIZES, embedding_size=24), tokens, None),
    "vit": (_vit, pixels, None),
    "encoder": (_encoder, encoder_batch, encoder_loss),
    "nanogpt": (lambda: NanoGPT(layers=LAYERS), nano_batch, None),
}


def made(name: str, training: bool) -> tuple[nn.Module, Any, Any]:
    """A model, its batch and loss, the same at every call."""
    build, batch, loss = MODELS[name]
    torch.manual_seed(1)
    model = build().train(training)
    torch.manual_seed(2)
    return model, batch(), loss
