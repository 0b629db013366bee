"""The list of collectives of a program, and what a ring sends of them."""

from __future__ import annotations

import pytest

from fxpar.cost.communication import collectives
from fxpar.cost.seconds import collective_seconds, sent
from fxpar.plan.cost import Cost
from tests.passes.modules import MLP, Behind, build, run
from tests.passes.test_insert_collectives import MLP_SPLIT


def test_collectives_are_listed_with_bytes_in_closed_form() -> None:
    result = run(build(Behind, MLP)[1], MLP_SPLIT)
    found = [(c.phase, c.op, c.node, c.bytes_formula, c.bytes) for c in collectives(result, {"b": 2, "s": 5})]
    assert found == [
        ("forward", "all_reduce", "embedding_reduce_from", "384*b*s", 3840),
        ("backward", "all_reduce", "layer_norm_copy_to", "384*b*s", 3840),
        ("forward", "all_reduce", "linear_1_reduce_from", "384*b*s", 3840),
    ]


@pytest.mark.parametrize(("op", "rounds"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
def test_a_ring_sends_all_parts_but_its_own_in_each_round(op: str, rounds: int) -> None:
    cost = Cost(bandwidth=100.0)
    assert sent(op, 4) == rounds * 0.75
    assert sent(op, 1) == 0
    assert collective_seconds(op, 4, 800.0, cost, 2.0) == rounds * (2.0 + 6.0)
