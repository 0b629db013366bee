"""What the ranks of a test world do with shared-out parameters, and the same on one process; see `data_jobs`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.ops import process_group
from fxpar.runtime.sharded import local_of
from tests.checkpoint.live import LiveBytes
from tests.cudagraphs import graphed
from tests.runtime import jobs, models

Found = dict[str, Any]
ROWS, LENGTH = 8, 5


def batches(count: int) -> list[dict[str, Tensor]]:
    """Microbatches of all ranks, of which the first rows count few words, and other ones in each."""
    generator = torch.Generator().manual_seed(5)
    made = torch.randint(0, models.VOCABULARY, (count, 2, ROWS, LENGTH), generator=generator)
    for i, (_, targets) in enumerate(made):
        targets[: 2 + i, 1:] = -100
    return [{"ids": ids, "targets": targets} for ids, targets in made]


def mine(model: ParallelModule, parts: Any) -> Any:
    """This rank's rows."""
    return fxpar.shard_batch(parts, model)


def build(
    shard: str,
    tp: int,
    dp: int,
    change: Callable[[Any], Any] | None = None,
    kind: type[nn.Module] = models.Tiny,
    **more: Any,
) -> ParallelModule:
    """The tiny model: cut matrices, tied words, buffers, a scale no ranks divide and one that is never used."""
    alone = not dist.is_initialized()
    layers: dict[str, Any] = {"split": models.SPLIT} if tp > 1 and not alone else {}
    plan = fxpar.Plan(**more) if alone else fxpar.Plan(tp=tp, dp=dp, shard=shard, **layers, **more)
    model = models.tiny(kind)
    if change is not None:
        change(model)
    rows = ROWS if alone else ROWS // dp
    return fxpar.parallelize(model, plan, {name: value[:rows] for name, value in batches(1)[0].items()})


def module(shard: str, tp: int = 1, dp: int = 2, **more: Any) -> ParallelModule:
    """A module as if it were new."""
    return jobs.kept(("shard", shard, tp, dp, *map(str, more.items())), partial(build, shard, tp, dp, **more))


def adamw(model: ParallelModule, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, **options)


def sizes(model: ParallelModule) -> dict[str, tuple[int, int]]:
    """Elements of each parameter, and of what this rank has of it."""
    return {name: (p.numel(), local_of(p).numel()) for name, p in model.named_parameters()}


def found(model: ParallelModule, losses: list[Tensor], norms: list[Tensor]) -> Found:
    return {
        "losses": [float(loss) for loss in losses],
        "norms": [float(norm) for norm in norms],
        "state": model.full_state_dict(),
    }


def train(shard: str, tp: int, dp: int, count: int, steps: int, clip: bool = True, **more: Any) -> Found:
    """AdamW steps with dropout; each has `count` microbatches."""
    model = module(shard, tp, dp, **more)
    optimizer = adamw(model)
    parts = mine(model, batches(count))
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(model.train_step(parts if count > 1 else parts[0]))
        norms += [model.clip_grad_norm_(0.5)] if clip else []
        optimizer.step()
    return {**found(model, losses, norms), "sizes": sizes(model)}


def compiled(shard: str, tp: int, dp: int, count: int, steps: int) -> Found:
    """The same of programs that Inductor compiles."""
    return train(shard, tp, dp, count, steps, compile=True)


class Sent(TorchDispatchMode):
    """Adds up the elements of parts that are gathered, and of wholes that are reduced and scattered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = {"all_gather": 0, "reduce_scatter": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        for name in self.elements:
            if str(func).startswith(f"_c10d_functional.{name}_"):
                values = args[0] if isinstance(args[0], list) else [args[0]]
                self.elements[name] += sum(value.numel() for value in values)
        return func(*args, **(kwargs or {}))


def sent(shard: str, count: int) -> dict[str, int]:
    """What a step of some microbatches sends of parameters."""
    model = module(shard)
    parts = mine(model, batches(count))
    model.train_step(parts)
    mode = Sent()
    with mode:
        model.train_step(parts)
    return mode.elements


def uneven(shard: str, tp: int, dp: int) -> Found:
    """Steps of microbatches whose rows the data ranks do not divide: five and seven."""
    model = module(shard, tp, dp)
    optimizer = adamw(model)
    parts = [{name: v[:rows] for name, v in part.items()} for part, rows in zip(batches(2), (5, 7), strict=True)]
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(model.train_step(mine(model, parts)))
        norms.append(model.clip_grad_norm_(0.5))
        optimizer.step()
    return found(model, losses, norms)


def hybrid(shard: str, count: int, steps: int) -> Found:
    """The same on four data ranks, of which two share out what two others hold as well."""
    return train(shard, 1, 4, count, steps, dp_shard=2)


def staged(shard: str, microbatches: int, **more: Any) -> Found:
    """Steps of a pipeline of two stages, which share tied words, each on two data ranks."""
    return _steps(build(shard, 1, 2, kind=models.Deep, pp=2, microbatches=microbatches, **more), batches(1)[0])


def routed(shard: str, ep: int, **more: Any) -> Found:
    """Steps of experts on some of four data ranks."""
    torch.manual_seed(0)
    (batch,) = graphed.words(1, rows=ROWS)
    example = {name: value[: ROWS // 4] for name, value in batch.items()}
    plan = fxpar.Plan(dp=4, ep=ep, shard=shard, **more)
    return _steps(fxpar.parallelize(graphed.mixtral().train(), plan, example), batch)


def _steps(model: ParallelModule, batch: Any) -> Found:
    optimizer = adamw(model)
    part = mine(model, batch)
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(model.train_step(part))
        norms.append(model.clip_grad_norm_(0.5))
        optimizer.step()
    result = {**found(model, losses, norms), "elements": sum(local for _, local in sizes(model).values())}
    model.close()
    return result


def without_sums(shard: str, tp: int, dp: int) -> Found:
    """Steps whose first calls leave their gradients; whole gradients after the last."""
    model = module(shard, tp, dp)
    optimizer = adamw(model)
    *first, last = mine(model, batches(3))
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            losses += [model.train_step(part) for part in first]
        losses.append(model.train_step(last))
        norms.append(model.clip_grad_norm_(0.5))
        optimizer.step()
    return found(model, losses, norms)


def accumulated(shard: str, tp: int, dp: int) -> Found:
    """Gradients of several calls added up in `.grad`."""
    model = module(shard, tp, dp)
    losses = [model.train_step(part) for part in mine(model, batches(3))]
    return {"losses": [float(loss) for loss in losses], "gradients": jobs.gradients(model)}


def plain(shard: str, tp: int, dp: int) -> Found:
    """Gradients and losses of plain calls, differentiated by autograd, with a step between them."""
    model = module(shard, tp, dp)
    optimizer = adamw(model)
    losses = []
    for part in mine(model, batches(3)):
        optimizer.zero_grad()
        loss = model(**part)["loss"]
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return {"losses": losses, "gradients": jobs.gradients(model), "state": model.full_state_dict()}


def evaluated(shard: str, tp: int, dp: int) -> list[float]:
    """Losses without gradients, before and after a step, after weights were loaded, and after a write in place."""
    model = module(shard, tp, dp)
    optimizer = adamw(model)
    (part,) = mine(model, batches(1))

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            loss = model(**part)["loss"]
        model.train()
        return float(loss)

    losses = [evaluate()]
    state = model.full_state_dict()
    model.train_step(part)
    optimizer.step()
    losses.append(evaluate())
    model.load_full_state_dict({name: value * 2 for name, value in state.items()})
    losses.append(evaluate())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    losses.append(evaluate())
    return losses


def _freeze(model: Any) -> None:
    model.up.weight.requires_grad_(False)


def frozen(shard: str, tp: int, dp: int) -> Found:
    """Steps with one parameter frozen before, one after the model was shared out."""
    model = build(shard, tp, dp, _freeze)
    model.get_parameter("down.weight").requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-6)
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(model.train_step(mine(model, batches(2))))
        norms.append(model.clip_grad_norm_(0.5))
        optimizer.step()
    return {**found(model, losses, norms), "gradients": sorted(jobs.gradients(model)), "sizes": sizes(model)}


def half(shard: str, tp: int, dp: int, kind: str) -> Found:
    """Steps in mixed precision: with a GradScaler in float16, whose first scale overflows."""
    model = module(shard, tp, dp, precision=kind)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3) if kind == "fp16" else None
    parts = mine(model, batches(2))
    losses, scales = [], []
    for _ in range(30 if scaler else 4):
        optimizer.zero_grad()
        if scaler is None:
            losses.append(model.train_step(parts))
            model.clip_grad_norm_(0.5)
            optimizer.step()
            continue
        losses.append(model.train_step(parts, scaler=scaler))
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    types = {str(p.dtype) for p in model.parameters()}
    return {**found(model, losses, []), "scales": scales, "types": types}


def hooked(shard: str, tp: int, dp: int) -> Found:
    """Gradients after hooks of parameters; what the hooks saw."""
    model = build(shard, tp, dp)
    seen: list[tuple[str, tuple[int, ...]]] = []
    for name, parameter in model.named_parameters():
        if name == "up.weight":
            parameter.register_hook(lambda gradient: gradient * 2)
        if name != "unused":
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, tuple(p.grad.shape))))
    (part,) = mine(model, batches(1))
    loss = model(**part)["loss"]
    loss.backward()
    return {"gradients": jobs.gradients(model), "seen": sorted(seen), "loss": float(loss.detach())}


def replayed(shard: str, impl: str, inside: bool, dp: int, **more: Any) -> tuple[bool, list[float]]:
    """Whether a training under the stand-in for CUDA graphs is the one without; its losses."""
    results = []
    for how in ("none", impl):
        model = build(shard, 1, dp, cuda_graphs=fxpar.CudaGraphs(how), **more)
        optimizer = adamw(model, fused=inside)
        losses, parts = [], mine(model, batches(2))
        for step in range(6):
            batch = [parts[step % 2], parts[(step + 1) % 2]]
            if inside:
                losses.append(float(model.train_step(batch, optimizer=optimizer, max_norm=0.5)))
            else:
                losses.append(float(model.train_step(batch)))
                model.clip_grad_norm_(0.5)
                optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses += [float(model(**part)["loss"]) for part in parts]
        results.append((losses, model.full_state_dict()))
        model.close()
    (losses, state), (other, graphed_state) = results
    return losses == other and all(torch.equal(state[n], graphed_state[n]) for n in state), losses


# Checkpoints.


def saved(folder: Path, shard: str, tp: int, dp: int, steps: int = 2) -> Found:
    """Trains and saves the training; what follows it."""
    model = module(shard, tp, dp)
    optimizer = adamw(model)
    parts = mine(model, batches(2))
    for _ in range(steps):
        optimizer.zero_grad()
        model.train_step(parts)
        optimizer.step()
    model.save_training(folder, optimizer, position=steps)
    return {"saved": model.full_state_dict(), **_follow(model, optimizer, parts)}


def resumed(folder: Path, shard: str, tp: int, dp: int) -> Found:
    """What follows a save that another plan made."""
    model = module(shard, tp, dp)
    optimizer = adamw(model)
    assert model.resume_training(folder, optimizer) == 2
    before = model.full_state_dict()
    return {"saved": before, **_follow(model, optimizer, mine(model, batches(2)))}


def _follow(model: ParallelModule, optimizer: torch.optim.Optimizer, parts: Any) -> Found:
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(float(model.train_step(parts)))
        optimizer.step()
    return {"losses": losses, "state": model.full_state_dict()}


def exported(folder: Path, shard: str, tp: int, dp: int) -> Found:
    """Writes safetensors and loads them into a module whose weights were lost."""
    model = module(shard, tp, dp)
    before = model.full_state_dict()
    model.save_checkpoint(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_checkpoint(folder)
    return {"before": before, "after": model.full_state_dict()}


class Layers(nn.Module):
    """Sixteen equal matrices, much larger than what they compute of a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(16))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """[b, 64]."""
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return {"loss": x.square().mean()}


def from_meta(shard: str, dp: int) -> Found:
    """A model of the meta device: bytes while its weights are made, while it trains a step, and at rest."""
    with torch.device("meta"):
        model = Layers()
    alone = not dist.is_initialized()
    batch = {"x": torch.randn(8, 64, generator=torch.Generator().manual_seed(4))}
    plan = fxpar.Plan(seed=3) if alone else fxpar.Plan(dp=dp, shard=shard, seed=3)
    module = fxpar.parallelize(model, plan, {"x": batch["x"][: 8 if alone else 8 // dp]})
    part = mine(module, batch)
    loss = float(module.train_step(part))
    module.zero_grad()
    with LiveBytes() as live:
        module.train_step(part)
    rest = sum(local_of(p).numel() * p.element_size() for p in module.parameters())
    loading = {"building": module.loading.peak, "training": live.peak, "rest": rest}
    return {**loading, "loss": loss, "state": module.full_state_dict()}


def gathered_at_once(times: int) -> bool:
    """Several gathers that are started before the first is waited for, again and again."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    values = [torch.full(shape, float(dist.get_rank())) for shape in ((12, 6), (12,), (6, 12), (6,), (16, 6), (6,))]
    expected = [torch.stack((torch.zeros_like(value), torch.ones_like(value))) for value in values]
    for _ in range(times):
        started = [process_group.start_gathers(values[skipped:], group, 2) for skipped in (0, 1, 2, 0)]
        for skipped, gathers in zip((0, 1, 2, 0), started, strict=True):
            found = [process_group.arrived(gather) for gather in gathers]
            if not all(map(torch.equal, found, expected[skipped:])):
                return False
    return True
