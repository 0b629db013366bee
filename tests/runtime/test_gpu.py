"""On GPUs: one process for each, NCCL, against one process on one of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_weights", "fp16"])
def test_gpus_train_like_one_process(name: str, precision: str) -> None:
    ranks = 1 << (min(torch.cuda.device_count(), 4).bit_length() - 1)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    worker = [str(Path(__file__).with_name("gpu_worker.py")), name, precision]
    done = subprocess.run(
        [*launcher, *worker],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name} {precision} on {ranks}: equal" in done.stdout
