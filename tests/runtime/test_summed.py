"""`loss_reduction="sum"`: losses that are divided by the count of the whole step are added, and never averaged."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpar
from fxpar.errors import PlanError
from fxpar.verification import verify
from tests.runtime import summed_jobs
from tests.runtime.world import World

Values = tuple[Tensor, dict[str, Tensor]]


@cache
def author() -> Values:
    """Loss and gradients of the plain model on all rows."""
    model = summed_jobs.Summed().double()
    loss = model(**summed_jobs.batch())["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_author(*ranks: dict[str, Any]) -> None:
    """Of a pipeline each rank has gradients of what it holds."""
    names = {name for found in ranks for name in found["cut"][1]}
    assert names == author()[1].keys()
    for found in ranks:
        _assert_author(found)


def _assert_author(found: dict[str, Any]) -> None:
    loss, gradients = author()
    assert found["count"] == int(summed_jobs.batch()["num_items_in_batch"])
    for how in ("cut", "list", "uneven"):
        own_loss, own = found[how]
        assert own_loss.item() == pytest.approx(loss.item(), rel=1e-12), how
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-12, msg=f"{how} {name}")


@pytest.mark.parametrize("as_tensor", [True, False])
def test_microbatches_of_one_process_add_up(as_tensor: bool) -> None:
    found = summed_jobs.train({"microbatches": 2}, as_tensor)
    assert_author(found)
    assert found["of another count"] == 0  # the count is no number of a program


@pytest.mark.parametrize("options", [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_so_do_data_ranks(world4: World, options: dict[str, int]) -> None:
    assert_author(*world4.run(summed_jobs.train, {**options, "microbatches": 2}, True))


@pytest.mark.parametrize("reduction", ["mean", "token", "local_mean"])
def test_another_reduction_is_an_error_that_names_the_remedy(reduction: str) -> None:
    kind, where, reason, remedy = summed_jobs.refused(reduction)
    assert (kind, where) == ("PlanError", "batch entry num_items_in_batch")
    assert f"averaged once more (loss_reduction={reduction})" in reason
    assert "Plan(loss_reduction='sum')" in remedy
    with pytest.raises(PlanError, match="num_items_in_batch"):
        verify(summed_jobs.Summed(), summed_jobs.batch(), fxpar.Plan(dp=2, loss_reduction=reduction))
