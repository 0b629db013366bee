"""What training scripts of others do with a module: their optimizers, clipping, state dicts and averages.

Every function runs alike in a rank and in the test's own process; see `jobs`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.runtime.sharded import IS_DISPATCHED, whole_of
from tests.checkpoint import weight_jobs
from tests.runtime import models
from tests.runtime.jobs import Found, case_module, gradients, kept, tiny_module, tp
from tests.zoo import CASES

# Rounding shows in the quotient of small moments, in one process as in many.
EPS = 1e-4


def module_of(name: str) -> tuple[ParallelModule, Any]:
    """A module as if it were new, and its batch: a case of the zoo, or the tiny llama, with sequence parallelism."""
    if name != "llama":
        return case_module(name), CASES[name].example()
    plan = fxpar.Plan(tp=tp(), sequence_parallel=tp() > 1)
    batch = {key: value.repeat(1, 2)[:, :8].contiguous() for key, value in weight_jobs.batch(name).items()}

    def build() -> ParallelModule:
        torch.manual_seed(1)
        return fxpar.parallelize(weight_jobs.llama().train(), plan, batch)

    return kept("ecosystem llama", build), batch


class Lion(torch.optim.Optimizer):
    """An optimizer of one's own: the sign of a mean of gradients."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.mul_(1 - 0.01 * group["lr"]).add_(
                    torch.sign(mean.mul(0.9).add(parameter.grad, alpha=0.1)), alpha=-group["lr"]
                )
                mean.lerp_(parameter.grad, 0.01)


class Lamb(Lion):
    """Steps as long as the parameter is: the norm of each tensor counts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = parameter.norm() / (parameter.grad.norm() + 1e-3)
                parameter.data.add_(parameter.grad * ratio.clamp(0.1, 1), alpha=-group["lr"])


class Shampoo(Lion):
    """Multiplies gradients with each other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 2:
                    parameter.sub_(parameter.grad @ parameter.grad.T @ parameter)


def train(name: str, kind: str, steps: int) -> Found:
    """Trains as a script does: torch's own clipping, groups with and without decay, a schedule, an average."""
    model, batch = module_of(name)
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "norm" not in n]
    others = [p for p in model.parameters() if all(p is not other for other in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    options: dict[str, Any] = {"loop": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}[kind]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=EPS, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    norms = []
    for step in range(steps):
        model.train_step(batch)
        norms.append(clip_grad_norm_(model.parameters(), 1.0, foreach=options.get("foreach")).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with torch.no_grad():
            for n, p in model.named_parameters():
                average[n].lerp_(p, 0.1) if step % 2 else average[n].mul_(0.9).add_(p.data, alpha=0.1)
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), list(average.values()))
    averages = model.full_state_dict()
    return {"norms": norms, "state": averages, "moments": _moments(model, optimizer)}


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{n} {key}": whole_of(value).clone()
        for n, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
        if isinstance(value, Tensor)
    }


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam amsgrad": partial(torch.optim.Adam, lr=0.01, eps=EPS, amsgrad=True),
    "Adam fused": partial(torch.optim.Adam, lr=torch.tensor(0.01), eps=EPS, fused=True, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01, eps=EPS),
    "Adagrad fused": partial(torch.optim.Adagrad, lr=0.01, eps=EPS, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, eps=EPS, centered=True, momentum=0.5),
    "RMSprop foreach": partial(torch.optim.RMSprop, lr=0.01, eps=EPS, foreach=True),
    "Adamax": partial(torch.optim.Adamax, lr=0.01, eps=EPS),
    "Adamax foreach": partial(torch.optim.Adamax, lr=0.01, eps=EPS, foreach=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.01, eps=EPS),
    "NAdam foreach": partial(torch.optim.NAdam, lr=0.01, eps=EPS, foreach=True),
    "RAdam": partial(torch.optim.RAdam, lr=0.01, eps=EPS),
    "RAdam foreach": partial(torch.optim.RAdam, lr=0.01, eps=EPS, foreach=True),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.1, eps=EPS),
    "Adadelta foreach": partial(torch.optim.Adadelta, lr=0.1, eps=EPS, foreach=True),
    "ASGD": partial(torch.optim.ASGD, lr=0.01),
    "Rprop": partial(torch.optim.Rprop, lr=0.001),
    "Lion": partial(Lion, lr=0.001),
    "Lamb": partial(Lamb, lr=0.1),
}


def optimizers() -> dict[str, dict[str, Tensor]]:
    """Weights after three steps of each optimizer, gradients clipped by value."""
    found = {}
    for name, make in _OPTIMIZERS.items():
        model = tiny_module()
        optimizer = make([p for n, p in model.named_parameters() if n != "unused"])
        for _ in range(3):
            optimizer.zero_grad()
            model.train_step(models.batch())
            clip_grad_value_(model.parameters(), 0.05, foreach="foreach" in name)
            optimizer.step()
        found[name] = model.full_state_dict()
    return found


def scaled() -> Found:
    """Steps of a loss scaler that meets an infinity on one rank, and weights after them."""
    model = tiny_module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(**models.batch())["loss"]).backward()
        if step == 1:
            whole = whole_of(model.get_parameter("up.weight").grad)  # type: ignore[arg-type]
            whole[-1, -1] = torch.inf  # the last rank's
            model.get_parameter("up.weight").grad.copy_(whole)  # type: ignore[union-attr]
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"scales": scales, "state": model.full_state_dict()}


def values() -> dict[str, Tensor]:
    """What scripts log, and gradients of what they compute from parameters."""
    model = tiny_module()
    model.train_step(models.batch())
    names = ("embed.weight", "up.weight", "up.bias", "down.weight", "norm.weight")
    found: dict[str, Any] = {"total": get_total_norm([p.grad for p in model.parameters() if p.grad is not None])}
    for n in names:
        p: Any = model.get_parameter(n)
        for order in (1.0, 2.0, 3.0, 0.0, torch.inf, -torch.inf):
            found[f"{n} norm {order}"] = torch.linalg.vector_norm(p.detach(), order)
        with torch.no_grad():
            found |= {f"{n} {k}": getattr(p, k)() for k in ("sum", "mean", "amax", "amin", "max", "min", "norm")}
        found[f"{n} finite"] = p.grad.isfinite().all()
        found[f"{n} none"] = p.grad.isnan().any()
        found[f"{n} sizes"] = torch.tensor([p.numel(), *p.shape, *p.stride(), p.dim()])
        found[f"{n} equal"] = torch.tensor([torch.equal(p, p.detach().clone()), torch.equal(p, p.detach() + 1)])
        found[f"{n} whole"] = whole_of(p)
        found[f"{n} where"] = whole_of(torch.where(p.detach() > 0, p.detach(), torch.zeros_like(p)))
        found[f"{n} scaled"] = whole_of(p.detach() * torch.arange(p.shape[-1]))
        found[f"{n} half"] = whole_of(p.detach().to(torch.bfloat16)).float()
        found[f"{n} new"] = whole_of(p.detach().new_ones(p.shape))
    return found


def penalties() -> dict[str, Tensor]:
    """Gradients of losses that scripts add to the model's."""
    model = tiny_module()
    own: list[Any] = [p for n, p in model.named_parameters() if n != "unused"]
    found: dict[str, Tensor] = {}

    def note(what: str) -> None:
        found.update({f"{what} {n}": g for n, g in gradients(model).items()})
        model.zero_grad()

    loss = model(**models.batch())["loss"]
    # Before torch 2.13 a part in a graph is refused, with the remedy that is followed here.
    terms = own if IS_DISPATCHED else [p.full_tensor() if hasattr(p, "full_tensor") else p for p in own]
    (loss + 0.1 * sum(p.pow(2).sum() for p in terms) + sum(p.norm() for p in terms)).backward()
    note("penalty")
    sum(p.full_tensor().abs().mean() if hasattr(p, "full_tensor") else p.abs().mean() for p in own).backward()
    note("whole")
    for parameter, part in zip(own, torch.autograd.grad(model(**models.batch())["loss"], own), strict=True):
        parameter.grad = part
    note("grad")
    seen: list[Any] = []
    handles = [own[1].register_hook(lambda g: g * 2), own[2].register_post_accumulate_grad_hook(seen.append)]
    model.step = 0
    model.train_step(models.batch())
    assert seen == [own[2]] or seen[0] is own[2]
    note("hooks")
    for handle in handles:
        handle.remove()
    own[1].requires_grad_(False)
    model.step = 0
    model.train_step(models.batch())
    note("frozen")
    own[1].requires_grad_(True)
    return found


# ---------------------------------------------------------------------- state


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> Found:
    """Whole state by torch's own calls, as one writes it with torch.save."""
    options = states.StateDictOptions(full_state_dict=True)
    return {
        "model": states.get_model_state_dict(model, options=options),
        "optimizer": states.get_optimizer_state_dict(model, optimizer, options=options),
    }


def resumed(name: str, folder: Path) -> Found:
    """State after two steps, and after two more of modules that were resumed from it in each of torch's ways."""
    model, batch = module_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)

    def steps(count: int) -> None:
        for _ in range(count):
            model.train_step(batch)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    steps(2)
    saved = copy.deepcopy(full(model, optimizer))
    own = copy.deepcopy(optimizer.state_dict())
    found: Found = {"saved": saved}
    if dist.is_initialized():
        sharded = states.get_state_dict(model, optimizer)
        save({"model": sharded[0], "optimizer": sharded[1]}, checkpoint_id=folder)
    steps(2)
    found["on"] = copy.deepcopy(full(model, optimizer))
    ways = ("dcp", "full", "rank 0") if dist.is_initialized() else ("full",)
    for way in (*ways, "own"):
        model, _ = module_of(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)
        if way == "own":
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(own)
        else:
            _restore(way, model, optimizer, copy.deepcopy(saved), folder)
        model.step = 2
        steps(2)
        found[way] = full(model, optimizer)
    return found


def _restore(way: str, model: nn.Module, optimizer: torch.optim.Optimizer, saved: Found, folder: Path) -> None:
    if way == "dcp":
        weights, moments = states.get_state_dict(model, optimizer)
        load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        options = states.StateDictOptions()
    else:
        is_reader = way == "full" or dist.get_rank() == 0
        weights, moments = (saved["model"], saved["optimizer"]) if is_reader else ({}, {})
        options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=way == "rank 0")
    states.set_model_state_dict(model, weights, options=options)
    states.set_optimizer_state_dict(model, optimizer, moments, options=options)
