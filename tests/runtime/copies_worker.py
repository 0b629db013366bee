"""What test_copies_gpu.py starts on each of two GPUs.

`equal`: trainings whose ranks copy beside those through NCCL; rank 0 prints which are equal to the bit on all ranks.
`lost`: rank 1 makes no more calls.
"""

import os
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import fxpar
from tests.runtime.graphed import gpt2, llama, train, words

STEPS, MICROBATCHES = 12, 2
PLANS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (partial(gpt2, 128, 2), {"tp": 2}),
    "llama": (partial(llama, 128, 2), {"tp": 2, "sequence_parallel": True}),
}
# Sums beside which nothing is computed in one shot, and all sums.
COSTS = {
    "copies": fxpar.Cost(least_copy=1.0, copy_latency=1e-12),
    "shots": fxpar.Cost(least_copy=1.0, copy_latency=1.0),
}


def compare() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, (build, plan) in PLANS.items():
        batches = words(STEPS, MICROBATCHES)
        plain = train(build, batches, exchange="nccl", **plan)
        assert len(set(plain.losses)) == len(plain.losses)
        for how, cost in COSTS.items():
            for impl in ("none", "full_iteration"):
                found = train(build, batches, impl, exchange="copy", cost=cost, **plan)
                same = torch.tensor(int(found == plain), device="cuda")
                dist.all_reduce(same, op=dist.ReduceOp.MIN)
                if dist.get_rank() == 0:
                    print(f"{name} {how} {impl}: {'equal' if int(same) else 'different'}", flush=True)


def lose() -> None:
    batch = words(1)[0]
    plan = fxpar.Plan(tp=2, exchange="copy", cost=COSTS["copies"], cuda_graphs=fxpar.CudaGraphs(sys.argv[2]))
    model = fxpar.parallelize(gpt2(128, 2).train(), plan, batch, timeout=5.0)
    for _ in range(4):
        model.train_step(batch)
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        time.sleep(60.0)
        os._exit(0)
    print(f"loss {float(model.train_step(batch))}", flush=True)


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    {"equal": compare, "lost": lose}[sys.argv[1]]()
