"""mark_regions: what ends a CUDA graph says why; all else is one region a phase."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers

import fxpar
from fxpar.cli.models import build
from fxpar.compile import compile_model
from fxpar.cost.capturable import CaptureRegion, capture_regions, scopes
from fxpar.errors import InputError, PassError
from fxpar.ir.program import Program, note, operands, output_types
from fxpar.ir.regions import inlined
from fxpar.layout.symbolic_sizes import names
from fxpar.ops.operator import is_view
from fxpar.passes.mark_regions import mark_regions
from fxpar.plan.plan_options import CudaGraphs
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from tests.cudagraphs.graphed import Reading
from tests.products import few
from tests.zoo import CASES, step_of

_TEXT = """\
fxpar 2
plan {}
properties canonical
symbol b = x.0 like 2
%x = input["x"] : f32[b, 8]
%m = aten.amax.default(%x) : f32[]
%scale = fxpar.item(%m) : f64[]
%number = aten._to_copy.default(%scale, dtype=dtype.f32) : f32[]
%y = aten.div.Tensor(%x, %number) : f32[b, 8]
%mask = aten.gt.Scalar(%y, 0) : bool[b, 8]
%zero = aten.zeros.default([], dtype=dtype.f32) : f32[]
%filled = aten.index_put.default(%y, [%mask], %zero) : f32[b, 8]
%more = aten.index_put.default(%filled, [%mask], %zero, True) : f32[b, 8]
%places = aten.argmax.default(%y, 1) : i64[b]
%taken = aten.index.Tensor(%more, [%places]) : f32[b, 8]
return more=%taken
"""


def test_marks_stand_where_graphs_end() -> None:
    program = mark_regions(parse_program(_TEXT))
    marks = {node.name: note(node).uncaptured for node in program.graph.nodes if node.op == "call_function"}
    assert {name: reason for name, reason in marks.items() if reason} == {
        "scale": "reads a value on the host; keep it a tensor: leave item() out",
        "more": "writes at a mask, whose true places are counted on the host",
    }
    text = print_program(program)
    assert '%scale = fxpar.item(%m) : f64[] {uncaptured="reads a value on the host; ' in text
    assert print_program(parse_program(text)) == text


def _step(program: Program) -> Program:
    return step_of(program)


def _t5() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    sizes |= {"use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.T5Config(**sizes)
    ids = torch.randint(1, 64, (3, 16))
    return transformers.T5ForConditionalGeneration(config).train(), {"input_ids": ids, "labels": ids}


CASES_OF_MODELS = itertools.product(("gpt2", "bert", "llama", "t5"), (True, False))


@pytest.mark.parametrize(("name", "sequence_parallel"), few(CASES_OF_MODELS, [("gpt2", True)]))
def test_a_model_is_one_region_forward_and_one_backward(name: str, sequence_parallel: bool) -> None:
    model, batch = _t5() if name == "t5" else (CASES[name].model(), CASES[name].example())
    plan = fxpar.Plan(tp=2, sequence_parallel=sequence_parallel)
    step = _step(compile_model(model, batch, plan).program)
    found, boundaries = capture_regions(inlined(step))
    assert [region.phase for region in found] == ["forward", "backward"]
    assert boundaries == []
    forward, backward = found
    read = set(backward.inputs) & set(forward.nodes)
    assert read <= set(forward.outputs)
    assert read


DEEPSEEK = "deepseek_v3,first_k_dense_replace=1,moe_intermediate_size=40,n_routed_experts=8,n_group=4,topk_group=2"
OF_EXPERTS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral,num_hidden_layers=1", {"dp": 2, "ep": 2}),
    ("mixtral", {"tp": 2, "ep": 2, "etp": 1}),
    (DEEPSEEK, {"dp": 2, "ep": 2}),
]


def _step_of_experts(name: str, **plan: Any) -> Program:
    built = build(name, None, None, 0)
    config = built.model.config
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = True
    batch = {key: value[:2] for key, value in built.batch.items()}
    return inlined(_step(compile_model(built.model.train(), batch, fxpar.Plan(**plan), loss=built.loss).program))


@pytest.mark.parametrize(("name", "plan"), few(OF_EXPERTS, OF_EXPERTS[:1]), ids=str)
def test_experts_on_other_ranks_are_one_region_forward_and_one_backward(name: str, plan: dict[str, Any]) -> None:
    """Nothing that their rows go through asks for a number, or has a size that depends on the routing."""
    step = _step_of_experts(name, **plan)
    found, boundaries = capture_regions(step)
    assert [region.phase for region in found] == ["forward", "backward"]
    assert boundaries == []
    targets = [str(node.target) for node in step.graph.nodes]
    assert (
        sum(target.startswith(("fxpar.all_gather", "fxpar.reduce_scatter", "fxpar.all_reduce")) for target in targets)
        >= 4
    )
    unsafe = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe)
    for node in step.graph.nodes:
        assert not any(tag in getattr(node.target, "tags", ()) for tag in unsafe)


DROPLESS: dict[str, Any] = {"dp": 2, "ep": 2, "experts": fxpar.Experts("dropless")}


def _live_outs(step: Program, region: CaptureRegion) -> list[str]:
    """Names, without numbers, of what the forward reads of layers' operations in a region after it."""
    later: list[str] = []
    for name in region.outputs:
        users = (user for user in step.node(name).users if user.op == "call_function")
        is_read = any(note(user).phase == "" and user.name not in region.nodes for user in users)
        if is_read and note(step.node(name)).fqn.startswith("model.layers"):
            later.append(name.rstrip("_0123456789"))
    return sorted(later)


def _has_counted_rows(step: Program, name: str) -> bool:
    counted = {symbol.name for symbol in step.counted}
    node = step.node(name)
    kinds = [kind for tensor in (node, *operands(node)) for kind in output_types(tensor)]
    return not names(size for kind in kinds for size in kind.shape).isdisjoint(counted)


# Permuted tokens, where each pair stands, how many travel, where those that come stand, how many of them each expert
# gets; then weights and residual.
OF_ROWS = ["getitem", "moe_permute_default", "split_sizes", "view_default", "getitem", "add"]


@pytest.mark.parametrize(
    ("name", "layers", "more"),
    # Of Mixtral the loss of the load reads the router's logits; of DeepSeek's the shared expert reads the norm.
    [
        pytest.param("mixtral", 2, ["div", "linear"], marks=[pytest.mark.matrix], id="mixtral"),
        pytest.param(DEEPSEEK, 1, ["mul", "mul"], id="deepseek_v3"),
    ],
)
def test_graphs_of_dropless_experts_end_where_rows_travel_alone(name: str, layers: int, more: list[str]) -> None:
    step = _step_of_experts(name, **DROPLESS)
    found, boundaries = capture_regions(step)
    forward = [region for region in found if region.phase == "forward"]
    assert len(forward) == layers + 1
    assert all(step.node(region.nodes[-1]).target is torch.ops.fxpar.moe_permute.default for region in forward[:-1])
    assert _live_outs(step, forward[layers - 1]) == sorted([*OF_ROWS, *more])
    assert not any(_has_counted_rows(step, node) for region in found for node in region.nodes)
    others = [each.node for each in boundaries if not _has_counted_rows(step, each.node)]
    assert all(is_view(step.node(node)) for node in others)


ROUTED = ("attn", "moe_router", "moe_preprocess")


def test_scopes_of_a_layer_of_experts() -> None:
    """Router and preprocess end where rows travel; the shared expert, which waits for none, is a graph too."""
    step = _step_of_experts(DEEPSEEK, **DROPLESS, cuda_graphs=CudaGraphs("partial", scope=ROUTED))
    forward = [region for region in capture_regions(step)[0] if region.phase == "forward"]
    first, last = step.node(forward[1].nodes[0]), step.node(forward[1].nodes[-1])
    assert note(first).fqn == "model.layers.1.input_layernorm"
    assert last.target is torch.ops.fxpar.moe_permute.default
    assert _live_outs(step, forward[1]) == sorted([*OF_ROWS, "mul", "mul"])
    assert [note(step.node(region.nodes[-1])).fqn for region in forward] == [
        "model.layers.0",
        "model.layers.1.mlp.experts",
        "model.layers.1.mlp.shared_experts.down_proj",
    ]
    backward = [n for r in capture_regions(step)[0] if r.phase == "backward" for n in r.nodes]
    assert any(step.node(node).target is torch.ops.fxpar.moe_unpermute.default for node in backward)
    static = {"dp": 2, "ep": 2, "cuda_graphs": CudaGraphs("partial", scope=("moe",))}
    found, _ = capture_regions(_step_of_experts("mixtral,num_hidden_layers=1", **static))
    assert found[0].nodes[0] == "pow_2"  # of the norm
    step = _step_of_experts("mixtral,num_hidden_layers=1", dp=2, ep=2)
    scope_of = {node.name: scope for node, scope in scopes(step).items()}
    whole = {name for name, scope in scope_of.items() if scope.startswith("moe")}
    captured = {name for region in found for name in region.nodes}
    assert captured <= whole
    assert all(is_view(step.node(name)) for name in whole - captured)


def test_a_histogram_without_bounds_reads_them_on_the_host() -> None:
    text = _TEXT.split("%m =", maxsplit=1)[0]
    text += "%a = aten.histc.default(%x, 4) : f32[4]\n%b = aten.histc.default(%x, 4, 0, 4) : f32[4]\n"
    program = mark_regions(parse_program(text + "%c = aten.add.Tensor(%a, %b) : f32[4]\nreturn c=%c\n"))
    marks = [note(node).uncaptured for node in program.graph.nodes if node.op == "call_function"]
    assert marks == ["reads the smallest and the largest value on the host; pass it its bounds", "", ""]


def test_what_reads_the_host_is_the_one_boundary() -> None:
    batch = {"x": torch.randn(4, 8, 16)}
    step = _step(compile_model(Reading(), batch, fxpar.Plan(tp=2)).program)
    found, boundaries = capture_regions(inlined(step))
    assert [region.phase for region in found] == ["forward", "forward", "backward"]
    (boundary,) = boundaries
    assert boundary.node == "item"
    assert boundary.reason.startswith("reads a value on the host")
    assert found[0].outputs["max_1"] == 4
    assert found[0].inputs["x"] == 4 * 8 * 16 * 4


def test_a_scope_is_attention_with_its_norm_and_sum() -> None:
    case = CASES["gpt2"]
    plan = case.plan(2).replace(cuda_graphs=CudaGraphs("partial", scope=("attn",)))
    step = inlined(_step(compile_model(case.model(), case.example(), plan).program))
    found, _ = capture_regions(step)
    assert [region.phase for region in found] == ["forward"] * 2 + ["backward"] * 2
    for region in found[:2]:
        targets = [str(step.node(name).target) for name in region.nodes]
        assert "layer_norm" in " ".join(targets)
        assert "fxpar.attention_forward" in targets
        assert targets[-1] == "aten.add.Tensor"
        assert not any("mlp" in note(step.node(name)).fqn for name in region.nodes)


def test_a_scope_that_no_part_has_is_refused() -> None:
    case = CASES["gpt2"]
    plan = case.plan(2).replace(cuda_graphs=CudaGraphs("partial", scope=("moe",)))
    program = compile_model(case.model(), case.example(), plan).program
    with pytest.raises(InputError, match=r"no part of the model is moe.*attn, mlp"):
        _step(program)


def test_it_runs_before_layers_are_outlined() -> None:
    case = CASES["gpt2"]
    step = _step(compile_model(case.model(), case.example(), case.plan(2)).program)
    with pytest.raises(PassError, match="has calls of regions"):
        mark_regions(step)
