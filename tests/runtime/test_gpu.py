"""On GPUs: one process for each, NCCL, against one process on one of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
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


def _steps_of_many_lengths(plan: fxpar.Plan) -> list[tuple[float, list[torch.Tensor]]]:
    """Loss and gradients of a small GPT-2 with dropout, for divisible, odd and single sizes."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=64, use_cache=False)
    config.update({"bos_token_id": 1, "eos_token_id": 1})
    model: torch.nn.Module = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 128, (4, 64), generator=torch.Generator().manual_seed(1))
    split = fxpar.parallelize(model, plan, {"input_ids": ids[:2, :8], "labels": ids[:2, :8]})
    found = []
    for rows, length in ((2, 8), (2, 16), (3, 7), (4, 33), (2, 8), (2, 2), (4, 64)):
        split.zero_grad()
        part = ids[:rows, :length].cuda()
        loss = float(split.train_step({"input_ids": part, "labels": part}))
        found.append((loss, [p.grad.clone() for p in split.parameters() if p.grad is not None]))
    return found


def test_lengths_are_symbols_in_kernels_and_masks_too() -> None:
    eager = _steps_of_many_lengths(fxpar.Plan())
    compiled = _steps_of_many_lengths(fxpar.Plan(compile=True))
    for (loss, gradients), (other, others) in zip(eager, compiled, strict=True):
        assert other == pytest.approx(loss, abs=1e-5)
        for a, b in zip(gradients, others, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
