"""Solved by segments, equal ones once, the choice costs exactly what it costs as a whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.cli.models import build
from fxpar.ir.grad_flow import carried
from fxpar.ir.program import Program
from fxpar.layout.layout import I, Placement, shard
from fxpar.passes import canonicalize
from fxpar.plan.plan import Plan
from fxpar.sharding import collapse
from fxpar.sharding.choose import _ends
from fxpar.sharding.collapse import cheapest, collapsed
from fxpar.sharding.options import list_options
from fxpar.sharding.problem import Given, Prices, Problem, cost_of, minimum, problem_of
from tests.products import few

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """[b, s, WIDTH]."""
        h: Tensor = self.down(functional.gelu(self.up(self.norm(x))) * scale)
        return x + h


class Stack(nn.Module):
    """Equal layers, of which those named in `hidden` differ; head tied to the table; one vector for all layers."""

    def __init__(self, layers: int, hidden: dict[int, int] | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Layer((hidden or {}).get(i, 32)) for i in range(layers))
        # A value without gradient that every layer wants cut, for which the conversion is paid once.
        self.register_buffer("scale", torch.ones(1) if hidden else torch.ones(32))

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s]."""
        x = self.table(ids)
        scale = self.get_buffer("scale") * 2
        for layer in self.layers:
            x = layer(x, scale)
        logits = functional.linear(x, self.table.weight)
        return functional.cross_entropy(logits.view(-1, 16), ids.view(-1))


def program_of(model: nn.Module) -> Program:
    """The canonical program of a model of tokens."""
    return canonicalize(capture(model, (torch.randint(0, 16, (3, 6)),), Plan(tp=2)).program)


def problem(program: Program, pins: dict[str, Placement] | None = None) -> Problem:
    """The choice as numbers, with some parameters decided."""
    owned = {p.fqn: program.node(p.node) for p in program.parameters}
    pinned = {owned[name]: placement for name, placement in (pins or {}).items()}
    options = list_options(program, 2, carried(program), pinned, True)
    return problem_of(program.graph, options, Prices(program, options, program.plan.cost), _ends(program, options))[1]


@cache
def equal(layers: int) -> Program:
    """The program of equal layers."""
    return program_of(Stack(layers))


@cache
def stack(layers: int) -> Problem:
    """The problem of equal layers."""
    return problem(equal(layers))


def solved(given: Problem, monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[int, ...], int]:
    """The choice by segments, and how many programs were solved for it."""
    count = 0

    def counted(part: Problem, decided: Given | None = None) -> tuple[int, ...] | None:
        nonlocal count
        count += 1
        assert len(part.costs) < len(given.costs)
        return minimum(part, decided)

    with monkeypatch.context() as patch:
        patch.setattr(collapse, "minimum", counted)
        picks = collapsed(given)
    assert picks is not None
    return picks, count


def same_as_whole(given: Problem, monkeypatch: pytest.MonkeyPatch) -> int:
    """Asserts that segments and the whole cost the same; returns how many programs were solved."""
    picks, count = solved(given, monkeypatch)
    whole = minimum(given)
    assert whole is not None
    assert cost_of(given, picks) == pytest.approx(cost_of(given, whole), rel=1e-9)
    return count


def test_the_number_of_programs_does_not_grow_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [same_as_whole(stack(layers), monkeypatch) for layers in (4, 6)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("hidden", [{0: 48, 5: 20}, {1: 48, 3: 48, 5: 48}])
def test_layers_that_differ_are_solved_for_themselves(hidden: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    same_as_whole(problem(program_of(Stack(6, hidden))), monkeypatch)


@pytest.mark.parametrize(
    "pins",
    [
        {"layers.2.up.weight": I},
        {"layers.2.up.weight": shard(1, WIDTH)},
        {"layers.5.down.weight": I, "layers.3.up.weight": I},
    ],
    ids=str,
)
def test_a_pinned_layer_is_not_merged(pins: dict[str, Placement], monkeypatch: pytest.MonkeyPatch) -> None:
    free = same_as_whole(stack(6), monkeypatch)
    pinned = problem(equal(6), pins)
    assert same_as_whole(pinned, monkeypatch) > free
    best = minimum(stack(6))
    picks = cheapest(pinned)
    assert best is not None
    assert picks is not None
    assert cost_of(pinned, picks) > cost_of(stack(6), best)


def rescaled(given: Problem, factor: Callable[[], float]) -> Problem:
    """The same choice at other costs; the conversions of a value have one price, whoever pays it."""
    prices: dict[object, float] = {}

    def scaled(value: object, source: int, target: int, price: float) -> float:
        return prices.setdefault((value, source, target), price * factor())

    uses = tuple(replace(u, prices=tuple((s, t, scaled(u.value, s, t, p)) for s, t, p in u.prices)) for u in given.uses)
    return replace(given, costs=tuple(tuple(c * factor() for c in costs) for costs in given.costs), uses=uses)


@pytest.mark.parametrize("seed", few(range(8), range(3)))
def test_at_any_costs_the_segments_cost_what_the_whole_costs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    same_as_whole(rescaled(stack(4), lambda: 10 ** draw.uniform(-2, 2)), monkeypatch)


def test_alternating_attention_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build("gemma2,num_hidden_layers=4", None, None, 0)
    program = canonicalize(capture(built.model.train(), built.batch, Plan(tp=2), built.loss).program)
    same_as_whole(problem(program), monkeypatch)


def test_what_cannot_be_has_no_solution() -> None:
    given = stack(4)
    end = given.uses[-1]
    assert end.user is None
    broken = replace(given, uses=(*given.uses[:-1], replace(end, wanted=((-1, ()),), prices=())))
    assert minimum(broken) is None
    assert collapsed(broken) is None
