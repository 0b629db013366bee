"""The cheapest way from one layout to another, where axes have links of their own."""

from __future__ import annotations

import pytest

from fxpar.layout.layout import Layout, R, shard
from fxpar.plan.cost import Cost
from fxpar.rules.conversion import conversions

AXES = {"dp": 2, "tp": 4}


@pytest.mark.parametrize(("slow", "order"), [("dp", ["dp", "tp"]), ("tp", ["tp", "dp"])])
def test_the_slower_axis_sends_while_the_value_is_still_cut_on_the_other(slow: str, order: list[str]) -> None:
    source = Layout.of({"dp": shard(0, 8), "tp": shard(1, 8)})
    cost = Cost(axes={slow: {"bandwidth": 1e9}})
    way = conversions(source, Layout.of({"dp": R, "tp": R}), AXES, False, cost)
    assert way is not None
    assert [axis for step in way for axis in step.axes] == order


def test_with_equal_links_the_axis_that_leaves_less_sends_last() -> None:
    source = Layout.of({"dp": shard(0, 8), "tp": shard(1, 8)})
    for cost in (Cost(), Cost(bandwidth=1e9), Cost(axes={axis: {"bandwidth": 7.0} for axis in AXES})):
        way = conversions(source, Layout.of({"dp": R, "tp": R}), AXES, False, cost)
        assert way is not None
        assert [step.axes for step in way] == [("dp",), ("tp",)]
