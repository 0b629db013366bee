"""Plain calls of a pipeline: evaluations between training steps give what one process gives, on every rank."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.pipeline.runtime import pipeline_jobs
from tests.runtime import models
from tests.runtime.jobs import Found
from tests.runtime.world import World

TENSOR_PARALLEL: dict[str, Any] = {"tp": 2, "split": models.SPLIT}


@cache
def one(kind: Any) -> Found:
    return pipeline_jobs.plain_calls({"kind": kind})


def check(ranks: list[Found], kind: Any = models.Tiny) -> None:
    wanted = one(kind)
    for found in ranks:
        assert found["steps"] == wanted["steps"] == [1, 2, 3, 4, 5, 5]
        torch.testing.assert_close(found["losses"], wanted["losses"], rtol=0, atol=1e-12)
        torch.testing.assert_close(found["outputs"], wanted["outputs"], rtol=0, atol=1e-12)
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, wanted["gradients"][name], rtol=0, atol=1e-12)
        assert found["refused"] == (
            "InputError",
            "forward",
            "a plain call is not differentiated through the stages of a pipeline",
            "train with train_step(batch), or call it under torch.no_grad()",
        )
        # The refused call has drawn nothing.
        assert found["step after"] == 6
        assert found["frozen"] == {"logits": False, "loss": False}


def test_every_rank_returns_the_models_output_between_training_steps(world2: World) -> None:
    check(world2.run(pipeline_jobs.plain_calls, {}))


@pytest.mark.matrix
def test_outputs_that_are_cut_are_dtensors_of_the_ranks_of_one_stage(world4: World) -> None:
    check(world4.run(pipeline_jobs.plain_calls, TENSOR_PARALLEL))


@pytest.mark.matrix
def test_ranks_with_several_stages_run_them_in_ascending_order(world2: World) -> None:
    check(world2.run(pipeline_jobs.plain_calls, {"virtual_stages": 2, "kind": models.Deep}), models.Deep)
