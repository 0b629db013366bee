"""What the ranks of a pipeline do with the state of a module, and the same on one process; see `jobs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.runtime.sharded import local_of
from tests.pipeline.runtime.pipeline_jobs import SECONDS, deep, parts, plan
from tests.runtime import models
from tests.runtime.jobs import Found, refusal


def training(options: dict[str, Any]) -> tuple[ParallelModule, torch.optim.Optimizer, Any]:
    """A module with AdamW in two groups, of which one has parameters of the last stage alone, and a scheduler."""
    model = deep(options)
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named.items() if "norm" not in n]},
        {"params": [p for n, p in named.items() if "norm" in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def steps(model: ParallelModule, optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
    """Losses of some steps of two microbatches."""
    found = []
    for _ in range(count):
        found.append(model.train_step(parts(models.batch())).item())
        found.append(model.clip_grad_norm_(0.1).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return found


def saved(folder: Path, options: dict[str, Any]) -> Found:
    """Two steps, a save, and two more steps."""
    model, optimizer, scheduler = training(options)
    steps(model, optimizer, scheduler, 2)
    path = model.save_training(folder, optimizer, scheduler, {"batch": 2})
    state = model.full_state_dict()
    return {"path": path, "state": state, "losses": steps(model, optimizer, scheduler, 2), "step": model.step}


def resumed(folder: Path, options: dict[str, Any]) -> Found:
    """The steps behind a save, in a training that has gone elsewhere."""
    model, optimizer, scheduler = training(options)
    steps(model, optimizer, scheduler, 1)
    position = model.resume_training(folder, optimizer, scheduler)
    state = model.full_state_dict()
    losses = steps(model, optimizer, scheduler, 2)
    return {"state": state, "losses": losses, "position": position, "step": model.step}


def checkpoints(folder: Path, options: dict[str, Any]) -> Found:
    """Full and distributed state dicts and safetensors, there and back; and what is refused of them."""
    model = deep(options)
    state = model.full_state_dict()
    own = model.state_dict()
    model.save_checkpoint(folder / "whole", shard_size=600)
    save_parts({"model": own}, checkpoint_id=folder / "parts")
    found: Found = {"state": state, "own": sorted(own), "names": sorted(n for n, _ in model.named_parameters())}
    found["files"] = {n: v for f in sorted((folder / "whole").glob("*.safetensors")) for n, v in load_file(f).items()}

    def spoil() -> None:
        with torch.no_grad():
            for value in model.parameters():
                local_of(value).fill_(0.25)

    def equal() -> bool:
        return all(torch.equal(value, state[name]) for name, value in model.full_state_dict().items())

    spoil()
    found["is spoilt"] = not equal()
    model.load_checkpoint(folder / "whole")
    found["safetensors"] = equal()
    spoil()
    again = model.state_dict()
    load_parts({"model": again}, checkpoint_id=folder / "parts")
    missing, unknown = model.load_state_dict(again)
    found["parts"], found["misfits"] = equal(), [*missing, *unknown]
    spoil()
    model.load_state_dict(state)
    found["whole as parts"] = equal()
    spoil()
    model.load_full_state_dict({name: value for name, value in state.items() if name != "head.weight"})
    found["full"] = equal()
    lacking = {name: value for name, value in state.items() if name != "up.0.bias"}
    found["lacking"] = refusal(lambda: model.load_full_state_dict(lacking))
    found["odd"] = refusal(lambda: model.load_full_state_dict({**state, "odd": torch.zeros(1)}))
    found["odd parts"] = refusal(lambda: model.load_state_dict({**again, "odd": torch.zeros(1)}))
    wrong = {**state, "up.0.bias": torch.zeros(3)}
    found["shape"] = refusal(lambda: model.load_full_state_dict(wrong))
    return found


def made(folder: Path, options: dict[str, Any]) -> Found:
    """Modules of a checkpoint and of a model on the meta device: weights, and what this rank held at most."""
    with torch.device("meta"):
        empty = models.Deep().double()
    empty.scale, empty.shift = torch.tensor(0.5, dtype=torch.float64), torch.arange(6.0, dtype=torch.float64)
    torch.manual_seed(4)
    empty.unused = torch.nn.Parameter(torch.randn(3, dtype=torch.float64))
    initial = fxpar.parallelize(empty, plan(**options), models.batch(), timeout=SECONDS)
    read = fxpar.parallelize(empty, plan(**options), models.batch(), checkpoint=folder, timeout=SECONDS)
    held = sum(local_of(value).numel() * 8 for value in initial.parameters())
    return {
        "initial": initial.full_state_dict(),
        "read": read.full_state_dict(),
        "held": (initial.loading.held, held + 7 * 8),
        "bytes read": (read.loading.read, held + 8),
    }
