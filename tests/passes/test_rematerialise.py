"""What the plan has computed again: less is kept, within the budget, and the gradients are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import fx

from fxpar.compile import Compilation, compile_model
from fxpar.cost.communication import collectives
from fxpar.cost.measure import measure
from fxpar.errors import PlanError
from fxpar.ir.program import Program, note
from fxpar.ir.regions import regions
from fxpar.ir.step import RECOMPUTE
from fxpar.manager import PassManager
from fxpar.ops.lower import lower
from fxpar.ops.process_group import Group
from fxpar.passes import step_passes
from fxpar.passes.outline_layers import outline_layers
from fxpar.plan.cost import Cost
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Recompute
from fxpar.runtime.calls import LoweredStep, cut
from fxpar.text.parsing import parse_program
from fxpar.text.printing import node_text
from fxpar.verify.static import STATIC, verify_static
from fxpar.verify.values import call_inputs, program_state, verify_values
from tests.products import few

_HEAD = """fxpar 2
plan {"tp": 2, "recompute": {"mode": "selective"}}
properties canonical coalesced collectives layouts local masks rng sequence vocabulary
symbol n = x.0 like 4
loss loss
%u1 = parameter["u1"] : f32[16, 8] tp:S(0)
%d1 = parameter["d1"] : f32[8, 16] tp:S(1)
%u2 = parameter["u2"] : f32[16, 8] tp:S(0)
%d2 = parameter["d2"] : f32[8, 16] tp:S(1)
%w = parameter["w"] : f32[8] tp:I
%x = input["x"] : f32[n, 8] tp:R
%y0 = aten.mul.Tensor(%x, %w) : f32[n, 8] tp:I
"""
_LAYER = """%c{i} = fxpar.copy_to[tp](%y{j}) : f32[n, 8] tp:I→R
%h{i} = aten.linear.default(%c{i}, %u{i}) : f32[n, 16] tp:S(1)
%a{i} = aten.exp.default(%h{i}) : f32[n, 16] tp:S(1)
%b{i} = aten.mul.Tensor(%a{i}, %h{i}) : f32[n, 16] tp:S(1)
%p{i} = aten.linear.default(%b{i}, %d{i}) : f32[n, 8] tp:P
%r{i} = fxpar.reduce_from[tp](%p{i}) : f32[n, 8] tp:P→I
%e{i} = aten.exp.default(%r{i}) : f32[n, 8] tp:I
%y{i} = aten.add.Tensor(%y{j}, %e{i}) : f32[n, 8] tp:I
"""
_END = """%loss = aten.sum.default(%y2) : f32[] tp:I
return loss=%loss
"""


def step_of(program: Program, **plan: Any) -> Program:
    """The step, before equal layers become calls."""
    trained = [p.fqn for p in program.parameters if p.trainable]
    planned = program.with_(plan=program.plan.replace(**plan))
    return PassManager(step_passes(("loss",), ("loss",), trained), STATIC).run(planned, until="prune")


def small(**plan: Any) -> Program:
    """Two layers of two products each."""
    layers = "".join(_LAYER.replace("{i}", str(i)).replace("{j}", str(i - 1)) for i in (1, 2))
    return step_of(parse_program(f"{_HEAD}{layers}{_END}"), **plan)


def backward(made: Program) -> list[str]:
    """The text of what the backward computes, up to the second layer's first gradient."""
    nodes = [n for n in made.graph.nodes if n.op == "call_function" and note(n).phase == "backward"]
    lines = [node_text(node, made).split(" : ")[0] for node in nodes]
    return lines[: next(i for i, line in enumerate(lines) if line.startswith("%mm_3 ")) + 1]


def again(made: Program) -> list[fx.Node]:
    """What is computed again."""
    return [n for n in made.graph.nodes if n.op == "call_function" and note(n).phase and note(n).origin == RECOMPUTE]


def kept(made: Program) -> int:
    """Bytes that a rank keeps for the backward."""
    lowered = lower(made, {axis: Group(axis, n) for axis, n in made.axes.items()})
    found = measure(made, lowered, {s.name: s.example for s in made.symbols}, torch.device("cpu"), backward=False)
    return sum(entry.bytes for entry in found.saved)


def test_pointwise_operations_are_computed_again_where_they_are_read() -> None:
    """What enters the products is; their results are kept, of which the second layer's `e2` is as large as `r2`."""
    assert backward(small()) == [
        "%sym_size_int = aten.sym_size.int(%x, 0)",
        "%expand = aten.expand.default(%loss_tangent, [%sym_size_int, 8])",
        "%mul = aten.mul.Tensor(%expand, %e2)",
        "%t = aten.t.default(%mul)",
        "%a2_again = aten.exp.default(%h2)",
        "%b2_again = aten.mul.Tensor(%a2_again, %h2)",
        "%mm = aten.mm.default(%t, %b2_again)",
        "%mm_1 = aten.mm.default(%mul, %d2)",
        "%mul_1 = aten.mul.Tensor(%mm_1, %a2_again)",
        "%mul_2 = aten.mul.Tensor(%mm_1, %h2)",
        "%mul_3 = aten.mul.Tensor(%mul_2, %a2_again)",
        "%add = aten.add.Tensor(%mul_1, %mul_3)",
        "%t_3 = aten.t.default(%add)",
        "%mm_2 = aten.mm.default(%t_3, %y1)",
        "%mm_3 = aten.mm.default(%add, %u2)",
    ]


def test_a_layer_is_computed_again_from_what_enters_it() -> None:
    """Its collective too; the last of its operations only where something reads them."""
    assert backward(small(recompute=Recompute("full"))) == [
        "%sym_size_int = aten.sym_size.int(%x, 0)",
        "%expand = aten.expand.default(%loss_tangent, [%sym_size_int, 8])",
        "%h2_again = aten.linear.default(%y1, %u2)",
        "%a2_again = aten.exp.default(%h2_again)",
        "%b2_again = aten.mul.Tensor(%a2_again, %h2_again)",
        "%p2_again = aten.linear.default(%b2_again, %d2)",
        "%r2_again = fxpar.all_reduce[tp](%p2_again)",
        "%e2_again = aten.exp.default(%r2_again)",
        "%mul = aten.mul.Tensor(%expand, %e2_again)",
        "%t = aten.t.default(%mul)",
        "%mm = aten.mm.default(%t, %b2_again)",
        "%mm_1 = aten.mm.default(%mul, %d2)",
        "%mul_1 = aten.mul.Tensor(%mm_1, %a2_again)",
        "%mul_2 = aten.mul.Tensor(%mm_1, %h2_again)",
        "%mul_3 = aten.mul.Tensor(%mul_2, %a2_again)",
        "%add = aten.add.Tensor(%mul_1, %mul_3)",
        "%t_3 = aten.t.default(%add)",
        "%mm_2 = aten.mm.default(%t_3, %y1)",
        "%mm_3 = aten.mm.default(%add, %u2)",
    ]


_REPEATED = """%l1 = aten.linear.default(%x, %u1) : f32[n, 16] tp:S(1)
%v1 = aten.expand.default(%l1, [4, -1, -1]) : f32[4, n, 16] tp:S(2)
%q1 = aten.exp.default(%v1) : f32[4, n, 16] tp:S(2)
%m1 = aten.mul.Tensor(%q1, %v1) : f32[4, n, 16] tp:S(2)
%p1 = aten.linear.default(%m1, %d1) : f32[4, n, 8] tp:P
%r1 = fxpar.reduce_from[tp](%p1) : f32[4, n, 8] tp:P→I
%loss = aten.sum.default(%r1) : f32[] tp:I
return loss=%loss
"""


def test_of_a_kept_value_its_views_are_made_again() -> None:
    """They cost nothing; a repeated one that is kept would be written out."""
    made = step_of(parse_program(f"{_HEAD.rsplit('%y0', 1)[0]}{_REPEATED}"))
    assert [node.name for node in again(made)] == ["v1_again", "q1_again", "m1_again"]
    assert kept(made) == 4 * 8 * 4


def test_each_byte_is_counted_once() -> None:
    """Of [4, 8] and [4, 16 / 2] in four bytes each: y, h, a, b and e of two layers; y, h and e; y alone."""
    value = 4 * 8 * 4
    assert [kept(small(recompute=Recompute(mode))) for mode in ("none", "selective", "full")] == [
        10 * value,
        6 * value,
        2 * value,
    ]


@pytest.mark.parametrize(
    ("budget", "products", "operations"),
    [(1280, 0, 0), (1279, 0, 1), (1024, 0, 2), (0.6, 0, 4), (767, 1, 5), (0.4, 2, 6), (512, 2, 6)],
)
def test_a_budget_is_kept_with_the_least_work(budget: float, products: int, operations: int) -> None:
    """Each value has 128 bytes: one operation for each that is too much, and no product before there must be one."""
    made = small(recompute=Recompute("selective", budget))
    assert kept(made) <= (budget if budget > 1 else budget * 1280)
    names = Counter(str(node.target) for node in again(made))
    assert (names["aten.linear.default"], names.total()) == (products, operations)


@pytest.mark.parametrize("budget", [511, 0, 0.39])
def test_a_budget_that_cannot_be_kept_is_refused_with_the_least_that_can(budget: float) -> None:
    with pytest.raises(PlanError, match="give at least 512 bytes, of 1280 without recomputation"):
        small(recompute=Recompute("selective", budget))


def test_a_model_without_layers_is_refused() -> None:
    text = f"{_HEAD}{_LAYER.replace('{i}', '1').replace('{j}', '0')}{_END}".replace("%y2", "%y1")
    with pytest.raises(PlanError, match="finds no layers"):
        step_of(parse_program(text), recompute=Recompute("full"))


def _config(kind: str) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 24, "use_cache": False}
    if kind == "gpt2":
        return transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, **sizes)
    heads: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attention_dropout": 0.1,
    }
    return transformers.LlamaConfig(hidden_size=16, intermediate_size=32, **heads, **sizes)


@cache
def compiled(kind: str, sequence_parallel: bool) -> tuple[Compilation, Mapping[str, Any], Mapping[str, Any]]:
    """A tiny model with dropout over two ranks, its state and a batch."""
    torch.manual_seed(0)
    model = {"gpt2": transformers.GPT2LMHeadModel, "llama": transformers.LlamaForCausalLM}[kind](_config(kind))
    model = model.train()
    ids = torch.randint(0, 24, (2, 8))
    batch = {"input_ids": ids, "labels": ids}
    found = compile_model(model, batch, Plan(tp=2, sequence_parallel=sequence_parallel, cost=_LARGE))
    state = program_state(found.captured.program, model)
    return found, state, call_inputs(found.captured, model, batch)


@cache
def differentiated(kind: str, sequence_parallel: bool) -> Program:
    """Its step, where all is kept."""
    program = compiled(kind, sequence_parallel)[0].program
    first, *_ = step_passes(("loss",), ("loss",), [p.fqn for p in program.parameters if p.trainable])
    return PassManager([first]).run(program)


@cache
def step(kind: str, sequence_parallel: bool, mode: str) -> Program:
    """Its step under one of the plans."""
    program = differentiated(kind, sequence_parallel)
    _, *others = step_passes((), (), ())
    return PassManager(others).run(program.with_(plan=program.plan.replace(**_PLANS[mode])), until="prune")


_MODELS = [(kind, sequence) for kind in ("gpt2", "llama") for sequence in (False, True)]
_FEW = [("gpt2", False), ("llama", True)]
_MARKED = few(_MODELS, _FEW)
_EVERY_TIME = {("llama", True, mode) for mode in ("selective", "budget", "full")}
# Of large models bytes decide how they are split, and not how often something is sent.
_LARGE = Cost(latency=1e-15)
_PLANS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "selective": {"recompute": Recompute("selective")},
    "budget": {"recompute": Recompute("selective", activation_memory_budget=0.3)},
    "full": {"recompute": Recompute("full")},
}


_CASES = [(*model, mode) for model in _MODELS for mode in ("selective", "budget", "full")]


@pytest.mark.parametrize(("kind", "sequence", "mode"), few(_CASES, _EVERY_TIME))
def test_gradients_stay_equal(kind: str, sequence: bool, mode: str) -> None:
    found, state, inputs = compiled(kind, sequence)
    made = step(kind, sequence, mode)
    assert again(made)
    if mode == "full":  # which has all that the others have
        verify_static(made)
    report = verify_values(found.captured.program, made, state, inputs)
    assert report.ok, report


@pytest.mark.parametrize(("kind", "sequence"), _MARKED)
def test_less_is_kept_and_no_more_than_the_budget(kind: str, sequence: bool) -> None:
    size = {mode: kept(step(kind, sequence, mode)) for mode in _PLANS}
    assert size["selective"] < 0.8 * size["none"]
    assert size["budget"] <= 0.3 * size["none"]
    assert size["full"] < 0.25 * size["none"]


@pytest.mark.parametrize(("kind", "sequence"), _MARKED)
def test_full_sends_again_what_layers_send_and_selective_gathers_alone(kind: str, sequence: bool) -> None:
    """Of what two layers send, all but their results, which are kept."""
    sent = {}
    for mode in _PLANS:
        sent[mode] = Counter(c.op for c in collectives(step(kind, sequence, mode)) if c.phase == "recompute")
    assert sent["none"] == sent["selective"] == {}
    assert set(sent["budget"]) == ({"all_gather"} if sequence else set())
    wanted = {"all_gather": 4, "reduce_scatter": 2} if sequence else {"all_reduce": 2}
    assert sent["full"] == wanted


def test_products_are_computed_again_only_where_the_budget_demands_it() -> None:
    for mode, demands in (("selective", False), ("budget", True)):
        names = {str(node.target) for node in again(step("llama", True, mode))}
        assert bool(names & {"aten.linear.default", "fxpar.attention_forward"}) is demands


def test_what_one_layer_leaves_to_the_next_is_kept() -> None:
    """Else the first layers would be computed again for the last one, and all of it be alive at once."""
    made = again(step("gpt2", False, "selective"))
    layers = [note(node).fqn.split(".")[2] for node in made if ".h." in note(node).fqn]
    assert layers == sorted(layers, reverse=True)
    assert set(layers) == {"0", "1"}


@pytest.mark.parametrize(("mode", "recomputes"), [("none", False), ("selective", True), ("full", True)])
def test_what_is_computed_again_stays_so_where_layers_are_calls(mode: str, recomputes: bool) -> None:
    """A compiler that saw forward and backward at once would keep what the plan says is not kept."""
    program = step("gpt2", False, mode)
    outlined = outline_layers(program.copy())
    assert regions(outlined)
    graph = lower(outlined, {"tp": Group("tp", 2)}).module.graph
    forward, early, late, parameter, both = cut(graph)
    made = LoweredStep(outlined, graph, forward, (*early, *late), parameter, both, {}, {}, (), {}, {}, len(early))
    assert made.recomputes is recomputes


def test_a_step_without_gradients_computes_nothing_again() -> None:
    program = compiled("gpt2", False)[0].program
    program = program.with_(plan=replace(program.plan, recompute=Recompute("full")))
    assert not again(PassManager(step_passes(("loss",), (), ()), STATIC).run(program, until="prune"))
