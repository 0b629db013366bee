"""Captured graphs of transformers' architectures, small and random, against the eager module."""

from __future__ import annotations

import pytest

from fxpar.capture.capture import capture
from fxpar.cli.models import build
from fxpar.errors import CaptureError
from fxpar.verify.values import check_capture

# Sequence and batch vary.
TEXT = """albert bart bert biogpt bloom clip_text_model codegen cohere convbert ctrl deberta-v2 distilbert electra ernie
exaone4 falcon gemma gemma2 gemma3_text glm glm4 gpt2 gpt_neo gpt_neox gpt_oss gptj granite granitemoe llama mistral
mixtral modernbert mpnet mpt mt5 nemotron nystromformer olmo olmo2 olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2
qwen2_moe qwen3 roberta smollm3 stablelm starcoder2 t5 whisper xglm xlnet""".split()
# The batch varies: images of one size, recurrences written as loops over the sequence.
FIXED = "beit deit dinov2 jamba mamba rwkv siglip_vision_model vit".split()


@pytest.mark.matrix
@pytest.mark.parametrize("kind", TEXT + FIXED)
def test_the_captured_graph_is_the_module(kind: str) -> None:
    built = build(kind, None, None, 0)
    model = built.model.train()
    captured = capture(model, built.batch, loss=built.loss)
    check_capture(captured, model, built.batch)
    names = {symbol.name for symbol in captured.program.symbols}
    assert captured.how == "export"
    assert captured.program.loss
    assert names >= {"b", "s"} if kind in TEXT else names == {"b"}


@pytest.mark.matrix
def test_what_cannot_be_captured_says_why() -> None:
    built = build("longformer", None, None, 0)
    with pytest.raises(CaptureError, match=r"modeling_longformer\.py:\d+: the model branches on values of tensors"):
        capture(built.model.train(), built.batch, loss=built.loss)
