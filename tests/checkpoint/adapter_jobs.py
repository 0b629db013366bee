"""What the ranks of a test world do with LoRA adapters of peft, and the same on one process; see `jobs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from tests.adapters import batch, tiny_llama, with_lora
from tests.runtime.jobs import Found, kept, refusal

Sizes = dict[str, Any]


def module(sizes: Sizes, options: dict[str, Any]) -> ParallelModule:
    """A model with adapters, split."""
    key = "adapters", *sizes.items(), str(options)
    plan = fxpar.Plan(**sizes, seed=3)
    return kept(key, lambda: fxpar.parallelize(with_lora(tiny_llama(), **options), plan, rows(sizes, 0)))


def rows(sizes: Sizes, seed: int) -> dict[str, Tensor]:
    """This data rank's part of a batch of four rows."""
    count = 4 // sizes.get("dp", 1)
    first = count * (torch.distributed.get_rank() if sizes.get("dp", 1) > 1 else 0)
    return {key: value[first : first + count] for key, value in batch(seed).items()}


def trained(sizes: Sizes, options: dict[str, Any], steps: int = 2) -> tuple[ParallelModule, fxpar.Optimizer]:
    """After some steps of AdamW."""
    model = module(sizes, options)
    optimizer = fxpar.Optimizer(model, "adamw", lr=1e-2)
    losses(model, optimizer, sizes, range(steps))
    return model, optimizer


def losses(model: ParallelModule, optimizer: fxpar.Optimizer, sizes: Sizes, seeds: Any) -> list[float]:
    found = []
    for seed in seeds:
        optimizer.zero_grad()
        found.append(model.train_step(rows(sizes, seed)).item())
        optimizer.step()
    return found


def saved(sizes: Sizes, options: dict[str, Any], folder: Path) -> Found:
    """Trains, saves the adapter and the merged model, and goes back to the adapter that was saved."""
    model, optimizer = trained(sizes, options)
    state = model.full_state_dict()
    model.save_checkpoint(folder / "adapter")
    model.save_checkpoint(folder / "merged", shard_size="9KB", merged=True)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.fill_(1.0)
    model.load_checkpoint(folder / "adapter" / "adapter_model.safetensors")
    return {
        "state": state,
        "again": model.full_state_dict(),
        "with_state": sorted(names[id(parameter)] for parameter in optimizer.state),
        "with_gradient": sorted(n for n, p in model.named_parameters() if p.grad is not None),
        "trained": sorted(n for n, p in model.named_parameters() if p.requires_grad),
    }


def loaded(sizes: Sizes, options: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """Loads an adapter under another plan."""
    model = module(sizes, options)
    model.load_checkpoint(folder)
    return model.full_state_dict()


def stopped(sizes: Sizes, options: dict[str, Any], folder: Path) -> Found:
    """Two steps, a save, and two more; then a training that has gone elsewhere resumes from it."""
    model, optimizer = trained(sizes, options)
    path = model.save_training(folder, optimizer, position=2)
    after = losses(model, optimizer, sizes, (2, 3))
    model, optimizer = trained(sizes, options, 1)
    position = model.resume_training(folder, optimizer)
    return {"path": path, "after": after, "again": losses(model, optimizer, sizes, (2, 3)), "position": position}


def unmerged(sizes: Sizes) -> Found:
    """What is told who would have peft merge what the ranks run, and that nothing has changed."""
    model = module(sizes, {})
    adapted: Any = model
    layer: Any = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    before = model.full_state_dict()
    found: Found = {
        "merge_adapter": refusal(adapted.merge_adapter),
        "merge_and_unload": refusal(adapted.merge_and_unload),
        "merge": refusal(layer.merge),
        "save_pretrained": refusal(lambda: model.save_pretrained("folder", selected_adapters=["other"])),
    }
    after = model.full_state_dict()
    found["same"] = all(torch.equal(before[name], after[name]) for name in before)
    found["counts"] = adapted.get_nb_trainable_parameters()
    return found


def from_base(sizes: Sizes, options: dict[str, Any], folder: Path) -> Found:
    """Splits a model without values, with the weights of a base model; then loads another one's under the adapter."""
    with torch.device("meta"):
        model: Any = with_lora(tiny_llama(), **options)
    split = fxpar.parallelize(model, fxpar.Plan(**sizes), rows(sizes, 0), checkpoint=folder / "base")
    before = split.full_state_dict()
    loss = split.train_step(rows(sizes, 0)).item()
    split.load_checkpoint(folder / "other")
    return {"before": before, "loss": loss, "after": split.full_state_dict()}
