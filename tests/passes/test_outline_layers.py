"""outline_layers: equal parts of a step are one region, found by structure, and written out they are what was there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fxpar
from fxpar.compile import compile_model
from fxpar.cost.layers import Rows, behind_gathers, behind_rows, longest, parts, row_runs
from fxpar.errors import CheckFailed, TextError
from fxpar.ir.program import Program, note
from fxpar.ir.regions import inlined, region_of, regions
from fxpar.manager import PassManager, has_same_dataflow
from fxpar.ops.collectives import COERCION_OF
from fxpar.passes.outline_layers import outline_layers
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import verify_static
from tests.products import few, product
from tests.zoo import CASES, SIZES, VOCABULARY, step_of, tokens

_LAYERS = """\
fxpar 2
plan {"tp": 2}
properties canonical coalesced collectives layouts local masks rng step vocabulary
symbol b = x.0 like 3
%x = input["x"] : f32[b, 8] tp:I
%fxpar_random_state = input["fxpar.rng"] : i64[3] tp:R
%b = aten.sym_size.int(%x, 0) : b
%start = aten.neg.default(%x) : f32[b, 8] tp:I
"""


def _layer(i: int, source: str) -> str:
    """An operation more than a part must have, and a draw of its own."""
    lines = [f"%a{i}_0 = aten.tanh.default(%{source}) : f32[b, 8] tp:I  # layers.{i} model.py:1"]
    for j in range(1, 24):
        lines.append(f"%a{i}_{j} = aten.mul.Tensor(%a{i}_{j - 1}, {j}.5) : f32[b, 8] tp:I  # layers.{i}.act model.py:2")
    lines.append(
        f"%d{i} = fxpar.dropout(%a{i}_23, %fxpar_random_state, 0.5) : f32[b, 8] tp:I {{random={i + 7}}}"
        f"  # layers.{i}.drop model.py:3"
    )
    lines.append(f"%y{i} = aten.add.Tensor(%{source}, %d{i}) : f32[b, 8] tp:I  # layers.{i} model.py:4")
    return "\n".join(lines) + "\n"


def _stack(count: int) -> Program:
    body = "".join(_layer(i, f"y{i - 1}" if i else "start") for i in range(count))
    return parse_program(f"{_LAYERS}{body}return y=%y{count - 1}\n")


def test_layers_become_calls_of_one_region() -> None:
    found = outline_layers(_stack(3))
    text = print_program(found)
    assert text.splitlines()[4:8] == [
        "region layer  # layers.0",
        "%start = operand : f32[b, 8] tp:I",
        "%fxpar_random_state = operand : i64[3] tp:R",
        "%a0_0 = aten.tanh.default(%start) : f32[b, 8] tp:I  # layers.0 model.py:1",
    ]
    assert text.splitlines()[31:] == [
        "%d0 = fxpar.dropout(%a0_23, %fxpar_random_state, 0.5) : f32[b, 8] tp:I {random=1}  # layers.0.drop model.py:3",
        "%y0 = aten.add.Tensor(%start, %d0) : f32[b, 8] tp:I  # layers.0 model.py:4",
        "result %y0",
        '%x = input["x"] : f32[b, 8] tp:I',
        '%fxpar_random_state = input["fxpar.rng"] : i64[3] tp:R',
        "%b = aten.sym_size.int(%x, 0) : b",
        "%start = aten.neg.default(%x) : f32[b, 8] tp:I",
        "%layer_1 = region.layer(%start, %fxpar_random_state, random=[7]) gives %y0  # layers.0",
        "%layer_2 = region.layer(%y0, %fxpar_random_state, random=[8]) gives %y1  # layers.1",
        "%layer_3 = region.layer(%y1, %fxpar_random_state, random=[9]) gives %y2  # layers.2",
        "return y=%y2",
    ]
    assert print_program(parse_program(text)) == text


def test_written_out_calls_are_what_was_there() -> None:
    program = _stack(3)
    out = inlined(outline_layers(program.copy()))
    assert has_same_dataflow(out, program)
    notes = {node.name: node.meta["custom"]["fxpar"] for node in out.graph.nodes if node.op == "call_function"}
    assert notes["layer_1_d0"].random == 7
    assert notes["y0"].region == "layer_1"
    assert notes["layer_3_d0"].random == 9
    assert notes["layer_3_d0"].fqn == "layers.2.drop"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (" * 1", " * 1", ""),  # nothing is changed, nothing is told
        ("aten.mul.Tensor(%a1_3, 4.5)", "aten.mul.Tensor(%a1_3, 4.25)", "literal"),
        ("aten.mul.Tensor(%a1_3, 4.5)", "aten.mul.Tensor(%a1_2, 4.5)", "operand"),
        ("aten.mul.Tensor(%a1_3, 4.5)", "aten.mul.Tensor(%start, 4.5)", "outer operand"),
    ],
)
def test_what_differs_in_one_layer_is_not_called(old: str, new: str, reason: str) -> None:
    program = parse_program(print_program(_stack(4)).replace(old, new))
    found = outline_layers(program.copy())
    calls = [node for node in found.graph.nodes if region_of(node) is not None]
    assert (len(calls) < 4) == bool(reason)
    assert has_same_dataflow(inlined(found), program)


def test_one_layer_stays_where_it_is() -> None:
    assert regions(outline_layers(_stack(1))) == []


def _text(old: str, new: str) -> str:
    text = print_program(outline_layers(_stack(2)))
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("region.layer(%start, %fxpar", "region.layer(%fxpar", "passes 1 values"),
        ("region.layer(%start, ", "region.layer(%fxpar_random_state, ", r"passes i64\[3\]"),
        (", random=[7]", "", "passes 0 identities"),
        ("random=[7]", "random=[7, 9]", "passes 2 identities"),
        ("random=[8]", "random=[7]", "draws the same random bits"),
        ("%start = operand : f32[b, 8] tp:I", "%start = operand : f32[b, 8] tp:R", "passes f32"),
    ],
)
def test_the_checks_descend_into_regions(old: str, new: str, reason: str) -> None:
    with pytest.raises(CheckFailed, match=reason):
        verify_static(parse_program(_text(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("region.layer(", "region.other(", "region.other is unknown"),
        (" gives %y0", "", "takes 0 of the 1 results"),
        (" gives %y0", " gives %y0, %z", "takes 2 of the 1 results"),
        (" gives %y0", " gives %x", "defined twice"),
        ("result %y0", "result %start", "not a node of the region"),
        ("result %y0\n", "", "is an input of the program"),
        ("region layer ", "region layer\nregion layer ", "in another region"),
        ("random=[7]", "random=7", "must be a list of numbers"),
        ("random=[7]", "seed=[7]", "takes no seed"),
    ],
)
def test_a_malformed_region_is_refused(old: str, new: str, reason: str) -> None:
    with pytest.raises(TextError, match=reason):
        parse_program(_text(old, new))


def _step(config: transformers.PretrainedConfig, model: type, **plan: Any) -> Program:
    compiled = compile_model(model(config).train(), tokens(), fxpar.Plan(tp=2, **plan))
    return step_of(compiled.program)


def _gpt2(layers: int) -> transformers.GPT2Config:
    return transformers.GPT2Config(n_layer=layers, n_embd=96, n_head=8, vocab_size=VOCABULARY, use_cache=False)


def _shape(step: Program) -> dict[str, tuple[int, int]]:
    """Of each region how many nodes it has, and how often it is called."""
    calls = [region_of(node) for node in step.graph.nodes]
    return {region.name: (len(region.body), calls.count(region)) for region in regions(step)}


def test_regions_do_not_grow_with_depth() -> None:
    few, many = (_step(_gpt2(layers), transformers.GPT2LMHeadModel, sequence_parallel=True) for layers in (2, 3))
    assert {name: size for name, (size, _) in _shape(few).items()} == {
        name: size for name, (size, _) in _shape(many).items()
    }
    assert [count for _, count in _shape(few).values()] == [2, 2]
    assert [count for _, count in _shape(many).values()] == [3, 3]


def test_gathers_in_front_of_a_step_cut_no_layer() -> None:
    """What travels there is waited for anywhere, and is no part: layers are called as without shards."""
    batch = {name: torch.cat([value, value[:1]]) for name, value in tokens().items()}
    model = transformers.GPT2LMHeadModel(_gpt2(4)).train()
    for shard in ("none", "optimizer", "gradients"):
        step = step_of(compile_model(model, batch, fxpar.Plan(dp=2, shard=shard)).program)
        assert {name: calls for name, (_, calls) in _shape(step).items()} == {"layer": 4, "layer_backward": 4}, shard


def _llama(layers: int) -> transformers.LlamaConfig:
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": layers, "num_key_value_heads": 4}
    return transformers.LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes)


@product(
    config__model=[(_gpt2(3), transformers.GPT2LMHeadModel), (_llama(3), transformers.LlamaForCausalLM)],
    sequence_parallel=[True, False],
)
def test_a_layer_ends_behind_the_norm_of_the_next(
    config: transformers.PretrainedConfig, model: type, sequence_parallel: bool
) -> None:
    step = _step(config, model, sequence_parallel=sequence_parallel)
    assert [count for _, count in _shape(step).values()] == [3, 3]
    targets = [str(node.target) for node in regions(step)[0].body]
    norm = ("aten.native_layer_norm.default", "aten.rsqrt.default")
    sums = [i for i, target in enumerate(targets) if target.startswith("fxpar.reduce")]
    norms = [i for i, target in enumerate(targets) if target in norm]
    assert [a < b for a, b in zip(sums, norms, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("config", "model", "norms"),
    [
        pytest.param(
            _gpt2(3),
            transformers.GPT2LMHeadModel,
            ("transformer.h.{}.ln_1", "transformer.ln_f"),
            marks=pytest.mark.matrix,
        ),
        (_llama(3), transformers.LlamaForCausalLM, ("model.layers.{}.input_layernorm", "model.norm")),
    ],
)
def test_what_a_layer_computes_of_the_next_one_has_its_own_module(
    config: transformers.PretrainedConfig, model: type, norms: tuple[str, ...]
) -> None:
    written = print_program(parse_program(print_program(_step(config, model))))
    nodes = inlined(parse_program(written)).graph.nodes
    for phase in ("", "backward"):
        found = Counter(note(node).fqn for node in nodes if node.op == "call_function" and note(node).phase == phase)
        for name in norms:
            assert len({found[each] for each in (name.format(i) for i in range(3))}) == 1
        # A backward adds the gradient of the residual connection to that of a norm; the last norm has none beside it.
        assert found[norms[0].format(1)] - found[norms[-1]] in ((0,) if not phase else (0, 1))
        assert found[norms[-1]] > 0


def test_cuts_stay_where_the_last_layer_would_be_another_one() -> None:
    """Behind it there is no norm, and where a layer has none in front of it there is nothing to gain."""
    program = parse_program(print_program(_stack(3)))
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    rows = row_runs(nodes)
    assert [node.name for node, inside in zip(nodes, rows.inside, strict=True) if not inside] == ["d0", "d1", "d2"]
    places = {node.name: i for i, node in enumerate(nodes)}
    assert rows.near[places["start"]] == places["a0_0"]  # and not y0, which is behind a draw
    assert rows.near[places["d0"]] == places["y0"]
    assert rows.near[places["y0"]] == places["a1_0"]
    assert rows.split(places["a1_0"]) == 1
    assert [count for _, count in _shape(outline_layers(program)).values()] == [3]


class _Ending(torch.nn.Module):
    """Layers of four blocks, and behind them a norm of what they have computed, or of what was there before."""

    def __init__(self, layers: int, before: bool) -> None:
        super().__init__()
        self.before = before
        self.linears = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4 * layers))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(4 * layers + 1))
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        start = x
        for norm, linear in zip(self.norms, self.linears, strict=False):
            x = x + torch.relu(linear(torch.tanh(norm(x))))
        last = torch.tanh(self.norms[-1](start if self.before else x))
        return {"loss": self.head(last).square().mean() + x.square().mean()}


@pytest.mark.parametrize("before", [False, True])
def test_no_layer_is_lost_to_a_norm_that_reads_another_value(before: bool) -> None:
    """Its tokens are those of the norm in front of a layer, and its text is not."""
    compiled = compile_model(_Ending(2, before), {"x": torch.randn(2, 3, 8)}, fxpar.Plan())
    found = _shape(outline_layers(compiled.program))
    assert [count for _, count in found.values()] == [2]


@pytest.mark.matrix
def test_sliding_and_full_layers_are_two_classes() -> None:
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        hidden_size=96,
        num_attention_heads=8,
        intermediate_size=160,
        num_key_value_heads=4,
        head_dim=12,
        sliding_window=8,
        vocab_size=VOCABULARY,
        attention_dropout=0.1,
        use_cache=False,
    )
    step = _step(config, transformers.Gemma3ForCausalLM)
    forward = [count for name, (_, count) in _shape(step).items() if not name.startswith("layer_backward")]
    assert forward == [4, 2]


@pytest.mark.parametrize("name", few(("llama", "bert", "bloom", "nanogpt"), ["llama"]))
def test_regions_print_and_parse(name: str) -> None:
    case = CASES[name]
    program = compile_model(case.model(), case.example(), case.plan(2), case.loss).program
    step = step_of(program)
    text = print_program(step)
    assert regions(step)
    assert print_program(parse_program(text)) == text
    out = print_program(inlined(step))
    assert print_program(parse_program(out)) == out


def test_the_manager_tells_what_changes_dataflow_in_a_region() -> None:
    program = parse_program(_text("%start, %fxpar_random_state, random=[7]", "%x, %fxpar_random_state, random=[7]"))
    with pytest.raises(fxpar.errors.PassError, match="preserves dataflow"):
        PassManager([_taking(program)]).run(_stack(2))


def _taking(other: Program) -> fxpar.manager.Pass:
    @fxpar.register_pass("taking", preserves="dataflow")
    def taking(program: Program) -> Program:
        """Another program."""
        return other

    return taking


def test_parts_of_a_sequence() -> None:
    layer, other = [1, 2, 3, 4], [1, 2, 9, 4]
    sequence = [7, *(layer * 5 + other) * 2, 8]
    # The last of each layer lives up to the first of the next, all others in their layer.
    until = [1, *(i + (1 if (i - 1) % 4 == 3 else 3 - (i - 1) % 4) for i in range(1, 49)), 49]
    found = parts(sequence, until)
    assert found == [(i, i + 4) for i in range(1, 49, 4)]
    assert longest([1, 2, 3]) is None
    assert parts([1, 1, 1, 1], [0, 1, 2, 3], least=2) == [(0, 2), (2, 4)]


def test_cuts_are_moved_behind_rows() -> None:
    """A layer is a norm (1, 2), a product (3), and what is added (4): the norm reads the sum and the product."""
    sequence = [0, *[1, 2, 3, 4] * 3, 1, 2, 5]
    until = list(range(1, len(sequence) + 1))
    inside = tuple(token in (1, 2, 4) for token in sequence)
    near = [i + 2 if token in (0, 4) else i + 1 for i, token in enumerate(sequence)]
    near = [i if sequence[i] == 2 or i == len(sequence) - 1 else last for i, last in enumerate(near)]
    rows, found = Rows(inside, near), [(1, 5), (5, 9), (9, 13)]
    assert [rows.split(cut) for cut in (5, 6, 7)] == [1, 2, 0]
    assert behind_rows(found, sequence, until, rows) == [(3, 7), (7, 11), (11, 15)]
    # Without a norm at the end, in other tokens, or where a tuple would be cut, they stay; so does a part alone.
    assert behind_rows(found, sequence[:13], until[:13], Rows(inside[:13], near[:13])) == found
    assert behind_rows(found, [*sequence[:13], 9, 2, 5], until, rows) == found
    assert behind_rows(found, sequence, [*until[:11], -1, *until[12:]], rows) == found
    assert behind_rows([found[0], found[2]], sequence, until, rows) == [found[0], found[2]]


def test_parts_end_with_the_gather_with_which_they_began() -> None:
    sequence, found = [0, *[1, 2, 3] * 3, 1, 4], [(1, 4), (4, 7), (7, 10)]
    gathers = [token == 1 for token in sequence]
    assert behind_gathers(found, sequence, gathers) == [(2, 5), (5, 8), (8, 11)]
    # The last one has none after it, it is another one, or it begins what follows.
    assert behind_gathers(found, sequence[:10], gathers[:10]) == found
    assert behind_gathers(found, [*sequence[:10], 5, 4], [*gathers[:10], True, False]) == found
    assert behind_gathers([*found, (10, 12)], sequence, gathers) == [*found, (10, 12)]
    assert behind_gathers(found, sequence, [False] * len(sequence)) == found


def test_a_backward_s_layer_does_not_begin_with_a_gather() -> None:
    """Nothing would be beside it; at the end it has the gradients of weights."""
    options: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "use_cache": False}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    config = transformers.LlamaConfig(**options)
    step = _step(config, transformers.LlamaForCausalLM, sequence_parallel=True, cost=fxpar.Cost(flops=1e14))
    (region,) = (region for region in regions(step) if region.name == "layer_backward")
    sent = [str(node.target) for node in region.body if node.target in COERCION_OF]
    assert sent.count("fxpar.all_gather") == sent.count("fxpar.reduce_scatter") == 2
    assert sent[0] == "fxpar.reduce_scatter"
    assert sent[-1] == "fxpar.all_gather"


def test_cuts_are_not_moved_into_what_stands_behind() -> None:
    """Other parts begin with the second half of a norm: the first parts may not take it."""
    sequence = [0, *[1, 2, 3, 4] * 3, 1, *[2, 6, 7] * 2]
    until = list(range(1, len(sequence) + 1))
    inside = tuple(token in (1, 2, 4) for token in sequence)
    near = [i + 2 if token in (0, 4) else i + 1 for i, token in enumerate(sequence)]
    near = [i if sequence[i] in (2, 6, 7) else last for i, last in enumerate(near)]
    rows, found = Rows(inside, near), [(1, 5), (5, 9), (9, 13), (14, 17), (17, 20)]
    assert behind_rows(found[:3], sequence, until, rows) == [(3, 7), (7, 11), (11, 15)]
    assert behind_rows(found, sequence, until, rows) == found


def test_a_run_reads_what_stands_in_front_of_it() -> None:
    rows = Rows((False, True, True), (2, 1, 2))
    assert [rows.split(cut) for cut in (1, 2, 3)] == [1, 1, 0]
