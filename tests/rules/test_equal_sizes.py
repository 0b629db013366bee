"""Sizes that are all alike, so that nothing can be told by them."""

from __future__ import annotations

import torch
import transformers

from fxpar.plan.plan import Plan
from fxpar.verification import expect, verify
from fxpar.verify.values import TOLERANCE
from tests.zoo import CASES, stirred


def test_equal_sizes_change_nothing() -> None:
    """Batch, sequence, heads and head size are 8; width, inner width and vocabulary 64; weights are square."""
    torch.manual_seed(6)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=8, n_inner=64, n_positions=64, vocab_size=64, use_cache=False
    )
    model = stirred(transformers.GPT2LMHeadModel(config).train())
    ids = torch.randint(0, 64, (8, 8))
    found = expect(verify(model, {"input_ids": ids, "labels": ids}, Plan(tp=2, split=CASES["gpt2"].split)))
    assert found.values is not None
    assert max(found.values.loss_error, found.values.output_error, found.values.max_grad_error) <= TOLERANCE
    assert found.values.gradients == len(list(model.parameters()))
    assert found.split_flops > 0.7
