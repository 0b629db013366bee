"""Trains a GPT-2 with fxpar inside of Lightning's Fabric, which starts the processes, copies batches and logs.

    pip install lightning-fabric                                     # fxpar does not need it
    python samples/train_fabric.py                                   # two processes, tensor parallelism
    torchrun --nproc-per-node 4 samples/train_fabric.py --tp 2 --dp 2

The model is not given to `fabric.setup`, which would wrap it in DistributedDataParallel: fxpar refuses that. The plan
says what the ranks share out, also the rows, so `setup_dataloaders` must not cut them a second time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning_fabric import Fabric
from lightning_fabric.loggers import CSVLogger
from torch.utils.data import DataLoader

import fxpar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="tensor ranks (2)")
    parser.add_argument("--dp", type=int, default=1, help="data ranks (1)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="folder of the metrics (logs)")
    chosen = parser.parse_args()

    logger = CSVLogger(chosen.logs, name="fabric", flush_logs_every_n_steps=1)
    fabric = Fabric(strategy="ddp", devices=chosen.tp * chosen.dp, loggers=logger)
    fabric.launch()

    sizes: dict[str, Any] = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    torch.manual_seed(0)
    author = transformers.GPT2LMHeadModel(config)
    words = torch.randint(0, 64, (64, 32)).cumsum(1) % 256
    rows: Any = [{"input_ids": row, "labels": row} for row in words]
    example = {"input_ids": words[:8], "labels": words[:8]}
    model = fxpar.parallelize(author, fxpar.Plan(tp=chosen.tp, dp=chosen.dp), example)
    optimizer = fxpar.Optimizer(model, "adamw", lr=3e-3, max_norm=1.0)

    sampler = fxpar.BatchSampler(len(rows), 16, model, seed=1)
    loader = fabric.setup_dataloaders(DataLoader(rows, batch_sampler=sampler), use_distributed_sampler=False)
    step, loss = 0, torch.zeros(())
    while step < chosen.steps:
        for batch in loader:
            loss = model.train_step(batch, optimizer=optimizer)
            step += 1
            fabric.log_dict({"loss": loss, "norm": optimizer.norm}, step)
            if step == chosen.steps:
                break
    fabric.print(f"loss {loss.item():.4f} after {step} steps on {fabric.world_size} processes")


if __name__ == "__main__":
    main()
