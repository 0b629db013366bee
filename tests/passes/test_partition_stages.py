"""partition_stages: what is on which stage, what is sent, what each stage computes for itself, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.capture.capture import capture
from fxpar.cli.models import load_model
from fxpar.compile import compile_model, compile_program
from fxpar.cost.seconds import filled
from fxpar.cost.stage_cut_points import StageShare, divisible, stage_shares
from fxpar.errors import CheckFailed, FxparError, InputError
from fxpar.ir.program import Program, note, update
from fxpar.ir.stages import crossings, holders, stage_of, stages_of
from fxpar.manager import PassManager
from fxpar.passes import DEFAULT_PASSES
from fxpar.passes.partition_stages import holding, partition_stages
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Pipeline
from fxpar.rewrite.loss_reduction import COUNT
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import check_stages
from tests.passes.modules import shown
from tests.passes.pipelines import Tied, compared, lines, sent, staged

GOLDEN = """\
%words_weight = parameter["words.weight"] : f32[16, 8] tp:S(0) {role="column", stage=0+1}
%up_weight = parameter["up.weight"] : f32[32, 8] tp:S(0) {role="column", stage=0}
%down_weight = parameter["down.weight"] : f32[8, 32] tp:S(1) {role="row", stage=1}
%ids = input["ids"] : i64[b, s] tp:R
%labels = input["labels"] : i64[b, s] tp:R
%embedding = fxpar.embedding[tp](%words_weight, %ids) : f32[b, s, 8] tp:P {role="vocab", stage=0}
%embedding_all_reduce = fxpar.all_reduce[tp](%embedding) : f32[b, s, 8] tp:P→R {stage=0}
%linear = aten.linear.default(%embedding_all_reduce, %up_weight) : f32[b, s, 32] tp:S(2) {role="column", stage=0}
%gelu = aten.gelu.default(%linear) : f32[b, s, 32] tp:S(2) {stage=0}
%gelu_on_1 = fxpar.transfer(%gelu) : f32[b, s, 32] tp:S(2) {stage=1}
%linear_1 = aten.linear.default(%gelu_on_1, %down_weight) : f32[b, s, 8] tp:P {role="row", stage=1}
%linear_1_all_reduce = fxpar.all_reduce[tp](%linear_1) : f32[b, s, 8] tp:P→R {stage=1}
%embedding_all_reduce_on_1 = fxpar.transfer(%embedding_all_reduce) : f32[b, s, 8] tp:R {stage=1}
%add = aten.add.Tensor(%embedding_all_reduce_on_1, %linear_1_all_reduce) : f32[b, s, 8] tp:R {stage=1}
%linear_2 = aten.linear.default(%add, %words_weight) : f32[b, s, 16] tp:S(2) {role="column", stage=1}
%view = aten.view.default(%linear_2, [-1, 8]) : f32[b*s, 16] tp:S(1) {stage=1}
%view_1 = aten.view.default(%labels, [-1]) : i64[b*s] tp:R {stage=1}
%cross_entropy_loss = fxpar.cross_entropy[tp](%view, %view_1) : f32[] tp:I {role="vocab", stage=1}
return output=%cross_entropy_loss
"""
# Beginnings at which the stream of layers alone crosses.
LAYERS = {"layers.1": 1, "layers.2": 2, "layers.3": 3}


def unevenness(shares: Sequence[StageShare]) -> float:
    """The most FLOPs of a stage over the mean."""
    flops = [share.flops for share in shares]
    return max(flops) * len(flops) / sum(flops)


def test_of_a_tiny_model() -> None:
    """A row of the table is on both stages; what the second reads of the first crosses, the residual included."""
    program = staged(Plan(tp=2, pp=2, pipeline=Pipeline({"down": 1})), Tied)
    assert shown(program) == GOLDEN
    assert compared(program, Tied).ok


def test_what_each_stage_can_compute_is_not_sent() -> None:
    """Places, a mask of the ids and a table of cosines are inputs' and a buffer's: each stage makes its own.

    The last stage begins behind the last product with them.
    """
    program = staged(Plan(pp=4, pipeline=Pipeline(LAYERS)), tables=True)
    assert [(stage, carries) for _, stage, carries in sent(program)] == [(1, True), (2, True), (3, True)]
    by_name = lines(program)
    for name in ("arange", "cos", "ne"):
        own = [line for line in by_name.values() if re.search(rf"= aten\.{name}\.", line)]
        assert sorted(re.findall(r"stage=(\d)", " ".join(own))) == ["0", "1", "2"], name
    assert "{stage=0+1+2}" in by_name["frequencies"]
    assert compared(program, tables=True).ok


def test_a_long_skip_is_passed_on_with_its_gradient() -> None:
    program = staged(Plan(pp=4, pipeline=Pipeline(LAYERS)), skip=True)
    first = next(name for name, line in lines(program).items() if "aten.add.Tensor(%embedding, " in line)
    assert [entry for entry in sent(program) if entry[0] == first] == [(first, k, True) for k in (1, 2, 3)]
    assert [c.source.name for c in crossings(program) if c.node.name == f"{first}_on_3"] == [f"{first}_on_2"]
    assert compared(program, skip=True).ok


@pytest.mark.matrix
def test_the_memory_of_an_encoder_is_passed_through_the_decoder() -> None:
    """Each later stage of the decoder gets it of the one before, and returns a gradient of it."""
    loaded = load_model("hf:t5,num_layers=1,num_decoder_layers=3", 3, 16, 0, True)
    stages = {"decoder.block.0": 1, "decoder.block.1": 2, "decoder.block.2": 3}
    plan = Plan(pp=4, tp=2, pipeline=Pipeline(stages))
    program = compile_program(capture(loaded.model, loaded.batch, plan, loaded.loss).program)
    dropped = next(c.source.name for c in crossings(program) if note(c.source).fqn == "encoder.dropout")
    memory = [c for c in crossings(program) if c.node.name.startswith(f"{dropped}_")]
    assert [(c.receiver, c.carries) for c in memory] == [(1, True), (2, True), (3, True)]
    assert len(crossings(program)) == 6  # and the decoder's own stream
    final = stages_of(program)[3]
    assert set(final.returned) == set(final.received)


def test_a_tied_parameter_is_of_each_stage_that_reads_it() -> None:
    program = staged(Plan(pp=4, pipeline=Pipeline(LAYERS)), tied=True)
    assert holders(program)["words.weight"] == (0, 3)
    assert holders(program)["places.weight"] == (0,)
    assert compared(program, tied=True).ok


def test_each_stage_sums_the_gradients_of_its_own_parameters() -> None:
    """A bucket of the whole is one of each stage; a tied parameter is in that of both."""
    program = staged(Plan(pp=4, dp=2, pipeline=Pipeline(LAYERS)), tied=True)
    buckets = [line for line in lines(program).values() if "= fxpar.sum_gradients[dp](" in line]
    summed = {re.findall(r"stage=(\d)", line)[0]: re.findall(r"%(\w+)", line)[1:] for line in buckets}
    assert set(summed) == set("0123")
    nodes = program.placeholders()
    trained = {p.node: note(nodes[p.node]).stages for p in program.parameters if p.trainable}
    for stage, names in summed.items():
        assert sorted(names) == sorted(name for name, stages in trained.items() if int(stage) in stages)
    assert trained["words_weight"] == (0, 3)
    assert compared(program, tied=True).ok


def test_a_bucket_does_not_give_all_parameters_to_the_first_that_reads_one() -> None:
    """What a stage holds is counted by operation, whether data ranks sum gradients in one bucket or not."""

    def held(dp: int) -> list[float]:
        found = divisible(staged(Plan(pp=2, dp=dp)))
        return [bytes_ for bytes_ in found.state_bytes if bytes_]

    assert held(1) == held(2)
    assert len(held(1)) > 10
    # Of so small a model what is held decides, and the stages hold alike.
    first, second = (share.bytes for share in stage_shares(staged(Plan(pp=2, dp=2))))
    assert max(first, second) < 1.5 * min(first, second)


def test_stages_of_a_model_that_is_quicker_than_a_message_are_alike() -> None:
    """What latency takes is the same wherever the cut is; it does not give all layers to the first and last stage."""
    shares = stage_shares(staged(Plan(pp=4)))
    assert all(share.first for share in shares)
    assert unevenness(shares) < 1.5


class _Cast(nn.Module):
    """Two matrices in bfloat16, and a loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.head = nn.Linear(8, 8), nn.Linear(8, 4096)
        self.bfloat16()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.narrow(x).relu()).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _seconds(compile: bool, multiprocessors: int) -> dict[str, list[float]]:
    """By operator, where memory takes next to no time."""
    cost = fxpar.Cost(memory=1e30, multiprocessors=multiprocessors)
    example = {"x": torch.randn(2, 4, 8, dtype=torch.bfloat16), "labels": torch.zeros(2, 4, dtype=torch.long)}
    forward = divisible(compile_model(_Cast(), example, Plan(pp=2, compile=compile, cost=cost)).program)
    seconds: dict[str, list[float]] = {}
    for node, each in zip(forward.order, forward.seconds, strict=True):
        seconds.setdefault(str(node.target).split(".")[1], []).append(each)
    return seconds


def test_few_rows_fill_fewer_multiprocessors() -> None:
    waves, full = _seconds(False, 132), _seconds(False, 1)
    (narrow, head), (plain, wide) = waves["linear"], full["linear"]
    # One tile of 64 by 64, of which 8 by 8 are computed; and 64 of them, on 132 multiprocessors.
    assert narrow / plain == pytest.approx(132 * 64 * 64 / (8 * 8 * 0.65))
    assert head / wide == pytest.approx(1 / filled(1, 8, 4096, 132))
    assert narrow / plain > head / wide


@pytest.mark.parametrize("compile", [True, False])
def test_a_cast_to_a_wider_type_is_stored_where_nothing_is_compiled(compile: bool) -> None:
    (cast,) = _seconds(compile, 132)["_to_copy"]
    assert (cast == 0.0) == compile


def _first_of(program: Program, stage: int) -> str:
    return stage_shares(program)[stage].first


@pytest.mark.parametrize(
    ("stages", "begin"),
    [
        ({"layers.1": 1}, "layers.1"),
        ({"layers.3": 1}, "layers.3"),
        ({"head": 1}, "head"),
        ({"layers.2.down": 1}, "layers.2.down"),
        ((1, 3), "layers.1"),
        ((3, 1), "layers.3"),
    ],
)
def test_the_plan_says_where_a_stage_begins(stages: Any, begin: str) -> None:
    program = staged(Plan(pp=2, pipeline=Pipeline(stages)))
    assert _first_of(program, 1).startswith(begin)
    assert compared(program).ok


def test_some_beginnings_are_given_and_the_others_chosen() -> None:
    program = staged(Plan(pp=2, virtual_stages=2, pipeline=Pipeline({"layers.3": 3})))
    assert _first_of(program, 3).startswith("layers.3")
    assert {stage for _, stage, _ in sent(program)} == {1, 2, 3}
    assert compared(program).ok


# Stages, where they begin, and the reason.
REFUSALS: Mapping[str, tuple[int, Any, str]] = {
    "a module that computes nothing": (2, {"moon": 1}, "stages['moon']: no operation of the program"),
    "another number of layers": (2, (2, 3), "2 + 3 layers are 5, and the model has 4"),
    "modules in another order": (3, {"layers.3": 1, "layers.1": 2}, "do not run in the order"),
    "one module twice": (3, {"layers.1": 1, "layers.1.norm": 2}, "do not run in the order"),
    "the module that runs first": (2, {"words": 1}, "or the first one runs first of all"),
    "a module that every stage computes": (2, {"places": 1}, "each stage computes this module for"),
    "no unit left": (4, {"layers.0": 3}, "no cut leaves each stage a unit with these beginnings"),
    "more stages than places": (64, (), "64 stages need 63 places to cut at, and the model has"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_it_refuses(case: str) -> None:
    pp, stages, message = REFUSALS[case]
    with pytest.raises(FxparError) as caught:
        staged(Plan(pp=pp, pipeline=Pipeline(stages)))
    assert message in str(caught.value)
    assert caught.value.remedy


class Scaled(nn.Module):
    """A number of the values, read again behind the second matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        """[b, 8]."""
        h = self.up(x)
        scale = h.detach().abs().max().item()
        return self.down(h / scale).sum() * scale


def test_a_number_of_values_is_sent_without_a_gradient() -> None:
    captured = capture(Scaled(), (torch.randn(4, 8),), Plan())
    program = compile_program(captured.program.with_(plan=Plan(pp=2, pipeline=Pipeline({"down": 1}))))
    assert sent(program) == [("div", 1, True), ("item", 1, False)]


SIZE_OF_A_RESULT = """fxpar 2
plan {"pp": 2, "pipeline": {"stages": {"down": 1}}}
properties canonical coalesced collectives layouts local masks rng sequence vocabulary
symbol b = x.0 like 4
loss out
%up = parameter["up"] : f32[8, 8] -
%x = input["x"] : f32[b, 8] -
%h = aten.mm.default(%x, %up) : f32[b, 8] -  # up model.py:1
%n = aten.sym_size.int(%h, 0) : b  # up model.py:1
%down = aten.view.default(%x, [%n, 8]) : f32[b, 8] -  # down model.py:2
%y = aten.mm.default(%down, %up) : f32[b, 8] -  # down model.py:2
%out = aten.sum.default(%y) : f32[] -
return out=%out
"""


def test_a_size_of_a_result_is_not_sent() -> None:
    with pytest.raises(FxparError, match="%down of stage 1 reads it, and only tensors can be sent") as caught:
        PassManager([partition_stages]).run(parse_program(SIZE_OF_A_RESULT))
    assert "Plan(pipeline=Pipeline(…))" in caught.value.remedy


@pytest.mark.parametrize(
    "plan", [Plan(pp=2, tp=2), Plan(pp=4, dp=2, pipeline=Pipeline(LAYERS)), Plan(pp=2, virtual_stages=2)]
)
def test_the_text_of_stages_is_read_back(plan: Plan) -> None:
    program = staged(plan, tied=True)
    text = print_program(program)
    again = parse_program(text)
    assert print_program(again) == text
    assert holders(again) == holders(program)
    for stage in stages_of(program):
        own = print_program(stage.program)
        assert "stage=" not in own.partition("\n%")[2]
        assert print_program(parse_program(own)) == own


# Depths of the models; with fewer layers stages are halves of layers, and more crosses.
LLAMA = (
    "hf:llama,hidden_size=4096,num_attention_heads=32,num_key_value_heads=8,intermediate_size=14336,"
    "vocab_size=128256,max_position_embeddings=8192,num_hidden_layers={}"
)
GPT = "hf:gpt2,n_embd=3072,n_head=32,n_inner=12288,vocab_size=51200,n_positions=1024,n_layer={}"
LARGE = {"llama-3-8b": (LLAMA, 8192, 1), "gpt-8.3b": (GPT, 1024, 8)}
# The most FLOPs of a stage over the mean, by model, layers and stages. The head of the vocabulary is as long as some
# layers, so that stages of few layers differ more.
MEASURED = {
    ("llama-3-8b", 16): {2: 1.0159, 4: 1.0635},
    ("gpt-8.3b", 16): {2: 1.0326, 4: 1.1429},
    ("llama-3-8b", 32): {2: 1.0047, 4: 1.0186, 8: 1.0916},
    ("gpt-8.3b", 72): {2: 1.0079, 4: 1.0337, 8: 1.0854},
}


def _check_cuts(name: str, layers: int) -> None:
    spec, length, tp = LARGE[name]
    loaded = load_model(spec.format(layers), 2, length, 0, True)
    captured = capture(loaded.model, loaded.batch, Plan(tp=tp), loaded.loss).program
    for pp, most in MEASURED[name, layers].items():
        program = compile_program(captured.with_(plan=Plan(tp=tp, pp=pp)))
        assert [(stage, carries) for _, stage, carries in sent(program)] == [(k, True) for k in range(1, pp)]
        for each in crossings(program):
            assert list(map(str, each.type.shape)) == ["b", "s", str(4096 if name.startswith("llama") else 3072)]
        ratio = unevenness(stage_shares(program))
        print(f"{name}, {layers} layers, pp {pp}: stage FLOPs max/mean {ratio:.4f}")
        assert ratio <= 1.02 * most


@pytest.mark.matrix
@pytest.mark.parametrize("name", LARGE)
def test_of_large_models_the_stream_alone_crosses(name: str) -> None:
    _check_cuts(name, 16)


@pytest.mark.matrix
@pytest.mark.parametrize("name", LARGE)
def test_of_large_models_the_stream_alone_crosses_at_their_depth(name: str) -> None:
    _check_cuts(name, max(layers for model, layers in MEASURED if model == name))


# The loss and what counts in it are on the last stage, wherever the model computes them.


class _Counted(nn.Module):
    """Counts before its first layer, and has a layer behind the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.behind = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        count = mask.sum()
        h = self.second(self.first(x).tanh())
        return {"loss": (h.square().mean(-1) * mask).sum() / count, "more": self.behind(h)}


def _compiled(**options: object) -> Program:
    plan = fxpar.Plan(pp=2, microbatches=2, **options)  # type: ignore[arg-type]
    return compile_model(_Counted(), {"x": torch.randn(8, 8), "mask": torch.ones(8)}, plan).program


def test_the_last_stage_has_the_count() -> None:
    program = _compiled(dp=2, loss_reduction="token", pipeline=Pipeline({"second": 1}))
    assert COUNT in program.outputs
    assert {COUNT, "loss"} <= set(stages_of(program)[-1].program.outputs)
    check_stages(program)
    node = program.output_nodes()[COUNT]
    assert stage_of(node) == 1
    update(node, stages=(0,))
    with pytest.raises(CheckFailed):
        check_stages(program)


def test_a_stage_that_would_begin_behind_the_loss_is_refused_with_a_reason() -> None:
    with pytest.raises(InputError) as caught:
        _compiled(pipeline=Pipeline({"behind": 1}))
    assert "behind the loss" in caught.value.reason


# A further program is cut so that parameters stay where they are, by stages that read none too.


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def test_stages_without_parameters_are_left_an_operation() -> None:
    held = {"layers.0.weight": (0,), "layers.0.bias": (0,), "layers.1.weight": (2,), "layers.1.bias": (2,)}
    passes = [holding(held) if item is partition_stages else item for item in DEFAULT_PASSES]
    program = compile_model(_Layers(), {"x": torch.randn(4, 8)}, fxpar.Plan(pp=3), passes=passes).program
    assert holders(program) == held
    made = [node for node in program.graph.nodes if node.op == "call_function"]
    assert {stage_of(node) for node in made} == {0, 1, 2}
