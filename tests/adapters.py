"""Small models with LoRA adapters of peft, as a user would make them."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def with_lora(model: Any, **options: Any) -> PeftModel:
    """The model with adapters that have values, as after some steps, and biases and dropout; in training mode.

    Args:
        model: changed in place, as peft does.
        options: of the configuration, besides those of a rank that nothing divides.
    """
    config: dict[str, Any] = {"r": 3, "lora_alpha": 5, "lora_dropout": 0.1, "target_modules": LINEAR}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config | options))
    torch.manual_seed(11)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name and not name.endswith("magnitude_vector.default.weight"):
            nn.init.normal_(parameter, std=0.1)
    adapted.train()
    return adapted
