"""Milliseconds of a training step through a pipeline, and how much of them is bubble.

    torchrun --nproc-per-node 2 samples/bench_pp.py --runs 1f1b:8 1f1b:16 1f1b:32 interleaved_1f1b:16 zb_h1:16
    torchrun --nproc-per-node 4 samples/bench_pp.py --model gpt-4.2b --runs 1f1b:16:compile zb_h1:16:graph
    python samples/bench_pp.py --runs alone:8:graph alone:16:graph  # the same microbatches on one GPU
    torchrun --nproc-per-node 2 samples/bench_pp.py --tiny --runs 1f1b:2 zb_h1:4  # to see that it runs

A run is SCHEDULE:MICROBATCHES, with `:compile` behind it, or with `:graph` (compiled, and one CUDA graph a rank);
the schedule `alone` is one process that adds up the gradients of the microbatches. Models and sizes are those of
`bench_tp.py`, the batch is cut into the microbatches. *Bubble* is what the schedule leaves idle where all stages take
equally long, by its simulation (a forward 1, each part of a backward 1). A step's time is the slowest rank's median.
With `--profile` the milliseconds in which a rank's GPU computed nothing, its communication apart, are there too.
A launch of a large graph waits while the device's queue is full, so the queue is made four times as large.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import fxpar
from fxpar.pipeline.compiler.builtin_schedules import build_schedule
from fxpar.pipeline.compiler.simulation import verified
from samples.bench_tp import _TINY, MODELS, build, run_all, time_steps, where_time_goes

os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")


def bubble(schedule: str, pp: int, virtual: int, microbatches: int) -> float:
    """The share of a rank's time that a schedule leaves idle, of the rank that idles most."""
    if schedule == "alone":
        return 0.0
    found = verified(build_schedule(schedule, pp=pp, microbatches=microbatches, virtual_stages=virtual))
    return found.timeline.bubble


def measure(run: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run on the ranks that there are."""
    words = run.split(":")
    if len(words) not in (2, 3) or not words[1].isdigit() or words[2:] not in ([], ["compile"], ["graph"]):
        raise SystemExit(f"{run!r}: write SCHEDULE:MICROBATCHES, with :compile or :graph behind it")
    schedule, microbatches = words[0], int(words[1])
    pp = int(os.environ.get("WORLD_SIZE", 1))
    virtual = 2 if schedule in ("interleaved_1f1b", "zbv") else 1
    size = replace(MODELS[options.model], batch=options.batch)
    if options.tiny:
        layers = {"n_layer": 4} if size.kind == "GPT2" else {"num_hidden_layers": 4}
        size = replace(size, options={**_TINY[size.kind], **layers}, batch=8, sequence=32)
    plan = fxpar.Plan(
        pp=pp,
        virtual_stages=virtual,
        microbatches=microbatches,
        schedule="" if schedule == "alone" else schedule,
        precision=options.precision,
        compile=bool(words[2:]),
        cuda_graphs=fxpar.CudaGraphs("full_iteration" if words[2:] == ["graph"] else "none"),
        communication=fxpar.Communication(options.transport),
    )
    ids = torch.randint(0, size.options["vocab_size"], (size.batch, size.sequence), generator=torch.Generator())
    # As large as a microbatch, with at least two samples: by its sizes stages are balanced.
    example = ids[: max(2, size.batch // microbatches)]
    start = time.perf_counter()
    model = fxpar.parallelize(build(size, 0.0), plan, {"input_ids": example, "labels": example})
    device = model.world.device
    batch = {"input_ids": ids.to(device), "labels": ids.to(device)}

    def step() -> torch.Tensor:
        model.zero_grad()
        return model.train_step(batch)

    built = time.perf_counter() - start
    loss = float(step())
    first = time.perf_counter() - start - built
    found: dict[str, Any] = {"run": run, "pp": pp, "schedule": schedule, "microbatches": microbatches, "loss": loss}
    found |= {"build_s": built, "first_s": first, "bubble": bubble(schedule, pp, virtual, microbatches)}
    found |= time_steps(step, device, options.warmup, options.steps)
    if options.profile:
        found |= {f"rank {rank}": split for rank, split in enumerate(profiles(step, device))}
    found["graphs"] = str(model.graph_figures or "")
    model.close()
    return {**found, "tokens_s": size.batch * size.sequence / found["ms"] * 1e3}


def profiles(step: Callable[[], torch.Tensor], device: torch.device) -> list[Any]:
    """Where the time of a step goes, of each rank."""
    here = where_time_goes(step, device)
    if not dist.is_initialized():
        return [here]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, here)
    return of_ranks


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a line for each run."""
    table = Table(title="a training step through a pipeline")
    for title in ("run", "ms", "host ms", "tokens/s", "bubble %", "peak GiB", "first step s", "loss"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for row in rows:
        values = [
            f"{row['ms']:,.1f}",
            f"{row['host_ms']:,.1f}",
            f"{row['tokens_s']:,.0f}",
            f"{100 * row['bubble']:.1f}",
        ]
        table.add_row(row["run"], *values, f"{row['peak_gib']:.1f}", f"{row['first_s']:.1f}", f"{row['loss']:.4f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="gpt-1.2b")
    parser.add_argument("--runs", nargs="+", default=["1f1b:8", "zb_h1:8"], help="SCHEDULE:MICROBATCHES[:compile]")
    parser.add_argument("--batch", type=int, default=32, help="sequences a step (32)")
    parser.add_argument("--transport", default="auto", help="as of fxpar.Communication (auto)")
    parser.add_argument("--profile", action="store_true", help="also say where the time goes, of each rank")
    parser.add_argument("--precision", default="bf16_weights", help="as of fxpar.Plan (bf16_weights)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock runs (3)")
    parser.add_argument("--steps", type=int, default=8, help="steps on the clock (8)")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    parser.add_argument("--json", metavar="FILE", help="append a JSON line for each run")
    options = parser.parse_args()
    run_all(options, measure, report)


if __name__ == "__main__":
    main()
