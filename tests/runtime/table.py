"""What the ranks of a test world do for the table of training runs."""

from __future__ import annotations

import torch

import fxpar
from fxpar.ir.step import RNG_PATH
from tests.runtime.jobs import Found, tp
from tests.zoo import CASES

STEPS = 20


def train(name: str, by_lines: bool, sequence_parallel: bool) -> Found:
    """Losses of 20 steps of AdamW, and how many nodes of the program draw random bits."""
    case = CASES[name]
    plan = case.plan(tp()) if by_lines else fxpar.Plan(tp=tp())
    model = fxpar.parallelize(
        case.model(), plan.replace(sequence_parallel=sequence_parallel), case.example(), case.loss
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(model.train_step(case.example()).item())
        model.clip_grad_norm_(1.0)
        optimizer.step()
    state = next(entry.node for entry in model.program.inputs if entry.path == RNG_PATH)
    return {"losses": losses, "random": len(model.program.node(state).users)}
