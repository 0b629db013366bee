"""Copies between two GPUs give what NCCL gives, and a GPU that waits for one that does not come waits no longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
ROOT = Path(__file__).parents[3]
SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}  # several ranks of a GPU


def on_ranks(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.run(
        [*launcher, str(Path(__file__).with_name("copies_worker.py")), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **SHARED},
        capture_output=True,
        text=True,
        timeout=300,
    )


@two
def test_training_is_the_same_to_the_bit() -> None:
    done = on_ranks(2, "equal")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.endswith(("equal", "different"))]
    kinds = [(how, impl) for how in ("copies", "shots") for impl in ("none", "full_iteration")]
    assert told == [f"{name} {how} {impl}: equal" for name in ("gpt2", "llama") for how, impl in kinds]


@two
def test_experts_are_the_same_to_the_bit() -> None:
    """Tokens that holders gather, and rows that are sent in blocks."""
    done = on_ranks(2, "experts")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.endswith(("equal", "different"))]
    ways = [(way, impl) for way in ("allgather", "alltoall") for impl in ("none", "full_iteration")]
    assert told == [f"{way} {impl}: equal" for way, impl in ways]


@four
def test_tokens_that_some_need_alone_give_the_same_bits_again() -> None:
    """Sums over four GPUs are in another order than NCCL's."""
    done = on_ranks(4, "needed")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.endswith(("equal", "different"))]
    assert told == ["none: equal", "full_iteration: equal"]


@pytest.mark.parametrize("count", [pytest.param(2, marks=two), pytest.param(4, marks=four)])
def test_chunks_of_tokens_train_as_one_and_wait_for_who_is_late(count: int) -> None:
    done = on_ranks(count, "chunks")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.endswith(("equal", "different"))]
    assert told == ["near: equal", "again: equal", "late: equal"]


@two
@pytest.mark.parametrize("impl", ["none", "full_iteration"])
def test_who_waits_in_vain_ends_and_says_for_whom(impl: str) -> None:
    done = on_ranks(2, "lost", impl)
    assert done.returncode != 0
    assert "loss" not in done.stdout
    assert "has waited for copies of other ranks for 5 s" in done.stderr
    assert "all ranks have begun the same calls or more" in done.stderr


@pytest.mark.parametrize("count", [4, 8])
def test_each_kind_on_more_ranks_than_gpus(count: int) -> None:
    done = on_ranks(count, "several")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["equal"] * count
