"""On GPUs: one process for each, NCCL, against one process on one of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpar

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


class Odd(nn.Module):
    """Values of a size that Inductor would pad on a GPU, which a backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(1025, 1025) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for linear in self.linears:
            x = x + torch.softmax(linear(x), -1)
        return {"loss": x.square().mean()}


def test_compiled_results_have_the_strides_that_their_readers_expect() -> None:
    batch = {"x": torch.randn(48, 1025)}
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = fxpar.parallelize(Odd(), fxpar.Plan(compile=compiled), batch)
        loss = float(model.train_step(batch))
        found.append((loss, [p.grad.norm().item() for p in model.parameters() if p.grad is not None]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-3)
