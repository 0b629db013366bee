"""Milliseconds of a training step, split by tensor or data parallelism.

    torchrun --nproc-per-node 2 samples/bench_tp.py --runs gpt-1.2b:compile gpt-1.2b:compile+sp llama-8b:compile
    torchrun --nproc-per-node 2 samples/bench_tp.py --runs gpt-1.2b:compile gpt-1.2b:compile+unchecked
    torchrun --nproc-per-node 2 samples/bench_tp.py --runs gpt-1.2b:compile+adamw gpt-1.2b:compile+mixed+adamw
    torchrun --nproc-per-node 2 samples/bench_tp.py --batch 4 --runs gpt-1.2b:dp+optimizer+compile+graph+adamw
    python samples/bench_tp.py --runs gpt-1.2b:eager gpt-1.2b:compile --json times.jsonl
    torchrun --nproc-per-node 2 samples/bench_tp.py --tiny       # a few thousand weights: to see that it runs

A run is MODEL:FLAG+FLAG…, flags `eager`, `compile`, `sp` (sequence parallelism), `dropout`, `mixed`
(`precision="bf16"` whatever `--precision` says), `adamw` (the step has AdamW and its clipping too, else
it is forward and backward alone), `unchecked` (batches are not compared over the ranks), `selective` and `full`
(recomputation), `graph` (the step is one CUDA graph), `dp` (ranks share out the batch, of which each has `--batch`
rows, in place of the layers), `optimizer`, `gradients` and `parameters` (what data ranks share out besides). Models
are transformers' own, in the sizes of the Megatron-LM paper (arXiv 1909.08053, table 2) and of Llama-3-8B, on the
meta device: each rank makes its shards, from seeds that the weights' names give, so that losses are comparable
between numbers of ranks. A step's time is the median between device events, and the slowest rank's. FLOPs are 6·P·T +
12·L·s·h·T for P weights of matrices, T tokens, L layers, s positions and h features of attention; a causal mask is
not counted off.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch.profiler import DeviceType, ProfilerActivity, profile

import fxpar

SHARDS = ("optimizer", "gradients", "parameters")
FLAGS: tuple[str, ...] = ("eager", "compile", "sp", "dropout", "mixed", "adamw", "unchecked", "selective", "full")
FLAGS += ("graph", "dp", *SHARDS)
# Kernels of NCCL, copies into other GPUs' memory, and kernels that send there themselves.
COMMUNICATION = ("nccl", "ptop", "push_")
_PROFILED = 3  # steps
ATTENTION = ("flash", "fmha", "cudnn", "sdpa", "attention")


@dataclass(frozen=True)
class Size:
    """A model: `kind` and `options` of its configuration, and the batch."""

    kind: str
    options: Mapping[str, Any]
    batch: int
    sequence: int


def _gpt(hidden: int, heads: int, layers: int) -> Size:
    options = {"n_embd": hidden, "n_head": heads, "n_layer": layers, "n_positions": 1024, "vocab_size": 51200}
    return Size("GPT2", options, 8, 1024)


_LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
_LLAMA |= {"num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 4096}
MODELS: Mapping[str, Size] = {
    "gpt-1.2b": _gpt(1536, 16, 40),
    "gpt-2.5b": _gpt(1920, 20, 54),
    "gpt-4.2b": _gpt(2304, 24, 64),
    "gpt-8.3b": _gpt(3072, 32, 72),
    "llama-8b": Size("Llama", _LLAMA, 2, 4096),
}
_TINY: Mapping[str, Mapping[str, int]] = {
    "GPT2": {"n_embd": 64, "n_head": 8, "n_layer": 2, "n_positions": 32, "vocab_size": 512},
    "Llama": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
    | {"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 32},
}


def build(size: Size, dropout: float) -> torch.nn.Module:
    """The model without memory, in training mode."""
    options = dict(size.options)
    if size.kind == "GPT2":
        options |= {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    elif dropout:
        raise SystemExit(f"{size.kind} has no dropout")
    config = getattr(transformers, f"{size.kind}Config")(use_cache=False, bos_token_id=1, eos_token_id=2, **options)
    with torch.device("meta"):
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model.train()


def step_flops(model: torch.nn.Module, size: Size) -> float:
    """Of one forward and backward."""
    names = {"GPT2": ("n_layer", "n_embd"), "Llama": ("num_hidden_layers", "hidden_size")}[size.kind]
    layers, hidden = (int(size.options[name]) for name in names)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} - {id(head.weight)}
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in tables)
    tokens = size.batch * size.sequence
    return 6.0 * matrices * tokens + 12.0 * layers * size.sequence * hidden * tokens


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over the ranks."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def time_steps(step: Callable[[], torch.Tensor], device: torch.device, warmup: int, count: int) -> dict[str, float]:
    """Milliseconds between device events (on a CPU: of the clock), and of the host to queue a step."""
    for _ in range(warmup):
        step()
    synchronize(device)
    gc.collect()
    gc.disable()
    spans, queued = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        synchronize(device)
        spans = [a.elapsed_time(b) for a, b in pairwise(events)]
    for _ in range(3 if spans else count):
        start = time.perf_counter()
        step()
        queued.append((time.perf_counter() - start) * 1e3)
        synchronize(device)
    gc.enable()
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    ms, host, peak = slowest([statistics.median(spans or queued), statistics.median(queued), peak], device)
    return {"ms": ms, "host_ms": host, "peak_gib": peak}


def synchronize(device: torch.device) -> None:
    """Waits for the device and the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def where_time_goes(step: Callable[[], torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Of one step on a GPU: milliseconds of kernels, of communication beside no kernel, and of neither.

    What a kernel that sends computes besides, a norm say, counts as communication. The names of the attention kernels
    too.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as tracer:
        for _ in range(_PROFILED):
            step()
        synchronize(device)
    kernels = [e for e in tracer.events() or [] if e.device_type == DeviceType.CUDA]
    if not kernels:
        return {}
    # The last step: the first one waits for whichever rank's profiler starts last. Each has as many kernels.
    kernels = sorted(kernels, key=lambda e: float(e.time_range.start))[-(len(kernels) // _PROFILED) :]
    first, last = min(e.time_range.start for e in kernels), max(e.time_range.end for e in kernels)
    other = _union([e for e in kernels if not any(word in e.name.lower() for word in COMMUNICATION)])
    everything = _union(kernels)
    names = {e.name.split("(")[0].split("<")[0] for e in kernels if any(word in e.name.lower() for word in ATTENTION)}
    by_name: dict[str, float] = {}
    for e in kernels:
        by_name[e.name[:60]] = by_name.get(e.name[:60], 0.0) + (e.time_range.end - e.time_range.start) / 1e3
    top = sorted(by_name.items(), key=lambda item: -item[1])[:12]
    return {
        "compute_ms": other / 1e3,
        "exposed_ms": (everything - other) / 1e3,
        "idle_ms": (last - first - everything) / 1e3,
        "kernels": len(kernels),
        "attention": sorted(names),
        "top": [[name, round(ms, 2)] for name, ms in top],
    }


def _union(events: Sequence[Any]) -> float:
    """Microseconds in which at least one of the events ran."""
    total, end = 0.0, float("-inf")
    for span in sorted((e.time_range for e in events), key=lambda span: float(span.start)):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total


def measure(run: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run on the ranks that there are."""
    name, _, given = run.partition(":")
    flags = set(given.split("+")) if given else {"eager"}
    if name not in MODELS or flags - set(FLAGS):
        raise SystemExit(f"{run!r}: choose from {', '.join(MODELS)} and {', '.join(FLAGS)}")
    size = MODELS[name]
    if options.tiny:
        size = Size(size.kind, _TINY[size.kind], 4, 32)
    ranks, is_data = int(os.environ.get("WORLD_SIZE", 1)), "dp" in flags
    size = replace(size, batch=options.batch or size.batch)
    precision = "bf16" if "mixed" in flags else options.precision
    recompute = next((flag for flag in ("selective", "full") if flag in flags), "none")
    shard = next((flag for flag in SHARDS if flag in flags), "none")
    plan = fxpar.Plan(
        tp=1 if is_data else ranks,
        dp=ranks if is_data else 1,
        shard=shard,
        cuda_graphs=fxpar.CudaGraphs("full_iteration" if "graph" in flags else "none"),
        sequence_parallel="sp" in flags,
        compile="compile" in flags,
        precision=precision,
        recompute=fxpar.Recompute(recompute),
    )
    original = build(size, 0.1 if "dropout" in flags else 0.0)
    flops = step_flops(original, size)
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)) if is_data else 0)
    ids = torch.randint(0, size.options["vocab_size"], (size.batch, size.sequence), generator=generator)
    start = time.perf_counter()
    example = {"input_ids": ids, "labels": ids}
    model = fxpar.parallelize(original, plan, example, check_inputs="unchecked" not in flags)
    adamw = fxpar.Optimizer(model, "adamw", lr=1e-4, max_norm=1.0) if "adamw" in flags else None
    device = model.world.device
    batch = {"input_ids": ids.to(device), "labels": ids.to(device)}

    def step() -> torch.Tensor:
        model.zero_grad()
        return model.train_step(batch, optimizer=adamw)

    built = time.perf_counter() - start
    loss = float(step())
    found: dict[str, Any] = {
        "run": run,
        "tp": plan.tp,
        "dp": plan.dp,
        "loss": loss,
        "build_s": built,
        "first_s": time.perf_counter() - start - built,
    }
    found |= time_steps(step, device, options.warmup, options.steps)
    found |= where_time_goes(step, device) if device.type == "cuda" else {}
    seconds = found["ms"] / 1e3
    found |= {"tokens_s": plan.dp * size.batch * size.sequence / seconds, "tflops": flops / seconds / plan.tp / 1e12}
    return found


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a line for each run."""
    table = Table(title="a training step")
    columns = {"ms": "ms", "host_ms": "host ms", "tokens_s": "tokens/s", "tflops": "TFLOP/s a rank"}
    columns |= {"exposed_ms": "exposed ms", "idle_ms": "idle ms", "peak_gib": "peak GiB", "first_s": "first step s"}
    for title in ("run", "tp", "dp", *columns.values(), "loss"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for row in rows:
        values = [f"{row[key]:,.1f}" if key in row else "–" for key in columns]
        table.add_row(row["run"], str(row["tp"]), str(row["dp"]), *values, f"{row['loss']:.4f}")
    Console(width=160).print(table)
    kernels = sorted({kernel for row in rows for kernel in row.get("attention", [])})
    print("exposed: communication behind which nothing else ran. idle: nothing ran.")
    if kernels:
        print("attention kernels:", ", ".join(kernels))


def run_all(
    options: argparse.Namespace,
    measure: Callable[[str, argparse.Namespace], dict[str, Any]],
    report: Callable[[Sequence[Mapping[str, Any]]], None],
) -> None:
    """Runs `options.runs` one after the other on all ranks; the first one prints and writes what was measured."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    is_first, rows = int(os.environ.get("RANK", 0)) == 0, []
    for run in options.runs:
        rows.append(measure(run, options))
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if is_first:
            print(json.dumps(rows[-1]), flush=True)
            if options.json:
                with open(options.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    if is_first:
        report(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=["gpt-1.2b:eager", "gpt-1.2b:compile"], help="MODEL:FLAG+FLAG")
    parser.add_argument("--precision", default="bf16_weights", help="as of fxpar.Plan (bf16_weights)")
    parser.add_argument("--batch", type=int, help="rows of a data rank (the model's of the tables)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock runs (5)")
    parser.add_argument("--steps", type=int, default=10, help="steps on the clock (10)")
    parser.add_argument("--tiny", action="store_true", help="models of a few thousand weights")
    parser.add_argument("--json", metavar="FILE", help="append a JSON line for each run")
    options = parser.parse_args()
    run_all(options, measure, report)


if __name__ == "__main__":
    main()
