"""What training scripts of others are refused: optimizers, calls and wrappers that would train something else.

Every function runs alike in a rank and in the test's own process; see `jobs`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import PrepareModuleOutput, SequenceParallel, parallelize_module
from torch.nn.utils import parameters_to_vector

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.runtime.sharded import IS_DISPATCHED
from tests.runtime import models
from tests.runtime.ecosystem import Shampoo
from tests.runtime.jobs import Found, compile_and_call, refusal, tiny_module, tp


def _zero(parameters: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.0)


def optimizers() -> Found:
    """What optimizers that mix elements are told, in their first step."""
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "Adafactor": torch.optim.Adafactor,
        "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2]),
        "LBFGS": torch.optim.LBFGS,
        "Shampoo": partial(Shampoo, lr=0.1),
        # Before torch 2.13 it is torch that refuses to send a part: a fast path in C++ asks no subclass.
        **({"ZeRO": _zero} if IS_DISPATCHED else {}),
    }
    found: Found = {}
    for name, make in kinds.items():
        model = tiny_module()
        before = model.full_state_dict()

        def closure() -> Tensor:
            return model.train_step(models.batch())  # noqa: B023 - called within the loop

        closure()
        optimizer = make([p for n, p in model.named_parameters() if n != "unused"])
        found[name] = refusal(partial(optimizer.step, closure if name == "LBFGS" else None))
        after = model.full_state_dict()
        found[f"{name} unchanged"] = all(torch.equal(before[n], after[n]) for n in before)
    return found


def calls(folder: Path) -> Found:
    """What is told to calls that would compute something else on each rank, or change what programs run on."""
    model = tiny_module()
    model.train_step(models.batch())
    p: Any = model.get_parameter("up.weight")
    q: Any = model.get_parameter("down.weight")

    @torch.no_grad()
    def quietly(action: Callable[[], Any]) -> Any:
        return action()

    actions: dict[str, Callable[[], Any]] = {
        "vector": lambda: parameters_to_vector(model.parameters()),
        "by rows": lambda: p.grad.norm(dim=1),
        "product": lambda: p @ q,
        "slice": lambda: p[:2],
        "random": lambda: quietly(lambda: nn.init.normal_(p)),
        "noise": lambda: torch.randn_like(p),
        "sort": lambda: p.detach().sort(),
        "std": lambda: p.detach().std(),
        "item": lambda: p.grad.tolist(),
        "numpy": lambda: p.detach().numpy(),
        "other parts": lambda: p.detach() + q.detach().T if p.shape == q.shape else p.detach() * q.detach(),
        "into a whole": lambda: torch.zeros(p.shape).add_(p.detach()),
        "wrong shape": lambda: setattr(p, "grad", torch.zeros(6, 6)),
        "data": lambda: setattr(p, "data", torch.zeros(12, 6)),
        "in a graph": lambda: p.mul_(2),
        "reduce": lambda: dist.all_reduce(p.grad),
        "save": lambda: torch.save(model.state_dict(), folder / "state.pt"),
        "save module": lambda: torch.save(model, folder / "module.pt"),
        "copy": lambda: copy.deepcopy(model),
        "copy a part": lambda: copy.deepcopy(model.up),
        "average": lambda: torch.optim.swa_utils.AveragedModel(model),
        "old weights": lambda: _stale(model),
        "exchanged": lambda: _exchanged(model),
    }
    return {name: refusal(action) for name, action in actions.items()}


def _stale(model: ParallelModule) -> None:
    original = models.tiny()
    parallel = fxpar.parallelize(original, models.plan(tp()), models.batch())
    optimizer = torch.optim.SGD(original.parameters(), lr=0.1)
    parallel.train_step(models.batch())
    optimizer.step()


def _exchanged(model: Any) -> None:
    own = model.up.weight
    model.up.weight = nn.Parameter(torch.zeros(12, 6))
    try:
        model.train_step(models.batch())
    finally:
        model.up.weight = own


def wrappers() -> Found:
    """What wrappers and hooks are told, and what models are that were wrapped before."""
    model: Any = tiny_module()
    mesh = model.world.device_mesh
    ignore: Callable[..., None] = lambda *args: None  # noqa: E731
    seen: list[Tensor] = []
    keep: Callable[..., None] = lambda module, args, *rest: seen.append(args[0].detach().norm())  # noqa: E731
    plain, plan = models.tiny, models.plan(tp())
    prepared = PrepareModuleOutput(output_layouts=(), desired_output_layouts=())
    made: dict[str, Callable[[], Any]] = {
        "DistributedDataParallel": lambda: nn.parallel.DistributedDataParallel(model),
        "of a part": lambda: nn.parallel.DistributedDataParallel(model.up),
        "fully_shard": lambda: fully_shard(model),
        "fully_shard a part": lambda: fully_shard(model.up),
        "FullyShardedDataParallel": lambda: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        "torch.compile": lambda: compile_and_call(model, models.batch()),
        "compile()": lambda: model.compile(),
        "DataParallel": lambda: model._replicate_for_data_parallel(),
        "parallelize_module": lambda: parallelize_module(model, mesh, {"norm": SequenceParallel()}),
        "output": lambda: parallelize_module(model, mesh, prepared),
        "forward hook": lambda: model.up.register_forward_hook(ignore),
        "pre-hook": lambda: model.up.register_forward_pre_hook(ignore),
        "backward hook": lambda: model.norm.register_full_backward_hook(ignore),
        "own hook": lambda: model.register_forward_hook(ignore),
        "a part": lambda: model.up(torch.zeros(1, 6)),
        "half": lambda: model.half(),
        "to": lambda: model.to(torch.float64),
    }
    before: dict[str, Callable[[], Any]] = {
        "DDP before": lambda: nn.parallel.DistributedDataParallel(plain()),
        "fully_shard before": lambda: fully_shard(plain()),
        "DataParallel before": lambda: nn.DataParallel(plain()),
        "compile before": lambda: torch.compile(plain()),
        "compile() before": lambda: _changed(plain(), lambda m: m.up.compile()),
        "backward hook before": lambda: _changed(plain(), lambda m: m.up.register_full_backward_hook(ignore)),
        "logging hook before": lambda: _changed(plain(), lambda m: m.up.register_forward_hook(keep)),
        "logging pre-hook before": lambda: _changed(plain(), lambda m: m.up.register_forward_pre_hook(keep)),
    }
    made |= {
        n: partial(lambda make: fxpar.parallelize(make(), plan, models.batch()), make) for n, make in before.items()
    }
    found: Found = {name: refusal(action) for name, action in made.items()}
    found["same"] = model.to("cpu") is model
    found["trains"] = float(model.train_step(models.batch()))
    return found


def _changed(model: nn.Module, change: Callable[[Any], Any]) -> nn.Module:
    change(model)
    return model


def hooked() -> float:
    """The loss of a model with hooks that change values, which are part of the trace."""
    model = models.tiny(dropout=0.0)
    model.up.register_forward_hook(lambda module, args, output: output * 3)
    model.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.down.register_forward_hook(lambda module, args, output: None)
    reference = float(model(**models.batch())["loss"].detach())
    parallel = fxpar.parallelize(model, models.plan(tp()), models.batch())
    return float(parallel.train_step(models.batch())) - reference
