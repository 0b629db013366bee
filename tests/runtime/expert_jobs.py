"""What the ranks of a test world do with experts, and the same on one process for reference."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.cli.models import build
from fxpar.plan.cost import Cost
from tests.passes import experts as words
from tests.runtime.jobs import gradients, refusal

Found = dict[str, Any]

ROWS, LENGTH = 8, 9


def batch() -> dict[str, torch.Tensor]:
    """Words of all data ranks, some of which do not count."""
    ids = torch.randint(0, 250, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:2, 3:] = -100
    return {"input_ids": ids, "labels": labels}


@cache
def module(options: tuple[tuple[str, Any], ...]) -> ParallelModule:
    """A small mixtral with dropout and its experts' load in the loss, of as many layers as there may be stages."""
    layers = dict(options).get("layers", 1)
    model = build(f"mixtral,num_hidden_layers={layers},attention_dropout=0.1", None, None, 0).model
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.3  # type: ignore[union-attr]
    model.set_experts_implementation("eager")  # type: ignore[operator]
    asked = {name: value for name, value in options if name != "layers"}
    plan = fxpar.Plan(**asked) if dist.is_initialized() else fxpar.Plan()
    rows = ROWS // plan.data_ranks
    example = {key: value[:rows] for key, value in batch().items()}
    return fxpar.parallelize(model.double().train(), plan, example)


def train(options: dict[str, Any], steps: int = 3, eps: float = 1e-6) -> Found:
    """Steps of AdamW, clipped; of the first the gradients."""
    model = module(tuple(sorted(options.items())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=eps)
    own = fxpar.shard_batch(batch(), model)
    found: Found = {"losses": [], "norms": []}
    for step in range(steps):
        optimizer.zero_grad()
        found["losses"].append(model.train_step(own).item())
        if step == 0:
            found["gradients"] = gradients(model)
        found["norms"].append(model.clip_grad_norm_(0.5).item())
        optimizer.step()
    found["state"] = model.full_state_dict()
    found["held"] = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    return found


def other_rows(options: dict[str, Any]) -> tuple[str, str, str, str]:
    """Data ranks that bring other numbers of rows."""
    torch.manual_seed(0)
    own, plan = words.batch(5), fxpar.Plan(**options)
    example = {key: value[: words.ROWS // plan.data_ranks] for key, value in own.items()}
    model = fxpar.parallelize(words.Routed().double().train(), plan, example)
    rows = 3 if dist.get_rank() else 4
    return refusal(lambda: model.train_step({key: value[:rows] for key, value in own.items()}))


def loads(options: dict[str, Any], routing: str, parts: int) -> tuple[list[Any], str]:
    """The load of a step of so many microbatches, before and behind it; and what the report says."""
    torch.manual_seed(0)
    own, plan = words.batch(5), fxpar.Plan(**options)
    rows = words.ROWS // plan.data_ranks
    example = {key: value[:rows] for key, value in own.items()}
    model = fxpar.parallelize(words.Routed(routing).double().train(), plan, example)
    own = fxpar.shard_batch(own, model)
    found = [model.report().loads]
    model.train_step([own] * parts if parts > 1 else own)
    report = model.report()
    assert report.to_dict()["loads"][0]["experts"] == report.loads[0].experts
    return [*found, report.loads], str(report)


def with_slots_by_loads(folder: Path) -> tuple[Any, Any, Any]:
    """Trains a step, and another of a plan whose slots are left to its loads: the plan then, the save's, the load."""
    torch.manual_seed(0)
    own, cost = words.batch(5), Cost(bandwidth=1e30, latency=1e-30, flops=1.0)
    example, file = {key: value[: words.ROWS // 2] for key, value in own.items()}, folder / "report.json"
    for experts in (fxpar.Experts(), fxpar.Experts(spare_experts="auto", expert_loads=str(file))):
        plan = fxpar.Plan(dp=2, ep=2, cost=cost, experts=experts)
        model = fxpar.parallelize(words.Routed("one").double().train(), plan, example)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model.train_step(fxpar.shard_batch(own, model))
        report = model.report()
        if dist.get_rank() == 0:
            file.write_text(json.dumps(report.to_dict()))
        dist.barrier()
    model.save_training(folder / "training", optimizer)
    (save,) = (folder / "training").rglob("training.json")
    saved = json.loads(save.read_text())["content"]["plan"]
    return model.plan.experts, saved["experts"], model.report().loads


def most_rows(together: bool) -> int:
    """The most rows that a source of two, or both together, has for one of two holders, before any step."""
    torch.manual_seed(0)
    model, half = words.Routed().double(), words.ROWS // 2
    with torch.no_grad():
        chosen = [
            model.router(model.words(ids).flatten(0, 1)).topk(words.CHOICES).indices
            for ids in words.batch(5)["ids"].split(words.ROWS if together else half)
        ]
    first = [int((own < words.EXPERTS // 2).sum()) for own in chosen]
    found: int = max(max(count, own.numel() - count) for count, own in zip(first, chosen, strict=True))
    return found


def budgeted(options: dict[str, Any], ways: str) -> Found:
    """Two steps of a small model whose router learns: losses, gradients of the first, outputs, what was repeated.

    Args:
        ways: `plain`, `list` of two microbatches, or `no_sync`, whose first call leaves its gradients.
    """
    torch.manual_seed(0)
    plan, own = fxpar.Plan(**options), words.batch(5)
    example = {key: value[: words.ROWS // plan.data_ranks] for key, value in own.items()}
    model = fxpar.parallelize(words.Routed().double().train(), plan, example)
    own = fxpar.shard_batch(own, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found: Found = {"losses": []}
    for step in range(2):
        if ways == "no_sync":
            with model.no_sync():
                model.train_step(own)
        found["losses"].append(model.train_step([own, own] if ways == "list" else own).item())
        if step == 0:
            found["gradients"] = gradients(model)
            found["report"] = str(model.report())
        optimizer.step()
        optimizer.zero_grad()
    found["state"] = model.full_state_dict()
    model.eval()
    with torch.no_grad():
        found["output"] = model(**own).item()
    return found


def saved(options: dict[str, Any], folder: Path) -> list[float]:
    """A step, a save, and the losses of the steps behind it."""
    model = module(tuple(sorted(options.items())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _losses(model, optimizer, 1)
    model.save_training(folder / "training", optimizer)
    model.save_checkpoint(folder / "weights")
    return _losses(model, optimizer, 2)


def resumed(options: dict[str, Any], folder: Path) -> tuple[list[float], bool]:
    """The losses of the steps behind another plan's save, and whether the weights alone are read as those of it."""
    model = module(tuple(sorted(options.items())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.resume_training(folder / "training", optimizer)
    there = {name: value.clone() for name, value in model.full_state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_checkpoint(folder / "weights")
    again = model.full_state_dict()
    return _losses(model, optimizer, 2), all(torch.equal(value, again[name]) for name, value in there.items())


def _losses(model: ParallelModule, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    own, found = fxpar.shard_batch(batch(), model), []
    for _ in range(steps):
        optimizer.zero_grad()
        found.append(model.train_step(own).item())
        optimizer.step()
    return found
