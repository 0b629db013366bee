"""What test_needed.py runs on ranks: experts whose tokens travel to those ranks alone that need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fxpar
from fxpar.experts.operators import selective_dispatch as operators
from fxpar.ops import peer_copies
from fxpar.peer_memory.compiler import symmetric_buffer
from fxpar.peer_memory.compiler.symmetric_buffer import CpuSymmetricBuffer
from tests.passes.experts import ROWS, Routed, batch
from tests.runtime.jobs import gradients

# What is not sent in one shot the process group sends, or all is copied.
COSTS = {"some": fxpar.Cost(), "all": fxpar.Cost(least_copy=1.0, copy_latency=1e-12)}


def _model(routing: str, experts: int, choices: int) -> Routed:
    """Without dropout, whose masks a model on one device draws elsewhere."""
    torch.manual_seed(0)
    model = Routed(routing, experts=experts, choices=choices).double().train()
    model.drop.p = 0.0
    return model


@contextmanager
def _counted() -> Iterator[list[int]]:
    """The numbers of rows that this rank writes into the memory of others."""
    found: list[int] = []
    copy_rows = symmetric_buffer.copy_rows

    def counting(there: Tensor, rows: Tensor, wanted: Tensor) -> None:
        found.append(int(wanted.sum()))
        copy_rows(there, rows, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_buffer, "copy_rows", counting)
        yield found


def _trained(model: Routed, own: dict[str, Tensor], options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """The loss of the second step, and its gradients; what was read is overwritten at once."""
    plan = fxpar.Plan(**options)
    parallel = fxpar.parallelize(model, plan, {key: value[: ROWS // plan.dp] for key, value in batch(5).items()})
    for _ in range(2):
        parallel.zero_grad()
        with symmetric_buffer.poisoned():
            loss = float(parallel.train_step(fxpar.shard_batch(own, parallel)))
    found = gradients(parallel)
    parallel.close()
    return loss, found


def differences(
    options: dict[str, Any], routing: str, experts: int, choices: int, length: int, cost: str, rows: int = ROWS
) -> tuple[float, float, int, int]:
    """The largest difference of loss and of gradients to one device, rows that this rank sent a step, and should."""
    own = {key: value[:rows] for key, value in batch(length).items()}
    own["labels"][:, 0] = own["ids"][:, 0]  # each row counts
    alone = _model(routing, experts, choices)
    loss = alone(**own)
    loss.backward()
    wanted = loss.item()
    options = {**options, "communication": fxpar.Communication("copy"), "cost": COSTS[cost]}
    with _counted() as sent:
        computed, found = _trained(_model(routing, experts, choices), own, options)
    odd = max(float((found[name] - p.grad).abs().max()) for name, p in alone.named_parameters() if p.grad is not None)
    return abs(computed - wanted), odd, sum(sent) // 2, 2 * _needed_rows(alone, own, int(options["ep"]))


def _needed_rows(model: Routed, own: dict[str, Tensor], ranks: int) -> int:
    """Of this rank's tokens how many others need, for each of them, and of theirs how many this one needs."""
    with torch.no_grad():
        chosen = model.shares(model.words(own["ids"]).flatten(0, 1)).topk(model.choices).indices
    tokens = chosen.view(dist.get_world_size(), -1, model.choices)
    rank, held, total = dist.get_rank(), model.experts // ranks, 0
    first = rank // ranks * ranks  # of the ranks among which experts are spread
    for other in (r for r in range(first, first + ranks) if r != rank):
        for mine, holder in ((rank, other), (other, rank)):
            total += sum(any(int(e) // held == holder - first for e in token) for token in tokens[mine])
    return total


def beside_nccl(options: dict[str, Any]) -> tuple[float, float]:
    """The largest difference of losses and gradients to what ranks compute that send all tokens."""
    found = [
        _trained(
            _model("learned", 8, 1),
            batch(5),
            {**options, "communication": fxpar.Communication(how), "cost": COSTS["all"]},
        )
        for how in ("copy", "nccl")
    ]
    (loss, own), (wanted, others) = found
    return abs(loss - wanted), max(float((own[name] - value).abs().max()) for name, value in others.items())


def each_way(dtype: torch.dtype, lead: tuple[int, ...], tokens: int, choices: int) -> list[str]:
    """What copies of rows give, beside the process group; those that differ. Some tokens chose nobody's expert."""
    from fxpar.ops.process_group import process_group
    from fxpar.runtime.world import connect, join

    size = dist.get_world_size()
    world = join(fxpar.Plan(tp=size), connect(60.0))
    group = world.groups["tp"].name
    made = CpuSymmetricBuffer(
        rank=world.rank, size=size, group=process_group(world.groups["tp"]), ranks=range(size), poisons=True
    )
    name, width, own = f"needed/{world.agreement.module}", 6, 3
    symmetric_buffer.register(name, made.open())
    shape = (*lead, size * tokens, choices)
    chosen = torch.randint(0, size * own + 2, shape, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randint(-9, 9, (*lead, width, tokens), generator=generator).to(dtype).transpose(-1, -2)
    y = torch.randint(-9, 9, (*lead, 1, size * tokens, width), generator=generator).to(dtype)
    index, odd = torch.tensor(world.rank), []
    for buffer in (1, 2, 1, 2):
        expanded = peer_copies.expand_copied(x, chosen, own, size, name, buffer)
        started = operators.start_tokens(x, group, size)
        if not torch.equal(expanded, operators.needed_tokens(started, chosen, own, index)):
            odd.append(f"expanded {buffer}")
    for buffer in (1, 2, 1, 2):
        summed = peer_copies.sum_copied(y, chosen, own, size, name, buffer)
        if not torch.equal(summed, operators.needed_sums(operators.start_sums(y, chosen, own, group, size, index))):
            odd.append(f"summed {buffer}")
    symmetric_buffer.close([name])
    return odd
