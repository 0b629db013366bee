"""What test_graphs_gpu.py starts on each of two GPUs: trainings with graphs, compared with the one without.

The arguments are `PLAN:IMPL`, or `overflow:WAY`. Rank 0 prints which of them are equal to the bit on all ranks.
"""

import os
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import fxpar
from tests.cudagraphs.graphed import Trained, deepseek_v3, gpt2, llama, mixtral, train, words
from tests.cudagraphs.overflowing import compared

STEPS, MICROBATCHES = 100, 4
PLANS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (partial(gpt2, 128, 2), {"tp": 2}),
    "llama": (partial(llama, 128, 2), {"tp": 2, "sequence_parallel": True}),
    "1f1b": (partial(gpt2, 128, 4), {"pp": 2}),
    "gpipe": (partial(gpt2, 128, 4), {"pp": 2, "schedule": "gpipe"}),
    "interleaved": (partial(llama, 128, 4), {"pp": 2, "virtual_stages": 2, "microbatches": MICROBATCHES}),
    "zb_h1": (partial(gpt2, 128, 4), {"pp": 2, "schedule": "zb_h1", "compile": True}),
    "zbv": (partial(gpt2, 128, 4), {"pp": 2, "virtual_stages": 2, "schedule": "zbv"}),
    "groups": (
        partial(gpt2, 128, 4),
        {
            "pp": 2,
            "virtual_stages": 2,
            "microbatches": MICROBATCHES,
            "communication": fxpar.Communication("nccl"),
        },
    ),
}
DROPLESS: dict[str, Any] = {"dp": 2, "ep": 2, "experts": fxpar.Experts("dropless")}
PLANS |= {"mixtral": (partial(mixtral, 128, 2), DROPLESS), "deepseek_v3": (partial(deepseek_v3, 128, 2), DROPLESS)}
OVERFLOWS: dict[str, dict[str, Any]] = {
    "inside": {},
    "sgd": {"optimizer": "sgd"},
    "after": {"inside": False},
}


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True, warn_only=True)
    known: dict[str, Trained] = {}
    for run in sys.argv[1:]:
        name, impl = run.split(":")
        if name == "overflow":
            report(run, *overflow(OVERFLOWS[impl]))
            continue
        build, plan = PLANS[name]
        # Replicas have tokens of their own, so that rows differ from rank to rank.
        batches = words(STEPS, MICROBATCHES, seed=1 + (int(os.environ["RANK"]) if "dp" in plan else 0))
        if name not in known:
            known[name] = train(build, batches, **plan)
            assert len(set(known[name].losses)) == len(known[name].losses)
        graphed = train(build, batches, impl, **plan)
        report(run, graphed == known[name] and graphed.figures.graphs >= 2, graphed.figures)


def report(run: str, is_equal: bool, figures: Any) -> None:
    """Prints whether a run is equal on all ranks."""
    same = torch.tensor(int(is_equal), device="cuda")
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print(f"{run} {'equal' if int(same) else 'different'} {figures}", flush=True)


def overflow(options: dict[str, Any]) -> tuple[bool, str]:
    """Compares trainings in which every tenth step has more rows of experts than places.

    In bfloat16, whose products of experts are one kernel with and without graphs.
    """
    overflows = range(4, STEPS, 10)
    is_equal, (note, _), graphs = compared("mixtral", STEPS, overflows, 2, {"precision": "bf16", **options})
    repeated = int(note.split()[3])  # a router that learns may send too many rows in other steps too
    return is_equal and graphs == 1 and len(overflows) <= repeated <= STEPS // 2, note


if __name__ == "__main__":
    main()
