"""Trains a small GPT-2 on the source of Python's standard library: split over processes, and on one process.

    python samples/quickstart.py                       # starts two processes by itself
    python samples/quickstart.py --tp 4 --steps 10
    torchrun --nproc-per-node 2 samples/quickstart.py  # in processes that are there already

The model is the one of the transformers library, unchanged, with dropout. Both runs must have the same losses: the
program exits with status 1 if they differ by 1e-4 anywhere. It uses GPUs where there is one for each process.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.cost.communication import collectives
from fxpar.ir.program import note

BATCH, LENGTH, TOLERANCE = 8, 128, 1e-4

# How the user wants the layers split: which matrices by their output features, which by their input features. In
# `head`, every rank gets whole attention heads. GPT-2 keeps q, k and v in one matrix; fxpar sees that by itself. What
# no line names is chosen: here the embedding tables, which are cut too.
SPLIT = {"*.c_attn": "head", "*.attn.c_proj": "row", "*.c_fc": "column", "*.mlp.c_proj": "row"}


def build_model() -> torch.nn.Module:
    """A GPT-2 over bytes, the same in every process because it is seeded."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    size = transformers.GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=8)
    size.update({"use_cache": False, "bos_token_id": 0, "eos_token_id": 0})
    model: torch.nn.Module = transformers.GPT2LMHeadModel(size)
    return model.train()


def read_corpus() -> torch.Tensor:
    """The bytes of the standard library's modules, one after the other."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch_of(corpus: torch.Tensor, step: int) -> dict[str, torch.Tensor]:
    """Random windows of the corpus, the same in every process."""
    starts = torch.randint(0, len(corpus) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    ids = torch.stack([corpus[start : start + LENGTH] for start in starts.tolist()]).long()
    return {"input_ids": ids, "labels": ids}


def train(plan: fxpar.Plan, steps: int) -> dict[str, Any]:
    """Trains on the processes of the plan; every one of them calls this."""
    torch.set_num_threads(1)  # as torchrun does: the processes share the cores
    corpus = read_corpus()
    start = time.perf_counter()
    model = fxpar.parallelize(build_model(), plan, example=batch_of(corpus, 0))
    compiled = time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(model.train_step(batch_of(corpus, step)).item())
        model.clip_grad_norm_(1.0)
        optimizer.step()
    return {
        "losses": losses,
        "parameters": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters()),
        "collectives": collectives_of_a_layer(model.program),
        "compile": compiled - start,
        "train": time.perf_counter() - compiled,
    }


def collectives_of_a_layer(program: fxpar.Program) -> str:
    """What the first layer communicates in a step, as the compiled program says."""
    mine = [c for c in collectives(program) if note(program.node(c.node)).fqn.startswith("transformer.h.0.")]
    counts = Counter(f"{c.op} {c.phase}" for c in sorted(mine, key=lambda c: c.phase, reverse=True))
    return ", ".join(f"{count} {what}" for what, count in counts.items()) or "none"


def train_alone(steps: int) -> dict[str, Any]:
    """The same run with a plan of ones, outside of the group that torchrun announces."""
    rank = os.environ.pop("RANK", None)
    found = train(fxpar.Plan(), steps)
    if rank is not None:
        os.environ["RANK"] = rank
    return found


def train_split(plan: fxpar.Plan, steps: int) -> dict[str, Any]:
    """The split run, in this process if torchrun started it, else in processes of our own; what rank 0 found."""
    if "RANK" in os.environ:
        return train(plan, steps)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(1, 1, plan.tp, run_id="quickstart", rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    ranks: dict[int, dict[str, Any]] = elastic_launch(config, train)(plan, steps)
    return ranks[0]


def report(one: dict[str, Any], split: dict[str, Any], tp: int) -> float:
    """Prints both runs next to each other; returns the largest difference of their losses."""
    console = Console()
    table = Table(title="GPT-2 on the standard library: loss of each step")
    for title in ("step", "one process", f"tp {tp}", "difference"):
        table.add_column(title, justify="right")
    gaps: list[float] = [abs(a - b) for a, b in zip(one["losses"], split["losses"], strict=True)]
    for step, (a, b, gap) in enumerate(zip(one["losses"], split["losses"], gaps, strict=True)):
        if step % 5 == 0 or step == len(gaps) - 1:
            table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{gap:.1e}")
    console.print(table)
    console.print(f"collectives a layer: {split['collectives']}")
    console.print(f"parameters a rank: {split['parameters']:,} of {one['parameters']:,}")
    for name, run in (("one process", one), (f"tp {tp}", split)):
        console.print(f"{name}: compiled in {run['compile']:.1f} s, trained in {run['train']:.1f} s")
    return max(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="training steps (30); rounding makes very long runs part")
    parser.add_argument("--tp", type=int, default=2, help="processes that share each layer (2; under torchrun its own)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    tp = int(os.environ.get("WORLD_SIZE", options.tp))
    is_first = int(os.environ.get("RANK", 0)) == 0
    one = train_alone(options.steps) if is_first else {}
    split = train_split(fxpar.Plan(tp=tp, split=SPLIT), options.steps)
    if is_first:
        gap = report(one, split, tp)
        verdict = "equal within" if gap <= TOLERANCE else "NOT equal within"
        print(f"losses {verdict} {TOLERANCE:g}: largest difference {gap:.1e}")
        raise SystemExit(gap > TOLERANCE)


if __name__ == "__main__":
    main()
