"""LoRA adapters of peft: cut with the matrices they belong to, and trained as on one device; the base is frozen."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from itertools import product
from math import prod
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fxpar.capture.capture import Captured, capture
from fxpar.cli.models import load_model
from fxpar.compile import compile_program, compile_step
from fxpar.cost import Report, make_report
from fxpar.cost.communication import collectives
from fxpar.cost.flops import matmul_flops
from fxpar.cost.work import work_of
from fxpar.errors import CaptureError
from fxpar.ir.program import Program, output_layouts
from fxpar.ir.regions import inlined
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.ops.lower import lower
from fxpar.ops.process_group import Group
from fxpar.passes import counted_steps
from fxpar.plan.plan import SHARDS, Plan
from fxpar.verify.values import call_inputs, program_state, reference_run, verify_values
from tests.adapters import ATTENTION, LINEAR, batch, tiny_llama, with_lora
from tests.models.test_data_parallel import rows
from tests.products import few

ODD = "llama,num_attention_heads=6,num_key_value_heads=2,hidden_size=84,intermediate_size=74"
EXPERTS = "qwen3_moe,moe_intermediate_size=40"
# Kinds of adapters, beside the usual: the model, and options of its configuration.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "odd": (ODD, {}),
    "experts": (EXPERTS, {"target_modules": ATTENTION}),
    "rslora": ("llama", {"use_rslora": True, "rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 7}}),
    "dora": ("llama", {"use_dora": True}),
    "biases": ("gpt2", {"bias": "lora_only", "lora_bias": True, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "all-biases": ("llama,attention_bias=true", {"bias": "all"}),
    "head": ("llama", {"modules_to_save": ["lm_head"], "target_modules": ATTENTION}),
    "words": ("llama", {"target_modules": ["embed_tokens", "down_proj"]}),
    "some-words": ("llama", {"trainable_token_indices": [1, 5]}),
}
MESHES: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2-sequence": {"tp": 2, "sequence_parallel": True},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "dp2-shared": {"dp": 2, "shard": "parameters"},
    "tp2-dp2-shared": {"tp": 2, "dp": 2, "shard": "parameters"},
    "dp2-pp2-shared": {"dp": 2, "pp": 2, "shard": "parameters"},
    "dp2-ep2-shared": {"dp": 2, "ep": 2, "shard": "parameters"},
}
EVERY_TIME = [
    *(("llama", mesh) for mesh in ("tp2-sequence", "pp2", "tp2-dp2-shared")),
    *(("odd", mesh) for mesh in ("tp2", "dp2")),
    *(("experts", mesh) for mesh in ("tp2-sequence", "dp2-ep2-shared")),
    *(("rslora", "tp2"), ("dora", "tp2"), ("biases", "tp2-sequence"), ("head", "tp2-dp2-shared"), ("words", "tp2")),
]
CASES = [(kind, mesh) for kind, mesh in product(KINDS, MESHES) if kind == "experts" or "ep2" not in mesh]


@cache
def adapted(kind: str) -> tuple[nn.Module, Any, Captured]:
    """A model with adapters, a batch of all ranks, and its capture."""
    name, options = KINDS[kind]
    loaded = load_model(f"hf:{name}", None, None, 0, True)
    examples = {key: rows(value) for key, value in loaded.batch.items()}
    examples["labels"][:2, 1:] = -100
    model = with_lora(loaded.model, **options)
    return model, examples, capture(model, examples, Plan(), loaded.loss)


@cache
def reference(kind: str) -> Any:
    """What one device computes, with the weights and the inputs."""
    model, examples, captured = adapted(kind)
    state, inputs = program_state(captured.program, model), call_inputs(captured, model, examples)
    return state, inputs, reference_run(captured.program, state, inputs)


def compiled(kind: str, **sizes: Any) -> Program:
    return compile_program(adapted(kind)[2].program.with_(plan=Plan(**sizes)))


def step(program: Program) -> Program:
    """What trains, with what is gathered again."""
    trained = [p.fqn for p in program.parameters if p.trainable]
    return inlined(compile_step(program, program.outputs, (program.loss,), trained))


@pytest.mark.parametrize(("kind", "mesh"), few(CASES, EVERY_TIME))
def test_loss_outputs_and_gradients_are_those_of_one_device(kind: str, mesh: str) -> None:
    """With dropout in adapters; of what is trained alone there are gradients."""
    program = compiled(kind, **MESHES[mesh])
    state, inputs, wanted = reference(kind)
    report = verify_values(
        adapted(kind)[2].program,
        program if "pp2" in mesh else step(program),  # of stages just the forward is verified by value
        state,
        inputs,
        reference=wanted,
    )
    assert report.ok, report
    trained = [name for name, parameter in adapted(kind)[0].named_parameters() if parameter.requires_grad]
    assert report.gradients == len(trained) == len(wanted.gradients)


def layouts(program: Program, axis: str) -> dict[str, str]:
    return {p.fqn: str(output_layouts(program.node(p.node))[0].on(axis)) for p in program.parameters}


def test_adapters_are_cut_with_their_matrices() -> None:
    """What is left of a cut matrix is small: the low rank, which is whole on all ranks."""
    found = layouts(compiled("llama", tp=2), "tp")
    for name in LINEAR:
        part = "self_attn" if name in ATTENTION else "mlp"
        path = f"base_model.model.model.layers.0.{part}.{name}"
        is_row = name in ("o_proj", "down_proj")
        assert found[f"{path}.base_layer.weight"] == ("S(1)" if is_row else "S(0)")
        assert found[f"{path}.lora_A.default.weight"] == ("S(1)" if is_row else "I")
        assert found[f"{path}.lora_B.default.weight"] == ("I" if is_row else "S(0)")


@pytest.mark.parametrize("sequence", [False, True])
def test_adapters_add_no_collective_to_a_layer(sequence: bool) -> None:
    """Their sums are added to those of the base before these are reduced; gradients are one bucket a step."""
    sent: dict[str, Counter[Any]] = {}
    base = load_model("hf:llama", None, None, 0, True)
    plan = Plan(tp=2, sequence_parallel=sequence)
    programs = {
        "base": compile_program(capture(base.model, adapted("llama")[1], Plan(), base.loss).program.with_(plan=plan)),
        "adapted": compiled("llama", tp=2, sequence_parallel=sequence),
    }
    for name, program in programs.items():
        sent[name] = Counter((c.op, c.phase, c.bytes_formula) for c in collectives(program) if c.phase != "parameter")
    # Nothing trains what comes before the first layer.
    assert sum(sent["adapted"].values()) <= sum(sent["base"].values())
    assert not sent["adapted"] - sent["base"]
    assert {key: n for key, n in sent["adapted"].items() if key[1] == "forward"} == {
        key: n for key, n in sent["base"].items() if key[1] == "forward"
    }
    assert sum(c.phase == "parameter" for c in collectives(programs["adapted"])) == 1


def sizes(program: Program, trained: bool) -> int:
    """Bytes of parameters."""
    return sum(
        4 * prod(map(int, p.type.shape)) for p in program.parameters if p.kind == "parameter" and p.trainable == trained
    )


def test_data_ranks_sum_gradients_of_adapters_alone() -> None:
    program = compiled("llama", dp=2)
    assert sum(c.bytes for c in collectives(program) if c.phase == "parameter") == sizes(program, True)


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_the_frozen_base_is_shared_out_with_all_parameters_alone(shard: str) -> None:
    """Its shards are gathered in the forward and in the backward, and no gradient of it is scattered."""
    program = step(compiled("llama", dp=2, shard=shard))
    cut = {p.fqn for p in program.parameters if output_layouts(program.node(p.node))[0].on("dp").is_shard}
    trained = {p.fqn for p in program.parameters if p.trainable}
    frozen = {p.fqn for p in program.parameters if p.kind == "parameter" and not p.trainable}
    assert cut == (trained | frozen if shard == "parameters" else trained)
    listed = collectives(program)
    assert sum(c.bytes for c in listed if c.op == "reduce_scatter") == sizes(program, True)
    gathered = {
        phase: sum(c.bytes for c in listed if c.op == "all_gather" and c.phase == phase)
        for phase in ("forward", "once", "recompute")
    }
    if shard != "parameters":
        assert gathered == {"forward": 0, "once": sizes(program, True), "recompute": 0}
        return
    whole = sizes(program, True) + sizes(program, False)
    words = 4 * 259 * 96  # the table, of which no gradient goes on
    assert gathered["forward"] == whole
    assert 0.8 * (whole - words) < gathered["recompute"] <= whole - words


def report(program: Program) -> Report:
    lowering = partial(lower, groups={axis: Group(axis, n) for axis, n in program.axes.items()})
    device = torch.device("cpu")
    return make_report(program, counted_steps(program, lowering), name="llama", device=device)


def test_reports_count_gradients_and_state_of_what_is_trained() -> None:
    """With AdamW: two tensors of state, and a count of steps."""
    for sizes_of_plan in ({"tp": 2}, {"dp": 2, "shard": "parameters"}):
        program = compiled("llama", **sizes_of_plan)
        (memory, *_) = report(program).ranks
        trained = [p for p in program.parameters if p.trainable]
        assert 0 < memory.gradients < memory.parameters / 5
        assert memory.optimizer == 2 * memory.gradients + 4 * len(trained)


def unsplit(**options: Any) -> Any:
    return with_lora(load_model("hf:llama", None, None, 0, True).model, **options)


def several(model: Any) -> Any:
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def merged(model: Any) -> Any:
    model.merge_adapter()
    return model


def quantised(model: Any) -> Any:
    layer = model.base_model.model.model.layers[1].self_attn.q_proj.base_layer
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    return model


def injected() -> Any:
    model = load_model("hf:llama", None, None, 0, True).model
    inject: Any = peft.inject_adapter_in_model
    return inject(peft.LoraConfig(r=2, target_modules=["q_proj"]), model)


def other_method() -> nn.Module:
    config = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    return peft.get_peft_model(load_model("hf:llama", None, None, 0, True).model, config)


def of_experts() -> Any:
    model = load_model(f"hf:{EXPERTS}", None, None, 0, True).model
    return with_lora(model, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"], lora_dropout=0.0)


QUERIES = "base_model.model.model.layers.{}.self_attn.q_proj"
REFUSED: dict[str, tuple[Any, str, str, str]] = {
    "several": (lambda: several(unsplit()), "PeftModelForCausalLM", "default, second", "delete_adapter"),
    "merged": (lambda: merged(unsplit()), QUERIES.format(0), "is merged", "unmerge_adapter"),
    "quantised": (lambda: quantised(unsplit()), QUERIES.format(1), "quantised", "bfloat16"),
    "injected": (injected, QUERIES.format(0).removeprefix("base_model.model."), "none of peft's", "get_peft_model"),
    "IA3": (other_method, "adapter default", "IA3Config", "LoraConfig"),
    "parameters": (of_experts, "base_model.model.model.layers.0.mlp.experts", "down_proj", "target_modules"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_nobody_could_train_or_save_is_refused(kind: str) -> None:
    build, where, reason, remedy = REFUSED[kind]
    with pytest.raises(CaptureError) as caught:
        capture(build(), adapted("llama")[1], Plan())
    assert caught.value.where == where
    assert reason in caught.value.reason
    assert remedy in caught.value.remedy


def test_a_step_multiplies_for_no_gradient_of_what_is_frozen() -> None:
    """FLOPs of forward and backward, by which a training says how busy GPUs are, are those that torch counts."""
    model = with_lora(tiny_llama())
    model.get_base_model().set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(**batch()).loss.backward()
    program = capture(model, batch(), Plan()).program
    sizes = {symbol.name: symbol.example for symbol in program.symbols}
    volume = work_of(program).at(sizes)
    assert volume.flops == counter.get_total_flops()
    assert volume.flops < 2.5 * sum(evaluate(flops, sizes) for _, flops in matmul_flops(program))
