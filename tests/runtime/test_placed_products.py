"""Weights' gradients of compiled steps are computed in the memory where they stay, and as they were elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxpar
from fxpar.ops import small_operators
from fxpar.ops.small_operators import Destination, chunks_added, into, place_products, placed_product


def traced(function: Any, *values: Tensor) -> torch.fx.GraphModule:
    return make_fx(function)(*values)


def test_only_what_is_nothing_but_a_result() -> None:
    def function(a: Tensor, b: Tensor) -> list[Tensor]:
        once, twice, read = a @ b, a @ (b * 2), a @ (b * 3)
        return [a + 1, once, twice, twice, read, read * 2]

    a, b = torch.randn(3, 4), torch.randn(4, 2)
    graph = traced(function, a, b)
    assert place_products(graph.graph, small_operators.product_in_place) == 1
    graph.recompile()
    place = torch.ones(3, 2)
    with into([None, Destination(place, adds=True), *[Destination(torch.empty(3, 2), adds=True)] * 4]):
        found = graph(a, b)
    assert found[1] is place
    torch.testing.assert_close(place, 1 + a @ b)
    for own, other in zip(found[2:], function(a, b)[2:], strict=True):
        torch.testing.assert_close(own, other)


def test_sums_of_products_are_computed_by_these_alone() -> None:
    """Sums of sums too; not where a summand is read again, is added to itself, or has another shape or type."""

    def function(a: Tensor, b: Tensor) -> list[Tensor]:
        sums = [a @ b + (a * 2) @ b, (a @ b + a @ b) + (a * 3) @ b]
        read, half = a @ b, a.bfloat16() @ b.bfloat16()
        return [*sums, read + a @ b, read * 2, half + a @ b, a[:1] @ b + a @ b, read + read]

    a, b = torch.randn(3, 4), torch.randn(4, 2)
    graph = traced(function, a, b)
    assert place_products(graph.graph, small_operators.product_in_place) == 3
    graph.recompile()
    places = [torch.ones(3, 2) for _ in range(7)]
    with into([Destination(place, adds=True) for place in places]):
        results = graph(a, b)
    expected = function(a, b)
    assert [result is place for result, place in zip(results, places, strict=True)] == [True] * 2 + [False] * 5
    for result, value in zip(results[:2], expected[:2], strict=True):
        torch.testing.assert_close(result, 1 + value)
    for result, value in zip(results[2:], expected[2:], strict=True):
        torch.testing.assert_close(result, value)


def test_it_replaces_or_adds() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    place = torch.full((3, 2), torch.nan)
    with into([Destination(place, adds=False)]):
        assert placed_product([a], [b], 0) is place
        torch.testing.assert_close(place, a @ b)
        assert placed_product([a], [b], 1) is not place  # the result has no place
    with into([Destination(place, adds=True)]):
        placed_product([a], [b], 0)
    torch.testing.assert_close(place, 2 * (a @ b))
    assert placed_product([a], [b], 0) is not place


def test_chunks_are_added_up_by_their_products() -> None:
    """However many rows each has, none too; in the place of the result, or where others read the sum in new memory."""
    values = [torch.randn(*shape) for k in (4, 1, 0, 5) for shape in ((3, k), (k, 2))]

    def function(*values: Tensor) -> list[Tensor]:
        total = chunks_added([torch.mm(a, b) for a, b in zip(values[::2], values[1::2], strict=True)])
        return [total * 2, total * 3, torch.mm(*values[:2]) + torch.mm(*values[6:])]

    graph = traced(function, *values)
    assert place_products(graph.graph, small_operators.product_in_place) == 4  # each sum of two once, and the last
    graph.recompile()
    place = torch.ones(3, 2)
    with into([None, None, Destination(place, adds=True)]):
        result = graph(*values)
    assert result[2] is place
    place -= 1
    torch.testing.assert_close(result, function(*values))


@pytest.mark.parametrize(
    "place",
    [
        torch.zeros(3, 2, dtype=torch.float64),
        torch.zeros(2, 3).t(),
        torch.zeros(6),
        nn.Parameter(torch.zeros(3, 2)),
        torch.zeros(7)[1:].view(3, 2),
    ],
    ids=["type", "strides", "shape", "subclass", "alignment"],
)
def test_a_place_of_another_kind_is_left_alone(place: Tensor) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    with torch.no_grad(), into([Destination(place, adds=True)]):
        torch.testing.assert_close(placed_product([a], [b], 0), a @ b)
    assert not place.any()


class Net(nn.Module):
    """Weights that are tied, frozen, hooked, and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.up, self.down, self.frozen = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6)
        self.twice, self.head = nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.frozen(self.down(self.up(self.tokens(ids)).tanh()))
        x = self.twice(self.twice(x).tanh())
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("impl", ["none", "partial", "full_iteration"])
@pytest.mark.parametrize("hooks", [False, True], ids=["plain", "hooks"])
def test_gradients_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch, impl: str, hooks: bool) -> None:
    written: list[bool] = []
    before = small_operators._fits

    def fits(place: Tensor, a: Tensor, b: Tensor) -> bool:
        written.append(before(place, a, b))
        return written[-1]

    monkeypatch.setattr(small_operators, "_fits", fits)
    torch.manual_seed(0)
    reference = Net().double()
    batch = {"ids": torch.randint(7, (3, 5)), "labels": torch.randint(7, (3, 5))}
    plan = fxpar.Plan(tp=1, compile=True, cuda_graphs=fxpar.CudaGraphs(impl))
    model = fxpar.parallelize(copy.deepcopy(reference), plan, batch, check_inputs=False)
    if hooks and impl != "full_iteration":
        for each in (model, reference):
            dict(each.named_parameters())["up.weight"].register_hook(lambda gradient: gradient * 2)
    for step in range(7):
        if step == 3:
            for each in (model, reference):
                each.zero_grad()
        if step == 5:
            for each in (model, reference):
                each.zero_grad(set_to_none=False)
        reference(**batch)["loss"].backward()
        model.train_step(batch)
        own, others = dict(model.named_parameters()), dict(reference.named_parameters())
        for name, parameter in others.items():
            if parameter.grad is None:
                assert own[name].grad is None
            else:
                torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-12, atol=1e-12)
    model.close()
    assert any(written)


def test_gradients_that_are_parts_of_one_tensor() -> None:
    """As users have them who keep all in one: some begin where compiled code asserts that no result begins."""
    torch.manual_seed(0)
    reference = Net()
    batch = {"ids": torch.randint(7, (3, 5)), "labels": torch.randint(7, (3, 5))}
    model = fxpar.parallelize(copy.deepcopy(reference), fxpar.Plan(tp=1, compile=True), batch, check_inputs=False)
    for each in (model, reference):
        for parameter in each.parameters():
            parameter.grad = torch.zeros(parameter.numel() + 1)[1:].view_as(parameter)
    model.train_step(batch)
    reference(**batch)["loss"].backward()
    own = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad)
