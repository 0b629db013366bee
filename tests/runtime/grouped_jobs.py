"""What the ranks of a test world do with experts whose products Transformer Engine's stand-in computes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

import fxpar
from tests.ops.grouped_gemm import stand_in
from tests.passes import experts as words
from tests.runtime import expert_jobs
from tests.runtime.jobs import gradients

Found = dict[str, Any]


def steps(options: dict[str, Any], routing: str) -> Found:
    """Two steps whose gradients add up, and an evaluation; how often the stand-in was called in the first step."""
    torch.manual_seed(0)
    plan, own = fxpar.Plan(**options), words.batch(5)
    example = {key: value[: words.ROWS // plan.data_ranks] for key, value in own.items()}
    with ExitStack() as stack:
        calls = stack.enter_context(stand_in()) if plan.grouped_gemm == "transformer_engine" else []
        model = fxpar.parallelize(words.Routed(routing).double().train(), plan, example)
        own = fxpar.shard_batch(own, model)
        losses = [model.train_step(own).item()]
        first = len(calls)
        losses.append(model.train_step(own).item())
        model.eval()
        with torch.no_grad():
            output = model(**own).item()
    return {"losses": losses, "gradients": gradients(model), "output": output, "calls": first}


def trained(options: dict[str, Any]) -> Found:
    """A step of a small Mixtral."""
    with stand_in() as calls:
        found = expert_jobs.train(options, 1)
    assert calls
    return found
