"""Milliseconds of a training step, as it is and as CUDA graphs, from bound by launches to bound by computation.

    python samples/bench_graphs.py                                        # small and 1.2B on one GPU
    torchrun --nproc-per-node 2 samples/bench_graphs.py --models gpt-1.2b gpt-2.5b
    python samples/bench_graphs.py --models gpt-small:1x512 --variants compile compile+full_iteration
    python samples/bench_graphs.py --tiny                                 # a few thousand weights: to see that it runs

A model is NAME or NAME:BATCHxSEQUENCE. A variant is `eager` or `compile`, with `+partial`, `+transformer_engine` or
`+full_iteration` behind it, and `+chunksN` for N chunks of tokens (`+chunksauto`). Variants of one model are timed in
turn, round after round, so that what drifts on the machine drifts for all; a step is forward and backward in bf16, from
freed gradients or added to those that are there (`--accumulated`). Columns: the median between device events, the
largest less the smallest of ten steps over that, what the host takes to queue a step, the most memory at one time, on
GPUs the time in which ranks communicated and nothing else ran and that in which nothing ran, and the seconds of
`parallelize`, of the first step and of recording within it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import fxpar
from samples.bench_tp import _TINY, MODELS, Size, build, slowest, synchronize, where_time_goes

VARIANTS = ("eager", "compile", "compile+partial", "compile+transformer_engine", "compile+full_iteration")
SMALL = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 51200}
SIZES: Mapping[str, Size] = {"gpt-small": Size("GPT2", SMALL, 1, 512), **MODELS}


@dataclass
class Timed:
    """A variant that is timed.

    Attributes:
        step: one training step.
        model: that it trains.
        loss: of the first.
        peak: bytes at one time, without those of other variants.
        build_s, first_s: seconds of `parallelize`, and of the first step with what it compiles and records.
        ms, host: of each step, milliseconds.
    """

    step: Callable[[], torch.Tensor]
    model: fxpar.ParallelModule
    loss: float
    peak: int
    build_s: float
    first_s: float
    ms: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


def sized(text: str, tiny: bool) -> Size:
    """The size of a model on the command line."""
    name, _, batch = text.partition(":")
    if name not in SIZES:
        raise SystemExit(f"{text!r}: choose from {', '.join(SIZES)}")
    size = SIZES[name]
    if tiny:
        return Size(size.kind, _TINY[size.kind], 4, 32)
    if batch:
        rows, _, tokens = batch.partition("x")
        return Size(size.kind, size.options, int(rows), int(tokens))
    return size


def make(size: Size, variant: str, options: argparse.Namespace) -> Timed:
    """A variant of a model, whose graphs are recorded."""
    how, *words = variant.split("+")
    (chunks,) = [word.removeprefix("chunks") for word in words if word.startswith("chunks")] or ["1"]
    impl = next((word for word in words if not word.startswith("chunks")), "none")
    plan = fxpar.Plan(
        tp=int(os.environ.get("WORLD_SIZE", 1)),
        compile=how == "compile",
        precision=options.precision,
        cuda_graphs=fxpar.CudaGraphs(impl),
        communication=fxpar.Communication(options.exchange, token_chunks=chunks if chunks == "auto" else int(chunks)),
        sequence_parallel=options.sequence_parallel,
    )
    ids = torch.randint(0, size.options["vocab_size"], (size.batch, size.sequence), generator=torch.Generator())
    original = build(size, options.dropout)
    example = ids.expand(max(2, size.batch), -1)  # of one row nothing would show what a row is
    start = time.perf_counter()
    model = fxpar.parallelize(original, plan, {"input_ids": example, "labels": example}, check_inputs=False)
    device = model.world.device
    own = ids if options.batches != "device" else ids.to(device)
    source = itertools.repeat({"input_ids": own, "labels": own})
    batches = iter(fxpar.prefetch(source, model) if options.batches == "prefetched" else source)

    def step() -> torch.Tensor:
        if not options.accumulated:
            model.zero_grad()
        return model.train_step(next(batches))

    built = time.perf_counter()
    before = occupied(device, reset=True)
    loss = float(step())
    first = time.perf_counter()
    for _ in range(options.warmup):
        step()
    synchronize(device)
    return Timed(step, model, loss, occupied(device) - before, built - start, first - built)


def occupied(device: torch.device, reset: bool = False) -> int:
    """The most bytes since the last reset; with `reset` those of now."""
    if device.type != "cuda":
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)


def time_round(timed: Timed, count: int) -> None:
    """Some steps of one variant."""
    device = timed.model.world.device
    synchronize(device)
    gc.collect()
    gc.disable()
    timed.step()  # under way while the host prepares the next: else the first on the clock would wait for the host
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            timed.step()
            event.record()
        synchronize(device)
        timed.ms += [a.elapsed_time(b) for a, b in pairwise(events)]
    for _ in range(2):
        start = time.perf_counter()
        timed.step()
        timed.host.append((time.perf_counter() - start) * 1e3)
        synchronize(device)
    gc.enable()
    if device.type != "cuda":
        timed.ms += timed.host[-2:]


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each variant of a model."""
    size = sized(name, options.tiny)
    made: dict[str, Timed] = {}
    for variant in options.variants:
        made[variant] = make(size, variant, options)
    for _ in range(options.rounds):
        for timed in made.values():
            time_round(timed, options.steps)
    rows = []
    for variant, timed in made.items():
        values = [statistics.median(timed.ms), statistics.median(timed.host), timed.peak / 2**30]
        values += [timed.build_s, timed.first_s]
        ms, host, peak, build_s, first_s = slowest(values, timed.model.world.device)
        last = timed.ms[-10:]
        row: dict[str, Any] = {"model": name, "variant": variant, "loss": timed.loss, "ms": ms, "host_ms": host}
        row |= {"spread": (max(last) - min(last)) / statistics.median(last), "peak_gib": peak}
        row |= {"build_s": build_s, "first_s": first_s}
        row["last_ms"] = [round(each, 3) for each in last]
        device = timed.model.world.device
        row |= where_time_goes(timed.step, device) if device.type == "cuda" else {}
        figures = timed.model.graph_figures
        rows.append(row | ({} if figures is None else {"graphs": figures.graphs, "record_s": figures.seconds}))
    for timed in made.values():
        timed.model.close()
    return rows


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a line for each variant, and how it compares with the model's first."""
    table = Table(title="a training step")
    columns = {"ms": "ms", "host_ms": "host ms", "spread": "spread %", "peak_gib": "peak GiB"}
    columns |= {
        "exposed_ms": "exposed ms",
        "idle_ms": "idle ms",
        "build_s": "build s",
        "first_s": "first step s",
        "record_s": "of it recording",
    }
    for title in ("model", "variant", *columns.values(), "graphs", "times faster", "loss"):
        table.add_column(title, justify="left" if title in ("model", "variant") else "right")
    first: dict[str, float] = {}
    for row in rows:
        base = first.setdefault(row["model"], row["ms"])
        shown = {**row, "spread": 100 * row["spread"]}
        values = [f"{shown[key]:,.2f}" if key in shown else "–" for key in columns]
        more = (str(row.get("graphs", "–")), f"{base / row['ms']:.2f}", f"{row['loss']:.4f}")
        table.add_row(row["model"], row["variant"], *values, *more)
    Console(width=200).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt-small", "gpt-1.2b"], help="NAME or NAME:BATCHxSEQUENCE")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), help="eager or compile, +IMPLEMENTATION")
    parser.add_argument("--precision", default="bf16_weights", help="as of fxpar.Plan (bf16_weights)")
    parser.add_argument("--exchange", default="auto", help="the collective_transport of fxpar.Communication (auto)")
    parser.add_argument("--sequence-parallel", action="store_true", help="norms on parts of the sequence")
    parser.add_argument("--dropout", type=float, default=0.0, help="probability, everywhere (0)")
    parser.add_argument(
        "--batches",
        choices=["device", "host", "prefetched"],
        default="device",
        help="where they lie; prefetched ones are copied from the host while the step before runs (device)",
    )
    parser.add_argument("--accumulated", action="store_true", help="gradients are added to those of the step before")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the clock runs (4)")
    parser.add_argument("--rounds", type=int, default=3, help="in each, all variants are timed in turn (3)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round (10)")
    parser.add_argument("--tiny", action="store_true", help="models of a few thousand weights")
    parser.add_argument("--json", metavar="FILE", help="append a JSON line for each variant")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    is_first, rows = int(os.environ.get("RANK", 0)) == 0, []
    for name in options.models:
        rows += measure(name, options)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if not is_first:
        return
    if options.json:
        with open(options.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    report(rows)


if __name__ == "__main__":
    main()
