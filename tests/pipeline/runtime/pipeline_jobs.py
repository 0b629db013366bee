"""What the ranks of a pipeline do in tests, and the same on one process for reference.

Every function runs alike in a rank and in the test's own process, where no group exists and the plan has no axes.
"""

from __future__ import annotations

import copy
import math
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.runtime.steps import Steps
from tests.runtime import models
from tests.runtime.jobs import Found, gradients, kept, refusal, whole
from tests.zoo import CASES

SECONDS = 30.0


def plan(microbatches: int = 2, **options: Any) -> fxpar.Plan:
    """Two stages or more on the ranks that are there; one process runs without axes."""
    if not dist.is_initialized():
        left = {k: v for k, v in options.items() if k not in ("tp", "dp", "split", "virtual_stages")}
        return fxpar.Plan(microbatches=microbatches if "batch_dims" in options else 1, **left)
    return fxpar.Plan(pp=dist.get_world_size() // options.get("tp", 1), microbatches=microbatches, **options)


def tiny(kind: Any = models.Tiny, microbatches: int = 2, **options: Any) -> ParallelModule:
    """A tiny model in double precision, as if it were new."""

    def build() -> ParallelModule:
        made = models.tiny(kind).double()
        return fxpar.parallelize(made, plan(microbatches, **options), models.batch(), timeout=SECONDS)

    return kept(("pipeline", kind, microbatches, str(options)), build)


def deep(options: dict[str, Any], microbatches: int = 2) -> ParallelModule:
    """As `tiny`, of four layers."""
    return tiny(models.Deep, microbatches, **options)


def parts(batch: dict[str, Tensor], count: int = 2) -> list[dict[str, Tensor]]:
    """A batch as microbatches of equal rows."""
    cut = {name: value.chunk(count) for name, value in batch.items()}
    return [{name: chunks[index] for name, chunks in cut.items()} for index in range(count)]


def plain_calls(options: dict[str, Any]) -> Found:
    """Evaluations between training steps, in both modes; and what is refused with gradients on."""
    model, batch = tiny(**options), models.batch()
    found: Found = {"losses": [], "steps": [], "outputs": []}

    def call(**given: Any) -> None:
        with torch.no_grad():
            found["outputs"].append({name: whole(value) for name, value in model(**given).items()})
        found["steps"].append(model.step)

    call(**batch)
    for _ in range(2):
        found["losses"].append(model.train_step(parts(batch)))
        found["steps"].append(model.step)
        call(ids=batch["ids"], scaled=True)
    model.eval()
    call(**models.batch(3, 7))
    model.train()
    found["losses"].append(model.train_step(parts(batch)))
    if dist.is_initialized():
        found["refused"] = refusal(lambda: model(**batch))
        found["step after"] = model.step
    found["gradients"] = gradients(model)
    model.requires_grad_(False)
    output = model(**batch)
    model.requires_grad_(True)
    found["frozen"] = {name: whole(value).requires_grad for name, value in output.items()}
    return found


def clipped(options: dict[str, Any]) -> Found:
    """Norms, what torch's own clipping is told, and a step with an optimizer inside."""
    model, batch = deep(options), models.batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with model.no_sync():
        model.train_step(parts(batch))
    model.train_step(parts(batch))
    found: Found = {"norms": [model.clip_grad_norm_(math.inf), model.clip_grad_norm_(0.01), model.clip_grad_norm_(1.0)]}
    found["gradients"] = gradients(model)
    if dist.is_initialized():
        own = [p.grad for p in model.parameters() if p.grad is not None]
        found["torch"] = [
            refusal(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)),
            refusal(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)),
            refusal(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf)),
            refusal(lambda: torch.stack([g.norm() for g in own]).norm()),
        ]
        found["one"] = type(own[0].norm().item()), copy.deepcopy(own[0]).shape == own[0].shape
    optimizer.zero_grad()
    found["loss"] = model.train_step(parts(batch), optimizer=optimizer, max_norm=0.1)
    found["flags"] = model.step_flags.norm, bool(model.step_flags.is_finite)
    found["state"] = model.full_state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    model.train_step(parts(batch), optimizer=optimizer, max_norm=0.1)
    found["broken"] = bool(model.step_flags.is_finite)
    return found


def scaled(inside: bool, frozen: bool) -> Found:
    """Steps in float16, of which one overflows on the first stage alone, with a scaler that all stages share."""
    model = fxpar.parallelize(models.tiny(models.Deep), plan(precision="fp16"), models.batch(), timeout=SECONDS)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in ("up.0", "down.0", "up.1", "down.1")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales, states = [], []
    for step in range(5):
        handle = None
        if step == 2 and "up.0.weight" in dict(model.named_parameters()):
            handle = model.get_parameter("up.0.weight").register_hook(lambda gradient: gradient * math.inf)
        if inside:
            model.train_step(parts(models.batch()), scaler=scaler, optimizer=optimizer, max_norm=1.0)
        else:
            model.train_step(parts(models.batch()), scaler=scaler)
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if handle is not None:
            handle.remove()
        scales.append(scaler.get_scale())
        states.append(model.full_state_dict())
    return {"scales": scales, "states": states}


def mixed() -> Found:
    """Steps in mixed precision with a scheduler and two optimizers, of which one has parameters of one stage alone."""
    model = fxpar.parallelize(models.tiny(models.Deep), plan(precision="bf16"), models.batch(), timeout=SECONDS)
    named = dict(model.named_parameters())
    norms: Any = {"params": [p for n, p in named.items() if "norm" in n]}
    first = torch.optim.AdamW([p for n, p in named.items() if "norm" not in n], lr=1e-2)
    second = torch.optim.SGD([norms], lr=1e-1)
    scheduler = torch.optim.lr_scheduler.StepLR(first, 2, 0.5)
    losses = []
    for _ in range(4):
        losses.append(model.train_step(parts(models.batch())).item())
        losses.append(model.clip_grad_norm_(1.0).item())
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return {"losses": losses, "types": {p.dtype for p in model.parameters()}, "step": model.step}


def ends_in_the_schedule() -> None:
    """The last rank is killed in front of its second microbatch."""
    model = tiny()
    model.train_step(parts(models.batch()))
    if dist.get_rank() == dist.get_world_size() - 1:
        plain, seen = Steps.run, list[int]()

        def dying(*args: Any, **options: Any) -> Any:
            seen.append(1)
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **options)

        Steps.run = dying  # type: ignore[method-assign]
    model.train_step(parts(models.batch()))


def cut(name: str, options: dict[str, Any]) -> Found:
    """A batch that is cut into three microbatches, against the same as a list; and one that cannot be cut."""
    case = CASES[name]
    batch = case.example()
    model = fxpar.parallelize(case.model(), plan(3, **options), batch, case.loss, timeout=SECONDS)
    dims = options["batch_dims"]
    lists = [{key: value.narrow(dims[key], index, 1) for key, value in batch.items()} for index in range(3)]
    found: Found = {"cut": model.train_step(batch), "gradients": gradients(model)}
    model.step = 0
    model.zero_grad()
    found["list"], found["of lists"] = model.train_step(lists), gradients(model)
    two = {key: value.narrow(dims[key], 0, 2) for key, value in batch.items()}
    found["two rows"] = refusal(lambda: model.train_step(two))
    model.step = 0
    found["one microbatch"] = model.train_step([two])
    if dist.is_initialized():
        other = {key: value.clone() for key, value in batch.items()}
        other["target"].select(dims["target"], 2).fill_(dist.get_rank())  # in the last microbatch alone
        found["other values"] = refusal(lambda: model.train_step(other))
    return found


def uneven(reduction: str) -> Found:
    """Data ranks with other numbers of rows, each a pipeline, some of whose words count; and other lengths."""
    batch, is_one = models.batch(8), not dist.is_initialized()
    batch["targets"][0, :3] = batch["targets"][5] = -100
    own = fxpar.Plan(loss_reduction=reduction)
    own = own if is_one else fxpar.Plan(pp=2, dp=2, microbatches=2, loss_reduction=reduction)
    model = fxpar.parallelize(models.tiny(models.Deep, dropout=0.0).double(), own, models.batch(), timeout=SECONDS)
    place = 0 if is_one else model.world.coordinates["dp"]
    cuts = [(0, 4), (4, 8)] if is_one else [[(0, 3), (4, 7)], [(3, 4), (7, 8)]][place]
    lists = [{name: value[first:last] for name, value in batch.items()} for first, last in cuts]
    found: Found = {"loss": model.train_step(lists), "gradients": gradients(model)}
    if not is_one:
        shorter = {name: value[:2, : 5 - 2 * place] for name, value in batch.items()}
        found["lengths"] = refusal(lambda: model.train_step([shorter, shorter]))
    return found
