"""Trains a GPT-2 through a pipeline: two stages of layers, each split over two processes.

    python samples/train_pp.py                                          # starts its own four processes
    python samples/train_pp.py --schedule zb_h1 --microbatches 8
    python samples/train_pp.py --virtual-stages 2 --layers 8            # interleaved: four stages on two ranks
    torchrun --nproc-per-node 8 samples/train_pp.py --pp 4 --tp 2 --layers 8

The model is transformers' own, over bytes of Python's standard library; its table of words is its head too, which the
first and the last stage hold together. Every process runs this program alike. At first the stages and the order of
what runs on them are printed.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import fxpar

CLIP = 1.0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2, help="processes that share out the layers (2)")
    parser.add_argument("--tp", type=int, default=2, help="processes that share each layer (2)")
    parser.add_argument("--virtual-stages", type=int, default=1, help="stages of each process (1)")
    parser.add_argument("--microbatches", type=int, default=4, help="into which a batch is cut (4)")
    parser.add_argument("--schedule", default="", help="1f1b, gpipe, interleaved_1f1b, zb_h1, zbv, or a file")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step (8)")
    parser.add_argument("--length", type=int, default=64, help="bytes a sequence (64)")
    parser.add_argument("--hidden", type=int, default=64, help="width; heads have 16 (64)")
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args()


def build_model(chosen: argparse.Namespace) -> Any:
    """The same model in every process, because it is seeded."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256,
        n_embd=chosen.hidden,
        n_layer=chosen.layers,
        n_head=chosen.hidden // 16,
        n_positions=chosen.length,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config).train()


def batch_of(text: torch.Tensor, number: int, chosen: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Random windows of the text. All ranks must get the same batch: its number seeds it."""
    draw = torch.Generator().manual_seed(number)
    starts = torch.randint(0, len(text) - chosen.length, (chosen.batch,), generator=draw)
    ids = torch.stack([text[start : start + chosen.length] for start in starts.tolist()]).long()
    return {"input_ids": ids, "labels": ids}


def train(chosen: argparse.Namespace) -> None:
    """What every process does."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    plan = fxpar.Plan(
        pp=chosen.pp,
        tp=chosen.tp,
        virtual_stages=chosen.virtual_stages,
        microbatches=chosen.microbatches,
        schedule=chosen.schedule,
    )
    model = fxpar.parallelize(build_model(chosen), plan, example=batch_of(text, 0, chosen))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    own = sum(p.numel() for p in model.parameters())
    print(f"rank {model.world.rank}: stages {', '.join(map(str, model.stages))}, {own:,} parameters", flush=True)
    start = time.perf_counter()
    for step in range(1, chosen.steps + 1):
        loss = model.train_step(batch_of(text, step, chosen))
        norm = model.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if model.world.rank == 0 and (step == 1 or step % 20 == 0):
            speed = step * chosen.batch * chosen.length / (time.perf_counter() - start)
            print(f"step {step}: loss {loss:.4f}, norm {norm:.2f}, {speed:,.0f} tokens/s", flush=True)


def main() -> None:
    chosen = options()
    size = chosen.pp * chosen.tp
    if "RANK" in os.environ or size == 1:
        train(chosen)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(1, 1, size, run_id="train", rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    elastic_launch(config, train)(chosen)


if __name__ == "__main__":
    main()
