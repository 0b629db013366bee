"""What test_graphs_gpu.py starts on each of two GPUs: trainings with graphs beside the one without.

Rank 0 prints which of them are equal to the bit on all ranks.
"""

import os
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.cudagraphs.graphed import gpt2, llama, train, words

STEPS, MICROBATCHES = 100, 4
PLANS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (partial(gpt2, 128, 2), {"tp": 2}),
    "llama": (partial(llama, 128, 2), {"tp": 2, "sequence_parallel": True}),
    "1f1b": (partial(gpt2, 128, 2), {"pp": 2}),
    "interleaved_1f1b": (partial(gpt2, 128, 4), {"pp": 2, "virtual_stages": 2, "microbatches": MICROBATCHES}),
    "zb_h1": (partial(gpt2, 128, 2), {"pp": 2, "schedule": "zb_h1"}),
}
# Plans and modes, as the arguments `gpt2:partial` name them.
RUNS = [tuple(argument.split(":")) for argument in sys.argv[1:]]


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in dict.fromkeys(name for name, _ in RUNS):
        build, plan = PLANS[name]
        batches = words(STEPS, MICROBATCHES)
        plain = train(build, batches, **plan)
        assert len(set(plain.losses)) == len(plain.losses)
        for impl in (impl for other, impl in RUNS if other == name):
            graphed = train(build, batches, impl, **plan)
            same = torch.tensor(int(graphed == plain and graphed.figures.graphs >= 2), device="cuda")
            dist.all_reduce(same, op=dist.ReduceOp.MIN)
            if dist.get_rank() == 0:
                print(f"{name} {impl}: {'equal' if int(same) else 'different'}", flush=True)


if __name__ == "__main__":
    main()
