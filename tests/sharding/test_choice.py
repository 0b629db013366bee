"""The choice is the minimum, follows the costs, and finds Megatron's split where nothing names it."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import Captured, capture
from fxpar.compile import compile_program
from fxpar.cost.flops import split_flops
from fxpar.cost.reasons import unsplit
from fxpar.ir.grad_flow import carried
from fxpar.ir.program import Program, operands
from fxpar.layout.layout import I, Placement, V
from fxpar.passes import canonicalize, divide_batch
from fxpar.passes.divide_sequence import divide
from fxpar.plan.cost import Cost
from fxpar.plan.plan import Plan
from fxpar.sharding.choose import Choice, place, solve
from fxpar.sharding.options import AxisOptions, Value, list_options, value_of
from fxpar.sharding.problem import Prices
from fxpar.verify.values import call_inputs, program_state, verify_values
from tests.layers import by_layer
from tests.products import product
from tests.zoo import CASES


@cache
def captured(name: str) -> tuple[nn.Module, Captured]:
    """A model of the zoo and its capture."""
    case = CASES[name]
    model = case.model()
    return model, capture(model, case.example(), Plan(), case.loss)


def slower(factor: float) -> Cost:
    """A machine on which everything takes `factor` times as long."""
    usual = Cost()
    rates = (usual.flops / factor, usual.memory / factor)
    return Cost(usual.bandwidth / factor, usual.latency * factor, *rates)


def compiled(name: str, plan: Plan) -> Program:
    """The localised program of a model of the zoo."""
    found = captured(name)[1]
    return compile_program(found.program.with_(plan=plan))


MEGATRON = ("gpt2", "bert", "llama", "qwen3", "bloom", "nanogpt")


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        pytest.param(name, 4, marks=[] if name == "bloom" else [pytest.mark.matrix])
        for name in CASES
        if name not in ("gpt2", "llama")
    ],
)
def test_without_a_plan_s_lines_every_model_is_split_and_right(name: str, tp: int) -> None:
    model, found = captured(name)
    program = compiled(name, Plan(tp=tp))
    state, inputs = program_state(found.program, model), call_inputs(found, model, CASES[name].example())
    report = verify_values(found.program, program, state, inputs)
    assert report.ok, report
    assert split_flops(program) >= 0.99


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        *(pytest.param(name, 1, marks=pytest.mark.matrix) for name in MEGATRON),
        ("gpt2", 1 / 3),
        ("bert", 3),
    ],
)
def test_layers_are_split_as_megatron_does_whatever_the_machine(name: str, factor: float) -> None:
    plan = Plan(tp=2, cost=slower(factor))
    program = compiled(name, plan)
    counts = by_layer(program)
    counts.pop("")
    assert list(counts.values()) == [{("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}] * 2
    assert unsplit(program) == []


def test_another_machine_changes_nothing_but_the_price() -> None:
    texts = {
        tuple(str(node.meta["custom"]["fxpar"].layout) for node in compiled("llama", plan).graph.nodes if node.meta)
        for plan in (Plan(tp=2, cost=slower(factor)) for factor in (1 / 3, 1, 3))
    }
    assert len(texts) == 1


class Small(nn.Module):
    """Few enough options to try all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Any:
        """[b, 8]."""
        h = x * self.scale
        return (h + self.down(functional.relu(self.up(h)))).sum()


class Shared(nn.Module):
    """One value that two matrices take: a conversion that is paid once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Any:
        """[b, 8]."""
        h = x * self.scale
        return (functional.relu(self.a(h)) * self.b(h)).sum()


Ends = dict[Value, tuple[Placement, ...]]


def problem(kind: type[nn.Module], cost: Cost) -> tuple[Program, AxisOptions, Prices, Ends]:
    """A small model's options and prices on two ranks."""
    torch.manual_seed(0)
    program = canonicalize(capture(kind(), (torch.randn(3, 8),), Plan(tp=2, cost=cost)).program)
    options = list_options(program, 2, carried(program), {}, True)
    loss = value_of(program.output_nodes()[program.loss])
    return program, options, Prices(program, options, cost), {loss: (I,)}


def cheapest(options: AxisOptions, prices: Prices, ends: Ends) -> float:
    """The least cost of all combinations of options, each added up without a solver."""
    nodes = list(options.of)
    uses = [(n, i, value_of(o)) for n in nodes if n.op == "call_function" for i, o in enumerate(operands(n))]
    price = cache(prices.conversion)
    own = {node: {option: prices.node(node, option) for option in found} for node, found in options.of.items()}
    best = math.inf
    for combination in itertools.product(*options.of.values()):
        pick = dict(zip(nodes, combination, strict=True))
        wanted = {(value, pick[node].operands[i]) for node, i, value in uses}
        wanted |= {(value, placements[0]) for value, placements in ends.items()}
        moved = [price(value, pick[value[0]].outputs[value[1]], target) for value, target in wanted]
        paid = [seconds for seconds in moved if seconds is not None]
        if len(paid) == len(moved):
            best = min(best, sum(own[node][option] for node, option in pick.items()) + sum(paid))
    return best


@product(cost=[Cost(), Cost(latency=1.0), Cost(bandwidth=1e6, flops=1e9)], kind=[Small, Shared])
def test_no_combination_is_cheaper(kind: type[nn.Module], cost: Cost) -> None:
    program, options, prices, ends = problem(kind, cost)
    found = solve(program.graph, options, prices, ends)
    assert found is not None
    assert found.cost == pytest.approx(cheapest(options, prices, ends), rel=1e-6)


def test_what_cannot_be_has_no_solution() -> None:
    program, options, prices, ends = problem(Small, Cost())
    assert solve(program.graph, options, prices, dict.fromkeys(ends, (V,))) is None


def test_with_the_batch_allowed_cutting_it_is_cheaper_for_the_small_model_of_the_paper() -> None:
    """1.2B parameters at 8 × 1024: a layer's gradients are 28.3 M elements, its four activations 50.3 M."""
    config = transformers.GPT2Config(n_embd=1536, n_head=16, n_layer=2, vocab_size=51200, use_cache=False)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).train()
        batch = {"input_ids": torch.zeros(8, 1024, dtype=torch.long)}

    def loss(outputs: Any, batch: Any) -> Tensor:
        logits: Tensor = outputs["logits"]
        return logits.float().square().sum()

    plan = Plan(tp=8)
    program = canonicalize(capture(model, batch, plan, loss).program.copy())
    for allowed in (False, True):
        given = divide(program.copy(), 8, {"b"}, where="batch", remedy="") if allowed else program
        options = list_options(given, 8, carried(given), {}, is_free=True, data_parallel=allowed)
        prices = Prices(given, options, plan.cost, width=1536)
        found = solve(given.graph, options, prices, {})
        assert found is not None
        matrices = [p for p in given.parameters if ".h." in p.fqn and len(p.type.shape) > 1]
        kinds = {found.chosen[given.node(p.node)].outputs[0].kind for p in matrices}
        assert kinds == {"I"} if allowed else "S" in kinds


# Axes with links of their own: what is solved on an axis is priced by its bandwidth and latency.


class Block(nn.Module):
    """A pair of linear layers whose split costs an all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.down(torch.relu(self.up(x))).square().mean()
        return loss


def chosen(cost: Cost) -> Choice:
    program = capture(Block(), (torch.randn(4, 8),), Plan(tp=2, dp=2, cost=cost)).program
    return place(divide_batch(canonicalize(program)), {}).choices["tp"]


def kinds(choice: Choice) -> set[str]:
    return {str(choice.chosen[node].outputs[0]) for node in choice.chosen if "weight" in node.name}


def test_an_axis_with_its_own_link_is_priced_as_a_machine_with_that_link() -> None:
    own, machine = (
        chosen(Cost(axes={"tp": {"bandwidth": 2e8, "latency": 3e-6}})),
        chosen(Cost(bandwidth=2e8, latency=3e-6)),
    )
    assert own.solution.cost == machine.solution.cost
    assert kinds(own) == kinds(machine) == {"I"}
    usual = chosen(Cost())
    assert usual.solution.cost < own.solution.cost
    assert kinds(usual) == {"S(0)", "S(1)"}


def test_the_links_of_another_axis_say_nothing() -> None:
    assert chosen(Cost(axes={"dp": {"bandwidth": 1e6, "latency": 1.0}})).solution.cost == chosen(Cost()).solution.cost
