"""Sequence parallelism: as many pairs of reduce-scatter and all-gather as there were all-reduces, by layouts alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from fxpar.capture.capture import Captured, capture
from fxpar.cli.models import LoadedModel, load_model
from fxpar.compile import compile_model, compile_program
from fxpar.cost.communication import collectives
from fxpar.cost.flops import split_flops
from fxpar.cost.reasons import unsplit
from fxpar.errors import PlanError
from fxpar.ir.program import Program, operands, output_layouts, output_types
from fxpar.layout.symbolic_sizes import names
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.verification import verify
from fxpar.verify.values import call_inputs, program_state, reference_run, verify_values
from tests.layers import by_layer
from tests.zoo import CASES

# Pairs of all-reduces of activations in a layer, where both halves of it have one or share one.
PAIRS = {"gpt2": 2, "bert": 2, "llama": 2, "qwen2": 2, "gpt_neox": 1, "gptj": 1, "falcon": 1}
MODELS = [
    *PAIRS,
    *("roberta", "mistral,sliding_window=5", "gemma2", "phi3", "opt", "bloom", "vit", "t5"),
    "gemma3_text,sliding_window=5",
]
# What runs every time; `make test-matrix` runs all.
FEW = [("llama", 2, True)]
WHOLE = {"vit": {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"}}


@cache
def loaded(name: str) -> tuple[LoadedModel, Captured]:
    """A tiny model in training mode, and its capture."""
    found = load_model(f"hf:{name}", None, None, 0, True)
    return found, capture(found.model, found.batch, Plan(), found.loss)


@cache
def reference(name: str) -> Any:
    """What one device computes, with the weights and the inputs."""
    found, captured = loaded(name)
    state, inputs = program_state(captured.program, found.model), call_inputs(captured, found.model, found.batch)
    return state, inputs, reference_run(captured.program, state, inputs)


def compiled(name: str, plan: Plan) -> Program:
    captured = loaded(name)[1]
    return compile_program(captured.program.with_(plan=plan))


def check(name: str, tp: int, sequence: bool) -> None:
    program = compiled(name, Plan(tp=tp, sequence_parallel=sequence))
    state, inputs, wanted = reference(name)
    report = verify_values(loaded(name)[1].program, program, state, inputs, reference=wanted)
    assert report.ok, report
    assert split_flops(program) >= 0.95
    assert {fqn for fqn, _ in unsplit(program)} <= WHOLE.get(name, set())
    assert parameters(program) <= 1
    assert full_vocabulary(program) == []


def parameters(program: Program) -> int:
    """Reductions of parameters in a step: one bucket."""
    return sum(c.phase == "parameter" for c in collectives(program))


def full_vocabulary(program: Program) -> list[str]:
    """Values of which a rank holds, or a collective moves, the whole of a dimension that a vocabulary cut reaches."""
    cut = {
        int(piece.size)
        for node in program.graph.nodes
        if node.op == "placeholder"
        for layout in output_layouts(node)
        for _, placement in layout
        for piece in placement.pieces
        if piece.padded
    }
    found = []
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        for kind, layout in zip(output_types(node), output_layouts(node), strict=True):
            whole = [dim for dim, size in enumerate(kind.shape) if size in cut]
            found += [node.name for dim in whole if not any(p.is_shard and p.dim == dim for _, p in layout)]
    return found


@pytest.mark.parametrize(("name", "tp", "sequence"), FEW)
def test_values_are_those_of_one_device(name: str, tp: int, sequence: bool) -> None:
    check(name, tp, sequence)


@pytest.mark.matrix
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_values_of_all_models(name: str, tp: int, sequence: bool) -> None:
    check(name, tp, sequence)


@pytest.mark.parametrize("tp", [4, pytest.param(2, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", ["encoder", pytest.param("nanogpt", marks=pytest.mark.matrix)])
def test_the_sequence_is_what_attention_runs_over(name: str, tp: int) -> None:
    """In torch.nn's encoder the first dimension of its input."""
    case = CASES[name]
    proof = verify(case.model(), case.example(), Plan(tp=tp, sequence_parallel=True), loss=case.loss)
    assert proof.ok, proof.values
    assert {s.dim: s.multiple for s in proof.program.symbols} == ({0: tp, 1: 1} if name == "encoder" else {0: 1, 1: tp})
    counts = by_layer(proof.program)
    counts.pop("", None)
    half = {(op, phase): 2 for op in ("all_gather", "reduce_scatter") for phase in ("forward", "backward")}
    assert list(counts.values())[1:] == [half]


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        pytest.param(*item, marks=[pytest.mark.matrix] if item[0] in ("bert", "qwen2", "gpt_neox", "gptj") else [])
        for item in PAIRS.items()
    ],
)
def test_a_layer_has_megatron_s_collectives(name: str, pairs: int) -> None:
    """Also where attention and MLP run side by side: partial sums, and what is dropped of them, add up."""
    for sequence in (False, True):
        counts = by_layer(compiled(name, Plan(tp=2, sequence_parallel=sequence)))
        counts.pop("")
        plain = {("all_reduce", "forward"): pairs, ("all_reduce", "backward"): pairs}
        half = {(op, phase): pairs for op in ("all_gather", "reduce_scatter") for phase in ("forward", "backward")}
        assert list(counts.values()) == [half if sequence else plain] * 2


def test_streams_are_cut_between_the_matrices() -> None:
    """Norms, residual sums and dropout work on a part of the tokens; their weights are summed in one bucket."""
    program = compiled("gpt2", Plan(tp=4, sequence_parallel=True))
    lengths = names([symbol.size for symbol in program.symbols if symbol.multiple > 1])
    for node in program.graph.nodes:
        if str(node.target) == "aten.layer_norm.default":
            placement = output_layouts(node)[0].on("tp")
            assert placement.is_shard
            assert names((output_types(node)[0].shape[placement.dim],)) == lengths
    (bucket,) = (node for node in program.graph.nodes if "sum_gradients" in str(node.target))
    # Weight and bias of five norms; a row bias is a summand on one rank, whose gradient every rank has.
    assert len(operands(bucket)) == 10


def test_a_sequence_that_the_ranks_cannot_share_out_is_refused() -> None:
    found = load_model("hf:llama", 3, 15, 0, True)
    plan = Plan(tp=2, sequence_parallel=True)
    with pytest.raises(PlanError, match=r"sequence_parallel: input_ids has 15 in dimension 1, which 2 ranks cannot"):
        compile_model(found.model, found.batch, plan, found.loss)
    assert [item.name for item in DEFAULT_PASSES].index("divide_sequence") == 4
