"""What test_stops_gpu.py starts on each of two GPUs: rank 1 fails, and its program catches that.

Called with how values travel (`nccl`, `copies`, `shots`), which graphs there are, and what happens (`before`,
`between`, `behind`, `killed`). Each rank prints what it was told and how long that took.
"""

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fxpar
from fxpar.cudagraphs.full import Iteration
from fxpar.cudagraphs.partial import GraphedStep
from fxpar.errors import FxparError
from fxpar.runtime.steps import FinishedForward
from tests.cudagraphs.graphed import gpt2, words
from tests.peer_memory.runtime.copies_worker import COSTS

ODD = 1
METHODS = [
    (kind, name, getattr(kind, name))
    for kind, name in ((FinishedForward, "backward"), (Iteration, "__call__"), (GraphedStep, "input_backward"))
]


class Broken(Exception):
    """Of no library."""


def made(way: str, impl: str, batch: Any) -> fxpar.ParallelModule:
    torch.manual_seed(0)
    how: dict[str, Any] = (
        {"communication": fxpar.Communication("nccl")}
        if way == "nccl"
        else {"communication": fxpar.Communication("copy"), "cost": COSTS[way]}
    )
    plan = fxpar.Plan(tp=2, cuda_graphs=fxpar.CudaGraphs(impl), **how)
    return fxpar.parallelize(gpt2(128, 2).train(), plan, batch, check_inputs=False, timeout=60.0)


def fail(*arguments: Any, **options: Any) -> Any:
    raise Broken("between two collectives")


def kill(*arguments: Any, **options: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def attempt(model: fxpar.ParallelModule, batch: Any) -> str:
    """The error of a step, whose result is waited for."""
    begin = time.monotonic()
    try:
        said = f"loss {float(model.train_step(batch)):.4f}"
    except (FxparError, Broken) as error:
        said = f"{type(error).__name__}: {error}"
    return f"{time.monotonic() - begin:.1f} s: {said}"


def odd(model: fxpar.ParallelModule, batch: Any, what: str) -> str:
    """A step in which rank 1 fails."""
    if dist.get_rank() != ODD:
        return attempt(model, batch)
    if what == "before":
        return attempt(model, {**batch, "mask": batch["input_ids"]})
    if what == "behind":

        def hook(parameter: Tensor) -> None:
            raise Broken("behind all collectives")

        next(p for p in model.parameters() if p.requires_grad).register_post_accumulate_grad_hook(hook)
        return attempt(model, batch)
    action = kill if what == "killed" else fail
    for kind, name, _ in METHODS:
        setattr(kind, name, action)
    return attempt(model, batch)


def main(way: str, impl: str, what: str) -> None:
    batch = words(1)[0]
    model = made(way, impl, batch)
    for _ in range(4):
        expected = float(model.train_step(batch))
    saying = [odd(model, batch, what), attempt(model, batch), attempt(model, batch)]
    rank = dist.get_rank()
    for i, said in enumerate(saying):
        print(f"rank {rank}, call {i}: {said} (before: {expected:.4f})", flush=True)
    if what != "before" and rank != ODD:
        torch.cuda.synchronize()
        print(f"rank {rank}: the device goes on: {float(torch.ones(8, device='cuda').sum())}", flush=True)
    model.close()
    if what in ("between", "behind"):
        print(f"rank {rank} anew: {anew(way, impl, what, batch)}", flush=True)


def anew(way: str, impl: str, what: str, batch: Any) -> str:
    """A step behind what the error says to do."""
    dist.destroy_process_group()
    for kind, name, method in METHODS:
        setattr(kind, name, method)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("nccl")
    return attempt(made(way, impl, batch), batch)


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    main(*sys.argv[1:4])
    os._exit(0)  # what waits for an ended rank while the process ends is no matter of this test
