"""Shared-out parameters on real processes: a training is that of one process, and a rank has its part alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import fxpar
from fxpar.plan.plan import SHARDS
from tests.products import few
from tests.runtime import shard_jobs
from tests.runtime.shard_jobs import Found
from tests.runtime.test_training import assert_same
from tests.runtime.world import World

SHARED = SHARDS[1:]
STEPS = 10
MESHES = ((1, 2), (2, 2), (1, 4))
Fixture = pytest.FixtureRequest


def world(request: Fixture, tp: int, dp: int) -> World:
    found: World = request.getfixturevalue(f"world{tp * dp}")
    return found


@cache
def alone(job: Callable[..., Any], *args: Any) -> Any:
    """What one process does."""
    return job("none", 1, 1, *args)


def assert_trained_alike(found: Found, expected: Found, tolerance: float = 1e-5) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=tolerance)
    assert found["norms"] == pytest.approx(expected["norms"], rel=tolerance)
    assert_same(found["state"], expected["state"], tolerance)


TRAININGS = [(shard, *mesh, count) for shard in SHARED for mesh in MESHES for count in (1, 4)]
EVERY_TIME = [
    *((shard, 1, 2, 4) for shard in SHARED),
    *(("optimizer", 2, 2, 1), ("parameters", 2, 2, 4), ("gradients", 1, 4, 1)),
]


@pytest.mark.parametrize(("shard", "tp", "dp", "count"), few(TRAININGS, EVERY_TIME))
def test_ten_steps_are_those_of_one_process(request: Fixture, shard: str, tp: int, dp: int, count: int) -> None:
    """AdamW, clipped, with dropout, tied words, buffers, uneven counts of words."""
    expected = alone(shard_jobs.train, count, STEPS)
    for found in world(request, tp, dp).run(shard_jobs.train, shard, tp, dp, count, STEPS):
        assert_trained_alike(found, expected)


@pytest.mark.parametrize(("tp", "dp"), few(MESHES, [(1, 2)]))
@pytest.mark.parametrize("shard", SHARED)
def test_data_ranks_may_bring_other_numbers_of_rows(request: Fixture, shard: str, tp: int, dp: int) -> None:
    """What is gathered of a parameter are no rows."""
    expected = alone(shard_jobs.uneven)
    for found in world(request, tp, dp).run(shard_jobs.uneven, shard, tp, dp):
        assert_trained_alike(found, expected)


# Elements of the table, two matrices, their biases and the norm: all but the three of `unused`.
WHOLE = 96 + 2 * 72 + 12 + 3 * 6
# What the backward reads again: matrices whose inputs carry a gradient, and the norm.
AGAIN = 96 + 2 * 72 + 2 * 6


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_sends_parameters_and_gradients_as_often_as_the_plan_says(world2: World, count: int) -> None:
    expected = {
        "optimizer": (WHOLE // 2, WHOLE),
        "gradients": (WHOLE // 2, count * WHOLE),
        "parameters": (count * (WHOLE + AGAIN) // 2, count * WHOLE),
    }
    for shard, (gathered, scattered) in expected.items():
        for found in world2.run(shard_jobs.sent, shard, count):
            assert found == {"all_gather": gathered, "reduce_scatter": scattered}, shard


HYBRID = [(shard, count) for shard in SHARED for count in (1, 4)]


@pytest.mark.parametrize(("shard", "count"), few(HYBRID, [("gradients", 4)]))
def test_some_ranks_share_out_and_others_hold_the_same(world4: World, shard: str, count: int) -> None:
    expected = alone(shard_jobs.train, count, STEPS)
    for found in world4.run(shard_jobs.hybrid, shard, count, STEPS):
        assert_trained_alike(found, expected)
        assert found["sizes"]["up.weight"] == (72, 36)


STAGES: list[tuple[str, dict[str, Any]]] = [
    (shard, options)
    for shard in SHARED
    for options in ({}, {"schedule": "zb_h1"}, {"precision": "bf16"}, {"cuda_graphs": fxpar.CudaGraphs("partial")})
]


@pytest.mark.parametrize(("shard", "options"), few(STAGES, [STAGES[0], STAGES[11]]))
def test_stages_train_as_without_shards(world4: World, shard: str, options: dict[str, Any]) -> None:
    """Of a pipeline on two data ranks; tied words are on both stages."""
    expected = world4.run(partial(shard_jobs.staged, **options), "none", 2)
    for found, wanted in zip(world4.run(partial(shard_jobs.staged, **options), shard, 2), expected, strict=True):
        assert_trained_alike(found, wanted)
        assert found["elements"] < 0.52 * wanted["elements"]


EXPERTS: list[tuple[str, dict[str, Any]]] = [
    (shard, options)
    for shard in SHARED
    for options in (
        {"ep": 2},
        {"ep": 4, "experts": fxpar.Experts("dropless")},
        {"ep": 2, "experts": fxpar.Experts(spare_experts=1, min_gain=0)},
        {"ep": 2, "cuda_graphs": fxpar.CudaGraphs("full_iteration")},
    )
]


@pytest.mark.parametrize(("shard", "options"), few(EXPERTS, []))
def test_experts_train_as_without_shards(world4: World, shard: str, options: dict[str, Any]) -> None:
    """Experts are shared out among the ranks that have the same ones."""
    expected = world4.run(partial(shard_jobs.routed, **options), "none")
    for found, wanted in zip(world4.run(partial(shard_jobs.routed, **options), shard), expected, strict=True):
        assert_trained_alike(found, wanted)
        assert found["elements"] < 0.6 * wanted["elements"] or options["ep"] == 4


@pytest.mark.parametrize(("shard", "count"), [("optimizer", 1), ("optimizer", 4), ("gradients", 1), ("parameters", 1)])
def test_two_data_ranks_change_no_bit_where_sums_have_one_order(world2: World, shard: str, count: int) -> None:
    args = 1, 2, count, STEPS, False
    for found, expected in zip(
        world2.run(shard_jobs.train, shard, *args), world2.run(shard_jobs.train, "none", *args), strict=True
    ):
        assert found["losses"] == expected["losses"]
        assert_same(found["state"], expected["state"], 0.0)


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_sums_of_each_microbatch_round_otherwise_alone(world2: World, shard: str) -> None:
    args = 1, 2, 4, STEPS, False
    for found, expected in zip(
        world2.run(shard_jobs.train, shard, *args), world2.run(shard_jobs.train, "none", *args), strict=True
    ):
        assert_same(found["state"], expected["state"], 1e-6)


@pytest.mark.parametrize("shard", SHARED)
def test_a_rank_has_its_part_of_what_the_ranks_divide(world2: World, shard: str) -> None:
    whole = {"unused": 3}  # three elements for two ranks
    for found in world2.run(shard_jobs.train, shard, 1, 2, 4, STEPS):
        for name, (elements, local) in found["sizes"].items():
            assert local == whole.get(name, elements // 2), name


@pytest.mark.matrix
def test_gathers_at_the_same_time_keep_the_memory_whole(world2: World) -> None:
    """By gloo: several at once killed processes after some ten thousand."""
    assert world2.run(shard_jobs.gathered_at_once, 10_000) == [True, True]


@pytest.mark.parametrize(("tp", "dp"), few(MESHES, [(1, 2)]))
@pytest.mark.parametrize("shard", SHARED)
def test_gradients_of_several_calls_are_added_up(request: Fixture, shard: str, tp: int, dp: int) -> None:
    """Within no_sync, whose first calls communicate nothing of them, and in `.grad`."""
    expected = alone(shard_jobs.without_sums)
    for found in world(request, tp, dp).run(shard_jobs.without_sums, shard, tp, dp):
        assert_trained_alike(found, expected)
    expected = alone(shard_jobs.accumulated)
    for found in world(request, tp, dp).run(shard_jobs.accumulated, shard, tp, dp):
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert_same(found["gradients"], expected["gradients"], 2e-6)


@pytest.mark.parametrize(("tp", "dp"), few(MESHES, [(1, 2)]))
@pytest.mark.parametrize("shard", SHARED)
def test_plain_calls_are_differentiated_by_autograd(request: Fixture, shard: str, tp: int, dp: int) -> None:
    expected = alone(shard_jobs.plain)
    for found in world(request, tp, dp).run(shard_jobs.plain, shard, tp, dp):
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert_same(found["gradients"], expected["gradients"], 2e-6)
        assert_same(found["state"], expected["state"], 1e-5)


@pytest.mark.parametrize(("tp", "dp"), few(MESHES, [(1, 2)]))
@pytest.mark.parametrize("shard", SHARED)
def test_every_call_sees_the_weights_of_its_time(request: Fixture, shard: str, tp: int, dp: int) -> None:
    """What was gathered before a step, a load or a write in place is not read after it."""
    expected = alone(shard_jobs.evaluated)
    assert len(set(expected)) == len(expected)
    for found in world(request, tp, dp).run(shard_jobs.evaluated, shard, tp, dp):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("tp", "dp"), few(MESHES, [(1, 2)]))
@pytest.mark.parametrize("shard", SHARED)
def test_frozen_parameters_stay(request: Fixture, shard: str, tp: int, dp: int) -> None:
    """One that was frozen at first is cut with all parameters alone; one that is frozen later has no gradient."""
    expected = alone(shard_jobs.frozen)
    for found in world(request, tp, dp).run(shard_jobs.frozen, shard, tp, dp):
        assert_trained_alike(found, expected)
        assert found["gradients"] == expected["gradients"]
        assert found["sizes"]["up.weight"] == (72, 72 // tp // (dp if shard == "parameters" else 1))


MIXED = [(shard, kind) for shard in SHARED for kind in ("bf16", "bf16_weights", "fp16")]


@pytest.mark.parametrize(("shard", "kind"), few(MIXED, [("optimizer", "fp16"), ("gradients", "bf16")]))
def test_mixed_precision_and_its_scaler_are_those_without_shards(world2: World, shard: str, kind: str) -> None:
    """Of ranks that have the whole, as half-precision sums are; scales that overflow are lowered on all alike."""
    (expected, _) = world2.run(shard_jobs.half, "none", 1, 2, kind)
    assert (min(expected["scales"]) < 2.0**40) if kind == "fp16" else not expected["scales"]
    tolerance = 2e-2 if kind == "bf16_weights" else 1e-5
    for found in world2.run(shard_jobs.half, shard, 1, 2, kind):
        assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert found["scales"] == expected["scales"]
        assert found["types"] == expected["types"]
        assert_same(found["state"], expected["state"], tolerance)


@pytest.mark.parametrize("shard", SHARED)
def test_hooks_of_parameters_are_called(world2: World, shard: str) -> None:
    expected = alone(shard_jobs.hooked)
    for found in world2.run(shard_jobs.hooked, shard, 1, 2):
        assert found["seen"] == expected["seen"]
        assert_same(found["gradients"], expected["gradients"], 2e-6)


COMPILED = [(shard, count) for shard in SHARDS for count in (1, 2)]


@pytest.mark.parametrize(("shard", "count"), few(COMPILED, [("optimizer", 1), ("gradients", 2)]))
def test_compiled_programs_train_alike(world2: World, shard: str, count: int) -> None:
    """One microbatch sends gradients while it is differentiated."""
    expected = alone(shard_jobs.train, count, 3)
    for found in world2.run(shard_jobs.compiled, shard, 1, 2, count, 3):
        assert_trained_alike(found, expected)


GRAPHS = [
    (shard, impl, inside) for shard in SHARED for impl in ("partial", "full_iteration") for inside in (False, True)
]


@pytest.mark.parametrize(
    ("shard", "impl", "inside"),
    few(
        GRAPHS,
        [
            ("optimizer", "full_iteration", True),
            ("gradients", "partial", False),
            ("parameters", "full_iteration", True),
        ],
    ),
)
def test_graphs_change_no_bit(world2: World, shard: str, impl: str, inside: bool) -> None:
    """By the stand-in for CUDA graphs, with two microbatches; an optimizer inside steps before what is gathered."""
    for same, losses in world2.run(shard_jobs.replayed, shard, impl, inside, 2):
        assert same
        assert losses[-1] < losses[0]


# Checkpoints.


@pytest.mark.parametrize("shard", few(SHARED, ["parameters"]))
def test_a_training_goes_on_to_the_bit(world2: World, tmp_path: Path, shard: str) -> None:
    expected = world2.run(shard_jobs.saved, tmp_path, shard, 1, 2)
    for found, wanted in zip(world2.run(shard_jobs.resumed, tmp_path, shard, 1, 2), expected, strict=True):
        assert found["losses"] == wanted["losses"]
        assert_same(found["saved"], wanted["saved"], 0.0)
        assert_same(found["state"], wanted["state"], 0.0)


RESUMES = [
    *(("none", 1, 2), ("optimizer", 1, 2), ("gradients", 1, 2), ("parameters", 1, 2)),
    *(("none", 2, 2), ("parameters", 2, 2), ("parameters", 1, 4), ("none", 1, 4)),
]


@pytest.mark.parametrize(("shard", "tp", "dp"), few(RESUMES, [("none", 1, 2), ("parameters", 1, 4)]))
@pytest.mark.parametrize("first", few(SHARDS, ["parameters", "none"]))
def test_a_training_goes_on_under_another_plan(
    request: Fixture, tmp_path: Path, first: str, shard: str, tp: int, dp: int
) -> None:
    (expected, _) = request.getfixturevalue("world2").run(shard_jobs.saved, tmp_path, first, 1, 2)
    for found in world(request, tp, dp).run(shard_jobs.resumed, tmp_path, shard, tp, dp):
        assert_same(found["saved"], expected["saved"], 0.0)
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert_same(found["state"], expected["state"], 1e-6)


@pytest.mark.parametrize("shard", SHARED)
def test_safetensors_have_the_whole_under_the_authors_names(world2: World, tmp_path: Path, shard: str) -> None:
    for found in world2.run(shard_jobs.exported, tmp_path, shard, 1, 2):
        assert found["before"].keys() == alone(shard_jobs.train, 4, STEPS)["state"].keys()
        assert_same(found["after"], found["before"], 0.0)
        assert any(bool(value.any()) for value in found["after"].values())


@pytest.mark.parametrize("dp", [2, 4])
def test_no_rank_ever_holds_the_whole_model(request: Fixture, dp: int) -> None:
    """From the meta device on: bytes of sixteen equal matrices, while they are made and in a step."""
    expected = shard_jobs.from_meta("none", 1)
    whole, matrix = expected["rest"], expected["rest"] // 16
    for shard in SHARED:
        for found in request.getfixturevalue(f"world{dp}").run(shard_jobs.from_meta, shard, dp):
            assert found["rest"] == whole // dp
            assert found["building"] <= whole // dp + matrix
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert_same(found["state"], expected["state"], 0.0)
            # The parts of all gradients, as they come and where they stay; two whole matrices, the gradients of two,
            # and one as it is sent.
            if shard == "parameters":
                assert found["training"] <= 2 * whole // dp + 5 * matrix
                assert dp < 4 or found["training"] < whole
            else:
                assert found["training"] >= whole
