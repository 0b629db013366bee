"""What test_halves.py runs on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fxpar
from fxpar.state.sharded import local_of
from tests.runtime.graphed import VOCABULARY, gpt2

# Of each step the rows that the data ranks bring to each of its microbatches.
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (((4, 4),), ((3, 3),), ((2, 2), (5, 5)), ((4, 2),), ((4, 3),))


def trained(options: dict[str, Any], halves: bool) -> tuple[list[float], list[Tensor], list[bool]]:
    """Losses and gradients of the steps, and which of the programs compute halves."""
    torch.manual_seed(0)
    plan = fxpar.Plan.from_dict({**options, "interleave_halves": halves, "cost": {"least_copy": 1.0}})
    own = dist.get_rank() if plan.dp > 1 else 0
    steps = STEPS if plan.dp > 1 else STEPS[:3]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (4, 8), generator=generator)
    model = gpt2(60, 2 if plan.recompute == "full" else 1).double().train()  # layers are found where they repeat
    parallel = fxpar.parallelize(model, plan, {"input_ids": ids, "labels": ids})
    losses, gradients = [], []
    for step in steps:
        parallel.zero_grad()
        parts = []
        for rows in step:
            whole = torch.randint(0, VOCABULARY, (sum(rows), 8), generator=generator)
            mine = whole.split(rows)[own]
            parts.append({"input_ids": mine, "labels": mine})
        losses.append(float(parallel.train_step(parts if len(parts) > 1 else parts[0])))
        gradients += [local_of(p.grad).clone() for p in parallel.parameters() if p.grad is not None]
    kinds = [compiled.program.plan.interleave_halves is True for compiled in parallel._programs]
    parallel.close()
    return losses, gradients, kinds


def differences(options: dict[str, Any]) -> tuple[float, float, list[bool]]:
    """The largest difference of losses and of gradients from those of whole batches, and which programs have halves."""
    losses, gradients, kinds = trained(options, True)
    wanted, expected, _ = trained({**options, "compile": False}, False)
    assert len(gradients) == len(expected)
    by_loss = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    by_gradient = max(float((a - b).abs().max()) for a, b in zip(gradients, expected, strict=True))
    return by_loss, by_gradient, kinds


def chosen(example_rows: int) -> tuple[Any, list[bool]]:
    """What the plan of a model left to cost by its first program, and of which kind all of its programs are.

    Halves are made to pay: sums take as long as products, and copies nothing else.
    """
    torch.manual_seed(0)
    cost = {"bandwidth": 1e9, "latency": 1e-9, "flops": 1e9, "memory": 1e15, "multiprocessors": 1}
    cost |= {"least_copy": 1.0, "copy_latency": 0.0, "kernel_latency": 0.0}
    plan = fxpar.Plan.from_dict({"tp": 2, "interleave_halves": "auto", "cost": cost})
    ids = torch.randint(0, VOCABULARY, (example_rows, 8))
    model = fxpar.parallelize(gpt2(60, 1).train(), plan, {"input_ids": ids, "labels": ids})
    for rows in (4, 3):
        mine = torch.randint(0, VOCABULARY, (rows, 8), generator=torch.Generator().manual_seed(rows))
        model.train_step({"input_ids": mine, "labels": mine})
    kinds = [compiled.program.plan.interleave_halves is True for compiled in model._programs]
    model.close()
    return model.plan.interleave_halves, kinds
