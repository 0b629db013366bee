"""Small models that tests share: unmodified architectures of pairwise distinct sizes, and how a user would split them.

Each `Case` builds a model in training mode with dropout on and all biases and norm weights away from their initial
zeros and ones, so that a bias that is added twice shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from fxpar.compile import compile_step
from fxpar.ir.program import Program
from fxpar.plan.plan import Plan

VOCABULARY, BATCH, SEQUENCE = 259, 3, 16
SIZES = {"num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 8, "intermediate_size": 160}


def step_of(program: Program, outputs: Sequence[str] | None = None) -> Program:
    """Returns the step that trains a program.

    Args:
        outputs: what it returns by name; the loss alone by default.
    """
    trained = [p.fqn for p in program.parameters if p.trainable]
    return compile_step(program, (program.loss,) if outputs is None else outputs, (program.loss,), trained)


@dataclass(frozen=True)
class Case:
    """One architecture: a builder, a batch, the plan's split and the loss."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    split: dict[str, str]
    loss: Callable[[Any, Any], Tensor] | None = None

    def model(self) -> nn.Module:
        """The model, the same at every call."""
        torch.manual_seed(1)
        return stirred(self.build().train())

    def example(self) -> Any:
        """The batch, the same at every call."""
        torch.manual_seed(2)
        return self.batch()

    def plan(self, tp: int) -> Plan:
        """The plan for tp ranks."""
        return Plan(tp=tp, split=self.split)


def stirred(model: nn.Module) -> nn.Module:
    """The model with biases and norm weights away from zeros and ones."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def tokens() -> dict[str, Tensor]:
    """Ids and labels, some of which are ignored."""
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def _config(kind: str, **options: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(
        **{"use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | options
    )


def gpt2_config(**options: Any) -> Any:
    """Of any model with GPT-2's body."""
    sizes = {"n_layer": 2, "n_embd": 96, "n_head": 8, "n_inner": 160, "n_positions": 64}
    return _config("GPT2", **sizes, vocab_size=VOCABULARY, **options)


def gpt2() -> nn.Module:
    """Conv1D, fused [q|k|v]."""
    return transformers.GPT2LMHeadModel(gpt2_config())


def words_config(kind: str, **options: Any) -> Any:
    """Of an encoder of words as long as `SEQUENCE` and longer: Bert, CLIPText."""
    return _config(kind, **SIZES, vocab_size=VOCABULARY, max_position_embeddings=64, **options)


def bert() -> nn.Module:
    """Encoder with biases everywhere."""
    return transformers.BertForMaskedLM(words_config("Bert"))


def llama_config(**options: Any) -> Any:
    """Of any model with Llama's body."""
    sizes = {**SIZES, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    return _config("Llama", **sizes, attention_dropout=0.1, attention_bias=True, mlp_bias=True, **options)


def llama() -> nn.Module:
    """Grouped-query attention, rotary positions, gated MLP."""
    return transformers.LlamaForCausalLM(llama_config())


def qwen3() -> nn.Module:
    """Norms on the heads of q and k: whole weights inside the split region."""
    config = _config(
        "Qwen3",
        num_hidden_layers=2,
        hidden_size=96,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=12,
        intermediate_size=160,
        vocab_size=VOCABULARY,
        attention_dropout=0.1,
    )
    return transformers.Qwen3ForCausalLM(config)


def bloom() -> nn.Module:
    """Interleaved q, k, v, ALiBi, attention written out, an autograd function as activation."""
    config = _config(
        "Bloom",
        n_layer=2,
        hidden_size=96,
        n_head=8,
        vocab_size=VOCABULARY,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    return transformers.BloomForCausalLM(config)


def vit_config(**options: Any) -> Any:
    """16 patches of an image."""
    kind: Any = transformers.ViTConfig
    return kind(**SIZES, image_size=32, patch_size=8, **options)


def vit() -> nn.Module:
    """Images: a convolution, a class token, 17 positions."""
    return transformers.ViTForImageClassification(
        vit_config(num_labels=7, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    )


def encoder() -> nn.Module:
    """`torch.nn.TransformerEncoder` as it comes, sequence first."""
    layer = nn.TransformerEncoderLayer(96, 8, 160, dropout=0.1)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def encoder_batch() -> dict[str, Tensor]:
    """[s, b, h] inputs and targets."""
    return {"src": torch.randn(SEQUENCE, BATCH, 96), "target": torch.randn(SEQUENCE, BATCH, 96)}


def encoder_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error."""
    return functional.mse_loss(outputs, batch["target"])


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.proj = nn.Linear(width, 160), nn.Linear(160, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.size()
        q, k, v = (
            t.view(b, s, self.heads, h // self.heads).transpose(1, 2) for t in self.qkv(self.ln_1(x)).split(h, 2)
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(h // self.heads)
        causal = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
        weights = self.drop(scores.masked_fill(~causal, float("-inf")).softmax(-1))
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).reshape(b, s, h)))
        result: Tensor = x + self.drop(self.proj(functional.gelu(self.fc(self.ln_2(x)))))
        return result


class NanoGPT(nn.Module):
    """A language model as one writes it by hand; tied head, in-place addition of positions."""

    def __init__(self, width: int = 96, heads: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.h = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        # As GPT-2 does. With the default each word would predict itself, and the loss be smaller than its rounding.
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx)
        x += self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)


def nano_batch() -> dict[str, Tensor]:
    """Ids and targets."""
    batch = tokens()
    return {"idx": batch["input_ids"], "targets": batch["labels"]}


def pixels() -> dict[str, Tensor]:
    """Images and classes."""
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 7, (BATCH,))}


_LLAMA_SPLIT = {
    "*.q_proj": "head",
    "*.k_proj": "head",
    "*.v_proj": "head",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
}

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "gpt2",
            gpt2,
            tokens,
            {"*.c_attn": "head", "*.attn.c_proj": "row", "*.c_fc": "column", "*.mlp.c_proj": "row"},
        ),
        Case(
            "bert",
            bert,
            tokens,
            {
                "*.self.*": "head",
                "*.attention.output.dense": "row",
                "*.intermediate.dense": "column",
                "*.layer.?.output.dense": "row",
            },
        ),
        Case("llama", llama, tokens, _LLAMA_SPLIT),
        Case("qwen3", qwen3, tokens, _LLAMA_SPLIT),
        Case(
            "bloom",
            bloom,
            tokens,
            {
                "*.query_key_value": "head",
                "*.self_attention.dense": "row",
                "*.dense_h_to_4h": "column",
                "*.dense_4h_to_h": "row",
            },
        ),
        Case(
            "vit",
            vit,
            pixels,
            {"*.[qkv]_proj": "head", "*.o_proj": "row", "*.fc1": "column", "*.fc2": "row"},
        ),
        Case(
            "encoder",
            encoder,
            encoder_batch,
            {
                "*.in_proj_*": "head",
                "*.out_proj": "row",
                "*.linear1": "column",
                "*.linear2": "row",
            },
            encoder_loss,
        ),
        Case("nanogpt", NanoGPT, nano_batch, {"*.qkv": "head", "*.out": "row", "*.fc": "column", "*.proj": "row"}),
    )
}
