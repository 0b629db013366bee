"""Data parallel ranks, alone and beside tensor parallel ones, train as one process does on all their rows."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.runtime import data_jobs
from tests.runtime.data_jobs import ONE_LAYER, Found
from tests.runtime.test_report import assert_agrees
from tests.runtime.test_training import assert_same
from tests.runtime.world import World

STEPS = 10
EVERY_TIME = {(ONE_LAYER, 2, 2, True, 3)}
TABLE = [
    (name, tp, dp, sequence, count)
    for name in (ONE_LAYER, "gpt2", "llama", "bert", "gpt_neox", "bloom")
    for tp, dp in ((2, 2), (1, 4))
    for sequence in ((False, True) if tp > 1 else (False,))
    for count in (1, 3)
]


@cache
def alone(name: str, count: int) -> Found:
    return data_jobs.train(name, 1, 1, False, count, STEPS)


@pytest.mark.parametrize(
    ("name", "tp", "dp", "sequence", "count"),
    [pytest.param(*row, marks=() if row in EVERY_TIME else pytest.mark.matrix) for row in TABLE],
)
def test_ten_steps_are_those_of_one_process(
    world4: World, name: str, tp: int, dp: int, sequence: bool, count: int
) -> None:
    """Losses, clipped norms and weights, with dropout, uneven counts of words, and microbatches."""
    expected = alone(name, count)
    for results in world4.run(data_jobs.train, name, tp, dp, sequence, count, STEPS):
        assert results["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert results["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert_same(results["state"], expected["state"], 1e-5)


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_gradients_of_microbatches_are_summed_once_a_step(world4: World, sequence: bool) -> None:
    expected = data_jobs.microbatches(ONE_LAYER, 1, 1, False)
    # Of the joined group one sum, of data ranks one, with sequence parallelism; else the second alone.
    for results in world4.run(data_jobs.microbatches, ONE_LAYER, 2, 2, sequence):
        assert results["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert_same(results["gradients"], expected["gradients"], 2e-6)
        assert len(results["sums"]) == (2 if sequence else 1)


# Two layers, each with a fused weight whose key and value both tensor parallel ranks hold.
SHARED = "falcon,multi_query=true,new_decoder_architecture=false,hidden_dropout=0.0,attention_dropout=0.0"


# All that a rank holds over the data ranks; then of each layer the shared part over the others.
SHARED_SUMS = [78912, 2 * 24 * 96]


@pytest.mark.parametrize(
    ("name", "dp", "sums"),
    [
        (f"{SHARED},num_hidden_layers=1", 1, [24 * 96]),
        pytest.param(f"{SHARED},num_hidden_layers=1", 2, [51840, 24 * 96], marks=pytest.mark.matrix),
        pytest.param(SHARED, 2, SHARED_SUMS, marks=pytest.mark.matrix),
    ],
)
def test_what_tensor_parallel_ranks_share_is_summed_once_a_step_on_each_axis(
    request: pytest.FixtureRequest, name: str, dp: int, sums: list[int]
) -> None:
    expected = data_jobs.microbatches(name, 1, 1, False)
    for results in request.getfixturevalue(f"world{2 * dp}").run(data_jobs.microbatches, name, 2, dp, False):
        assert results["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert_same(results["gradients"], expected["gradients"], 2e-6)
        assert results["sums"] == sums


@pytest.mark.matrix
def test_what_is_shared_is_summed_once_in_mixed_precision_too(world4: World) -> None:
    for results in world4.run(data_jobs.microbatches, SHARED, 2, 2, False, "bf16"):
        assert results["sums"] == SHARED_SUMS
    for apart in world4.run(data_jobs.microbatches_apart, SHARED, 2, 2):
        assert [n for n, (error, size) in apart.items() if error > 1e-5 * max(size, 1e-3)] == []


@pytest.mark.matrix
def test_what_one_layer_shares_is_summed_in_the_main_type(world4: World) -> None:
    """No bucket holds the sum of a single gradient, whose type is not the parameter's."""
    for apart in world4.run(data_jobs.microbatches_apart, f"{SHARED},num_hidden_layers=1", 2, 2):
        assert [n for n, (error, size) in apart.items() if error > 1e-5 * max(size, 1e-3)] == []


# Of the model whose programs other tests have made with sequence parallelism.
@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_norms_by_torch_and_by_the_module_are_the_true_one(world4: World, sequence: bool) -> None:
    expected, _ = data_jobs.torch_clips(ONE_LAYER, 1, 1, False)
    for mine, torchs in world4.run(data_jobs.torch_clips, ONE_LAYER, 2, 2, sequence):
        assert mine == pytest.approx(expected, rel=1e-5)
        assert torchs == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_outputs_are_tensors_of_both_axes(world4: World, sequence: bool) -> None:
    expected = data_jobs.outputs(ONE_LAYER, 1, 1, False)
    for results in world4.run(data_jobs.outputs, ONE_LAYER, 2, 2, sequence):
        assert results["kind"] == "DTensor"
        assert results["placements"] == "(Shard(dim=0), Shard(dim=2))"
        assert_same({"logits": results["logits"]}, {"logits": expected["logits"]}, 1e-5)


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_a_step_sends_and_holds_what_the_report_says(world4: World, sequence: bool) -> None:
    report = assert_agrees(world4.run(data_jobs.account, ONE_LAYER, 2, 2, sequence))
    axes = Counter(c["axis"] for c in report["collectives"])
    assert set(axes) == {"dp", "tp"} | ({"dp-tp"} if sequence else set())


def test_calls_that_differ_are_refused_before_they_hang(world4: World) -> None:
    for results in world4.run(data_jobs.refusals, 2, 2):
        wheres = [where for where, _ in results]
        assert all("input_ids" in where for where in wheres[:3])
        assert wheres[3:] == ["batch entry input_ids", "batch"]
        assert results[3][1] == "has 1 rows in dimension 0, fewer than the 2 ranks of dp"


@pytest.mark.matrix
@pytest.mark.parametrize(("tp", "dp"), [(1, 4), (4, 1)])
def test_a_training_goes_on_under_other_axes(world4: World, tmp_path: Path, tp: int, dp: int) -> None:
    """Saved by 2 x 2 ranks, taken up by 1 x 4, by 4 x 1 and by one process."""
    (state, *_) = world4.run(data_jobs.saved, str(tmp_path), 2, 2)
    expected = data_jobs.resumed(str(tmp_path), 1, 1)
    assert expected["position"] == 7
    assert_same(expected["before"], state, 0.0)
    for results in world4.run(data_jobs.resumed, str(tmp_path), tp, dp):
        assert_same(results["before"], state, 0.0)
        assert results["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert_same(results["after"], expected["after"], 1e-5)
