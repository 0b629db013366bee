"""Training on real processes gives what one process gives: losses, norms, weights and gradients, with dropout on."""

import functools
import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.runtime import jobs, table
from tests.runtime.jobs import Found
from tests.runtime.world import World

STEPS = 20


def assert_same(results: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """The same names, and values that differ by no more than the tolerance of the largest value of all."""
    assert results.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        gap = float((results[name] - value).abs().max())
        assert gap <= tolerance * largest, f"{name} differs by {gap / largest:.1e} of {largest:.1e}"


def assert_trains_like_one_process(
    world: World, name: str, dtype: torch.dtype = torch.float32, tolerance: float = 1e-5
) -> None:
    expected = jobs.train(name, STEPS, dtype)
    assert expected["losses"][-1] < expected["losses"][0] - 0.1
    for results in world.run(jobs.train, name, STEPS, dtype):
        assert results["losses"] == pytest.approx(expected["losses"], rel=0, abs=tolerance)
        assert results["norms"] == pytest.approx(expected["norms"], rel=tolerance)
        assert_same(results["state"], expected["state"], tolerance)


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("llama", "bert"))]
)
def test_two_ranks_train_like_one_process(world2: World, name: str) -> None:
    assert_trains_like_one_process(world2, name)


@pytest.mark.matrix
def test_four_ranks_train_like_one_process_with_a_callable_loss(world4: World) -> None:
    # In fp64: by rounding in fp32 a word of this model comes to lie on the other side of a ReLU.
    assert_trains_like_one_process(world4, "encoder", torch.float64, 1e-10)


@functools.cache
def alone(name: str) -> Found:
    """The run of the table on one process."""
    return table.train(name, by_lines=False, sequence_parallel=False)


TABLE = list(itertools.product((2, 4), ("gpt2", "bert", "llama"), (True, False), (False, True)))


@pytest.mark.matrix
@pytest.mark.parametrize(("tp", "name", "by_lines", "sequence_parallel"), TABLE)
def test_twenty_steps_with_dropout_have_the_losses_of_one_process(
    request: pytest.FixtureRequest, tp: int, name: str, by_lines: bool, sequence_parallel: bool
) -> None:
    expected = alone(name)
    assert len(expected["losses"]) == 20
    assert expected["losses"][-1] < expected["losses"][0] - 1
    # Dropout in gpt2 and bert: on the embeddings, in each of two layers on the scores and after both halves.
    assert expected["random"] == {"gpt2": 7, "bert": 7, "llama": 2}[name]
    for results in request.getfixturevalue(f"world{tp}").run(table.train, name, by_lines, sequence_parallel):
        assert results["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-5)
        assert results["random"] == expected["random"]


# The tied head of nanogpt starts out so sure of its words that rounding shows in its small gradients.
@pytest.mark.parametrize(
    ("name", "tolerance"), [("gpt2", 2e-6), pytest.param("nanogpt", 3e-5, marks=pytest.mark.matrix)]
)
def test_plain_call_and_accumulation_give_the_gradients_of_train_step(
    world2: World, name: str, tolerance: float
) -> None:
    expected = jobs.two_steps(name)
    for results in world2.run(jobs.two_steps, name):
        for loss in ("loss", "plain loss"):
            assert float(results[loss]) == pytest.approx(float(expected["loss"]), abs=1e-5)
        for step in ("once", "twice"):
            assert_same(results[step], expected[step], tolerance)
        assert_same(results["plain"], results["once"], 0.0)
        assert any(not torch.equal(results["twice"][n], 2 * value) for n, value in results["once"].items())


def test_checkpointed_layers_have_the_same_gradients(world2: World) -> None:
    expected = jobs.two_steps("gpt2")
    for results in world2.run(jobs.checkpointed, "gpt2"):
        assert results["regions"] == 2
        assert float(results["loss"]) == pytest.approx(float(expected["loss"]), abs=1e-5)
        assert_same(results["gradients"], expected["once"])


def test_bf16_trains_and_leaves_the_original_alone(world2: World) -> None:
    first, second = world2.run(jobs.half_precision)
    assert first["losses"] == second["losses"]
    assert first["types"] == {torch.bfloat16}
    assert first["original"] == {torch.float32}
    assert first["losses"][-1] < first["losses"][0]


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("gpt2", 2e-6), *(pytest.param(*row, marks=pytest.mark.matrix) for row in (("nanogpt", 3e-5), ("llama", 2e-6)))],
)
def test_clipping_is_that_of_torch_on_one_process(world2: World, name: str, tolerance: float) -> None:
    limit = 0.5
    expected = jobs.clip(name, limit)
    leaves = [torch.nn.Parameter(value) for value in expected["before"].values()]
    for leaf, value in zip(leaves, expected["before"].values(), strict=True):
        leaf.grad = value.clone()
    norm = torch.nn.utils.clip_grad_norm_(leaves, limit)
    clipped = {n: leaf.grad for n, leaf in zip(expected["before"], leaves, strict=True) if leaf.grad is not None}
    assert float(norm) > limit
    assert math.isclose(float(expected["norm"]), float(norm), rel_tol=1e-6)
    for results in world2.run(jobs.clip, name, limit):
        assert float(results["norm"]) == pytest.approx(float(norm), rel=tolerance)
        assert_same(results["after"], clipped, tolerance)
