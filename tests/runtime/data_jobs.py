"""What the ranks of a test world do with data parallel ranks, and the same on one process for reference.

Ranks are given a plan for each; in the test's own process, where no group exists, it is of one rank and the batch is
that of all.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.cli.models import load_model
from fxpar.cost.communication import collectives
from fxpar.errors import FxparError
from fxpar.runtime.sharded import whole_of
from fxpar.runtime.steps import FinishedForward
from tests.runtime import accounting, jobs

Found = dict[str, Any]

ROWS = 8
# For what a second layer would only repeat.
ONE_LAYER = "gpt2,n_layer=1"


def plan(tp: int, dp: int, **options: Any) -> fxpar.Plan:
    return fxpar.Plan(tp=tp, dp=dp, **options) if dist.is_initialized() else fxpar.Plan()


def batches(name: str, count: int = 1) -> list[Any]:
    """Microbatches of all ranks, whose first rows count few words."""
    example = load_model(f"hf:{name}", 3, None, 0, True).batch
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(count):
        order = torch.cat([torch.randperm(3, generator=generator) for _ in range(3)])[:ROWS]
        batch = {key: value[order].clone() for key, value in example.items()}
        if "labels" in batch and batch["labels"].dim() > 1:
            batch["labels"][:2, 2:] = -100
        found.append(batch)
    return found


def module(name: str, tp: int, dp: int, **options: Any) -> ParallelModule:
    """A model as if it were new."""
    key = (name, tp, dp, plan(tp, dp, **options))

    def build() -> ParallelModule:
        loaded = load_model(f"hf:{name}", 3, None, 0, True)
        rows = ROWS // dp if dist.is_initialized() else ROWS
        example = {k: v[:rows] for k, v in batches(name)[0].items()}
        return fxpar.parallelize(loaded.model, plan(tp, dp, **options), example, loaded.loss)

    return jobs.kept(key, build)


def train(name: str, tp: int, dp: int, sequence_parallel: bool, count: int, steps: int) -> Found:
    """AdamW steps, clipped, with dropout; each step has `count` microbatches."""
    model = module(name, tp, dp, sequence_parallel=sequence_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    parts = batches(name, count)
    own = fxpar.shard_batch(parts if count > 1 else parts[0], model)
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(model.train_step(own).item())
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
    return {"losses": losses, "norms": norms, "state": model.full_state_dict()}


class Sums(TorchDispatchMode):
    """Lists the sizes of sums over ranks."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def sums_of_parameters() -> Iterator[list[int]]:
    """Sizes of the sums over ranks in parameter phases."""
    sizes: list[int] = []
    plain: Any = FinishedForward.parameter

    def counted(pending: FinishedForward, held: Any) -> Any:
        with Sums(sizes):
            return plain(pending, held)

    changed: Any = FinishedForward
    changed.parameter = counted
    try:
        yield sizes
    finally:
        changed.parameter = plain


def microbatches(name: str, tp: int, dp: int, sequence_parallel: bool, precision: str = "as_is") -> Found:
    """Gradients of three microbatches on top of a step's, and how many large sums the three took."""
    model = module(name, tp, dp, sequence_parallel=sequence_parallel, precision=precision)
    own = fxpar.shard_batch(batches(name, 3), model)
    model.train_step(own[0])
    with sums_of_parameters() as sums:
        loss = model.train_step(own).item()
    gradients = {n: whole_of(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, "gradients": gradients, "sums": [count for count in sums if count > 64]}


def microbatches_apart(name: str, tp: int, dp: int) -> dict[str, tuple[float, float]]:
    """Under mixed precision: how far the gradients of two microbatches are from the mean of two steps', and size.

    A step of one microbatch sums gradients within its backward. Halves of a loss round as the loss does.
    """
    model = module(name, tp, dp, precision="bf16")
    own = fxpar.shard_batch(batches(name, 2), model)
    model.train_step(own)
    together = {n: whole_of(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for part in own:
        model.train_step(part)
    apart = {n: whole_of(p.grad) / len(own) for n, p in model.named_parameters() if p.grad is not None}
    assert together.keys() == apart.keys()
    return {n: (float((apart[n] - g).abs().max()), float(g.abs().max())) for n, g in together.items()}


def torch_clips(name: str, tp: int, dp: int, sequence_parallel: bool) -> tuple[float, float]:
    """The norm by the module and by torch's own function."""
    model = module(name, tp, dp, sequence_parallel=sequence_parallel)
    model.train_step(fxpar.shard_batch(batches(name)[0], model))
    own = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    whole = own.full_tensor() if hasattr(own, "full_tensor") else own
    return model.clip_grad_norm_(1e9).item(), float(whole)


def outputs(name: str, tp: int, dp: int, sequence_parallel: bool) -> Found:
    """The logits of a plain call, whole."""
    model = module(name, tp, dp, sequence_parallel=sequence_parallel).eval()
    found = model(**fxpar.shard_batch(batches(name)[0], model))
    logits = found["logits"]
    kind = type(logits).__name__
    placements = str(getattr(logits, "placements", ""))
    whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    return {"kind": kind, "placements": placements, "logits": whole.detach().clone()}


def account(name: str, tp: int, dp: int, sequence_parallel: bool) -> Found:
    """A step as it was counted and, from rank 0, its report and the program's collectives."""
    model = module(name, tp, dp, sequence_parallel=sequence_parallel)
    found = accounting.step(model, fxpar.shard_batch(batches(name)[0], model))
    if dist.get_rank() == 0:
        found["report"] = model.report().to_dict()
        found["listed"] = Counter((c.phase, c.op, c.bytes) for c in collectives(model.program))
    return found


def refusals(tp: int, dp: int) -> list[tuple[str, str]]:
    """Where and why calls are refused."""
    model = module(ONE_LAYER, tp, dp, sequence_parallel=True)
    batch = batches(ONE_LAYER)[0]
    own = fxpar.shard_batch(batch, model)
    tensor_rank = dist.get_rank() % tp
    other_values = {key: value.clone() for key, value in own.items()}
    if tensor_rank:
        other_values["input_ids"][0, 0] += 1
    other_rows = {key: value[: len(value) - tensor_rank] for key, value in own.items()}
    # The same words in the same order, so that sizes alone tell them apart.
    other_sizes = {key: value.view(len(value) * (1 + tensor_rank), -1) for key, value in own.items()}
    calls = (
        lambda: model.train_step(other_values),
        lambda: model.train_step(other_rows),
        lambda: model.train_step(other_sizes),
        lambda: fxpar.shard_batch({key: value[:1] for key, value in batch.items()}, model),
        lambda: model.train_step([]),
    )
    found = []
    for call in calls:
        try:
            call()
        except FxparError as error:
            found.append((error.where, error.reason))
    return found


def saved(folder: str, tp: int, dp: int) -> dict[str, Tensor]:
    """Trains two steps and saves; the weights."""
    model = module(ONE_LAYER, tp, dp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    own = fxpar.shard_batch(batches(ONE_LAYER)[0], model)
    for _ in range(2):
        optimizer.zero_grad()
        model.train_step(own)
        optimizer.step()
    model.save_training(folder, optimizer, position=7)
    return model.full_state_dict()


def resumed(folder: str, tp: int, dp: int) -> Found:
    """Goes on from a save under another plan: weights and a further step."""
    model = module(ONE_LAYER, tp, dp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    position = model.resume_training(folder, optimizer)
    before = model.full_state_dict()
    optimizer.zero_grad()
    loss = model.train_step(fxpar.shard_batch(batches(ONE_LAYER)[0], model)).item()
    optimizer.step()
    return {"position": position, "before": before, "loss": loss, "after": model.full_state_dict()}
