"""Models whose published files have other names and shapes than the modules, and what ranks do with such files."""

from pathlib import Path
from typing import Any

import torch
import transformers

import fxpar
from tests.runtime.jobs import Found

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "use_cache": False,
}
_HEADS: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


def build(name: str) -> Any:
    torch.manual_seed(0)
    if name == "qwen3_moe":
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_SIZES, **_HEADS, **_EXPERTS))
    if name == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_SIZES, **_HEADS, num_local_experts=4))
    size: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return transformers.ViTForImageClassification(transformers.ViTConfig(**size, image_size=16, patch_size=8))


def read(axes: dict[str, int], folder: Path) -> Found:
    """Builds a model on the meta device and reads this rank's parts; the whole of it, and what that took."""
    with torch.device("meta"):
        empty = build("qwen3_moe")
    plan = fxpar.Plan(**axes)  # type: ignore[arg-type]
    ids = torch.arange(16).view(2, 8)
    model = fxpar.parallelize(empty, plan, {"input_ids": ids, "labels": ids}, checkpoint=folder)
    return {
        "state": model.full_state_dict(),
        "read": model.loading.read,
        "besides": model.loading.peak - model.loading.held,
    }
