"""Heads of transformers, with padding, over data parallel ranks: what one device computes on all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fxpar.plan.plan import Plan
from fxpar.verification import verify
from tests.zoo import SEQUENCE, VOCABULARY, gpt2_config, llama_config, vit_config, words_config

hf: Any = transformers  # whose types know no keyword of a subclass
ROWS, CLASSES = 4, 5
Loaded = tuple[nn.Module, dict[str, Tensor]]


def text(model: nn.Module, **labels: Tensor) -> Loaded:
    """Words of which two rows have fewer than others."""
    ids = torch.randint(2, VOCABULARY, (ROWS, SEQUENCE))
    ids[1, 10:] = 0
    ids[3, 5:] = 0
    return model.train(), {"input_ids": ids, "attention_mask": (ids != 0).long(), **labels}


def image(model: nn.Module) -> Loaded:
    return model.train(), {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.tensor([1, 2, 0, 4])}


def choices() -> Loaded:
    ids = torch.randint(1, VOCABULARY, (ROWS, 3, SEQUENCE))
    ids[1, :, 9:] = 0
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([0, 2, 1, 1])}
    return hf.BertForMultipleChoice(words_config("Bert")).train(), batch


def clip_text() -> Loaded:
    config = words_config("CLIPText", eos_token_id=VOCABULARY - 1, projection_dim=48)
    model, batch = text(hf.CLIPTextModelWithProjection(config))
    batch["input_ids"][:, 4] = VOCABULARY - 1
    return model, batch


CLASS = torch.tensor([1, 2, 0, 4])
SPAN = {"start_positions": torch.tensor([1, 3, 0, 5]), "end_positions": torch.tensor([2, 7, 40, 6])}
HEADS: dict[str, Callable[[], Loaded]] = {
    "gpt2 sequence": lambda: text(hf.GPT2ForSequenceClassification(gpt2_config(num_labels=CLASSES)), labels=CLASS),
    "llama sequence": lambda: text(hf.LlamaForSequenceClassification(llama_config(num_labels=CLASSES)), labels=CLASS),
    "llama regression": lambda: text(
        hf.LlamaForSequenceClassification(llama_config(num_labels=1, problem_type="regression")),
        labels=torch.randn(ROWS),
    ),
    "llama several labels": lambda: text(
        hf.LlamaForSequenceClassification(llama_config(num_labels=CLASSES, problem_type="multi_label_classification")),
        labels=torch.randint(0, 2, (ROWS, CLASSES)).float(),
    ),
    "bert sequence": lambda: text(
        hf.BertForSequenceClassification(words_config("Bert", num_labels=CLASSES)), labels=CLASS
    ),
    "bert words": lambda: text(
        hf.BertForTokenClassification(words_config("Bert", num_labels=CLASSES)),
        labels=torch.randint(0, CLASSES, (ROWS, SEQUENCE)),
    ),
    "bert answers": lambda: text(hf.BertForQuestionAnswering(words_config("Bert")), **SPAN),
    "llama answers": lambda: text(hf.LlamaForQuestionAnswering(llama_config()), **SPAN),
    "bert choices": choices,
    "bert masked words": lambda: text(
        hf.BertForMaskedLM(words_config("Bert")),
        labels=torch.where(torch.rand(ROWS, SEQUENCE) < 0.3, torch.randint(0, VOCABULARY, (ROWS, SEQUENCE)), -100),
    ),
    "clip text": clip_text,
    "vit": lambda: image(hf.ViTForImageClassification(vit_config(num_labels=CLASSES))),
    "swin": lambda: image(
        hf.SwinForImageClassification(
            hf.SwinConfig(
                image_size=32,
                patch_size=4,
                embed_dim=24,
                depths=[1, 1],
                num_heads=[2, 4],
                window_size=4,
                num_labels=CLASSES,
                drop_path_rate=0.0,
            )
        )
    ),
}
FEW = {("gpt2 sequence", 2)}


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        pytest.param(name, tp, marks=[] if (name, tp) in FEW else [pytest.mark.matrix])
        for name in HEADS
        for tp in (1, 2)
    ],
)
def test_a_head_over_data_ranks_is_that_of_one_device(name: str, tp: int) -> None:
    torch.manual_seed(0)
    model, batch = HEADS[name]()
    found = verify(model, batch, Plan(tp=tp, dp=2))
    assert found.ok, found.values
