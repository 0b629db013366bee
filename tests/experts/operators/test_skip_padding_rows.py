"""Rows that nobody reads are not written: with other values in them nothing changes, and what is read has zeros."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxpar.experts.operators import permute
from fxpar.experts.operators.grouped import grouped_linear, swiglu_gradient, swiglu_rows
from fxpar.experts.operators.permute import moe_permute, take_weighed
from fxpar.ops.lower import leave_unread, lower
from fxpar.ops.process_group import Group
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Experts, Recompute
from fxpar.verification import expect, verify
from tests.passes.experts import Routed, batch, dispatched
from tests.products import few
from tests.zoo import step_of

aten, fxp = torch.ops.aten, torch.ops.fxpar
FILLING = (fxp.moe_permute, fxp.take_weighed, fxp.grouped_linear, fxp.swiglu_rows, fxp.swiglu_gradient)
PLANS: dict[str, tuple[dict[str, Any], bool]] = {
    "allgather": ({"dp": 2, "ep": 2, "experts": Experts("allgather")}, True),
    "alltoall": ({"dp": 2, "ep": 2, "experts": Experts("alltoall")}, True),
    "dropless": ({"dp": 2, "ep": 2, "experts": Experts("dropless")}, True),
    "etp": ({"dp": 2, "tp": 2, "ep": 4, "etp": 1}, True),
    "capacity": ({"dp": 2, "ep": 2, "experts": Experts(capacity_factor=0.8)}, True),
    "recompute": ({"dp": 2, "ep": 2, "recompute": Recompute("selective")}, True),
    "own": ({"dp": 2}, False),  # all rows are somebody's
    "padded": (
        {"dp": 2, "ep": 2, "experts": Experts(capacity_factor=0.8, pad_to_capacity=True)},
        False,
    ),  # nobody's are between
}


def written(graph: fx.Graph) -> Counter[bool]:
    """How many operators fill rows that are nobody's, and how many do not."""
    calls = [node for node in graph.nodes if getattr(node.target, "overloadpacket", None) in FILLING]
    names = [[argument.name for argument in node.target._schema.arguments] for node in calls]
    places = [each.index("fill") for each in names]
    return Counter(node.args[i] if i < len(node.args) else True for node, i in zip(calls, places, strict=True))


@pytest.mark.parametrize("name", few(PLANS, ("allgather", "etp", "padded")))
def test_what_they_hold_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, leaves = PLANS[name]
    program = dispatched(Plan(**own))
    assert program.loss is not None
    step = step_of(program)
    lowered = lower(step, {axis: Group(axis, n) for axis, n in step.axes.items()})
    # Rows that travel, forward and backward; or what the forward made and a recomputed order reads.
    filled = {"alltoall": 2, "dropless": 2, "etp": 2, "capacity": 2, "recompute": 2}.get(name, 0)
    counted = written(lowered.module.graph)
    assert (counted[True] == filled and counted[False] >= 8) if leaves else not counted[False]
    monkeypatch.setattr(permute, "UNREAD", math.nan)
    for routing in ("learned", "one"):
        torch.manual_seed(0)
        expect(verify(Routed(routing), batch(5), Plan(**own)))


def experts_of(counts: str = "counts", sum_over: str = "put", blocks: int = 1) -> fx.Graph:
    """Tokens that go to experts and back.

    Args:
        blocks: in which rows stand.
        counts: of the second product: those of its rows, or others.
        sum_over: what reads its rows.
    """
    graph = fx.Graph()
    x, order, own, others, first, second = (graph.placeholder(n) for n in ("x", "order", "own", "others", "w1", "w2"))
    buffer = graph.call_function(fxp.dispatch_indices.default, (order, own, blocks, 6))
    taken = graph.call_function(fxp.moe_permute.default, (x, buffer, 2))
    made = graph.call_function(fxp.grouped_linear.default, (taken, first, own, False))
    made = graph.call_function(aten.relu.default, (made,))
    made = graph.call_function(fxp.grouped_linear.default, (made, second, own if counts == "counts" else others, False))
    found: dict[str, Any] = {
        "put": (fxp.moe_unpermute.default, (made, buffer, 3, 2)),
        "order": (fxp.moe_unpermute.default, (made, order, 3, 2)),
        "all": (aten.sum.dim_IntList, (made, [0])),
        "norm": (aten.softmax.int, (made, 0)),
        "weights": (fxp.grouped_linear.default, (taken, made, own, False)),
        "slice": (aten.slice.Tensor, (made, 0, 2)),
    }
    graph.output((graph.call_function(*found[sum_over]) if sum_over in found else made,))
    return graph


def test_nothing_is_written_where_all_that_reads_passes_over_them() -> None:
    graph = experts_of()
    leave_unread(graph)
    assert written(graph) == {False: 3}
    leave_unread(graph)  # and once
    assert written(graph) == {False: 3}


@pytest.mark.parametrize("reader", ["order", "all", "norm", "weights", "slice", "output"])
def test_what_reads_all_rows_has_zeros(reader: str) -> None:
    graph = experts_of(sum_over=reader)
    leave_unread(graph)
    # The product whose rows are read, and one that reads them as matrices.
    assert written(graph) == {False: 2, True: 2 if reader == "weights" else 1}


def test_rows_of_other_counts_have_zeros() -> None:
    """The second product would read rows that the first one has not written."""
    graph = experts_of(counts="others")
    leave_unread(graph)
    assert written(graph) == {True: 2, False: 1}


def test_rows_in_several_blocks_have_zeros_between_them() -> None:
    graph = experts_of(blocks=2)
    leave_unread(graph)
    assert written(graph) == {True: 3}


def test_operators_leave_what_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permute, "UNREAD", math.nan)
    order, counts = torch.tensor([3, 0, -1]), torch.tensor([1, 1])
    x, weights, matrices = torch.randn(2, 4), torch.rand(2, 2), torch.randn(2, 5, 4)
    gates, gradient = torch.randn(3, 2, 4), torch.randn(3, 4)
    for fill in (True, False):
        made: list[Tensor] = [
            moe_permute(x, order, 2, fill),
            take_weighed(x, weights, order, torch.float32, fill),
            grouped_linear(torch.randn(3, 4), matrices, counts, False, fill),
            swiglu_rows(gates, counts, fill),
            swiglu_gradient(gradient, gates, counts, fill),
        ]
        for each in made:
            assert each[:2].isfinite().all()
            assert (each[2] == 0).all() if fill else each[2].isnan().all()


def test_integers_stay_what_they_are() -> None:
    """As floats the last digits of large ones would be lost."""
    x = torch.tensor([[2**53 + 1], [2**24 + 1]])
    for fill in (True, False):
        assert moe_permute(x, torch.tensor([1, 0, -1]), 1, fill).flatten().tolist() == [2**24 + 1, 2**53 + 1, 0]
