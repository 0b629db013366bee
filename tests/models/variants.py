"""Options under which the zoo's models are verified: what users vary without touching the model's code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.capture.capture import Captured, capture
from fxpar.compile import compile_program
from fxpar.cost.flops import split_flops
from fxpar.plan.plan import Plan
from fxpar.verification import Verification
from fxpar.verify.static import verify_static
from fxpar.verify.values import call_inputs, check_capture, program_state, verify_values
from tests.zoo import CASES, VOCABULARY, Case, NanoGPT, stirred

TEXT = ("gpt2", "bert", "llama", "qwen3", "bloom")
_POSITIONS = ("gpt2", "bert", "llama", "qwen3")
_CHECKPOINTS = (*TEXT, "vit")
_TWO_ATTENTIONS = ("gpt2", "bert", "llama", "qwen3", "vit")
PADDINGS = ("none", "left", "right", "positions")


@dataclass(frozen=True)
class Variant:
    """One combination.

    Attributes:
        tp: ranks.
        padding: none, left or right: a mask with padded rows; positions: as left, with the positions passed too.
        recompute: the author's activation checkpointing is on.
        frozen: every third parameter asks for no gradient.
        attention: sdpa or eager (written out).
        odd: batch 5, sequence 17, and sizes of which a rank has 3 heads, 1 of them for keys, and 75 hidden units.
    """

    tp: int = 2
    padding: str = "none"
    recompute: bool = False
    frozen: bool = False
    attention: str = "sdpa"
    odd: bool = False

    def __str__(self) -> str:
        flags = [name for name in ("recompute", "frozen", "odd") if getattr(self, name)]
        return "-".join([f"tp{self.tp}", f"pad_{self.padding}", self.attention, *flags])

    def possible(self, name: str) -> bool:
        """Whether the model has the options."""
        return (
            (self.padding == "none" or name in (_POSITIONS if self.padding == "positions" else TEXT))
            and (not self.recompute or name in _CHECKPOINTS)
            and (self.attention == "sdpa" or name in _TWO_ATTENTIONS)
        )


def run(name: str, variant: Variant) -> Verification:
    """Verifies a model of the zoo by value under the options: the capture against the module, the ranks against it."""
    case = CASES[name]
    model, captured = trace(name, _traced(variant))
    batch = _batch(case, variant)
    captured = replace(captured, program=captured.program.with_(plan=Plan(tp=variant.tp, split=case.split)))
    program = compile_program(captured.program)
    check_capture(captured, model, batch)
    state, inputs = program_state(captured.program, model), call_inputs(captured, model, batch)
    report = verify_values(captured.program, program, state, inputs)
    return Verification(report.ok, "values", program, split_flops(program), verify_static(program), report)


def _traced(variant: Variant) -> Variant:
    """The variant whose trace serves this one too: the side of the padding and the ranks are not in it."""
    padding = "left" if variant.padding == "right" else variant.padding
    return replace(variant, padding=padding, tp=variant.tp if variant.odd else 2)


@lru_cache(maxsize=12)
def trace(name: str, variant: Variant) -> tuple[nn.Module, Captured]:
    """The model with the options, and its capture."""
    case = CASES[name]
    model = _odd(case, variant.tp) if variant.odd else case.model()
    if variant.attention != "sdpa":
        model.set_attn_implementation(variant.attention)  # type: ignore[operator]
    if variant.recompute:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(not variant.frozen or index % 3 != 1)
    return model, capture(model, _batch(case, variant), Plan(), case.loss)


def _odd(case: Case, tp: int) -> nn.Module:
    """Three heads a rank, one of them for keys, 75 hidden units."""
    torch.manual_seed(3)
    changes = {
        "num_attention_heads": 3 * tp,
        "n_head": 3 * tp,
        "num_key_value_heads": tp,
        "head_dim": 48 // tp,
        "intermediate_size": 75 * tp,
        "n_inner": 75 * tp,
        "hidden_size": 144,
        "n_embd": 144,
    }
    model: nn.Module
    if case.name == "nanogpt":
        model = NanoGPT(width=144, heads=3 * tp)
    elif case.name == "encoder":
        layer = nn.TransformerEncoderLayer(96, 3 * tp, 75 * tp, dropout=0.1)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    else:
        usual = case.build()
        config: Any = usual.config
        for name, value in changes.items():
            if name in config.to_dict() or name in config.attribute_map:
                setattr(config, name, value)
        model = type(usual)(config)
    return stirred(model.train())


def _batch(case: Case, variant: Variant) -> Any:
    torch.manual_seed(4)
    rows, length = (5, 17) if variant.odd else (3, 16)
    if case.name == "vit":
        return {"pixel_values": torch.randn(rows, 3, 32, 32), "labels": torch.randint(0, 7, (rows,))}
    if case.name == "encoder":
        return {"src": torch.randn(length, rows, 96), "target": torch.randn(length, rows, 96)}
    ids = torch.randint(0, VOCABULARY, (rows, length))
    labels = ids.clone()
    labels[0, :3] = -100
    if case.name == "nanogpt":
        return {"idx": ids, "targets": labels.roll(1, 1)}  # of its own words the tied head is sure: no loss is left
    batch: dict[str, Tensor] = {"input_ids": ids, "labels": labels}
    if variant.padding == "none":
        return batch
    mask = torch.ones(rows, length, dtype=torch.long)
    for row, count in enumerate((0, 3, 5)):
        mask[row, :count] = 0
    if variant.padding == "positions":
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if variant.padding == "right":
        mask = mask.flip(1)
    return batch | {"labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask}
