"""mark_regions: what ends a CUDA graph says why; all else is one region a phase."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers

import fxpar
from fxpar.cli.models import build
from fxpar.compile import compile_model, compile_step
from fxpar.cost.capturable import capture_regions
from fxpar.errors import InputError, PassError
from fxpar.ir.program import Program, note
from fxpar.ir.regions import inlined
from fxpar.passes.mark_regions import mark_regions
from fxpar.plan.option_groups import CudaGraphs
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from tests.cudagraphs.graphed import Reading
from tests.products import few
from tests.zoo import CASES

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
return more=%more
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
    trained = [p.fqn for p in program.parameters if p.trainable]
    return compile_step(program, (program.loss,), (program.loss,), trained)


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


@pytest.mark.parametrize(("name", "plan"), few(OF_EXPERTS, OF_EXPERTS[:1]), ids=str)
def test_experts_on_other_ranks_are_one_region_forward_and_one_backward(name: str, plan: dict[str, Any]) -> None:
    """Nothing that their rows go through asks for a number, or has a size that depends on the routing."""
    built = build(name, None, None, 0)
    config = built.model.config
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = True
    batch = {key: value[:2] for key, value in built.batch.items()}
    program = compile_model(built.model.train(), batch, fxpar.Plan(**plan), loss=built.loss).program
    step = inlined(_step(program))
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
