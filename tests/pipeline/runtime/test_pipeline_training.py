"""What goes with training in a pipeline: norms, loss scaling, mixed precision, optimizers; each as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pipeline.runtime import pipeline_jobs
from tests.runtime.jobs import Found
from tests.runtime.world import World

TENSOR_PARALLEL: dict[str, Any] = {"tp": 2, "split": {"up.*": "column", "down.*": "row"}}


def check_clipped(ranks: list[Found]) -> None:
    one = pipeline_jobs.clipped({})
    for found in ranks:
        # Words that two stages hold count once.
        for key in ("norms", "loss", "state"):
            torch.testing.assert_close(found[key], one[key], rtol=0, atol=1e-11)
        torch.testing.assert_close(found["flags"], one["flags"], rtol=0, atol=1e-11)
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, one["gradients"][name], rtol=0, atol=1e-11)
        for kind, where, reason, remedy in found["torch"]:
            assert (kind, where) == ("InputError", "norm of several gradients")
            assert "torch.nn.utils.clip_grad_norm_" in reason
            assert remedy.startswith("call model.clip_grad_norm_(max_norm)")
        assert found["one"] == (float, True)
        assert not found["broken"]
    assert set().union(*(found["gradients"] for found in ranks)) == one["gradients"].keys()


def test_norms_are_of_all_stages_and_those_of_one_are_refused(world2: World) -> None:
    check_clipped(world2.run(pipeline_jobs.clipped, {}))


@pytest.mark.matrix
def test_norms_with_cut_parameters_are_of_all_stages(world4: World) -> None:
    check_clipped(world4.run(pipeline_jobs.clipped, TENSOR_PARALLEL))


@pytest.mark.parametrize(
    ("inside", "frozen"),
    [
        pytest.param(False, False, marks=pytest.mark.matrix),
        (True, False),
        pytest.param(False, True, marks=pytest.mark.matrix),
    ],
)
def test_all_stages_skip_the_step_that_overflows_on_one(world2: World, inside: bool, frozen: bool) -> None:
    one = pipeline_jobs.scaled(inside, frozen)
    assert one["scales"] == [64.0, 128.0, 64.0, 64.0, 128.0]
    for found in world2.run(pipeline_jobs.scaled, inside, frozen):
        assert found["scales"] == one["scales"]
        assert all(torch.equal(value, found["states"][1][name]) for name, value in found["states"][2].items())
        torch.testing.assert_close(found["states"], one["states"], rtol=0, atol=2e-3)


def test_mixed_precision_with_two_optimizers_and_a_scheduler(world2: World) -> None:
    one = pipeline_jobs.mixed()
    for found in world2.run(pipeline_jobs.mixed):
        assert found["losses"] == pytest.approx(one["losses"], rel=2e-2)
        assert found["types"] == {torch.float32}
        assert found["step"] == one["step"]
