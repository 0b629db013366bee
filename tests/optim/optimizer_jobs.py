"""What the ranks of a test world do with `fxpar.Optimizer`, and with optimizers of torch on one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.optim import Muon
from fxpar.runtime import chunked_step
from fxpar.runtime.sharded import local_of, whole_of
from tests.optim.muon_jobs import RATE, LoopOverMatrices
from tests.runtime import models
from tests.runtime.shard_jobs import Found, batches, build, found, mine, module

RULES: dict[Any, dict[str, Any]] = {"*.bias": {"weight_decay": 0.0}, nn.LayerNorm: {"weight_decay": 0.0, "lr": 3e-3}}
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1},
    "adam": {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True},
    "sgd": {"lr": 1e-1, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.5},
}
STATE = ("exp_avg", "exp_avg_sq", "main")
CLASSES = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def by_hand(model: ParallelModule, algorithm: str) -> torch.optim.Optimizer:
    """The groups of `RULES` in a script, of torch's optimizer."""
    named = dict(model.named_parameters())
    biases = [p for name, p in named.items() if name.endswith("bias")]
    norms = [p for name, p in named.items() if name == "norm.weight"]
    rest = [p for name, p in named.items() if not name.endswith("bias") and name != "norm.weight"]
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": biases, "weight_decay": 0.0}]
    groups.append({"params": norms, "weight_decay": 0.0, "lr": 3e-3})
    optimizer: torch.optim.Optimizer = CLASSES[algorithm](groups, **OPTIONS[algorithm])
    return optimizer


def expected(algorithm: str, norm_type: float, count: int, **more: Any) -> Found:
    """Steps by hand, on one process."""
    model = build("none", 1, 1, **more)
    return run(model, by_hand(model, algorithm), count, norm_type)


def run(model: ParallelModule, optimizer: Any, count: int, norm_type: float | None, inside: bool = False) -> Found:
    """Five steps with a rate that falls; clipped here where there is a norm."""
    falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    parts = mine(model, batches(count))
    losses: list[Tensor] = []
    norms: list[Any] = []
    for _ in range(5):
        batch = parts if count > 1 else parts[0]
        if inside:
            losses.append(model.train_step(batch, optimizer=optimizer))
            norms.append(model.step_flags.norm)
        else:
            losses.append(model.train_step(batch))
            norm = None if norm_type is None else model.clip_grad_norm_(0.5, norm_type)
            optimizer.step()
            norms.append(optimizer.norm.clone() if norm is None else norm)
            optimizer.zero_grad()
        falling.step()
    return found(model, losses, norms)


def made(model: ParallelModule, algorithm: str, norm_type: float = 2.0, **more: Any) -> fxpar.Optimizer:
    """The optimizer under test."""
    options = {**OPTIONS[algorithm], **more}
    return fxpar.Optimizer(model, algorithm, groups=RULES, max_norm=0.5, norm_type=norm_type, **options)


def trained(
    mesh: tuple[str, int, int],
    algorithm: str,
    norm_type: float,
    count: int,
    inside: bool,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> Found:
    """The same steps, of chunks so small that they cut parameters."""
    chunked_step.CHUNK = 37
    shard, tp, dp = mesh
    model = build(shard, tp, dp, **more)
    result = run(model, made(model, algorithm, norm_type, **(options or {})), count, None, inside)
    model.close()
    return result


# Muon for matrices, AdamW for the rest.


def matrices_by_hand() -> Found:
    """Two optimizers of a script, on one process."""
    model = build("none", 1, 1)
    named = dict(model.named_parameters())
    matrices = [named["up.weight"], named["down.weight"]]
    others = [p for p in named.values() if all(p is not matrix for matrix in matrices)]
    both = [LoopOverMatrices(matrices), torch.optim.AdamW(others, **OPTIONS["adamw"])]
    losses, norms = [], []
    for _ in range(4):
        losses.append(model.train_step(mine(model, batches(1))[0]))
        norms.append(model.clip_grad_norm_(0.5))
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    return found(model, losses, norms)


def matrices(mesh: tuple[str, int, int], inside: bool) -> Found:
    """The same by rules."""
    Muon.ns_dtype = torch.float64
    model = build(*mesh)
    adamw = {"algorithm": "adamw", **OPTIONS["adamw"]}
    rules: dict[Any, dict[str, Any]] = {nn.Embedding: adamw, lambda name, parameter: parameter.ndim < 2: adamw}
    optimizer = fxpar.Optimizer(model, "muon", lr=RATE, groups=rules, max_norm=0.5)
    losses: list[Tensor] = []
    norms: list[Any] = []
    for _ in range(4):
        losses.append(model.train_step(mine(model, batches(1))[0], optimizer=optimizer if inside else None))
        if not inside:
            optimizer.step()
            optimizer.zero_grad()
        norms.append(None if optimizer.norm is None else optimizer.norm.clone())
    Muon.ns_dtype = torch.bfloat16
    return found(model, losses, norms)


# Main weights.


def half_by_hand(count: int) -> Found:
    """Steps of AdamW on float32 values of weights in bfloat16, of their gradients in float32."""
    model = build("none", 1, 1, precision="bf16_weights")
    named = dict(model.named_parameters())
    mains = {name: nn.Parameter(p.detach().float()) for name, p in named.items()}
    optimizer = torch.optim.AdamW(mains.values(), **OPTIONS["adamw"])
    parts = mine(model, batches(count))
    losses = []
    for _ in range(5):
        losses.append(float(model.train_step(parts if count > 1 else parts[0])))
        for name, parameter in named.items():
            mains[name].grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(mains[name])
        model.zero_grad()
    return {"losses": losses, "state": model.full_state_dict()}


def half(mesh: tuple[str, int, int], count: int, **options: Any) -> Found:
    """The same by `fxpar.Optimizer`, and what lies in its state."""
    chunked_step.CHUNK = 37
    model = build(*mesh, precision="bf16_weights")
    optimizer = fxpar.Optimizer(model, main_weights=True, **OPTIONS["adamw"], **options)
    parts = mine(model, batches(count))
    losses = []
    for _ in range(5):
        losses.append(float(model.train_step(parts if count > 1 else parts[0], optimizer=optimizer)))
    named = dict(model.named_parameters())
    dtypes = {str(v.dtype) for p in named.values() for k, v in optimizer.state.get(p, {}).items() if k != "step"}
    mains = {n: optimizer.state[p]["main"] for n, p in named.items() if p in optimizer.state}
    rounded = all(torch.equal(local_of(main).bfloat16(), local_of(named[n])) for n, main in mains.items())
    return {"losses": losses, "state": model.full_state_dict(), "dtypes": dtypes, "rounded": rounded}


def half_norm(mesh: tuple[str, int, int]) -> tuple[float, float]:
    """The norm that clips gradients in bfloat16, and the one of their values in float64."""
    model = build(*mesh, precision="bf16_weights")
    optimizer = fxpar.Optimizer(model, lr=0.0, max_norm=1e9)
    model.train_step(mine(model, batches(1))[0])
    gradients = [whole_of(p.grad).double() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return float(optimizer.norm), float(torch.nn.utils.get_total_norm(gradients))  # type: ignore[arg-type]


def loaded_weights(through_data: bool) -> tuple[bool, bool]:
    """Whether main weights follow weights that were loaded; whether they are lost without a step between."""
    model = build("none", 1, 1, precision="bf16_weights")
    optimizer = fxpar.Optimizer(model, main_weights=True, lr=0.0)
    part = mine(model, batches(1))[0]
    model.train_step(part, optimizer=optimizer)
    state = {name: value * 2 for name, value in model.full_state_dict().items() if name != "scale"}  # a buffer
    if through_data:
        for parameter in model.parameters():
            parameter.data.mul_(2)
    else:
        model.load_full_state_dict({**model.full_state_dict(), **state})
    model.train_step(part, optimizer=optimizer)
    steps = []
    for _ in range(2):
        after = model.full_state_dict()
        steps.append(all(torch.equal(after[name], state[name]) for name in state))
        model.train_step(part, optimizer=optimizer)
    return steps[0], steps[1]


# Saves.


def saved(folder: Path, mesh: tuple[str, int, int], **options: Any) -> Found:
    """Trains, saves, and goes on."""
    chunked_step.CHUNK = 37
    model = build(*mesh, precision="bf16_weights")
    optimizer = made(model, "adamw", **options)
    parts = mine(model, batches(2))
    for _ in range(2):
        model.train_step(parts, optimizer=optimizer)
    model.save_training(folder, optimizer)
    return _follow(model, optimizer, parts)


def resumed(folder: Path, mesh: tuple[str, int, int], steps: int = 0, **options: Any) -> Found:
    """Goes on in a module that was trained elsewhere, after some steps whose state is lost."""
    chunked_step.CHUNK = 41
    model = build(*mesh, precision="bf16_weights")
    optimizer = made(model, "adamw", **options)
    parts = mine(model, batches(2))
    for _ in range(steps):
        model.train_step(parts, optimizer=optimizer)
    model.resume_training(folder, optimizer)
    if options.get("offload"):  # the state was read into the memory that is stepped, of which the host has one
        for parameter, state in optimizer.state.items():
            places: list[Any] = [optimizer.empty_state(parameter, key) for key in STATE]
            assert [place.data_ptr() for place in places] == [state[key].data_ptr() for key in STATE]
    return _follow(model, optimizer, parts)


def _follow(model: ParallelModule, optimizer: Any, parts: Any) -> Found:
    losses = [float(model.train_step(parts, optimizer=optimizer)) for _ in range(2)]
    return {"losses": losses, "state": model.full_state_dict()}


# What is not finite.


def poisoned(mesh: tuple[str, int, int], nonfinite: str, kind: type[nn.Module] = models.Tiny, **more: Any) -> Found:
    """One step in which the last rank, or a stage, has a NaN in its part of two gradients, and one after it."""
    model = build(*mesh, kind=kind, **more)
    optimizer = fxpar.Optimizer(model, lr=1e-2, nonfinite=nonfinite, max_norm=0.5)
    is_last = "pp" in more or not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    bad = "up.weight" if kind is models.Tiny else "down.2.weight"
    named = dict(model.named_parameters())
    is_on = [True]

    def poison(gradient: Tensor) -> Tensor | None:
        if not (is_on[0] and is_last):
            return None
        gradient = gradient.clone()
        local_of(gradient).view(-1)[-1] = math.nan
        return gradient

    for parameter in (named[name] for name in ("embed.weight", bad) if name in named):
        parameter.register_hook(poison)
    part = mine(model, batches(2))
    before = model.full_state_dict()
    result: Found = {"error": ""}
    model.train_step(part)
    try:
        optimizer.step()
    except fxpar.FxparError as error:
        result["error"] = str(error)
    optimizer.zero_grad()
    result |= {"named": optimizer.nonfinite_gradient(), "norm": float(optimizer.norm)}  # type: ignore[arg-type]
    after = model.full_state_dict()
    result["unchanged"] = all(torch.equal(before[name], after[name]) for name in before)
    is_on[0] = False
    model.train_step(part)
    optimizer.step()
    result["state"], result["named then"] = model.full_state_dict(), optimizer.nonfinite_gradient()
    return result


def replayed(shard: str, dp: int, nonfinite: str = "ignore") -> Found:
    """Steps in a graph (its stand-in), two shapes in turn, one with weights that are NaN; and without graphs."""
    results = []
    for how in ("none", "full_iteration"):
        model = build(shard, 1, dp, cuda_graphs=fxpar.CudaGraphs(how))
        optimizer = made(model, "adamw", nonfinite=nonfinite)
        parts, seen = mine(model, batches(3)), list[tuple[Any, ...]]()
        for step in range(8):
            if step == 5 and nonfinite == "skip":
                good = model.get_parameter("down.weight").detach().clone()
                with torch.no_grad():
                    model.get_parameter("down.weight").fill_(math.inf)
            batch = parts[:2] if step % 2 else parts
            loss = float(model.train_step(batch, optimizer=optimizer))
            norms: list[Any] = [optimizer.norm, model.step_flags.norm]
            name = optimizer.nonfinite_gradient() if nonfinite == "skip" else None
            seen.append((loss if math.isfinite(loss) else None, *map(float, norms), name))
            if step == 5 and nonfinite == "skip":
                with torch.no_grad():
                    model.get_parameter("down.weight").copy_(good)
        results.append((seen, model.full_state_dict()))
        model.close()
    (seen, state), (other, graphed) = results
    return {"same": str(seen) == str(other) and all(torch.equal(state[n], graphed[n]) for n in state), "seen": seen}


def rates() -> list[float]:
    """How far a replayed step moves a weight, before and after a state with another rate was loaded, and a new rate."""
    model = build("none", 1, 1, cuda_graphs=fxpar.CudaGraphs("full_iteration"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    part = mine(model, batches(1))[0]
    moved = []

    def step() -> None:
        before = model.get_parameter("up.weight").detach().clone()
        model.train_step(part, optimizer=optimizer)
        moved.append(float((model.get_parameter("up.weight") - before).abs().max()))

    step()
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 1e-4
    optimizer.load_state_dict(state)
    step()
    optimizer.param_groups[0]["lr"] = 0.0
    step()
    model.close()
    return moved


def scaled(mesh: tuple[str, int, int], how: str, nonfinite: str) -> Found:
    """Steps in float16 with a scaler whose first scale overflows; `inside` of `train_step`, or `unscaled` before."""
    model = module(*mesh, precision="fp16")
    optimizer = made(model, "adamw", nonfinite=nonfinite)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=100)
    part, scales = mine(model, batches(2)), []
    for _ in range(16):
        model.train_step(part, scaler=scaler, optimizer=optimizer if how == "inside" else None)
        if how == "unscaled":
            scaler.unscale_(optimizer)
        if how != "inside":
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    steps = {float(s["step"]) for s in optimizer.state.values() if "step" in s}
    return {"scales": scales, "steps": steps, "state": model.full_state_dict()}
