"""Heads that tp does not divide, and weights that hold several things: by value, with layouts chosen by cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fxpar.capture.capture import Captured, capture
from fxpar.compile import compile_model, compile_program
from fxpar.cost.communication import Collective, collectives
from fxpar.cost.flops import split_flops
from fxpar.cost.reasons import unsplit
from fxpar.ir.program import Program, note, operands, output_layouts
from fxpar.ops.collectives import copy_to, copy_to_shared, sum_gradients
from fxpar.plan.plan import Plan
from fxpar.verification import Verification
from fxpar.verify.values import TOLERANCE, call_inputs, program_state, verify_values
from tests.models.table import Record, add_row
from tests.verify.cases import prepared
from tests.verify.cases import program as split
from tests.zoo import stirred

VOCABULARY, LAYERS = 256, 1
_USUAL = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 96,
    "num_attention_heads": 8,
    "intermediate_size": 160,
    "attention_dropout": 0.1,
}
_GPT2 = {"n_layer": LAYERS, "n_embd": 96, "n_head": 8, "n_inner": 160, "n_positions": 64}


@dataclass(frozen=True)
class Model:
    """An architecture with heads of some numbers, and the cut of its attention's weights at some tp.

    Attributes:
        kind: name in transformers.
        options: of the configuration.
        cuts: by tp, layouts of parameters by the end of their names.
        collectives: by tp, those of its layers where they are not all-reduces alone.
    """

    kind: str
    options: Mapping[str, Any]
    cuts: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    collectives: Mapping[int, Collection[str]] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """In training mode, with biases and norm weights away from zeros and ones."""
        torch.manual_seed(1)
        usual = _GPT2 if self.kind.startswith("GPT") else _USUAL
        tokens = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        config = getattr(transformers, f"{self.kind}Config")(use_cache=False, **tokens, **{**usual, **self.options})
        config._attn_implementation = self.options.get("attn_implementation", "sdpa")
        name = "GPT2LMHeadModel" if self.kind == "GPT2" else f"{self.kind}ForCausalLM"
        return stirred(getattr(transformers, name)(config).train())


def _llama(kv: int, heads: int = 8, **options: Any) -> dict[str, Any]:
    return {"num_key_value_heads": kv, "num_attention_heads": heads, **options}


_Q, _O = {"q_proj.weight": "tp:S(0)"}, {"o_proj.weight": "tp:S(1)"}
_WHOLE = dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"), "tp:I")
_PLAIN = {**_Q, "k_proj.weight": "tp:S(0)", "v_proj.weight": "tp:S(0)", **_O}
_ONE = {**_Q, "k_proj.weight": "tp:I", "v_proj.weight": "tp:I", **_O}
_PAIRS = {**_Q, "k_proj.weight": "tp:S(0: 24 / 2; I)", "v_proj.weight": "tp:S(0: 24 / 2; I)", **_O}
# Three heads of k and v, each for two of q: q is cut by pairs, and o by its outputs.
_THREE = {
    "q_proj.weight": "tp:S(0: 3 x 32)",
    "k_proj.weight": "tp:I",
    "v_proj.weight": "tp:I",
    "o_proj.weight": "tp:S(0)",
}
_GATHERED = ("all_gather", "reduce_scatter", "all_reduce")
_BIASES = {"q_proj.bias": "tp:S(0)", "k_proj.bias": "tp:S(0: 24 / 2; I)"}

MODELS: dict[str, Model] = {
    "kv1": Model("Llama", _llama(1, attention_bias=True), {2: _ONE, 4: _ONE}),
    "kv2": Model("Llama", _llama(2, attention_bias=True), {2: _PLAIN, 4: {**_PAIRS, **_BIASES}}),
    "kv3": Model("Llama", _llama(3, 6), {2: _THREE, 4: _WHOLE}, {2: _GATHERED}),
    "kv6of12": Model("Llama", _llama(6, 12), {4: _THREE}, {4: _GATHERED}),
    "heads6": Model("Llama", _llama(6, 6), {2: _PLAIN, 4: _WHOLE}),
    "qwen2": Model("Qwen2", _llama(2), {4: {**_PAIRS, **_BIASES}}),
    "mistral": Model("Mistral", _llama(2, sliding_window=8, attn_implementation="eager"), {4: _PAIRS}),
    "phi3": Model(
        "Phi3",
        _llama(2, resid_pdrop=0.1),
        {
            2: {"qkv_proj.weight": "tp:S(0: 96 | 2 x 24)", "gate_up_proj.weight": "tp:S(0: 2 x 160)"},
            4: {"qkv_proj.weight": "tp:S(0: 96 | 2 x 24 / 2; I)", **_O},
        },
    ),
    "falcon1": Model(
        "Falcon",
        {"multi_query": True, "new_decoder_architecture": False, "hidden_dropout": 0.1, "bias": True},
        {4: {"query_key_value.weight": "tp:S(0: 96 | !24; I)", "query_key_value.bias": "tp:S(0: 96 | !24; I)"}},
    ),
    "falcon2": Model(
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "hidden_dropout": 0.1},
        {2: {"query_key_value.weight": "tp:S(0)"}, 4: {"query_key_value.weight": "tp:S(0: 144 / 2; I)"}},
    ),
    "bigcode": Model("GPTBigCode", {"multi_query": True}, {4: {"c_attn.weight": "tp:S(0: 96 | !24; I)"}}),
    "gpt2": Model("GPT2", {}, {4: {"c_attn.weight": "tp:S(1: 3 x 96)", "c_attn.bias": "tp:S(0: 3 x 96)"}}),
    "gpt2of6": Model("GPT2", {"n_head": 6}, {4: {"c_attn.weight": "tp:I", "attn.c_proj.weight": "tp:I"}}),
}
# What runs every time; `make test-matrix` runs all.
FEW = {("heads6", 4), ("phi3", 4)}
CASES = [
    pytest.param(name, tp, marks=[] if (name, tp) in FEW else [pytest.mark.matrix])
    for name, model in MODELS.items()
    for tp in model.cuts
]


def batch() -> dict[str, torch.Tensor]:
    """Ids and labels."""
    torch.manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (3, 16))
    return {"input_ids": ids, "labels": ids.clone()}


@cache
def captured(name: str) -> tuple[nn.Module, Captured]:
    """The model and its capture."""
    model = MODELS[name].build()
    return model, capture(model, batch(), Plan())


@cache
def program(name: str, tp: int) -> Program:
    """The localised program, its layouts chosen by cost."""
    found = captured(name)[1]
    return compile_program(found.program.with_(plan=Plan(tp=tp)))


def layouts(name: str, tp: int) -> dict[str, str]:
    """The layout of each parameter."""
    found = program(name, tp)
    return {p.fqn: str(output_layouts(found.node(p.node))[0]) for p in found.parameters}


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_heads_of_all_numbers_by_value(name: str, tp: int, record_property: Record) -> None:
    model, found = captured(name)
    mine = program(name, tp)
    state, inputs = program_state(found.program, model), call_inputs(found, model, batch())
    report = verify_values(found.program, mine, state, inputs)
    assert report.ok, report
    assert max(report.loss_error, report.output_error, report.max_grad_error) <= TOLERANCE
    assert {c.op for c in in_layers(mine)} == {*MODELS[name].collectives.get(tp, ("all_reduce",))}
    for end, wanted in MODELS[name].cuts[tp].items():
        assert {layout for fqn, layout in layouts(name, tp).items() if fqn.endswith(end)} == {wanted}, end
    add_row(record_property, name, tp, "none", Verification(True, "values", mine, split_flops(mine), (), report))


def in_layers(found: Program) -> list[Collective]:
    """The collectives of the layers, without those of tables and head."""
    return [c for c in collectives(found) if re.search(r"(layers|\bh)\.0", note(found.node(c.node)).fqn)]


@pytest.mark.parametrize(
    ("name", "tp", "parameters"),
    # k and v, their weights and biases: of shared blocks the gradients are summed, and of whole weights.
    [
        *[("kv1", 4, 4), ("kv2", 2, 0), ("kv2", 4, 4), ("phi3", 4, 1)],
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in [("kv1", 2, 4), ("mistral", 4, 2), ("bigcode", 4, 2)]
        ),
    ],
)
def test_a_layer_costs_two_all_reduces_each_way_whatever_its_kv_heads(name: str, tp: int, parameters: int) -> None:
    found = program(name, tp)
    counts = Counter(c.phase for c in in_layers(found) if c.phase != "parameter")
    # The first layer's f is not before the norm, whose weights have gradients: both are there.
    assert counts == Counter({"forward": 2, "backward": 2})
    summed = [node for node in found.graph.nodes if node.target in (sum_gradients, copy_to_shared, copy_to)]
    weights = [other for node in summed for other in operands(node) if other.op == "placeholder"]
    assert len(weights) == parameters
    assert sum(c.phase == "parameter" for c in collectives(found)) == bool(parameters)


def test_of_a_fused_weight_just_the_shared_part_is_summed() -> None:
    found = program("phi3", 4)
    (shared,) = [c for c in collectives(found) if c.phase == "parameter"]
    assert (shared.op, shared.bytes) == ("all_reduce", 2 * 24 * 96 * 4)


@pytest.mark.parametrize(
    "name", ["kv1", "kv2", "phi3", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("qwen2", "mistral"))]
)
def test_all_is_split_but_what_few_kv_heads_leave_to_several_ranks(name: str) -> None:
    kv = 1 if name == "kv1" else 2
    # In columns of width 96: k and v; q, o, the attention over 16 tokens, gate, up, down and the output head.
    few, rest = 2 * 12 * kv, 2 * 96 + 2 * 16 + 3 * 160 + VOCABULARY
    divided = 0.0 if kv == 1 else (1 - 2 / 4) / (1 - 1 / 4)  # one head is on all ranks, each of two on two of four
    share = split_flops(program(name, 4))
    assert share == pytest.approx((rest + divided * few) / (rest + few), abs=0.001)
    assert share > 0.95


@pytest.mark.parametrize(
    ("name", "tp", "reason"),
    [
        ("heads6", 4, r"to f32\[b, s, 6, 16\] tears S\(2\) over 4 ranks"),
        pytest.param("gpt2of6", 4, r"to f32\[b, s, 6, 16\] tears S\(2\) over 4 ranks", marks=pytest.mark.matrix),
    ],
)
def test_heads_that_do_not_divide_leave_attention_whole_and_the_rest_split(name: str, tp: int, reason: str) -> None:
    whole = {fqn: why for fqn, why in unsplit(program(name, tp)) if ".0." in fqn}
    attention = [fqn for fqn in layouts(name, tp) if "attn" in fqn and fqn.endswith("weight")]
    assert sorted(whole) == sorted(attention)
    assert all(re.search(reason, why) for why in whole.values())
    assert any("its attention stays whole" in why for why in whole.values())


@pytest.mark.parametrize(
    ("name", "tp", "reason"),
    [
        ("kv3", 2, r"to f32\[b, s, 3, 16\] tears S\(2\) over 2 ranks"),
        pytest.param("kv6of12", 4, r"to f32\[b, s, 6, 8\] tears S\(2\) over 4 ranks", marks=pytest.mark.matrix),
    ],
)
def test_kv_heads_that_do_not_divide_stay_whole_and_those_of_queries_are_split(name: str, tp: int, reason: str) -> None:
    whole = {fqn.rpartition("self_attn.")[2]: why for fqn, why in unsplit(program(name, tp)) if ".0." in fqn}
    assert sorted(whole) == ["k_proj.weight", "v_proj.weight"]
    assert all(re.search(reason, why) for why in whole.values())


def test_one_head_that_every_rank_needs_is_reported() -> None:
    whole = {fqn.rpartition("self_attn.")[2]: why for fqn, why in unsplit(program("kv1", 4)) if ".0." in fqn}
    assert whole == dict.fromkeys(
        ("k_proj.weight", "v_proj.weight"), "no cut fits: it makes one head, which every rank needs"
    )


@pytest.mark.parametrize("heads", [3, 5])
def test_heads_of_one_matrix_that_ranks_cannot_share_out_are_counted(heads: int) -> None:
    layer = nn.TransformerEncoderLayer(30, heads, 64, batch_first=True)
    compiled = compile_model(layer, (torch.randn(3, 5, 30),), Plan(tp=2), lambda outputs, batch: outputs.mean())
    reason = f"no cut fits: it makes {heads} heads, which 2 ranks cannot share out"
    assert dict(unsplit(compiled.program))["self_attn.in_proj_weight"] == reason


SPLIT = {
    "*.[qkv]_proj": "head",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
}


@pytest.mark.parametrize(("name", "split"), [("kv2", SPLIT), ("phi3", {"*.qkv_proj": "head", "*.o_proj": "row"})])
def test_a_plan_s_lines_find_shared_blocks_too(name: str, split: dict[str, str]) -> None:
    model, found = captured(name)
    given = compile_program(found.program.with_(plan=Plan(tp=4, split=split)))
    for parameter in given.parameters:
        if "attn" in parameter.fqn:
            assert str(output_layouts(given.node(parameter.node))[0]) == layouts(name, 4)[parameter.fqn]
    state, inputs = program_state(found.program, model), call_inputs(found, model, batch())
    assert verify_values(found.program, given, state, inputs).ok


def test_grouped_attention_of_the_fused_kernel_by_value() -> None:
    found = split("grouped", 4)
    assert prepared("grouped").compare(found).ok
    mine = {p.fqn: str(output_layouts(found.node(p.node))[0]) for p in found.parameters}
    assert (mine["k.weight"], mine["qkv.bias"]) == ("tp:S(0: 8 / 2; I)", "tp:S(0: 32 | !8; I)")


def test_frozen_weights_share_blocks_without_a_collective() -> None:
    case = prepared("grouped").case
    model, example = case.model(), case.example()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("k."))
    found = capture(model, example, Plan(tp=4))
    frozen = compile_program(found.program)
    (mine,) = {str(output_layouts(frozen.node(p.node))[0]) for p in frozen.parameters if p.fqn == "k.weight"}
    assert mine == "tp:S(0: 8 / 2)"
    assert not any("k_weight" in collective.node for collective in collectives(frozen))
    state, inputs = program_state(found.program, model), call_inputs(found, model, example)
    assert verify_values(found.program, frozen, state, inputs).ok
