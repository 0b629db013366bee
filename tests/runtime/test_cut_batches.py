"""Batches that are cut into microbatches: by what is proven to be their rows, with a pipeline and without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxpar
from fxpar.errors import InputError
from fxpar.runtime.batch import batch_facts
from tests.pipeline.runtime import pipeline_jobs
from tests.runtime.jobs import Found
from tests.runtime.world import World
from tests.zoo import CASES

ROWS: dict[str, Any] = {"batch_dims": {"src": 1, "target": 1}}


def test_a_batch_whose_first_dimension_is_not_its_rows_is_not_cut_by_it() -> None:
    case = CASES["encoder"]
    with pytest.raises(InputError, match="needs the whole of dimension") as caught:
        fxpar.parallelize(case.model(), fxpar.Plan(microbatches=2), case.example(), case.loss)
    assert caught.value.where == "microbatches"
    assert "batch_dims={path: dim}" in caught.value.remedy


def check(found: Found) -> None:
    assert torch.equal(found["cut"], found["list"])
    assert all(torch.equal(gradient, found["of lists"][name]) for name, gradient in found["gradients"].items())
    kind, where, reason, remedy = found["two rows"]
    assert (kind, where) == ("InputError", "batch entry src")
    assert reason == "has 2 rows in dimension 1, which 3 microbatches cannot share out"
    assert remedy.startswith("pass a multiple of 3, a list of microbatches")


def test_rows_that_the_plan_names_are_cut(world2: World) -> None:
    one = pipeline_jobs.cut("encoder", ROWS)
    check(one)
    for found in world2.run(pipeline_jobs.cut, "encoder", ROWS):
        check(found)
        assert found["other values"][1] == "batch entry target"
        for key in ("cut", "one microbatch"):
            torch.testing.assert_close(found[key], one[key], rtol=1e-5, atol=1e-6)
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, one["gradients"][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", [pytest.param("mean", marks=pytest.mark.matrix), "token"])
def test_data_ranks_with_other_rows_are_pipelines_of_their_own(world4: World, reduction: str) -> None:
    one = pipeline_jobs.uneven(reduction)
    for found in world4.run(pipeline_jobs.uneven, reduction):
        torch.testing.assert_close(found["loss"], one["loss"], rtol=0, atol=1e-12)
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, one["gradients"][name], rtol=0, atol=1e-12)
        assert found["lengths"][:2] == ("InputError", "batch entry ids")
        assert found["lengths"][3] == "pad them to one length on every data rank"


def test_a_digest_is_that_of_values_and_not_of_how_they_lie() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    assert batch_facts((z.conj(),), True) == batch_facts((z.conj().resolve_conj(),), True) != batch_facts((z,), True)
