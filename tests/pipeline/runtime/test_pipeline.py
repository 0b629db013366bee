"""A pipeline on real processes trains what one process trains: losses, norms, every gradient, with dropout on."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import fxpar
from fxpar.errors import PlanError, ScheduleError
from fxpar.pipeline.compiler.builtin_schedules import local_stages, schedule_of
from tests.pipeline.runtime import pipelined
from tests.pipeline.runtime.pipelined import Trained

more = pytest.mark.matrix

RUNS: list[Any] = [
    ("gpt2", {"pp": 2, "virtual_stages": 2, "schedule": "zbv"}, 4),
    pytest.param("llama", {"pp": 2, "tp": 2, "sequence_parallel": True, "schedule": "gpipe"}, 2, marks=more),
    pytest.param("gpt2", {"pp": 2}, 4, marks=more),
    pytest.param("gpt2", {"pp": 2, "virtual_stages": 2}, 4, marks=more),
    pytest.param("gpt2", {"pp": 2, "schedule": "zb_h1"}, 4, marks=more),
    pytest.param("bert", {"pp": 4}, 2, marks=more),
    pytest.param("gpt2", {"pp": 2, "schedule": "zb_h1", "dp": 2}, 2, marks=more),
    pytest.param("llama", {"pp": 2, "virtual_stages": 2, "schedule": "zbv"}, 4, marks=more),
    pytest.param("nanogpt", {"pp": 4, "virtual_stages": 1, "schedule": "zb_h1"}, 1, marks=more),
    pytest.param("gpt2", {"pp": 2, "tp": 2, "recompute": fxpar.Recompute("full")}, 2, marks=more),
    pytest.param("gpt2", {"pp": 2, "recompute": fxpar.Recompute("selective"), "schedule": "zb_h1"}, 2, marks=more),
]


@functools.cache
def alone(name: str, microbatches: int, dtype: torch.dtype) -> Trained:
    return pipelined.train(name, {}, microbatches, dtype)


def compare(
    request: pytest.FixtureRequest,
    name: str,
    plan: dict[str, Any],
    microbatches: int,
    dtype: torch.dtype,
    tolerance: float,
) -> list[Trained]:
    """Every rank has the losses and norms of one process, and of what it holds the gradients."""
    whole = {**plan, "microbatches": microbatches}
    size = fxpar.Plan(**whole).world_size
    one = alone(name, microbatches, dtype)
    largest = max(float(g.abs().max()) for g in one.gradients.values())
    found: list[Trained] = request.getfixturevalue(f"world{size}").run(
        pipelined.train, name, whole, microbatches, dtype
    )
    for rank in found:
        assert rank.losses == pytest.approx(one.losses, rel=max(tolerance, 1e-6))  # float32 in transformers
        assert rank.norms == pytest.approx(one.norms, rel=tolerance)
        for fqn, gradient in rank.gradients.items():
            gap = float((gradient - one.gradients[fqn]).abs().max())
            assert gap <= tolerance * largest, f"{fqn} differs by {gap / largest:.1e}"
    held = [set(rank.gradients) for rank in found]
    assert set.union(*held) == one.gradients.keys()
    assert set.intersection(*held) < one.gradients.keys()  # no rank has all
    return found


@pytest.mark.parametrize(("name", "plan", "microbatches"), RUNS)
def test_a_pipeline_trains_what_one_process_trains(
    request: pytest.FixtureRequest, name: str, plan: dict[str, Any], microbatches: int
) -> None:
    # Norms and tables of llama, and every loss, are float32 whatever the model is: tp sums parts of them.
    tolerance = 1e-6 if name == "llama" or plan.get("tp", 1) > 1 else 1e-12
    found = compare(request, name, plan, microbatches, torch.float64, tolerance)
    chosen = fxpar.Plan(**plan, microbatches=microbatches)
    peaks = schedule_of(chosen, microbatches).peaks
    for rank in found:
        place = next(i for i in range(chosen.pp) if local_stages(chosen, i) == rank.stages)
        assert rank.flying == peaks[place]


@pytest.mark.parametrize(
    ("plan", "microbatches"),
    [
        pytest.param({"pp": 2, "virtual_stages": 2}, 4, marks=more),
        pytest.param({"pp": 2, "schedule": "zb_h1"}, 4, marks=more),
    ],
)
def test_compiled_stages_are_those_that_run_operator_by_operator(
    request: pytest.FixtureRequest, plan: dict[str, Any], microbatches: int
) -> None:
    compare(request, "gpt2", {**plan, "compile": True}, microbatches, torch.float32, 2e-5)


@more
def test_what_a_rank_keeps_does_not_grow_with_the_microbatches(request: pytest.FixtureRequest) -> None:
    world = request.getfixturevalue("world2")
    for count in (8, 64):
        found = world.run(pipelined.train, "gpt2", {"pp": 2, "microbatches": count}, count, torch.float32, count)
        assert [rank.flying for rank in found] == [2, 1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "1f1b"}, "schedule='1f1b' is of a pipeline"),
        ({"pp": 2, "schedule": 3}, "schedule must be a name or a file, got 3"),
        ({"microbatches": 0}, "microbatches must be an integer"),
        ({"pp": 2, "pipeline": fxpar.Pipeline(group_size=2)}, "group_size=2 is of several stages"),
        ({"pp": 2, "virtual_stages": 2, "pipeline": fxpar.Pipeline(group_size=0)}, "group_size must be an integer"),
        ({"virtual_stages": 2}, "virtual_stages=2 without a pipeline"),
        ({"pp": 2, "pipeline": fxpar.Pipeline({"h.1": 2})}, "stages.'h.1'.=2 is none of the stages 1 to 1"),
        ({"pp": 3, "pipeline": fxpar.Pipeline({"h.1": 1, "h.2": 1})}, "two modules one stage"),
        ({"pp": 2, "pipeline": fxpar.Pipeline((1, 2, 3))}, "3 numbers of layers for 2 stages"),
    ],
)
def test_plans_that_make_no_pipeline_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        fxpar.Plan(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "moonwalk"}, "moonwalk: No such file"),
        ({"schedule": "forward_only"}, "schedule forward_only: has no backward"),
        ({"schedule": "zbv"}, "zbv has two stages a rank"),
        ({"virtual_stages": 2, "microbatches": 1}, "needs a microbatch for each of the 2 ranks"),
    ],
)
def test_schedules_that_a_plan_cannot_have_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        schedule_of(fxpar.Plan(pp=2, **options), options.get("microbatches", 4))


def test_a_plan_with_stages_comes_back_from_yaml() -> None:
    for stages in ({"transformer.h.1": 1}, (1, 1)):
        plan = fxpar.Plan(pp=2, pipeline=fxpar.Pipeline(stages), microbatches=4, schedule="zb_h1")
        assert fxpar.Plan.from_yaml(plan.to_yaml()) == plan
        assert plan.on_one_rank() == fxpar.Plan()
