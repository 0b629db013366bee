"""Milliseconds of a training step whose experts are on different GPUs.

    torchrun --nproc-per-node 2 samples/bench_moe.py --runs learned balanced learned+compile
    torchrun --nproc-per-node 2 samples/bench_moe.py --runs learned+dropless learned+dropless+partial learned+alltoall
    torchrun --nproc-per-node 2 samples/bench_moe.py --runs learned+dropless+compile learned+dropless+partial+compile
    torchrun --nproc-per-node 4 samples/bench_moe.py --runs learned+compile --batch 2 --json times.jsonl
    torchrun --nproc-per-node 2 samples/bench_moe.py --runs hot+compile+graph hot+spare2+compile+graph
    torchrun --nproc-per-node 2 samples/bench_moe.py --tiny --precision fp32     # to see that it runs, on a CPU too

A run is FLAG+FLAG…. How tokens are routed: `learned`, the model's own router; `balanced`, as many tokens for each
expert; or an eighth of the experts has eight times the weight of others: `hot`, the first ones; `spread`, ones in equal
distances; `moving`, others in each step; `hot_rank`, all experts of the first rank. `spare1`, `spare2` and `spare4` are
spare slots of each rank for replicas of hot experts. Other flags are `compile`; `graph` (the step is one CUDA graph),
`partial` (graphs end where rows travel alone); `adamw` (the step has torch's fused AdamW and its clipping too, behind a
graph); `unchecked` (batches are not compared over the ranks); `selective` and `full` (recomputation); `dropless` (rows
travel alone), `alltoall` (rows travel in blocks), `budget` (buffers have half as many places again as an even load
needs), `copy` and `nccl` (what ranks send by, where not by what is faster). With `dropless`, `compile` compiles what
stands between experts.
Every GPU has its own sequences and experts: the plan is dp = ep = their number, etp = 1. The model is transformers'
Mixtral on the meta device, of 8 layers of width 2048 with 64 experts of width 1024, of which a token has 8, and 4
sequences of 2048 tokens a GPU. A step's time is the slowest rank's median. FLOPs are 6·P·T + 12·L·s·h·T, where P has of
the experts' weights those that a token meets.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from samples.bench_tp import Size, build, run_all, time_steps, where_time_goes

ROUTINGS = ("balanced", "hot", "spread", "moving", "hot_rank")
SLOTS = {"spare1": 1, "spare2": 2, "spare4": 4}
FLAGS = (
    *("learned", *ROUTINGS, *SLOTS, "eager", "compile", "graph", "adamw", "unchecked", "selective", "full", "dropless"),
    *("alltoall", "budget", "copy", "nccl", "partial"),
)
# Larger than any router's score.
_FAR = 1e4

_SIZE = {"hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}
_SIZE |= {"num_hidden_layers": 8, "vocab_size": 32000, "max_position_embeddings": 2048}
_SIZE |= {"num_local_experts": 64, "num_experts_per_tok": 8}
_TINY = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
_TINY |= {"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 32}
_TINY |= {"num_local_experts": 8, "num_experts_per_tok": 2}


class Routed(nn.Module):
    """A layer's router and experts, where a token's place in its sequence decides which experts it goes to.

    What it weighs them by is the router's own score.

    Args:
        block: of the model.
        chosen: the experts of each place, [s, K].
        moved: by how many numbers all of them are moved on in each step.
    """

    def __init__(self, block: Any, chosen: Tensor, moved: int) -> None:
        super().__init__()
        self.gate, self.experts, self.k, self.moved = block.gate, block.experts, chosen.shape[1], moved
        preferred = torch.zeros(chosen.shape[0], self.gate.weight.shape[0]).scatter(1, chosen, _FAR)
        self.register_buffer("preferred", preferred)
        self.register_buffer("first", torch.zeros((), dtype=torch.int64))
        self.preferred: Tensor
        self.first: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        scores = functional.linear(hidden, self.gate.weight).float()
        preferred = self.preferred[torch.arange(hidden.shape[1], device=hidden.device)]
        if self.moved:
            count = scores.shape[-1]
            preferred = preferred[:, (torch.arange(count, device=hidden.device) - self.first) % count]
            self.first.add_(self.moved)
        top = torch.softmax(scores + preferred, dim=-1).topk(self.k, dim=-1)
        weights = top.values / top.values.sum(dim=-1, keepdim=True)
        rows = hidden.reshape(-1, hidden.shape[-1])
        mixed: Tensor = self.experts(
            rows, top.indices.reshape(-1, self.k), weights.reshape(-1, self.k).to(hidden.dtype)
        )
        return mixed.reshape(hidden.shape)


def choices(routing: str, places: int, experts: int, k: int, ranks: int) -> Tensor:
    """Returns the experts of each place in a sequence, [places, k]."""
    if routing == "balanced":
        return (torch.arange(places * k) % experts).view(places, k)
    weights, hot = torch.ones(experts), max(experts // 8, 1)
    heated = {"spread": torch.arange(hot) * (experts // hot), "hot_rank": torch.arange(experts // ranks)}
    weights[heated.get(routing, torch.arange(hot))] = 8.0
    return torch.multinomial(weights.expand(places, experts), k, generator=torch.Generator().manual_seed(17))


def size_of(options: argparse.Namespace) -> Size:
    """The model and the sequences of one GPU."""
    found = dict(_TINY if options.tiny else _SIZE)
    given = {"num_hidden_layers": options.layers, "num_local_experts": options.experts}
    given |= {"num_experts_per_tok": options.topk, "max_position_embeddings": options.seq}
    found |= {name: value for name, value in given.items() if value}
    tied = {"tie_word_embeddings": True, "sliding_window": None}
    return Size("Mixtral", found | tied, options.batch, found["max_position_embeddings"])


def step_flops(size: Size, tokens: int) -> float:
    """Of one forward and backward."""
    own = size.options
    h, layers, heads = own["hidden_size"], own["num_hidden_layers"], own["num_attention_heads"]
    attention = 2 * h * h * (1 + own["num_key_value_heads"] / heads)
    experts = own["num_experts_per_tok"] * 3 * h * own["intermediate_size"] + h * own["num_local_experts"]
    matrices = layers * (attention + experts) + own["vocab_size"] * h
    return float(6 * matrices * tokens + 12 * layers * size.sequence * h * tokens)


def measure(run: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run on the ranks that there are."""
    flags = set(run.split("+"))
    if flags - set(FLAGS):
        raise SystemExit(f"{run!r}: choose from {', '.join(FLAGS)}")
    world = int(os.environ.get("WORLD_SIZE", 1))
    size, slots = size_of(options), sum(SLOTS[flag] for flag in flags & SLOTS.keys())
    plan = fxpar.Plan(
        dp=world,
        ep=world,
        etp=1,
        experts=fxpar.Experts(
            dispatch=next((how for how in ("dropless", "alltoall") if how in flags), "static"),
            recv_capacity_factor=1.5 if "budget" in flags else None,
            spare_experts=slots,
            min_gain=options.min_gain if slots else None,
        ),
        communication=fxpar.Communication(
            collective_transport=next((how for how in ("copy", "nccl") if how in flags), "auto")
        ),
        compile="compile" in flags,
        cuda_graphs=fxpar.CudaGraphs(
            "full_iteration" if "graph" in flags else "partial" if "partial" in flags else "none"
        ),
        precision=options.precision,
        recompute=fxpar.Recompute(next((flag for flag in ("selective", "full") if flag in flags), "none")),
    )
    original: Any = build(size, 0.0)
    count, k = size.options["num_local_experts"], size.options["num_experts_per_tok"]
    routing = next((flag for flag in ROUTINGS if flag in flags), None)
    if routing is not None:
        chosen, moved = choices(routing, size.sequence, count, k, world), max(count // 8, 1)
        for layer in original.model.layers:
            layer.mlp = Routed(layer.mlp, chosen, moved if routing == "moving" else 0)
    whole = replace(size, batch=size.batch * world)
    ids = torch.randint(0, size.options["vocab_size"], (whole.batch, whole.sequence), generator=torch.Generator())
    start = time.perf_counter()
    own = ids[: size.batch]
    example = {"input_ids": own, "labels": own}
    model = fxpar.parallelize(original, plan, example, check_inputs="unchecked" not in flags)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if "adamw" in flags else None
    device = model.world.device
    batch = fxpar.shard_batch({"input_ids": ids.to(device), "labels": ids.to(device)}, model)

    def step() -> Tensor:
        model.zero_grad()
        loss = model.train_step(batch)
        if adamw is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
        return loss

    built = time.perf_counter() - start
    loss = float(step())
    first = time.perf_counter() - start - built
    found: dict[str, Any] = {"run": run, "ep": world, "loss": loss, "build_s": built, "first_s": first}
    found |= time_steps(step, device, options.warmup, options.steps)
    found |= where_time_goes(step, device) if device.type == "cuda" else {}
    loads = model.report().loads
    for name, by_layer in (
        ("before", [load.before or load.ranks for load in loads]),
        ("after", [load.ranks for load in loads]),
    ):
        found[name] = max((max(ranks) * world / sum(ranks) for ranks in by_layer), default=1.0)
    seconds, tokens = found["ms"] / 1e3, whole.batch * whole.sequence
    return found | {"tokens_s": tokens / seconds, "tflops": step_flops(size, tokens) / seconds / world / 1e12}


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a line for each run."""
    table = Table(title="a training step with experts")
    columns = {"ms": "ms", "host_ms": "host ms", "tokens_s": "tokens/s", "tflops": "TFLOP/s a rank"}
    columns |= {"exposed_ms": "exposed ms", "idle_ms": "idle ms", "peak_gib": "peak GiB", "first_s": "first step s"}
    for title in ("run", "ep", *columns.values(), "before", "after", "loss"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for row in rows:
        values = [f"{row[key]:,.1f}" if key in row else "–" for key in columns]
        values += [f"{row[key]:.2f}" for key in ("before", "after")]
        table.add_row(row["run"], str(row["ep"]), *values, f"{row['loss']:.4f}")
    Console(width=180).print(table)
    print("exposed: communication behind which nothing else ran. idle: nothing ran.")
    print("before, after: rows of the fullest rank over the mean, without replicas and with them.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=["learned", "balanced", "learned+compile"], help="FLAG+FLAG")
    parser.add_argument("--batch", type=int, default=4, help="sequences a GPU (4)")
    parser.add_argument("--seq", type=int, default=0, help="tokens a sequence (2048)")
    parser.add_argument("--layers", type=int, default=0, help="(8)")
    parser.add_argument("--experts", type=int, default=0, help="of a layer (64)")
    parser.add_argument("--topk", type=int, default=0, help="experts of a token (8)")
    parser.add_argument("--precision", default="bf16_weights", help="as of fxpar.Plan (bf16_weights)")
    parser.add_argument("--min-gain", type=float, help="as of fxpar.Experts (by cost)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock runs (5)")
    parser.add_argument("--steps", type=int, default=10, help="steps on the clock (10)")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    parser.add_argument("--json", metavar="FILE", help="append a JSON line for each run")
    options = parser.parse_args()
    run_all(options, measure, report)


if __name__ == "__main__":
    main()
