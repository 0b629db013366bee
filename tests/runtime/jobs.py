"""What the ranks of a test world do, and the same on one process for reference.

Every function runs alike in a rank and in the test's own process, where no group exists and tp is 1.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.errors import FxparError
from fxpar.ops.process_group import close_abandoned
from fxpar.runtime.sharded import local_of, whole_of
from tests.runtime import models
from tests.zoo import CASES, VOCABULARY

Found = dict[str, Any]

_kept: dict[Any, tuple[ParallelModule, dict[str, Tensor]]] = {}


def tp() -> int:
    """Ranks of the world; 1 in the test's own process."""
    return dist.get_world_size() if dist.is_initialized() else 1


def kept(key: Any, build: Callable[[], ParallelModule]) -> ParallelModule:
    """The module as if it were new: compiled once, its first weights loaded again."""
    if key not in _kept:
        made = build()
        _kept[key] = made, made.full_state_dict()
    found, state = _kept[key]
    found.train()
    found.load_full_state_dict(state)
    found.zero_grad()
    found.step = 0
    return found


def forget() -> None:
    """Lets go of the modules that `kept` made, and of their groups: on CPUs each wakes up a hundred times a second."""
    _kept.clear()
    gc.collect()
    close_abandoned()


def case_module(name: str, dtype: torch.dtype = torch.float32) -> ParallelModule:
    """A case of the zoo."""
    case = CASES[name]
    batch = case_batch(name, dtype)
    return kept((name, dtype), lambda: fxpar.parallelize(case.model().to(dtype), case.plan(tp()), batch, case.loss))


def case_batch(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The example of a case, what is no integer in it of the given type."""
    return {key: v.to(dtype) if v.is_floating_point() else v for key, v in CASES[name].example().items()}


def tiny_module(kind: type[nn.Module] = models.Tiny, loss: str | None = None) -> ParallelModule:
    """One of the tiny models that take ids and targets."""
    return kept(kind, lambda: fxpar.parallelize(models.tiny(kind), models.plan(tp()), models.batch(), loss))


def gradients(model: ParallelModule) -> dict[str, Tensor]:
    """Whole gradients by the author's names."""
    return {n: whole_of(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def refusal(action: Callable[[], Any]) -> tuple[str, str, str, str]:
    """Type, place, reason and remedy of the error of fxpar that the action must raise."""
    try:
        action()
    except FxparError as error:
        return type(error).__name__, error.where, error.reason, error.remedy
    raise AssertionError("nothing was refused")


def compile_and_call(model: Any, batch: dict[str, Any]) -> None:
    """`torch.compile` of a module, and a call: from torch 2.14 on nothing asks the module before, and Dynamo wraps what
    it says.
    """
    try:
        compiled: Any = torch.compile(model)
        compiled(**batch)
    except InternalTorchDynamoError as error:
        inside = error.__cause__ or error.__context__
        raise (inside if isinstance(inside, FxparError) else error) from None
    finally:
        torch.compiler.reset()


# ---------------------------------------------------------------------- training


def train(name: str, steps: int, dtype: torch.dtype = torch.float32) -> Found:
    """Trains a case with AdamW, clipped, with dropout and a learning rate that falls."""
    model = case_module(name, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    batch = case_batch(name, dtype)
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(model.train_step(batch).item())
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
        scheduler.step()
    return {"losses": losses, "norms": norms, "state": model.full_state_dict()}


def two_steps(name: str) -> Found:
    """Gradients of one train_step, of the plain call with backward, and of two train_steps added."""
    model, batch = case_module(name), CASES[name].example()
    loss = model.train_step(batch)
    once = gradients(model)
    model.train_step(batch)
    twice = gradients(model)
    model.zero_grad()
    model.step = 0
    outputs = model(**batch)
    plain = outputs["loss"] if hasattr(outputs, "keys") else outputs[1]
    plain.backward()
    return {"loss": loss, "once": once, "twice": twice, "plain loss": plain.detach(), "plain": gradients(model)}


def checkpointed(name: str) -> Found:
    """Gradients of a model whose layers are recomputed, and how many regions run again."""
    case = CASES[name]

    def build() -> ParallelModule:
        model: Any = case.model()
        model.gradient_checkpointing_enable()
        return fxpar.parallelize(model, case.plan(tp()), case.example(), case.loss)

    model = kept(("checkpointed", name), build)
    loss = model.train_step(case.example())
    program = model.program
    regions = {node.meta["custom"]["fxpar"].recompute for node in program.graph.nodes if node.op == "call_function"}
    return {"loss": loss, "gradients": gradients(model), "regions": len(regions - {0})}


def half_precision() -> Found:
    """Three steps in bf16."""
    original, batch = models.tiny(), models.batch()
    model = fxpar.parallelize(original, models.plan(tp(), precision="bf16_weights"), batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(model.train_step(batch).item())
        model.clip_grad_norm_(1.0)
        optimizer.step()
    types = {p.dtype for p in model.parameters()}
    return {"losses": losses, "types": types, "original": {p.dtype for p in original.parameters()}}


# ---------------------------------------------------------------------- calls


def named_loss() -> Found:
    """Both scalars of a model with two, the first as its loss by name and the other by a plain call."""
    model, batch = tiny_module(models.TwoScalars, "task"), models.batch()
    loss = model.train_step(batch)
    task = gradients(model)
    model.zero_grad()
    model(**batch)["penalty"].backward()
    evaluated = model.eval()(ids=batch["ids"])
    return {"loss": loss, "task": task, "penalty": gradients(model), "keys": sorted(evaluated)}


def whole(value: Tensor) -> Tensor:
    """The tensor itself, or what the ranks hold of it together."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def evaluate(name: str, rows: int, length: int) -> Found:
    """Logits of a case in evaluation mode without labels, twice, for another batch."""
    model = case_module(name).eval()
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        first, second = model(input_ids=ids), model(input_ids=ids)
    return {
        "ids": ids,
        "first": whole(first.logits),
        "second": whole(second.logits),
        "type": type(first).__name__,
        "loss": first.loss,
    }


def auxiliary(training_first: bool) -> Found:
    """Losses in both modes, the gradient of a head that only training uses, and its size here."""
    split = {"up": "column", "down": "row", "head": "column"} if training_first else {"[uh]*": "column", "down": "row"}
    batch = {"x": torch.randn(3, 6, generator=torch.Generator().manual_seed(4))}
    plan = fxpar.Plan(tp=tp(), split=split if tp() > 1 else {})
    made = models.tiny(models.Auxiliary).train(training_first)
    model = fxpar.parallelize(made, plan, batch)
    evaluated = float(model.eval()(**batch)["loss"].detach())
    loss = float(model.train().train_step(batch))
    weight = model.get_parameter("head.weight")
    return {"evaluated": evaluated, "loss": loss, "gradients": gradients(model), "rows": local_of(weight).shape[0]}


def sharded_output() -> Found:
    """Loss, gradients and logits of a model whose head is split by vocabulary."""
    split = {**CASES["llama"].split, "lm_head": "column"}
    batch = {"input_ids": torch.arange(24).reshape(3, 8) % 64}
    batch["labels"] = batch["input_ids"]
    plan = fxpar.Plan(tp=tp(), split=split if tp() > 1 else {})
    model = kept("wide", lambda: fxpar.parallelize(models.wide_llama(), plan, batch))
    loss = model.train_step(batch)
    found = {"loss": loss, "gradients": gradients(model)}
    logits = model(input_ids=batch["input_ids"]).logits
    found["type"] = type(logits).__name__
    found["local"] = tuple(logits.to_local().shape) if tp() > 1 else tuple(logits.shape)
    whole = logits.full_tensor() if tp() > 1 else logits
    model.zero_grad()
    whole.square().mean().backward()
    return {**found, "logits": whole.detach(), "of logits": gradients(model)}


def modes() -> Found:
    """Losses in training, evaluation and training again, and without gradients."""
    model, batch = tiny_module(), models.batch()
    first = model(**batch)["loss"]
    model.eval()
    evaluated = [model(**batch)["loss"].item() for _ in range(2)]
    model.train()
    model.step = 0
    with torch.no_grad():
        silent = model(**batch)["loss"]
    return {
        "training": [first.item(), silent.item()],
        "evaluated": evaluated,
        "graph": (first.requires_grad, silent.requires_grad),
    }


# ---------------------------------------------------------------------- state


def clip(name: str, limit: float) -> Found:
    """The norm and the clipped gradients, whole."""
    model = case_module(name)
    model.train_step(CASES[name].example())
    before = gradients(model)
    norm = model.clip_grad_norm_(limit)
    return {"before": before, "norm": norm, "after": gradients(model)}


def state_of(name: str) -> dict[str, Tensor]:
    """The full state dict of a case that was just split."""
    return case_module(name).full_state_dict()


def tiny_state() -> Found:
    """Names and state of a tiny model, and its local sizes."""
    model = tiny_module()
    return {
        "state": model.full_state_dict(),
        "parameters": [n for n, _ in model.named_parameters()],
        "buffers": [n for n, _ in model.named_buffers()],
        "modules": [n for n, _ in model.named_modules()],
        "sizes": {n: tuple(p.shape) for n, p in model.named_parameters()},
        "parts": {n: tuple(local_of(p).shape) for n, p in model.named_parameters()},
    }


def reload(state: dict[str, Tensor]) -> Found:
    """Loads a state dict and gathers it again."""
    model = tiny_module()
    model.load_full_state_dict(state)
    return model.full_state_dict()


def refused_states(states: dict[str, Any]) -> Found:
    """What each bad state dict is told, and whether anything of it was loaded."""
    model = tiny_module()
    before = model.full_state_dict()
    found: Found = {name: refusal(partial(model.load_full_state_dict, state)) for name, state in states.items()}
    after = model.full_state_dict()
    found["unchanged"] = all(torch.equal(before[n], after[n]) for n in before)
    return found


def frozen() -> Found:
    """Gradients and weights after a step where two parameters are frozen, one before and one after the split."""
    original = models.tiny()
    original.norm.weight.requires_grad_(False)
    model = fxpar.parallelize(original, models.plan(tp()), models.batch())
    dict(model.named_parameters())["up.weight"].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.train_step(models.batch())
    found: Found = {"gradients": gradients(model)}
    optimizer.step()
    found["state"] = model.full_state_dict()
    dict(model.named_parameters())["norm.weight"].requires_grad_(True)
    found["thawed"] = refusal(lambda: model.train_step(models.batch()))
    return found


# ---------------------------------------------------------------------- refusals


def refused_calls() -> dict[str, tuple[str, str, str, str]]:
    """What calls that cannot work are told; the module works afterwards."""
    import copy
    import pickle

    from accelerate import Accelerator

    model, batch = tiny_module(), models.batch()
    ids, targets = batch["ids"], batch["targets"]
    actions: dict[str, Callable[[], Any]] = {
        "double": lambda: fxpar.parallelize(model, models.plan(tp()), batch),
        "nested": lambda: fxpar.parallelize(nn.Sequential(model), models.plan(tp()), batch),
        "world": lambda: fxpar.parallelize(models.tiny(), models.plan(tp() + 1), batch),
        "generate": lambda: model.generate(ids),
        "checkpointing": lambda: model.gradient_checkpointing_enable({"use_reentrant": False}),
        "accelerate": lambda: Accelerator(cpu=True).prepare(model),
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.dumps(model),
        "cast": lambda: model.half(),
        "no loss": lambda: model.train_step({"ids": ids}),
        "unknown": lambda: model.train_step({**batch, "mask": ids}),
        "missing": lambda: model.train_step({"targets": targets}),
        "type": lambda: model.train_step({"ids": ids, "targets": targets.float()}),
        "unequal": lambda: model.train_step({"ids": ids, "targets": targets[:2]}),
        "dimensions": lambda: model.train_step({"ids": ids[0], "targets": targets[0]}),
        "empty": lambda: model.train_step({"ids": ids[:0], "targets": targets[:0]}),
        "array": lambda: model.train_step({"ids": ids.numpy(), "targets": targets}),
        "twice": lambda: model(ids, ids=ids),
        "inputs with gradients": lambda: model(torch.ones(2, 3, requires_grad=True)),
    }
    found = {name: refusal(action) for name, action in actions.items()}
    with torch.no_grad():
        found["no_grad"] = refusal(lambda: model.train_step(batch))
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = refusal(lambda: model.train_step(batch))
    model.eval()
    found["evaluation"] = refusal(lambda: model.train_step(batch))
    model.train().train_step(batch)
    return found


def disagreeing(what: str) -> tuple[str, str, str, str]:
    """What ranks are told that built different models, or that were given different plans."""
    rank = dist.get_rank()
    torch.manual_seed(rank if what == "weights" else 0)
    model = models.Tiny()
    split = {"up": "column"} if what == "plan" and rank else models.SPLIT
    return refusal(lambda: fxpar.parallelize(model, fxpar.Plan(tp=tp(), split=split), models.batch()))


def abandoned() -> Found:
    """Groups of this process while modules come and go, and what is computed with what a dead one left behind."""

    def build() -> ParallelModule:
        return fxpar.parallelize(models.tiny(models.Tiny), models.plan(tp()), models.batch())

    alive = build()
    first = alive.train_step(models.batch()).item()
    counts = []
    for _ in range(3):
        build()
        gc.collect()
        counts.append(len(distributed_c10d._world.pg_map))
    parts = build().state_dict()
    gc.collect()
    again = build()
    again.load_state_dict(parts)
    alive.step = 0
    whole = {name: whole_of(part) for name, part in parts.items()}
    return {
        "counts": counts,
        "losses": (first, alive.train_step(models.batch()).item(), again.train_step(models.batch()).item()),
        "same": all(torch.equal(whole_of(part), whole[name]) for name, part in again.state_dict().items()),
    }


def fail_on(rank: int) -> int:
    """Raises on one rank."""
    if dist.get_rank() == rank:
        raise ValueError("this rank fails")
    return dist.get_rank()


def hang_on(rank: int) -> None:
    """Waits forever on one rank."""
    if dist.get_rank() == rank:
        import time

        time.sleep(3600)
