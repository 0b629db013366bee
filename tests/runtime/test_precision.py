"""Mixed precision: float32 values, gradients and state around a program in half precision, never with stale copies."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.runtime import precision_jobs as jobs
from tests.runtime.jobs import Found
from tests.runtime.world import World


def assert_no_route_is_missed(results: Found) -> None:
    assert results.keys() == jobs.ROUTES.keys()
    for name, (changed, missed) in results.items():
        assert changed > 0, f"{name} changes nothing"
        assert missed == [], name


@pytest.mark.matrix
def test_no_write_is_missed_on_one_process() -> None:
    assert_no_route_is_missed(jobs.routes())
    assert set(map(tuple, jobs.unseen().values())) == {()}


def test_no_write_is_missed_on_two_ranks(world2: World) -> None:
    for results in world2.run(jobs.routes):
        assert_no_route_is_missed(results)
    for results in world2.run(jobs.unseen):
        assert set(map(tuple, results.values())) == {()}


def test_values_are_cast_once_a_step() -> None:
    results = jobs.counts()
    every = results["step"]
    assert every == 8  # words once
    assert [results[key] for key in ("second microbatch", "plain microbatch", "after clipping")] == [0, 0, 0]
    assert results["after the optimizer, before zero_grad"] == results["next step"] == every
    assert results["two calls"] == 0.0
    assert "modified" in results["late backward"]


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.matrix)])
def test_gradients_and_state_are_float32(world2: World, precision: str) -> None:
    for results in (jobs.gradients_are_float32(precision), *world2.run(jobs.gradients_are_float32, precision)):
        assert results["kinds"] == {torch.float32}
        assert results["gap"] < 1e-5  # a sum of a hundred in bf16 would stop at 2^8 of its last place
        assert results["unused"] is None


def assert_alike(results: Found, expected: Found, tolerance: float) -> None:
    assert results["losses"] == pytest.approx(expected["losses"], rel=2**-6)
    for name, value in expected["weights"].items():
        assert results["weights"][name].dtype == torch.float32
        gap = float((results["weights"][name] - value).abs().max() / value.abs().max())
        assert gap < tolerance, f"{name} differs by {gap:.1e}"


@pytest.mark.parametrize("fused", [False, True])
def test_training_is_that_of_a_loop_by_hand(world2: World, fused: bool) -> None:
    expected = jobs.by_hand(8, 1e-2)
    assert expected["losses"][-1] < expected["losses"][0] - 0.5
    alone = jobs.train("bf16", 8, 1e-2, fused=fused)
    assert_alike({**alone, "weights": {n: alone["weights"][n] for n in expected["weights"]}}, expected, 2**-6)
    for results in world2.run(jobs.train, "bf16", 8, 1e-2, 2, fused):
        assert_alike(results, alone, 2**-6)


def test_float16_skips_a_step_on_all_ranks_together(world2: World) -> None:
    for overflow_on in (0, 1):
        for results in world2.run(jobs.scaled, overflow_on):
            assert results["loss"][0] == results["loss"][1]
            assert results["skipped"]
            assert results["moved"]
            assert results["scales"] == [32.0, 32.0]
            assert 0.1 < results["norm"] < 100
            assert "GradScaler('cpu')" in results["none"][3]
            assert "disabled" in results["disabled"][2]
            assert results["nonsense"][1] == "scaler"


def test_updates_below_bfloat16_s_resolution_are_not_lost(world2: World) -> None:
    exact, lost = jobs.small_updates("fp32"), jobs.small_updates("bf16_weights")
    for results in (jobs.small_updates("bf16"), *world2.run(jobs.small_updates, "bf16")):
        for name, distance in exact.items():
            assert results[name] == pytest.approx(distance, rel=0.1)
            assert lost[name] < 0.5 * distance


def test_training_is_that_of_fully_shard(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        expected = jobs.fully_sharded(8, 1e-2)
    finally:
        dist.destroy_process_group()
    results = jobs.train("bf16", 8, 1e-2)
    assert_alike({**results, "weights": {n: results["weights"][n] for n in expected["weights"]}}, expected, 2**-6)


@pytest.mark.matrix
def test_two_hundred_steps_follow_float32(world2: World) -> None:
    rate = 3e-5
    exact, *_ = world2.run(jobs.curve, "fp32", 200, rate)
    mixed, *_ = world2.run(jobs.curve, "bf16", 200, rate)
    whole, *_ = world2.run(jobs.curve, "bf16_weights", 200, rate)
    assert exact[-1] < exact[0] - 0.5
    assert mixed == pytest.approx(exact, rel=0.01)
    assert abs(whole[-1] / exact[-1] - 1) > 0.05
