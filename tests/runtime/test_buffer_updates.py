"""Buffers that a forward writes are what one device makes of them, once a microbatch, under every plan."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import fxpar
from tests.runtime import written_jobs
from tests.runtime.world import World
from tests.runtime.written_jobs import Found

GRAPHS = {how: fxpar.CudaGraphs(how) for how in ("partial", "full_iteration")}
_OTHERS = pytest.mark.matrix
PLANS = [
    pytest.param("convnet", fxpar.Plan(tp=2), marks=_OTHERS),
    pytest.param("convnet", fxpar.Plan(dp=2, batch_norm="global"), marks=_OTHERS),
    pytest.param("convnet", fxpar.Plan(tp=2, cuda_graphs=GRAPHS["partial"])),
    pytest.param("convnet", fxpar.Plan(dp=2, batch_norm="global", cuda_graphs=GRAPHS["full_iteration"])),
    pytest.param("convnet", fxpar.Plan(pp=2)),
    pytest.param("codebook", fxpar.Plan(tp=2), marks=_OTHERS),
    pytest.param("codebook", fxpar.Plan(dp=2), marks=_OTHERS),
    pytest.param("counted", fxpar.Plan(dp=2)),
]


@cache
def alone(kind: str) -> Found:
    return written_jobs.alone(kind)


@pytest.mark.parametrize(("kind", "plan"), PLANS)
def test_buffers_are_those_of_one_device(world2: World, kind: str, plan: fxpar.Plan) -> None:
    """Two steps of two microbatches, a call without gradients, and an evaluation."""
    wanted = alone(kind)
    held: set[str] = set()
    for found in world2.run(written_jobs.split, kind, plan):
        assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-12)
        torch.testing.assert_close(found["buffers"], wanted["buffers"], rtol=0, atol=1e-12)
        held |= found["gradients"].keys()
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, wanted["gradients"][name], rtol=0, atol=1e-12)
        saved = {name: value for name, value in found["saved"].items() if name in wanted["buffers"]}
        torch.testing.assert_close(saved, {name: wanted["buffers"][name] for name in saved}, rtol=0, atol=1e-12)
    assert held == wanted["gradients"].keys()
