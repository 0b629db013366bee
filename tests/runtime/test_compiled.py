"""Compiled programs are the eager ones: equal layers are compiled once, and again only for new shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fxpar.plan.plan_options import Recompute
from tests.cudagraphs.graphed import SmallExperts, deepseek_v3, mixtral
from tests.runtime import compiled
from tests.runtime.test_training import assert_same
from tests.runtime.world import World

ALL_REDUCE = "_c10d_functional.all_reduce.default"
GATHER, SCATTER = (
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.reduce_scatter_tensor.default",
)


def assert_equal(results: Any) -> None:
    """Losses and gradients are the eager program's."""
    assert results["compiled"]["losses"] == pytest.approx(results["eager"]["losses"], abs=1e-5)
    assert_same(results["compiled"]["gradients"], results["eager"]["gradients"], 1e-5)


@pytest.mark.matrix
def test_a_compiled_program_is_the_eager_one(world2: World) -> None:
    for results in world2.run(compiled.train, "tiny", {}):
        assert_equal(results)
        forward, backward = results["graphs"]
        # Of the embedding, the MLP and twice of the loss; backward: of the MLP and the head.
        assert (forward[ALL_REDUCE], backward[ALL_REDUCE]) == (4, 2)


@pytest.mark.parametrize(("sequence_parallel", "most"), [(True, 6), pytest.param(False, 8, marks=pytest.mark.matrix)])
def test_equal_layers_are_compiled_once_in_the_order_of_the_program(
    world2: World, sequence_parallel: bool, most: int
) -> None:
    """Gradients of weights run between a collective's start and its wait."""
    for results in world2.run(compiled.deep, sequence_parallel, seconds=600):
        assert_equal(results)
        first, second = results["eager"]["losses"]
        assert first != second  # each step drops others
        assert results["graphs"] <= most  # a layer and the head, forward and backward, and what surrounds them
        assert results["code"] == results["program"]
        assert max(results["code"]) >= 2


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize(
    "more",
    [{}, {"checkpointed": True}, {"recompute": Recompute("selective")}, {"recompute": Recompute("full")}],
)
def test_compiled_programs_under_sequence_parallelism(world2: World, name: str, more: dict[str, Any]) -> None:
    for results in world2.run(compiled.train, name, {"sequence_parallel": True, **more}, seconds=600):
        assert_equal(results)
        # In a layer, which is compiled once: into the attention and the MLP, and out of both; in the backward alike.
        assert sum(graph.get(SCATTER, 0) for graph in results["graphs"]) >= 4
        assert sum(graph.get(GATHER, 0) for graph in results["graphs"]) >= 4


@pytest.mark.parametrize(
    ("rows", "graphs"),
    [
        ((2, 5, 3, 2), [1, 2, 2, 2]),
        pytest.param((2, 5, 2, 5, 3, 7, 1), [1, 2, 2, 2, 2, 2, 3], marks=pytest.mark.matrix),
    ],
    ids=len,
)
def test_sizes_are_symbols_from_the_second_ones_on(rows: tuple[int, ...], graphs: list[int]) -> None:
    results = compiled.shapes(rows)
    for a, b in zip(results["eager"], results["compiled"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    # A batch of one is a number: operations take it for one that is broadcast.
    assert results["graphs"] == [0] * len(rows) + graphs


@pytest.mark.matrix
def test_steps_of_many_lengths_are_compiled_twice() -> None:
    """For the first sizes and for all others."""
    results = compiled.lengths([(2, 8), (2, 12), (2, 7), (2, 33), (2, 8)], None)
    for eager, other in zip(results["eager"], results["compiled"], strict=True):
        assert_equal({"eager": eager, "compiled": other})
    first, second, *same = results["graphs"]
    assert second == 2 * first
    assert same == [second] * 3


@pytest.mark.matrix
def test_steps_of_many_lengths_are_compiled_thrice(world2: World) -> None:
    """For the first sizes, for all others, and for a length of one; divisible, odd, and with another batch."""
    sizes = [(2, 8), (2, 12), (2, 7), (2, 33), (2, 8), (2, 1), (2, 2)]
    for results in world2.run(compiled.lengths, sizes, None, seconds=600):
        for eager, other in zip(results["eager"], results["compiled"], strict=True):
            assert_equal({"eager": eager, "compiled": other})
        first, second, *same = results["graphs"]
        assert second == 2 * first
        assert same == [second] * 3 + [3 * first] * 2


@pytest.mark.matrix
@pytest.mark.parametrize("more", [{"sequence_parallel": True}, {"recompute": Recompute("full")}])
def test_steps_of_many_lengths_under_other_plans(world2: World, more: dict[str, Any]) -> None:
    sizes = [(2, 8), (2, 12), (3, 6), (4, 10), (5, 14)]
    for results in world2.run(compiled.lengths, sizes, more, seconds=900):
        for eager, other in zip(results["eager"], results["compiled"], strict=True):
            assert_equal({"eager": eager, "compiled": other})
        assert results["graphs"][2:] == results["graphs"][2:3] * 3


@pytest.mark.parametrize(
    ("build", "options", "lengths", "steps"),
    [
        (SmallExperts, {}, (5, 5, 5), [0, 1, 1]),
        pytest.param(mixtral, {}, (5, 5, 5), [0, 1, 1], marks=pytest.mark.matrix),
        pytest.param(mixtral, {}, (5, 6, 7, 3, 5), [0, 1, 2, 2, 2], marks=pytest.mark.matrix),
        pytest.param(deepseek_v3, {}, (5, 5, 5), [0, 1, 1], marks=pytest.mark.matrix),
        pytest.param(
            partial(mixtral, layers=3), {"recompute": Recompute("full")}, (5, 5, 5), [0, 1, 1], marks=pytest.mark.matrix
        ),
        pytest.param(mixtral, {"recompute": Recompute("selective")}, (5, 5, 5), [0, 1, 1], marks=pytest.mark.matrix),
        pytest.param(
            partial(mixtral, layers=2),
            {"dp": 1, "tp": 2, "etp": 1, "sequence_parallel": True},
            (6, 6, 6),
            [0, 1, 1],
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_experts_without_drops_are_compiled_once_for_all_loads(
    world2: World, build: Callable[[], nn.Module], options: dict[str, Any], lengths: tuple[int, ...], steps: list[int]
) -> None:
    """For the first length and for all others: how many rows come changes nothing."""
    for results in world2.run(compiled.dropless, build, options, lengths, seconds=900):
        eager, other = results["eager"], results["compiled"]
        assert other.losses == pytest.approx(eager.losses, abs=1e-5)
        for a, b in zip(other.weights, eager.weights, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        assert len(set(eager.losses)) == len(eager.losses)
        *before, end = results["graphs"]
        once = before[1]
        assert once > 2  # what stands before experts and after them, forward and backward
        assert before == [once * count for count in steps]
        assert end < 2 * once * max(steps)  # of evaluations the forward
        assert len(results["rows"]) >= len(lengths)


@pytest.mark.matrix
def test_a_new_memory_layout_is_no_new_shape() -> None:
    results = compiled.variants()
    assert results["graphs"] == 2
    assert len(results["losses"]) == 10


@pytest.mark.matrix
def test_weights_that_the_loss_does_not_reach_get_no_gradient(world2: World) -> None:
    for results in world2.run(compiled.without_gradient):
        assert {"aside.bias", "aside.weight", "first.weight"} <= set(results["bucket"])
        assert results["eager"] == results["compiled"] == ["aside.bias", "aside.weight"]
