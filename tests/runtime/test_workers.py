"""Processes that compile kernels are started where there are kernels to compile."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fxpar.plan.plan import Plan
from fxpar.runtime.world import start_workers


@pytest.mark.parametrize(
    ("plan", "has_gpu", "times"), [(Plan(compile=True), True, 1), (Plan(compile=True), False, 0), (Plan(), True, 0)]
)
def test_they_are_started_for_compiled_plans_on_gpus(plan: Plan, has_gpu: bool, times: int) -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=has_gpu),
        mock.patch("torch._inductor.async_compile.maybe_warm_pool") as warm,
    ):
        start_workers(plan)
    assert warm.call_count == times
