"""Experts whose products Transformer Engine computes: a step is the single device's, and on GPUs torch's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpar
from fxpar.errors import InputError
from tests.passes import experts as words
from tests.runtime import grouped_jobs
from tests.runtime.test_experts import alone
from tests.runtime.test_training import assert_same
from tests.runtime.world import World

ROOT = Path(__file__).resolve().parents[2]
ENGINE: dict[str, Any] = {"ep": 2, "dispatch": "exact", "grouped_gemm": "transformer_engine"}


@pytest.mark.parametrize("routing", ["learned", pytest.param("one", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("mesh", [{"dp": 2}, pytest.param({"tp": 2, "etp": 1}, marks=pytest.mark.matrix)])
def test_ranks_train_what_one_process_trains(world2: World, mesh: dict[str, Any], routing: str) -> None:
    """Of all rows for one rank's experts too."""
    wanted = grouped_jobs.steps({}, routing)
    for rank, found in enumerate(world2.run(grouped_jobs.steps, {**mesh, **ENGINE}, routing)):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-12)
        assert found["output"] == pytest.approx(wanted["output"], rel=1e-12)
        assert_same(found["gradients"], wanted["gradients"], 1e-12)
        assert found["calls"] == (0 if routing == "one" and rank else 6)


@pytest.mark.matrix
@pytest.mark.parametrize("more", [{"recompute": "full"}, {"recompute": "selective"}, {"tp": 2}, {"pp": 2}], ids=str)
def test_beside_other_options(request: pytest.FixtureRequest, more: dict[str, Any]) -> None:
    """Of a Mixtral: products are computed again, experts are split, a pipeline's ranks hold a layer each."""
    layers = more.get("pp", 1)
    wanted = alone(layers)
    world = request.getfixturevalue(f"world{2 * more.get('tp', 1) * layers}")
    for found in world.run(grouped_jobs.trained, {"dp": 2, **ENGINE, **more, "layers": layers}):
        assert found["losses"] == pytest.approx(wanted["losses"][:1], rel=1e-6)  # float32 in transformers
        assert_same(found["gradients"], {name: wanted["gradients"][name] for name in found["gradients"]}, 1e-6)


def _refused() -> str:
    with pytest.raises(InputError) as found:
        fxpar.parallelize(words.Routed(), fxpar.Plan(dp=2, **ENGINE), words.batch(5))
    return str(found.value)


def test_ranks_without_a_gpu_are_refused(world2: World) -> None:
    for told in world2.run(_refused):
        assert "Transformer Engine multiplies on GPUs, and the ranks run on cpu; set grouped_gemm='torch'" in told


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")
@pytest.mark.parametrize("precision", ["bf16_weights", "bf16", "fp32"])
def test_on_gpus_a_step_is_that_of_torch_s_products(precision: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(Path(__file__).with_name("grouped_gemm_worker.py")), precision],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{precision}: alike" in done.stdout, done.stdout
