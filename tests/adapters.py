"""Small models with LoRA adapters of peft, as a user would make them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def with_lora(model: Any, **options: Any) -> Any:
    """The model with adapters that have values, as after some steps, and biases and dropout; in training mode.

    Args:
        model: changed in place, as peft does.
        options: of the configuration, besides those of a rank that nothing divides.
    """
    config: dict[str, Any] = {"r": 3, "lora_alpha": 5, "lora_dropout": 0.1, "target_modules": LINEAR}
    config |= {"task_type": "CAUSAL_LM"} | options
    adapted = get_peft_model(model, LoraConfig(**config))
    torch.manual_seed(11)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name and not name.endswith("magnitude_vector.default.weight"):
            nn.init.normal_(parameter, std=0.1)
    adapted.train()
    return adapted


WORDS, TOKENS = 50, 8


def tiny_llama() -> Any:
    """Two layers and odd sizes; the same at every call."""
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS}
    sizes |= {"hidden_size": 24, "intermediate_size": 42, "num_hidden_layers": 2, "max_position_embeddings": 32}
    tokens: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **tokens, use_cache=False))


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Ids and labels of four rows."""
    ids = torch.randint(3, WORDS, (4, TOKENS), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}
