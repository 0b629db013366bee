"""Data ranks whose batches have other lengths and row counts compute what one process does on their concatenation."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.runtime import uneven_jobs
from tests.runtime.data_jobs import ONE_LAYER
from tests.runtime.test_training import assert_same
from tests.runtime.uneven_jobs import Found
from tests.runtime.world import World

STEPS = 4
TABLE: dict[tuple[str, int, int, int, str], Any] = {(ONE_LAYER, 2, 2, 3, "token"): {"sequence_parallel": True}}
MORE = {
    (name, tp, dp, count, reduction): {"sequence_parallel": tp > 1}
    for name in ("gpt2", "llama", "bert", "gpt_neox", "bloom")
    for tp, dp in ((2, 2), (1, 4))
    for count, reduction in ((1, "mean"), (3, "mean"), (3, "token"))
    if (name, tp, dp, count, reduction) not in TABLE
} | {("llama", 2, 2, 3, "token"): {}}


@cache
def alone(name: str, dp: int, count: int, reduction: str) -> Found:
    return uneven_jobs.train(name, 1, dp, count, STEPS, {"loss_reduction": reduction})


@pytest.mark.matrix
@pytest.mark.parametrize(
    "row",
    [*TABLE, *MORE],
    ids=lambda row: "-".join(map(str, row)),
)
def test_steps_are_those_of_the_padded_concatenation(world4: World, row: tuple[str, int, int, int, str]) -> None:
    name, tp, dp, count, reduction = row
    wanted = alone(name, dp, count, reduction)
    options = {"loss_reduction": reduction, **{**TABLE, **MORE}[row]}
    for found in world4.run(uneven_jobs.train, name, tp, dp, count, STEPS, options):
        assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        assert_same(found["state"], wanted["state"], 1e-5)


def test_microbatches_weigh_by_their_words_where_the_plan_says_so() -> None:
    """The reference itself: the mean over all words of the step is not the mean of means."""
    words, means = alone(ONE_LAYER, 2, 3, "token"), alone(ONE_LAYER, 2, 3, "mean")
    assert abs(words["losses"][0] - means["losses"][0]) > 1e-4  # ten times what is allowed above


EXACT = [(ONE_LAYER, 2, 2, True, (7, 5))]
EXACT_MORE = [
    (name, tp, dp, sequence, rows)
    for name in ("gpt2", "llama", "bert", "t5", "gpt_neox", "bloom", "encoder")
    for tp, dp, rows in ((2, 2, (11, 1)), (1, 4, (3, 4, 4, 1)))
    for sequence in ((False, True) if tp > 1 else (False,))
]


@pytest.mark.parametrize(
    ("name", "tp", "dp", "sequence", "rows"),
    [*EXACT, *(pytest.param(*row, marks=pytest.mark.matrix) for row in EXACT_MORE)],
)
def test_gradients_in_double_precision_are_those_of_one_device(
    world4: World, name: str, tp: int, dp: int, sequence: bool, rows: tuple[int, ...]
) -> None:
    for loss, worst in world4.run(uneven_jobs.deviation, name, tp, dp, sequence, rows):
        assert loss < 1e-9
        assert worst < 1e-9


def test_what_depends_on_padding_or_on_equal_rows_is_refused(world2: World) -> None:
    for found in world2.run(uneven_jobs.refusals):
        assert found[0][0] == "batch entry ids"
        assert "depends on what pads it" in found[0][1]
        assert found[1:5] == [("", "")] * 4
        assert "arange" in found[5][0]
        assert found[5][1] == "every rank holds the rows of all, and the data ranks bring 3, 2"
        assert found[6] == ("", "")


@pytest.mark.parametrize(
    ("tp", "is_compiled", "precision", "unit"),
    [
        pytest.param(2, False, "fp32", 1e-5, marks=pytest.mark.matrix),
        (1, False, "bf16", 2e-2),
        pytest.param(1, True, "fp32", 1e-5, marks=pytest.mark.matrix),
    ],
)
def test_floating_numbers_of_rows_are_those_of_all(
    world2: World, world4: World, tp: int, is_compiled: bool, precision: str, unit: float
) -> None:
    losses, state = uneven_jobs.scaled(1, False, precision)
    for found, weights in (world4 if tp == 2 else world2).run(uneven_jobs.scaled, tp, is_compiled, precision):
        assert found == pytest.approx(losses, rel=unit)
        assert_same(weights, state, unit)


MORE_REFUSED = (
    "takes together rows that every rank makes for all",
    "takes the number of rows as a number",
    "the model takes another branch for the rows of all data ranks",
    "the loss, its gradient or a buffer depends on what pads it",
    "has size 3 in dimension 0 on data rank 1, but ids dimension 0 has 2",
)


def test_results_that_would_be_none_of_the_concatenation_are_refused(world2: World) -> None:
    """By all ranks alike."""
    for found in world2.run(uneven_jobs.more_refusals):
        for (_, reason), wanted in zip(found, MORE_REFUSED, strict=False):
            assert wanted in reason
        assert found[5] == ("", "")
        assert found[6][0] == "batch entry n"
