"""Routed rows and experts' products: what they give, whatever the routing, and what autograd makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.errors import InputError
from fxpar.experts.operators.grouped import (
    _masks,
    _runs,
    expand_by_expert,
    grouped_linear,
    grouped_outer,
    sum_by_expert,
)
from fxpar.experts.operators.permute import (
    dot_rows,
    moe_combine,
    moe_permute,
    moe_unpermute,
    sort_by_expert,
    take_weighed,
)
from fxpar.ir.program import output_layouts
from fxpar.plan.plan import Plan
from fxpar.verification import expect, verify

E, K, H, N = 4, 2, 6, 10


def x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def routings() -> Iterator[tuple[str, Tensor]]:
    yield "all to one", torch.tensor([[1, 3]] * 5)
    yield "one token", torch.tensor([[2, 0]])
    yield "no token", torch.zeros(0, K, dtype=torch.int64)
    yield "mixed", torch.tensor([[0, 1], [3, 0], [1, 2], [2, 3], [0, 3]])
    yield "some to nobody", torch.tensor([[0, E], [E, E], [1, 2]])


def loop(hidden: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    found = 0 * (hidden + weights.sum() + up.sum() + down.sum())
    for t, chosen in enumerate(indices.tolist()):
        for k, e in enumerate(chosen):
            if e < E:
                found[t] = found[t] + fxpar_swiglu(hidden[t] @ up[e].T) @ down[e].T * weights[t, k]
    return found


def fxpar_swiglu(inner: Tensor) -> Tensor:
    gate, up = inner.chunk(2, -1)
    return functional.silu(gate) * up


@pytest.mark.parametrize(("name", "indices"), list(routings()))
def test_experts_are_the_loop_over_tokens(name: str, indices: Tensor) -> None:
    leaves = [x(len(indices), H), x(len(indices), K), x(E, 2 * N, H), x(E, H, N)]
    results = []
    for compute in (loop, fxpar.ops.experts):
        hidden, weights, up, down = own = [leaf.clone().requires_grad_() for leaf in leaves]
        found = compute(hidden, indices, weights, up, down)
        found.square().sum().backward()
        results.append([found, *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in own)])
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_rows_are_sorted_by_expert_and_then_by_place() -> None:
    order, counts = sort_by_expert(torch.tensor([[2, 0], [0, 7], [2, -1]]), 3)
    assert order.tolist() == [1, 2, 0, 4, 3, 5]
    assert counts.tolist() == [2, 0, 2]


def test_a_place_of_minus_one_is_no_row() -> None:
    order = torch.tensor([3, -1, 0])
    tokens = x(2, H)
    rows = moe_permute(tokens, order, K)
    assert torch.equal(rows, torch.stack([tokens[1], torch.zeros(H, dtype=torch.float64), tokens[0]]))
    assert torch.equal(moe_unpermute(rows + 1, order, 2, K), tokens + 1)


def test_a_tokens_rows_are_added_in_the_order_of_its_choices() -> None:
    """Whatever experts they are: in this order the large ones cancel before the small one is added."""
    y = torch.tensor([[1.0], [1e30], [-1e30]])
    assert moe_unpermute(y, torch.tensor([2, 0, 1]), 1, 3).item() == 1.0


def test_weighed_rows_are_rows_times_their_weights() -> None:
    order, k = torch.tensor([[3, -1, 0, 5], [2, 4, -1, 1]]), 2
    tokens, rows, weights = x(2, 3, H), x(2, 4, H), x(2, 3, k)
    own = moe_permute(weights.reshape(2, 6, 1), order, 1)
    assert torch.equal(moe_combine(rows, weights, order, rows.dtype), moe_unpermute(rows * own, order, 3, k))
    assert torch.equal(take_weighed(tokens, weights, order, rows.dtype), moe_permute(tokens, order, k) * own)
    dots = moe_unpermute((moe_permute(tokens, order, k) * rows).sum(-1, keepdim=True), order, 6, 1)
    assert torch.equal(dot_rows(tokens, rows, order, k, rows.dtype), dots.view(2, 3, k))


def test_the_three_weighed_operators_are_each_others_derivatives() -> None:
    order = torch.tensor([3, -1, 0, 5])
    tokens, rows, weights = (value.requires_grad_() for value in (x(3, 2), x(4, 2), x(3, 2)))
    kind = torch.float64
    for run, inputs in (
        (lambda y, w: moe_combine(y, w, order, kind), (rows, weights)),
        (lambda x, w: take_weighed(x, w, order, kind), (tokens, weights)),
        (lambda x, y: dot_rows(x, y, order, 2, kind), (tokens, rows)),
    ):
        assert torch.autograd.gradcheck(run, inputs)
        assert torch.autograd.gradgradcheck(run, inputs)


def test_halves_are_weighed_and_added_in_float32() -> None:
    rows = torch.tensor([[1.0], [1 / 256]], dtype=torch.bfloat16)
    weights = torch.tensor([[1 / 3, 1.0]])
    made = moe_combine(rows, weights, torch.tensor([0, 1]), torch.float32)
    assert made.item() == pytest.approx(1 / 3 + 1 / 256, rel=1e-6)


def test_rows_behind_those_of_the_experts_are_nobodys() -> None:
    rows, counts = x(5, H), torch.tensor([1, 0, 2, 0])
    rows[3:] = torch.nan
    weight = x(E, N, H)
    made = grouped_linear(rows, weight, counts, False)
    assert torch.equal(made[3:], torch.zeros(2, N, dtype=torch.float64))
    assert torch.equal(made[:1], rows[:1] @ weight[0].T)
    for found in (grouped_outer(rows, rows, counts, 0), sum_by_expert(rows, counts, 0)):
        assert not found.isnan().any()
        assert not found[[1, 3]].any()
    assert not expand_by_expert(x(E, H), counts, 5)[3:].any()


def test_a_gradient_is_that_of_numbers() -> None:
    counts = torch.tensor([[[2, 1], [0, 3]], [[1, 1], [0, 0]]])
    rows = x(2, 2, 3, 2).requires_grad_()
    inputs = (rows, x(2, 2, 2, 3).requires_grad_(), x(2, 2, 3).requires_grad_())

    def run(rows: Tensor, weight: Tensor, bias: Tensor) -> Any:
        made: Tensor = grouped_linear(rows, weight, counts, True)
        return made + expand_by_expert(bias, counts, 3)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_masks_are_the_runs() -> None:
    counts = torch.tensor([2, 0, 3])
    masks = [mask.flatten().nonzero().flatten().tolist() for mask in _masks(counts, 6)]
    assert masks == [[0, 1], [], [2, 3, 4]]
    assert [list(range(start, end)) for _, start, end in _runs(counts)] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": x(2, 3, H)}, "dimensions"),
        ({"indices": torch.zeros(3, K)}, "indices of type"),
        ({"down": x(E + 1, H, N)}, "experts"),
        ({"weights": torch.zeros(3, K, dtype=torch.int64)}, "weights of type"),
        ({"gate_up_bias": [x(E, N), x(E, N)]}, "2 biases"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], reason: str) -> None:
    given = {"hidden": x(3, H), "indices": torch.zeros(3, K, dtype=torch.int64), "weights": x(3, K)}
    given |= {"gate_up": x(E, 2 * N, H), "down": x(E, H, N)}
    with pytest.raises(InputError, match=reason):
        fxpar.ops.experts(**{**given, **change})


class Grouped(nn.Module):
    """A layer in the manner of torchtitan's: three matrices an expert, a sigmoid to choose by, one shared."""

    def __init__(self, scored_first: bool) -> None:
        super().__init__()
        self.scored_first = scored_first
        self.inner, self.router = nn.Linear(5, 24), nn.Linear(24, 4, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(4, 32, 24) * 0.2) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(4, 24, 32) * 0.2)
        self.shared = nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 24))

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, 5]."""
        hidden = self.inner(x).flatten(0, 1)
        scores, chosen = self.router(hidden).sigmoid().topk(2)
        weights = scores / scores.sum(-1, keepdim=True) if self.scored_first else scores
        routed = fxpar.ops.experts(hidden, chosen, weights, (self.w1, self.w3), self.w2)
        result: Tensor = routed + self.shared(hidden)
        return result.square().mean()


@pytest.mark.parametrize("scored_first", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_a_layer_of_ones_own_is_split_as_an_mlp_is(scored_first: bool) -> None:
    torch.manual_seed(3)
    found = expect(verify(Grouped(scored_first).train(), {"x": torch.randn(3, 7, 5)}, Plan(tp=2)))
    program = found.program
    cuts = {p.fqn: output_layouts(program.node(p.node))[0].on("tp").dim for p in program.parameters if p.fqn[0] == "w"}
    assert cuts == {"w1": 1, "w3": 1, "w2": 2}
    assert found.split_flops > 0.9
