"""What test_copy_transport.py runs on ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpar
from fxpar.errors import RankError
from fxpar.ops import peer_copies, process_group
from fxpar.peer_memory.compiler import symmetric_buffer
from fxpar.peer_memory.compiler.symmetric_buffer import CpuSymmetricBuffer
from fxpar.runtime.world import World
from tests.cudagraphs.graphed import VOCABULARY, gpt2, llama
from tests.runtime.compiled import Deep

_COST = fxpar.Cost(least_copy=1.0, copy_latency=1e-12)
_BUILDS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: gpt2(60, 2),
    "llama": lambda: llama(64, 2),
    "blocks": lambda: Deep(1),
    "norms": lambda: Norms(),
}


class Norms(nn.Module):
    """Blocks behind norms: a gradient's sum travels beside a product, and lies across in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norms = nn.Linear(8, 8), nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.ups, self.downs = (nn.ModuleList(nn.Linear(*s) for _ in range(2)) for s in ((8, 32), (32, 8)))

    def forward(self, x: Tensor) -> Tensor:
        """The loss of x [b, 8, 8]."""
        x = self.first(x)
        for i, (norm, up, down) in enumerate(zip(self.norms, self.ups, self.downs, strict=True)):
            inside = norm(x).transpose(1, 2) if i else norm(x)
            made = down(torch.relu(up(inside)))
            x = x + (made.transpose(1, 2) if i else made)
        return x.square().mean() + x.sum(-1).sin().mean()


def trained(name: str, exchange: str, options: dict[str, Any], steps: int = 2) -> tuple[list[float], list[Tensor], int]:
    """Losses, gradients of the last step, and bytes of symmetric buffers; what was read is overwritten at once."""
    torch.manual_seed(0)
    model = _BUILDS[name]().double().train()
    ids = torch.randint(0, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    if name in ("blocks", "norms"):
        batch = {"x": (ids[..., None] + torch.arange(8)).double().sin()}
    parallel = fxpar.parallelize(
        model,
        fxpar.Plan(communication=fxpar.Communication(exchange), cost=_COST, **options),
        batch,
    )
    losses = []
    for _ in range(steps):
        parallel.zero_grad()
        with symmetric_buffer.poisoned():
            losses.append(float(parallel.train_step(batch)))
    gradients = [p.grad.clone() for p in parallel.parameters() if p.grad is not None]
    size = parallel._peer_memory.reach.bytes
    parallel.close()
    return losses, [fxpar.runtime.sharded.local_of(g) for g in gradients], size


def told() -> list[tuple[list[tuple[int, int]], int, str]]:
    """Of plans with copies and without: copies and their number of each kind, bytes, and what the report says."""
    found = []
    for exchange in ("copy", "nccl", "auto"):
        batch = {"x": torch.ones(4, 8, 8, dtype=torch.float64)}
        plan = fxpar.Plan(tp=2, communication=fxpar.Communication(exchange), cost=_COST)
        parallel = fxpar.parallelize(Deep(1, 2).double(), plan, batch)
        parallel.train_step(batch)
        report = parallel.report()
        parallel.close()
        assert all(line.copied <= line.count for line in report.collectives)
        copied = [(line.copied, line.count) for line in report.collectives]
        found.append((copied, report.copied_into, str(report)))
    return found


def differences(name: str, options: dict[str, Any]) -> tuple[float, float, int]:
    """The largest difference of losses and of gradients between copies and collectives, and bytes of symmetric buffers.

    Collectives run in eager programs, which compiled ones are like.
    """
    losses, gradients, none = trained(name, "nccl", {**options, "compile": False})
    copied_losses, copied_gradients, size = trained(name, "copy", options)
    assert none == 0
    odd = max(abs(a - b) for a, b in zip(losses, copied_losses, strict=True))
    return odd, max(float((a - b).abs().max()) for a, b in zip(gradients, copied_gradients, strict=True)), size


def closed() -> str:
    """What a step says behind `close`."""
    torch.manual_seed(0)
    batch = {"x": torch.zeros(4, 8, 8)}
    model = fxpar.parallelize(
        Deep(1).train(),
        fxpar.Plan(tp=2, communication=fxpar.Communication("copy"), cost=_COST),
        batch,
    )
    model.train_step(batch)
    model.close()
    try:
        model.train_step(batch)
    except fxpar.errors.InputError as error:
        return str(error)
    return ""


class _Breaking(TorchDispatchMode):
    """Raises behind a send, on all ranks alike, as the lack of memory may."""

    def __init__(self, sends: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = sends

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._left -= func is torch.ops.fxpar.send_copies.default
        if not self._left:
            raise MemoryError("no more")
        return found


def broken_off() -> str:
    """What a step says behind one that an error ended between a send and what reads it."""
    torch.manual_seed(0)
    batch = {"x": torch.zeros(4, 8, 8)}
    model = fxpar.parallelize(
        Norms().train(),
        fxpar.Plan(tp=2, communication=fxpar.Communication("copy"), cost=_COST),
        batch,
    )
    model.train_step(batch)
    try:
        with _Breaking(1):
            model.train_step(batch)
    except MemoryError:
        pass
    try:
        model.train_step(batch)
    except fxpar.errors.InputError as error:
        return str(error)
    finally:
        model.close()
    return "nothing"


def _world() -> tuple[World, CpuSymmetricBuffer]:
    from fxpar.ops.process_group import process_group
    from fxpar.runtime.world import connect, join

    size = torch.distributed.get_world_size()
    world = join(fxpar.Plan(tp=size), connect(60.0))
    made = CpuSymmetricBuffer(
        rank=world.rank, size=size, group=process_group(world.groups["tp"]), ranks=range(size), seconds=1.0
    )
    return world, made.open()


def each_kind(dtype: torch.dtype, shape: tuple[int, ...]) -> list[str]:
    """What each kind of copy gives, beside the collective; those that differ."""
    world, made = _world()
    name, size = f"test/{world.agreement.module}", world.size
    symmetric_buffer.register(name, made)
    group = world.groups["tp"].name
    x = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(world.rank)).to(dtype)
    x = x.transpose(0, -1)  # not contiguous
    cut, runs = (1, [(1, None)]), (2, [(2 if shape[0] % (2 * size) == 0 else 1, None)])
    found = {
        "sum": (
            peer_copies.summed(peer_copies.start_sum(x, name, 1), name, 1),
            process_group.arrived(process_group.start_sum(x, group)),
        ),
        "gather": (
            peer_copies.gathered(peer_copies.start_gather(x, name, 2), *cut, name, 2),
            process_group.put_in_places(process_group.start_gather(x, group, size), *cut),
        ),
        "scatter": (
            peer_copies.scattered(peer_copies.start_scatter(x, *cut, size, name, 3), *cut, name, 3),
            process_group.scattered(process_group.start_scatter(x, *cut, group, size)),
        ),
        "several runs": (
            peer_copies.scattered(peer_copies.start_scatter(x, *runs, size, name, 6), *runs, name, 6),
            process_group.scattered(process_group.start_scatter(x, *runs, group, size)),
        ),
        "gather of runs": (
            peer_copies.gathered(peer_copies.start_gather(x, name, 7), *runs, name, 7),
            process_group.put_in_places(process_group.start_gather(x, group, size), *runs),
        ),
        "one shot": (
            peer_copies.sum_in_one_shot(x, name, 5),
            process_group.arrived(process_group.start_sum(x, group)),
        ),
        "exchange": (
            peer_copies.exchanged(peer_copies.start_exchange(x, *cut, size, name, 4), 0, cut[1], name, 4),
            process_group.put_in_places(process_group.start_exchange(x, *cut, group, size), 0, cut[1]),
        ),
    }
    with mock.patch.object(peer_copies, "_WIDE", 0):  # rows of blocks are copied where they lie, however few bytes
        apart = peer_copies.scattered(peer_copies.start_scatter(x, *cut, size, name, 8), *cut, name, 8)
    found["scatter of rows that lie apart"] = apart, found["scatter"][1]
    odd = [kind for kind, (own, other) in found.items() if not torch.equal(own, other)]
    symmetric_buffer.close([name])
    return odd


def one_shot(size: int) -> bool:
    """Whether sums in one shot, of which each takes the one before, are those of the group."""
    world, made = _world()
    name = f"one_shot/{world.agreement.module}"
    symmetric_buffer.register(name, made)
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(world.rank)).double().t()  # not contiguous
    x = torch.complex(x, -x) if size % 2 else x
    own = other = x
    with symmetric_buffer.poisoned():
        for buffer in (1, 2, 1, 2):
            own = peer_copies.sum_in_one_shot(own, name, buffer) / (2 + world.rank)
            other = process_group.arrived(process_group.start_sum(other, world.groups["tp"].name)) / (2 + world.rank)
    symmetric_buffer.close([name])
    return torch.equal(own, other)


def lost() -> str:
    """What a rank says whose partner sends nothing."""
    world, made = _world()
    name = f"lost/{world.agreement.module}"
    symmetric_buffer.register(name, made)
    x = torch.ones(4)
    for buffer in (1, 2, 1):
        peer_copies.summed(peer_copies.start_sum(x, name, buffer), name, buffer)
    if world.rank == 1:
        time.sleep(2.0)
        symmetric_buffer.close([name])
        return ""
    try:
        peer_copies.summed(peer_copies.start_sum(x, name, 2), name, 2)
    except RankError as error:
        return str(error)
    finally:
        symmetric_buffer.close([name])
    return "nothing"
