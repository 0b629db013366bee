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
}


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, (build, plan) in PLANS.items():
        batches = words(STEPS, MICROBATCHES)
        plain = train(build, batches, **plan)
        assert len(set(plain.losses)) == len(plain.losses)
        for impl in sys.argv[1:]:
            graphed = train(build, batches, impl, **plan)
            same = torch.tensor(int(graphed == plain and graphed.figures.graphs >= 2), device="cuda")
            dist.all_reduce(same, op=dist.ReduceOp.MIN)
            if dist.get_rank() == 0:
                print(f"{name} {impl}: {'equal' if int(same) else 'different'}", flush=True)


if __name__ == "__main__":
    main()
