"""Trains a Llama with tensor parallelism: a program to start your own from.

    python samples/train_llama_tp.py --tp 2 --sequence-parallel              # starts its own processes
    torchrun --nproc-per-node 8 samples/train_llama_tp.py --precision bf16   # in the processes that torchrun starts

The model is the one of the transformers library, over bytes; the text is the source of Python's standard library, of
which the last twentieth is held out. Every process runs this program alike; fxpar runs its part of the model in each.
At the end the folder `checkpoint`, which must be new, holds the whole model under its names in transformers:
`LlamaForCausalLM.from_pretrained("checkpoint")` reads it.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import fxpar

EVALUATION_BATCHES = 4
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="processes that share each layer (2; under torchrun its own)")
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="cut norms and residuals over the sequence too"
    )
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20, help="steps in which the learning rate rises (20)")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest learning rate (1e-3)")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step (8)")
    parser.add_argument("--length", type=int, default=128, help="bytes a sequence (128)")
    parser.add_argument("--hidden", type=int, default=128, help="width; heads have 16 (128)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--evaluate-every", type=int, default=50, help="steps between evaluations (50)")
    parser.add_argument(
        "--saves", type=Path, default=Path("saves"), help="folder of what --resume goes on from (saves)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last save")
    parser.add_argument(
        "--out", type=Path, default=Path("checkpoint"), help="new folder for the checkpoint (checkpoint)"
    )
    chosen = parser.parse_args()
    if chosen.steps < 1 or chosen.evaluate_every < 1 or chosen.hidden % 32:
        parser.error("--steps and --evaluate-every must be at least 1, --hidden a multiple of 32")
    chosen.tp = int(os.environ.get("WORLD_SIZE", chosen.tp))
    return chosen


def build_model(chosen: argparse.Namespace) -> Any:
    """The same model in every process, because it is seeded."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=chosen.hidden,
        intermediate_size=3 * chosen.hidden,
        num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.hidden // 16,
        num_key_value_heads=chosen.hidden // 32,
        max_position_embeddings=chosen.length,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def read_corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and bytes that are held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return text[: -len(text) // 20], text[-len(text) // 20 :]


def batch_of(text: torch.Tensor, number: int, chosen: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Random windows of the text. All ranks must get the same batch: its number seeds it."""
    draw = torch.Generator().manual_seed(number)
    starts = torch.randint(0, len(text) - chosen.length, (chosen.batch,), generator=draw)
    ids = torch.stack([text[start : start + chosen.length] for start in starts.tolist()]).long()
    return {"input_ids": ids, "labels": ids}


def learning_rate(step: int, warmup: int, steps: int) -> float:
    """A share of the highest rate: linear warmup, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def evaluate(model: fxpar.ParallelModule, text: torch.Tensor, chosen: argparse.Namespace) -> float:
    """Mean loss on fixed windows of the held-out text. All ranks must call it."""
    model.eval()
    losses = [model(**batch_of(text, number, chosen)).loss for number in range(EVALUATION_BATCHES)]
    model.train()
    return float(sum(losses)) / len(losses)


def train(chosen: argparse.Namespace) -> None:
    """What every process does."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    training, held_out = read_corpus()
    plan = fxpar.Plan(tp=chosen.tp, sequence_parallel=chosen.sequence_parallel, precision=chosen.precision)
    model = fxpar.parallelize(build_model(chosen), plan, example=batch_of(training, 0, chosen))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=chosen.lr, betas=BETAS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, chosen.warmup, chosen.steps)
    )
    is_first, start, since = model.world.rank == 0, time.perf_counter(), 0
    done = model.resume_training(chosen.saves, optimizer, scheduler) if chosen.resume else 0
    steps = range(done + 1, chosen.steps + 1)
    # On GPUs a batch is copied while the step before it runs.
    batches = fxpar.prefetch((batch_of(training, step, chosen) for step in steps), model)
    for step, batch in zip(steps, batches, strict=True):
        loss = model.train_step(batch)
        norm = model.clip_grad_norm_(CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        since += 1
        if step % chosen.evaluate_every == 0 or step == chosen.steps:
            value = loss.item()  # waits for the device, so that the time is that of finished steps
            seconds = time.perf_counter() - start
            held = evaluate(model, held_out, chosen)
            if is_first:
                speed = since * chosen.batch * chosen.length / seconds
                print(f"step {step}: loss {value:.4f}, held out {held:.4f}, norm {norm:.2f}, {speed:,.0f} tokens/s")
            model.save_training(chosen.saves, optimizer, scheduler, position=step)
            start, since = time.perf_counter(), 0
    model.save_checkpoint(chosen.out)  # all ranks take part; the first one writes
    if is_first:
        print(f"saved to {chosen.out}")


def main() -> None:
    chosen = options()
    if "RANK" in os.environ or chosen.tp == 1:
        train(chosen)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(1, 1, chosen.tp, run_id="train", rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    elastic_launch(config, train)(chosen)


if __name__ == "__main__":
    main()
