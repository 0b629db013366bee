"""Trains a small Mixtral whose experts are on two processes, and the same one on one: the losses are equal.

    python samples/train_moe.py                                         # starts its own two processes
    python samples/train_moe.py --ep 4 --experts 8 --steps 20
    python samples/train_moe.py --ep 1                                  # one process alone
    torchrun --nproc-per-node 4 samples/train_moe.py --ep 4 --tp 2      # pairs of them split all but the experts

The model is transformers' own, over bytes of Python's standard library, with the load of its experts in the loss. The
processes share out the batch, or with `--tp` each layer too, and each has other experts: the rows of its tokens travel
to those that hold their experts, and back. Where the program starts its processes itself, it trains on one before, and
exits with status 1 if a loss differs by 1e-4.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import fxpar

CLIP, TOLERANCE = 1.0, 1e-4


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, default=2, help="processes that hold different experts (2)")
    parser.add_argument("--tp", type=int, default=1, help="processes, of these, that share each layer (1)")
    parser.add_argument("--experts", type=int, default=4, help="of each layer; a token has two (4)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step (8)")
    parser.add_argument("--length", type=int, default=32, help="bytes a sequence (32)")
    parser.add_argument("--hidden", type=int, default=64, help="width; heads have 16 (64)")
    parser.add_argument("--layers", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.ep % chosen.tp or chosen.steps < 1:
        parser.error("--ep must be a multiple of --tp, and --steps at least 1")
    return chosen


def build_model(chosen: argparse.Namespace) -> Any:
    """The same model in every process, because it is seeded."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=256,
        hidden_size=chosen.hidden,
        intermediate_size=2 * chosen.hidden,
        num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.hidden // 16,
        num_key_value_heads=chosen.hidden // 32,
        num_local_experts=chosen.experts,
        num_experts_per_tok=2,
        max_position_embeddings=chosen.length,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config).train()


def batch_of(text: torch.Tensor, number: int, chosen: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Random windows of the text, of all ranks; its number seeds it."""
    draw = torch.Generator().manual_seed(number)
    starts = torch.randint(0, len(text) - chosen.length, (chosen.batch,), generator=draw)
    ids = torch.stack([text[start : start + chosen.length] for start in starts.tolist()]).long()
    return {"input_ids": ids, "labels": ids}


def train(plan: fxpar.Plan, chosen: argparse.Namespace) -> list[float]:
    """What every process of the plan does; the loss of each step."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    rows = chosen.batch // plan.dp
    example = {key: value[:rows] for key, value in batch_of(text, 0, chosen).items()}
    model = fxpar.parallelize(build_model(chosen), plan, example=example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    own = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    print(f"rank {model.world.rank}: {own:,} parameters", flush=True)
    losses = []
    for step in range(1, chosen.steps + 1):
        losses.append(float(model.train_step(fxpar.shard_batch(batch_of(text, step, chosen), model))))
        if model.world.rank == 0:
            print(f"step {step}: loss {losses[-1]:.5f}", flush=True)
        model.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    chosen = options()
    # With etp=1 no expert is split: the processes that split each layer hold different experts too.
    plan = fxpar.Plan(dp=chosen.ep // chosen.tp, tp=chosen.tp, ep=chosen.ep, etp=1)
    if "RANK" in os.environ or chosen.ep == 1:
        train(plan, chosen)
        return
    print("on one process:", flush=True)
    alone = train(fxpar.Plan(), chosen)
    print(f"on {chosen.ep} processes:", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(1, 1, chosen.ep, run_id="train", rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    losses = elastic_launch(config, train)(plan, chosen)[0]
    gap = max(abs(one - split) for one, split in zip(alone, losses, strict=True))
    print(f"largest difference of a loss: {gap:.1e}")
    if not gap <= TOLERANCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
