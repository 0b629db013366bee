"""The units in which a step is compiled: no more texts for many layers; each value is made before it is read."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx

import fxpar
from fxpar.compile import compile_model, lower_program
from fxpar.ir.program import Note, ScalarType, TensorType, has_note, note, output_node, output_types, set_note
from fxpar.layout.symbolic_sizes import names
from fxpar.mesh.axes import joined_names
from fxpar.ops.collectives import reduce_from
from fxpar.ops.process_group import Group
from fxpar.runtime import inductor
from fxpar.runtime import units as units_module
from fxpar.runtime.units import Segment, StepUnits, computing_again, dense, is_number, units_of
from tests.cudagraphs.graphed import deepseek_v3, mixtral, words
from tests.passes.experts import Routed
from tests.zoo import SIZES, VOCABULARY, step_of, tokens

aten = torch.ops.aten


@functools.cache
def _graph(layers: int, experts: bool) -> fx.Graph:
    """The step of a GPT-2 or a Mixtral with dropout; in a Mixtral there are sizes of what the program makes itself."""
    config = transformers.GPT2Config(n_layer=layers, n_embd=96, n_head=8, vocab_size=VOCABULARY, use_cache=False)
    model: torch.nn.Module = transformers.GPT2LMHeadModel(config)
    batch = tokens()
    plan = fxpar.Plan(tp=2, sequence_parallel=True)
    if experts:
        model, batch, plan = mixtral(layers=layers), words(1)[0], fxpar.Plan(dp=2, ep=2)
    program = compile_model(model.train(), batch, plan).program
    step = step_of(program)
    groups = {name: Group("ranks", 2) for name in joined_names(program.axes)}
    graph: fx.Graph = lower_program(step, groups).module.graph
    return graph


def _units(layers: int, *, paired: bool, experts: bool = False) -> tuple[StepUnits, frozenset[str], set[str]]:
    """Of a step its units, what is wanted at the end, and what is there at the start."""
    graph = _graph(layers, experts)
    wanted = frozenset(node.name for node in output_node(graph).all_input_nodes)
    start = {node.name for node in graph.nodes if node.op == "placeholder"}
    return units_of(graph, ("backward", "parameter"), wanted, paired=paired), wanted, start


@pytest.fixture(scope="module")
def few() -> tuple[StepUnits, frozenset[str], set[str]]:
    return _units(2, paired=True)


def test_there_are_as_many_texts_for_many_layers_as_for_few(few: tuple[StepUnits, frozenset[str], set[str]]) -> None:
    many, _, _ = _units(3, paired=True)
    texts = [{unit.text for unit in (*units.forward, *units.backward)} for units in (few[0], many)]
    assert len(texts[0]) == len(texts[1])
    assert len(many.forward) == len(few[0].forward) + 1
    paired = [unit for unit in many.forward if unit.backward is not None]
    assert len(paired) >= 4  # three layers and the head


@pytest.mark.matrix
def test_inner_layers_of_experts_have_one_text() -> None:
    """Sizes of what a layer makes are numbers of its own, forward and backward, so that it is a region."""
    units, _, _ = _units(4, paired=True, experts=True)
    texts = Counter(unit.text for unit in units.forward if unit.backward is not None)
    assert max(texts.values()) >= 2


@pytest.mark.parametrize(
    ("paired", "experts"),
    [(True, False), (False, False), *(pytest.param(how, True, marks=pytest.mark.matrix) for how in (True, False))],
)
def test_each_value_is_made_before_it_is_read(paired: bool, experts: bool) -> None:
    units, wanted, there = _units(2, paired=paired, experts=experts)
    for unit in units.forward:
        assert set(unit.early) <= there
        there |= {unit.nodes[i].name for i in units.results[unit][0]}
    for unit in units.backward:
        assert {*unit.late, *(() if unit.forward is not None else unit.early)} <= there
        there |= {unit.nodes[i].name for i in units.results[unit][1]}
    assert wanted <= there


class _Balanced(Routed):
    """Sums the shares of experts before rows travel; the loss reads the sums when they are back."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.words(input_ids)
        shares = self.shares(x.view(-1, x.shape[-1]))
        load = shares.sum(0)
        logits = self.head(self.mixed(x, shares.topk(self.choices)))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss + load.square().sum()}


@pytest.mark.parametrize(
    ("build", "plan"),
    [
        (_Balanced, {"dp": 2}),
        pytest.param(mixtral, {"dp": 2}, marks=pytest.mark.matrix),
        pytest.param(deepseek_v3, {"tp": 2, "etp": 1, "sequence_parallel": True}, marks=pytest.mark.matrix),
    ],
)
def test_what_the_routing_gives_a_size_is_in_no_compiled_unit(
    build: Callable[[], torch.nn.Module], plan: dict[str, Any]
) -> None:
    """In one call, whatever its reasons; of what is compiled all operands are tensors, and sends are awaited."""
    model, experts = build(), fxpar.Experts("dropless")
    program = compile_model(model.train(), words(1)[0], fxpar.Plan(ep=2, experts=experts, compile=True, **plan)).program
    step = step_of(program)
    for node in [node for node in step.graph.nodes if node.target is reduce_from]:
        node.all_input_nodes[0].append(node)  # sent as early as can be
    graph = lower_program(step, {n: Group("ranks", 2) for n in joined_names(program.axes)}).module.graph
    wanted = frozenset(node.name for node in output_node(graph).all_input_nodes)
    units = units_of(graph, ("backward", "parameter"), wanted, paired=True)
    counted = {number.name for number in step.counted}
    made = {node.name: node for node in graph.nodes}
    for unit in units.forward:
        assert (unit.forward is not None and unit.backward is not None) <= (not unit.eager)
    for unit in (unit for unit in (*units.forward, *units.backward) if not unit.eager):
        inside = set(unit.nodes)
        for node in unit.nodes:
            assert is_number(node) or names(n for kind in output_types(node) for n in kind.shape).isdisjoint(counted)
            assert not node.name.endswith("_start") or inside.issuperset(node.users)
        for name in (*unit.early, *unit.late):
            assert not has_note(made[name]) or isinstance(note(made[name]).type, TensorType)
            assert made[name].name != "split_sizes"
    eager = [[node.name for node in unit.nodes if not is_number(node)] for unit in units.forward if unit.eager]
    assert eager[0] == ["split_sizes_start"]
    assert eager[1][:2] == ["split_sizes", "send_rows_start"]
    assert eager[-1][-1] == "return_rows"
    # A shared expert is computed while rows travel back.
    assert len(eager) == (3 if build is deepseek_v3 else 2)


def test_what_a_number_reads_is_handed_on() -> None:
    """A size of what one segment makes, which that one reads and another one too."""
    graph = fx.Graph()
    x = graph.placeholder("x")

    def add(target: Any, args: tuple[Any, ...], kind: Any, region: str = "") -> fx.Node:
        return set_note(graph.call_function(target, args), Note(kind, region=region))

    kind = TensorType(torch.float32, (4,))
    made = add(aten.relu.default, (x,), kind, "first")
    size = add(aten.sym_size.int, (made, 0), ScalarType(4))
    one = add(aten.arange.default, (size,), kind, "first")
    other = add(aten.arange.default, (size,), kind, "second")
    graph.output((one, other))
    units = units_of(graph, (), {one.name, other.name}, paired=False)
    first, second = units.forward
    assert [node.name for node in first.nodes] == [made.name, size.name, one.name]
    assert second.early == (made.name,)
    assert [first.nodes[i] for i in units.results[first][0]] == [made, one]


def test_every_operation_stands_in_one_unit(few: tuple[StepUnits, frozenset[str], set[str]]) -> None:
    units, _, _ = few
    distinct = dict.fromkeys((*units.forward, *units.backward))
    nodes = [node for unit in distinct for node in unit.nodes if not is_number(node)]
    assert not any(unit.backward.again for unit in distinct if unit.backward is not None)
    assert len(nodes) == len(set(nodes))
    graph = nodes[0].graph
    assert set(nodes) == {node for node in graph.nodes if node.op == "call_function" and not is_number(node)}


@functools.cache
def _llama(layers: int, recompute: str) -> fx.Graph:
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": layers, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes)
    model = transformers.LlamaForCausalLM(config).bfloat16().train()
    program = compile_model(model, tokens(), fxpar.Plan(tp=2, recompute=fxpar.Recompute(recompute))).program
    step = step_of(program)
    graph: fx.Graph = lower_program(step, {"tp": Group("ranks", 2)}).module.graph
    return graph


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_a_norm_keeps_is_computed_again_where_it_is_read(recompute: str) -> None:
    """A layer gives the residual connection, the next one's norm, and a number of each row: no more is kept."""
    graph = _llama(3, recompute)
    wanted = frozenset(node.name for node in output_node(graph).all_input_nodes)
    units = units_of(graph, ("backward", "parameter"), wanted, paired=recompute == "none")
    layers = [unit for unit in units.forward if unit.forward is not None and unit.forward.region]
    assert len(layers) == 3
    assert len({unit.text for unit in units.forward}) == 3  # what is in front, a layer, the head
    for unit in layers:
        given = [unit.nodes[i] for i in units.results[unit][0]]
        large = [node for node in given if note(node).type.shape[-1] == 96]  # type: ignore[union-attr]
        assert [note(node).type.dtype for node in large[-2:]] == [torch.bfloat16] * 2  # type: ignore[union-attr]
        assert len(large) <= 2
    again = [unit.backward.again for unit in units.backward if unit.backward is not None]
    made = [node for unit in units.forward for node in unit.nodes]
    assert any(again)
    assert set().union(*again) <= set(made)


class _Beside(torch.nn.Module):
    """Layers of two blocks beside each other, each with a norm, on tokens first, of which one is left out.

    Args:
        told: whether the loss reads the norms of all layers, in front of their weights.
    """

    def __init__(self, layers: int, told: bool, width: int = 12) -> None:
        super().__init__()
        self.told = told
        linears = [(width, 2 * width), (2 * width, width)] * 2 * layers
        self.linears = torch.nn.ModuleList(torch.nn.Linear(*sizes) for sizes in linears)
        self.weights = torch.nn.ParameterList(torch.rand(width) for _ in range(2 * layers + 1))
        self.head = torch.nn.Linear(width, 5)

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def _block(self, norm: Tensor, i: int) -> Tensor:
        found: Tensor = self.linears[2 * i + 1](torch.relu(self.linears[2 * i](self.weights[i] * norm)))
        return found

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, norms = x.transpose(0, 1)[1:], []
        for i in range(0, len(self.weights) - 1, 2):
            norms.append(self._norm(x))
            x = x + self._block(norms[-1], i) + self._block(self._norm(x), i + 1)
        loss = self.head(self.weights[-1] * self._norm(x)).square().mean()
        return {"loss": loss + sum(each.sin().mean() for each in norms) if self.told else loss}


@pytest.mark.parametrize("told", [False, True])
def test_units_are_compiled_for_the_strides_that_others_give(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a norm of what has gaps: it is computed again of what has none, where its strides are others."""
    again = 0

    def checked(module: fx.GraphModule, fakes: Any, **kwargs: Any) -> Any:
        def run(values: list[Any]) -> Any:
            assert [each.stride() for each in values] == [each.stride() for each in fakes]
            return module(*values)

        return run

    def counted(*segments: Any) -> Segment:
        nonlocal again
        found = computing_again(*segments)
        again += len(found.again)
        return found

    monkeypatch.setattr(inductor, "compile_fx_inner", checked)
    monkeypatch.setattr(units_module, "computing_again", counted)
    batch = {"x": torch.randn(3, 5, 12)}
    module = _Beside(3, told)
    expected = module(**batch)["loss"]
    found = fxpar.parallelize(module, fxpar.Plan(compile=True), batch).train_step(batch)
    torch.testing.assert_close(found, expected.detach())
    assert again


def test_draws_take_their_identities_as_operands(few: tuple[StepUnits, frozenset[str], set[str]]) -> None:
    units, _, _ = few
    layers = [unit for unit in units.forward if unit.identities]
    identities = [identity for unit in layers for identity in unit.identities]
    assert len(identities) == len(set(identities)) == 7  # of the embedding, and three of each layer
    assert len({unit.text for unit in layers}) < len(layers)
    assert not any(str(identity) in unit.text for unit in layers for identity in unit.identities)


def test_what_a_unit_gives_has_no_gaps() -> None:
    """Of repeated and of sliced values Inductor chooses the strides, which others are compiled for."""
    x = torch.arange(24.0).view(2, 3, 4)
    for value in (x, x.permute(2, 0, 1), x[1], x.unsqueeze(1)):
        assert dense(value) is value
    for value in (x[:, :2], x[..., 1:], x.unsqueeze(2).expand(2, 3, 5, 4), x.as_strided((3, 3), (1, 1))):
        found = dense(value)
        assert found.is_contiguous()
        assert torch.equal(found, value)
