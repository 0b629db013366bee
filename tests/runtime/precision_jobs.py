"""What the ranks of a test world do in mixed precision, and the same on one process; see `jobs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.errors import InputError
from fxpar.runtime.parameters import Copies
from fxpar.runtime.sharded import ShardedParameter, leaf_of, local_of, whole_of
from tests.runtime import models
from tests.runtime.jobs import Found, kept, refusal, tp

Batch = dict[str, Tensor]


def module(precision: str, dropout: float = 0.0, **options: Any) -> ParallelModule:
    """The tiny model: cut matrices, whole norms, tied words, an unused parameter."""
    plan = models.plan(tp(), precision=precision, **options)
    build = lambda: fxpar.parallelize(models.tiny(dropout=dropout), plan, models.batch())  # noqa: E731
    return kept(("precision", precision, dropout, *options.items()), build)


def copies_of(model: ParallelModule) -> Copies:
    """The module's copies."""
    assert model._runner.copies is not None
    return model._runner.copies


def stale(model: ParallelModule) -> list[str]:
    """Parameters whose copies are not what they should be."""
    named, copies = dict(model.named_parameters()), copies_of(model)._copies
    assert copies
    return [n for n, copy in copies.items() if not torch.equal(copy, local_of(named[n]).to(copy.dtype))]


# ---------------------------------------------------------------------- what changes main values


@torch.no_grad()
def _each(model: ParallelModule, change: Callable[[Any], Any]) -> None:
    for parameter in model.parameters():
        change(parameter)


def _step(kind: Any, **options: Any) -> Callable[[ParallelModule], None]:
    def change(model: ParallelModule) -> None:
        kind(model.parameters(), lr=0.1, **options).step()

    return change


def _load(model: ParallelModule) -> None:
    model.load_full_state_dict({n: v * 1.5 for n, v in model.full_state_dict().items()})


def _load_parts(model: ParallelModule) -> None:
    model.load_state_dict({n: (v.detach() * 1.5) for n, v in model.state_dict().items()})


def _foreach(model: ParallelModule) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 1.5)


def _replace_data(model: ParallelModule) -> None:
    for parameter in model.parameters():
        if not isinstance(parameter, ShardedParameter):  # there it is refused
            parameter.data = parameter.data * 1.5


def _inference(model: ParallelModule) -> None:
    with torch.inference_mode():
        _each(model, lambda p: p.mul_(1.5))


def _swap(model: ParallelModule) -> None:
    """As an average of weights takes their place for an evaluation."""
    average = [p.detach().clone().mul_(1.5) for p in model.parameters()]
    for parameter, value in zip(model.parameters(), average, strict=True):
        parameter.data.copy_(value)


@torch.no_grad()
def _initialise(model: ParallelModule) -> None:
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, len(name) / 16)


ROUTES: Mapping[str, Callable[[ParallelModule], None]] = {
    "AdamW, one by one": _step(torch.optim.AdamW, foreach=False),
    "AdamW, foreach": _step(torch.optim.AdamW, foreach=True),
    "AdamW, fused": _step(torch.optim.AdamW, fused=True),
    "SGD, fused": _step(torch.optim.SGD, fused=True),
    "Adagrad, fused": _step(torch.optim.Adagrad, fused=True),
    "RMSprop": _step(torch.optim.RMSprop, foreach=True),
    "in place": lambda model: _each(model, lambda p: p.mul_(1.5)),
    "copy": lambda model: _each(model, lambda p: p.copy_(p.detach() * 1.5)),
    "data in place": lambda model: _each(model, lambda p: p.data.mul_(1.5)),
    "data exchanged": _replace_data,
    "detached": lambda model: _each(model, lambda p: p.detach().mul_(1.5)),
    "the part": lambda model: _each(model, lambda p: p.to_local().mul_(1.5) if hasattr(p, "place") else p.mul_(1.5)),
    "foreach": _foreach,
    "in inference mode": _inference,
    "an average's swap": _swap,
    "initialised": _initialise,
    "a state dict": _load,
    "a state dict of parts": _load_parts,
    "declared": lambda model: _raw(model, torch.autograd.graph.increment_version),
}


def _raw(model: ParallelModule, after: Callable[[Any], Any]) -> None:
    """A write that torch cannot see, as a kernel of one's own makes it."""
    for parameter in model.parameters():
        local_of(parameter).numpy()[...] *= 1.5
        after(leaf_of(parameter))


def routes() -> Found:
    """After each write in the midst of an accumulation: what the next call would have missed."""
    model, batch, found = module("bf16"), models.batch(), Found()
    for name, change in ROUTES.items():
        model.zero_grad()
        model.train_step(batch)
        change(model)
        before = stale(model)
        model.train_step(batch)
        found[name] = (len(before), stale(model))
    return found


def unseen() -> Found:
    """After a write that torch does not see: a new step, and an evaluation."""
    model, batch = module("bf16"), models.batch()
    model.train_step(batch)
    model.zero_grad()
    _raw(model, lambda _: None)
    model.train_step(batch)
    found: Found = {"a new step": stale(model)}
    for mode in (torch.no_grad, torch.inference_mode):
        model.eval()
        with mode():
            model(**batch)
            _raw(model, lambda _: None)
            model(**batch)
        found[f"evaluation, {mode.__name__}"] = stale(model)
    model.train()
    model.train_step(batch)
    found["back in training"] = stale(model)
    return found


def counts() -> Found:
    """How many parameters are cast in steps, microbatches and plain calls."""
    model, batch, found = module("bf16"), models.batch(), Found()
    copies = copies_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def count(action: Callable[[], Any]) -> int:
        before = copies.casts
        action()
        return copies.casts - before

    found["step"] = count(lambda: model.train_step(batch))
    found["second microbatch"] = count(lambda: model.train_step(batch))
    found["plain microbatch"] = count(lambda: model(**batch)["loss"].backward())
    model.clip_grad_norm_(1.0)
    found["after clipping"] = count(lambda: model.train_step(batch))
    optimizer.step()
    found["after the optimizer, before zero_grad"] = count(lambda: model(**batch))
    optimizer.zero_grad()
    found["next step"] = count(lambda: model.train_step(batch))
    optimizer.zero_grad()
    one, two = model(**batch)["loss"], model(**batch)["loss"]
    (one + two).backward()  # the second call cast anew, to the same values
    twice = {n: whole_of(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.zero_grad()
    model.train_step(batch)
    model.train_step(batch)
    found["two calls"] = max(
        float((twice[n] - whole_of(p.grad)).abs().max()) for n, p in model.named_parameters() if p.grad is not None
    )
    pending = model(**batch)["loss"]
    optimizer.step()
    model.train_step(batch)
    try:
        pending.backward()
    except InputError as error:
        found["late backward"] = str(error)
    return found


def gradients_are_float32(precision: str) -> Found:
    """Types of values, gradients and state; what `torch.autograd.grad` and hooks get; sums of many microbatches."""
    model, batch = module(precision), models.batch()
    parameters = [p for n, p in model.named_parameters() if n != "unused"]
    seen: list[torch.dtype] = []
    handle = parameters[0].register_hook(lambda grad: seen.append(grad.dtype))
    loss = model(**batch)["loss"]
    asked = torch.autograd.grad(loss, parameters)
    model(**batch)["loss"].backward()
    handle.remove()
    once = {n: whole_of(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    for _ in range(99):
        model(**batch)["loss"].backward()
    hundred = {n: whole_of(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    gap = max(float((hundred[n] / 100 - once[n]).abs().max() / once[n].abs().max()) for n in once)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    optimizer.step()
    state = {v.dtype for s in optimizer.state.values() for v in s.values()}
    kinds = {p.dtype for p in parameters} | {p.grad.dtype for p in parameters if p.grad is not None}
    return {"kinds": kinds | state | {a.dtype for a in asked} | set(seen), "gap": gap, "unused": model.unused.grad}


def train(precision: str, steps: int, rate: float, micro: int = 2, fused: bool = False) -> Found:
    """Losses and weights of some steps of SGD with momentum, microbatches accumulated."""
    model = module(precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=fused, foreach=not fused)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        for _ in range(micro):
            ids, targets = torch.randint(0, models.VOCABULARY, (2, 4, 5), generator=generator)
            losses.append(model.train_step({"ids": ids, "targets": targets}).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": model.full_state_dict()}


def by_hand(steps: int, rate: float, micro: int = 2) -> Found:
    """The same without fxpar: a bf16 model that is cast from float32 weights for each step."""
    model = models.tiny(dropout=0.0)
    mains = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.bfloat16()
    model.scale, model.shift = model.scale.float(), model.shift.float()
    optimizer = torch.optim.SGD(mains.values(), lr=rate, momentum=0.9)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(mains[n])
        for _ in range(micro):
            ids, targets = torch.randint(0, models.VOCABULARY, (2, 4, 5), generator=generator)
            loss = model(ids, targets)["loss"]
            loss.backward()
            losses.append(loss.item())
            for n, p in model.named_parameters():
                if p.grad is not None:
                    mains[n].grad = p.grad.float() if mains[n].grad is None else mains[n].grad + p.grad.float()
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": mains}


def scaled(overflow_on: int) -> Found:
    """float16 with a scaler: a gradient of one rank overflows, and no rank steps."""
    model, batch = module("fp16"), models.batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    before = model.full_state_dict()
    loss = model.train_step(batch, scaler=scaler)
    plain = model.eval()(**batch)["loss"]
    model.train()
    weight = leaf_of(model.get_parameter("up.weight"))
    assert weight.grad is not None
    if model.world.rank == overflow_on:
        weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    skipped = model.full_state_dict()
    scales = [scaler.get_scale()]
    optimizer.zero_grad()
    model.train_step(batch, scaler=scaler)
    scaler.unscale_(optimizer)
    norm = model.clip_grad_norm_(1e9)
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale())
    return {
        "loss": (loss.item(), plain.item()),
        "skipped": all(torch.equal(before[n], v) for n, v in skipped.items()),
        "moved": any(not torch.equal(before[n], v) for n, v in model.full_state_dict().items()),
        "scales": scales,
        "norm": norm.item(),
        "none": refusal(lambda: model.train_step(batch)),
        "disabled": refusal(lambda: model.train_step(batch, scaler=torch.amp.GradScaler("cpu", enabled=False))),
        "nonsense": refusal(lambda: model.train_step(batch, scaler=1.0)),  # type: ignore[arg-type]
    }


# ---------------------------------------------------------------------- curves


def curve(precision: str, steps: int, rate: float) -> list[float]:
    """Losses of a small GPT that learns to count in threes."""
    import transformers

    torch.manual_seed(0)
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    size: Any = transformers.GPT2Config
    config = size(n_layer=2, n_embd=48, n_head=4, vocab_size=64, n_positions=32, use_cache=False, **still)
    generator = torch.Generator().manual_seed(5)
    starts = torch.randint(0, 64, (steps, 8, 1), generator=generator)
    data = [(start + 3 * torch.arange(16)) % 64 for start in starts]
    example = {"input_ids": data[0], "labels": data[0]}
    plan = fxpar.Plan(tp=tp(), precision=precision)
    model = fxpar.parallelize(transformers.GPT2LMHeadModel(config).train(), plan, example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=True)
    losses = []
    for ids in data:
        losses.append(model.train_step({"input_ids": ids, "labels": ids}).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def small_updates(precision: str) -> dict[str, float]:
    """How far steps of 1e-5 move each matrix: the sum over all elements."""
    model, batch = module(precision), models.batch()
    before = model.full_state_dict()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    for _ in range(20):
        model.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()
    after = model.full_state_dict()
    return {n: float((after[n].double() - before[n].double()).abs().sum()) for n in ("up.weight", "down.weight")}


def fully_sharded(steps: int, rate: float, micro: int = 2) -> Found:
    """What `train` does, by torch's `fully_shard` on one rank."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = models.tiny(dropout=0.0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        for _ in range(micro):
            ids, targets = torch.randint(0, models.VOCABULARY, (2, 4, 5), generator=generator)
            loss = model(ids, targets)["loss"]
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    return {"losses": losses, "weights": weights}
