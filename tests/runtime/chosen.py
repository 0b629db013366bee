"""What the ranks of a test world do with plans that have no lines: vocabulary and sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

import fxpar
from tests.runtime.jobs import Found, kept, refusal, tp
from tests.zoo import CASES


def module(name: str, **options: Any) -> fxpar.ParallelModule:
    """A case of the zoo under a plan that names nothing."""
    case, plan = CASES[name], fxpar.Plan(tp=tp(), **options)
    return kept((name, plan), lambda: fxpar.parallelize(case.model(), plan, case.example(), case.loss))


def train(name: str, steps: int) -> Found:
    """Trains with sequence parallelism, AdamW and clipping, with dropout; and what odd tokens are told."""
    model = module(name, sequence_parallel=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    batch, losses, norms = CASES[name].example(), [], []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(model.train_step(batch).item())
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
    odd = {key: value[:, :15] for key, value in batch.items()}
    told = refusal(lambda: model.train_step(odd)) if tp() > 1 else ()
    return {"losses": losses, "norms": norms, "state": model.full_state_dict(), "odd": told}


def logits(name: str) -> Found:
    """Logits over a vocabulary that the ranks do not divide, their words, and a gradient through them."""
    model = module(name)
    found: Any = model(**CASES[name].example()).logits
    is_cut = isinstance(found, DTensor)
    whole = found.full_tensor() if is_cut else found
    whole[..., 7].sum().backward()
    total = model.clip_grad_norm_(1e9)
    part = tuple(found.to_local().shape) if is_cut else tuple(found.shape)
    return {"whole": whole.detach(), "part": part, "shape": tuple(found.shape), "norm": float(total)}
