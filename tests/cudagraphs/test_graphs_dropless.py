"""Experts whose rows are as many as the routing decides stand between graphs: steps are the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.cudagraphs.partial import Replayed, dynamic_values
from fxpar.cudagraphs.pool import StandInPool
from fxpar.runtime.calls import UnitCall, Values, freeing
from tests.cudagraphs.graphed import SmallExperts, deepseek_v3, equal_where_rows_are_counted, mixtral
from tests.runtime.world import World

# Two graphs of the forward, three of the backward, two of evaluations.
ROUTED = ("attn", "moe_router", "moe_preprocess")
matrix = pytest.mark.matrix


@pytest.mark.parametrize(
    ("build", "plan", "micro", "rows", "length", "graphs"),
    [
        (SmallExperts, {}, 2, 2, 5, 7),
        pytest.param(mixtral, {}, 2, 2, 5, 7, marks=matrix),
        pytest.param(deepseek_v3, {}, 3, 2, 3, 7, marks=matrix),
        pytest.param(mixtral, {}, 3, 3, 3, 7, marks=matrix),
        pytest.param(deepseek_v3, {}, 2, 2, 7, 7, marks=matrix),
        pytest.param(partial(mixtral, layers=2), {"recompute": fxpar.Recompute("full")}, 2, 2, 5, 11, marks=matrix),
        pytest.param(mixtral, {"precision": "bf16"}, 2, 2, 5, 7, marks=matrix),
        pytest.param(mixtral, {"scope": ROUTED}, 2, 2, 5, 3, marks=matrix),
        pytest.param(mixtral, {"compile": True}, 2, 2, 5, 7, marks=matrix),
        pytest.param(deepseek_v3, {"compile": True, "precision": "bf16"}, 2, 2, 5, 7, marks=matrix),
        pytest.param(mixtral, {"compile": True, "scope": ROUTED}, 2, 2, 5, 3, marks=matrix),
        pytest.param(mixtral, {"every": 2, "set_to_none": False}, 1, 2, 5, 7, marks=matrix),
    ],
)
def test_a_training_is_the_same_to_the_bit(
    world2: World, build: Callable[[], nn.Module], plan: dict[str, Any], micro: int, rows: int, length: int, graphs: int
) -> None:
    for same, figures, losses in world2.run(equal_where_rows_are_counted, build, plan, micro, rows, length):
        assert same
        assert len(set(losses)) == len(losses)
        assert figures.graphs == graphs


def _first(values: list[Any]) -> tuple[Tensor, Tensor]:
    """Returns as many rows as the first number says, outside of graphs, and their sum."""
    (x,) = values
    rows = x[1 : 1 + int(x[0])].clone()
    return rows, rows.sum()


def _square(values: list[Any]) -> tuple[Tensor]:
    (rows,) = values
    return (rows.square(),)


def _add(values: list[Any]) -> tuple[Tensor]:
    total, x = values
    return (total + x,)


def _calls() -> list[UnitCall]:
    calls = [
        UnitCall(_add, ("x", "one"), ("y",)),
        UnitCall(_first, ("y",), ("rows", "total"), uncaptured="counts"),
        UnitCall(_square, ("rows",), ("squares",), uncaptured="counts"),
        UnitCall(_add, ("total", "one"), ("z",)),
        UnitCall(_add, ("squares", "total"), ("last",), uncaptured="counts"),
    ]
    return freeing(calls, ("z", "last"))


def test_values_between_graphs_change_their_sizes() -> None:
    calls = _calls()
    dynamic = dynamic_values(calls, ("z",))
    assert dynamic == {"rows", "squares", "last"}  # a graph reads the total
    x, one = torch.zeros(6), torch.ones(())
    values: Values = {"x": x, "one": one}

    def run(index: int, environment: Values) -> None:
        calls[index](environment)

    replayed = Replayed(StandInPool(), calls, values, run, dynamic)
    z = values["z"]
    assert len(replayed.graphs) == 2
    for count in (4, 0, 2):
        x.copy_(torch.arange(6.0))
        x[0] = count - 1
        late: Values = {}
        replayed.replay(late, run)
        expected = torch.arange(2.0, 2.0 + count)
        assert float(z) == float(expected.sum()) + 1
        assert torch.equal(late.pop("last"), expected.square() + expected.sum())
        assert late == {}  # all else was freed at its last use
