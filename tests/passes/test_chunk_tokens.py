"""chunk_tokens: what stands between operations that mix tokens runs in chunks of rows, and no value changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxpar.cli.models import load_model
from fxpar.compile import compile_model, compile_step
from fxpar.cost.flops import matmul_flops
from fxpar.cost.seconds import estimates, travels
from fxpar.errors import PlanError
from fxpar.ir.program import Program, note
from fxpar.ir.regions import inlined, region_of
from fxpar.ir.stages import Stage
from fxpar.ir.step import batch_symbol
from fxpar.layout.symbolic_sizes import symbol
from fxpar.manager import PassManager
from fxpar.ops.token_chunks import CHUNKED, chunk_sized, chunk_taken, chunks_joined
from fxpar.passes.chunk_tokens import chunk_tokens
from fxpar.plan.cost import Cost
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Communication, Recompute
from fxpar.rewrite.chunk_choice import ChunkChoice, ChunkPrice, cheapest, chunk_prices
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify import simulate_ranks
from fxpar.verify.static import STATIC, verify_static
from fxpar.verify.values import call_inputs, program_state, verify_values
from tests.products import few
from tests.verify.steps import Attentive, Small, Trial
from tests.zoo import step_of

_HEAD = """\
fxpar 2
plan {"tp": 2, "communication": {"token_chunks": 2}}
properties canonical collectives layouts local step
symbol b = x.0 like 4
%w = parameter["w"] : f32[6, 8] tp:S(0)
%v = parameter["v"] : f32[8, 4] tp:S(1)
%x = input["x"] : f32[b, 6] tp:S(1)
"""
_SUM = """\
%h = aten.mm.default(%x, %w) : f32[b, 8] tp:P
%h_sum = fxpar.all_reduce[tp](%h) : f32[b, 8] tp:P→R
%y = aten.mm.default(%h_sum, %v) : f32[b, 4] tp:S(1)
"""
# Of 10 tokens a row.
_SCATTERED = _HEAD.replace("f32[b, 6] tp:S(1)", "f32[b, 10, 6] tp:S(2)") + (
    "%h = aten.matmul.default(%x, %w) : f32[b, 10, 8] tp:P\n"
    "%part = fxpar.reduce_scatter[tp](%h) : f32[b, 10, 8] tp:P→S(1)\n"
    "%relu = aten.relu.default(%part) : f32[b, 10, 8] tp:S(1)\n"
    "%all = fxpar.all_gather[tp](%relu) : f32[b, 10, 8] tp:S(1)→R\n"
    "%y = aten.matmul.default(%all, %v) : f32[b, 10, 4] tp:S(2)\n"
    "return y=%y\n"
)


def chunked(text: str, count: int = 2) -> Program:
    """The program in chunks, whose dataflow and chunks the manager checks."""
    checks = [check for check in STATIC if check.name == "chunks"]
    return PassManager([chunk_tokens], checks).run(parse_program(text.replace('chunks": 2', f'chunks": {count}')))


def order(text: str, count: int = 2) -> list[str]:
    """Names of the operations, in order."""
    return [node.name for node in chunked(text, count).graph.nodes if node.op == "call_function"]


def test_products_of_one_chunk_stand_between_a_sum_and_its_reader() -> None:
    first, second = "floor(b/2)", "b - floor(b/2)"
    assert print_program(chunked(_HEAD + _SUM + "return y=%y\n")).splitlines()[7:] == [
        "%b_whole = fxpar.size(%x, 0) : b",
        f"%x_chunk0 = fxpar.take_chunk(%x, 0, %b_whole, 0, 2) : f32[{first}, 6] tp:S(1)",
        f"%h_chunk0 = aten.mm.default(%x_chunk0, %w) : f32[{first}, 8] tp:P",
        f"%h_sum_chunk0 = fxpar.all_reduce[tp](%h_chunk0) : f32[{first}, 8] tp:P→R",
        f"%x_chunk1 = fxpar.take_chunk(%x, 0, %b_whole, 1, 2) : f32[{second}, 6] tp:S(1)",
        f"%h_chunk1 = aten.mm.default(%x_chunk1, %w) : f32[{second}, 8] tp:P",
        f"%h_sum_chunk1 = fxpar.all_reduce[tp](%h_chunk1) : f32[{second}, 8] tp:P→R",
        f"%y_chunk0 = aten.mm.default(%h_sum_chunk0, %v) : f32[{first}, 4] tp:S(1)",
        f"%y_chunk1 = aten.mm.default(%h_sum_chunk1, %v) : f32[{second}, 4] tp:S(1)",
        "%y = fxpar.join_chunks([%y_chunk0, %y_chunk1], 0) : f32[b, 4] tp:S(1)",
        "return y=%y",
    ]


def test_what_is_light_follows_the_next_chunk_s_products() -> None:
    """A norm between a reduce-scatter and a gather: its sum has had the time of one product to arrive."""
    names = [name for name in order(_SCATTERED, 3) if not name.startswith("x_")]
    heavy = [f"{name}_chunk{i}" for i in range(3) for name in ("h", "part")]
    light = {i: [f"relu_chunk{i}", f"all_chunk{i}"] for i in range(3)}
    assert names == [
        *("b_whole", *heavy[:4], *light[0], *heavy[4:], *light[1], "y_chunk0"),
        *(*light[2], "y_chunk1", "y_chunk2", "y"),
    ]


def test_only_what_lies_between_a_collective_and_a_product_is_cut() -> None:
    """What no collective waits for stays whole, and so do operations over all rows and draws."""
    head = _HEAD + '%other = input["other"] : f32[8, 5] tp:R\n%rng = input["fxpar.rng"] : i64[3] tp:R\n'
    text = "%before = aten.relu.default(%x) : f32[b, 6] tp:S(1)\n" + _SUM.replace("(%x,", "(%before,")
    text += (
        "%after = aten.relu.default(%y) : f32[b, 4] tp:S(1)\n"
        "%turned = aten.flip.default(%h_sum, [0]) : f32[b, 8] tp:R\n"
        "%noise = fxpar.dropout(%h_sum, %rng, 0.4, []) : f32[b, 8] tp:R {random=7}\n"
        "%scores = aten.mm.default(%h_sum, %other) : f32[b, 5] tp:R\n"
        "return y=%after, t=%turned, n=%noise, s=%scores\n"
    )
    names = order(head + text)
    in_chunks = {name.partition("_chunk")[0] for name in names if "_chunk" in name}
    assert in_chunks == {"x", "before", "h", "h_sum", "y", "scores"}
    whole = [name for name in names if "_chunk" not in name and name != "b_whole"]
    assert whole == ["y", "after", "scores", "h_sum", "turned", "noise"]


_OVER_ROWS = (
    "%t = aten.t.default(%h_sum) : f32[8, b] tp:R\n"
    "%dw = aten.mm.default(%t, %h_sum) : f32[8, 8] tp:R\n"
    "%z = aten.mm.default(%y, %u) : f32[b, 8] tp:P\n"
    "%z_sum = fxpar.all_reduce[tp](%z) : f32[b, 8] tp:P→R\n"
    "return z=%z_sum, dw=%dw\n"
)


def test_what_is_little_is_computed_again_of_what_a_backward_reads_whole() -> None:
    """Not what a product of a chunk reads, which is in memory; nor what would need more to be put together."""
    head = _HEAD + '%u = parameter["u"] : f32[4, 8] tp:S(0)\n%g = input["g"] : f32[b, 4] tp:S(1)\n'
    body = _SUM + (
        "%gate = aten.sigmoid.default(%y) : f32[b, 4] tp:S(1)\n"
        "%act = aten.mul.Tensor(%gate, %y) : f32[b, 4] tp:S(1)\n"
        "%o = aten.mm.default(%act, %u) : f32[b, 8] tp:P\n"
        "%o_sum = fxpar.all_reduce[tp](%o) : f32[b, 8] tp:P→R\n"
        "%end = aten.neg.default(%o_sum) : f32[b, 8] tp:R\n"
    )
    backward = (
        "%dy = aten.mul.Tensor(%g, %y) : f32[b, 4] tp:S(1)\n%dz = aten.mul.Tensor(%dy, %gate) : f32[b, 4] tp:S(1)\n"
    )
    backward += "%dw = aten.mul.Tensor(%dz, %act) : f32[b, 4] tp:S(1)\n%de = aten.relu.default(%end) : f32[b, 8] tp:R\n"
    text = head + body + backward.replace("\n", " {phase=backward}\n") + "return dw=%dw, de=%de\n"
    program = chunked(text)
    targets = {name: str(program.node(name).target) for name in ("y", "gate", "act")}
    join = "fxpar.join_chunks"
    assert targets == {"y": join, "gate": "aten.sigmoid.default", "act": join}
    assert program.node("gate").args == (program.node("y"),)


def test_sums_over_rows_of_a_backward_follow_what_is_sent_together() -> None:
    """Products of all chunks stand side by side, and delay no chunk's collective; in a forward they are not cut."""
    head = _HEAD + '%u = parameter["u"] : f32[4, 8] tp:S(0)\n'
    text = (_SUM + _OVER_ROWS).replace("\n", " {phase=backward}\n").replace("dw {phase=backward}", "dw")
    names = order(head + text)
    assert names.index("z_sum_chunk0") < names.index("dw_chunk0") == names.index("dw_chunk1") - 1
    assert "dw" in names
    assert "dw_chunk0" not in order(head + _SUM + _OVER_ROWS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fxpar.all_reduce[tp](%h) : f32[b, 8] tp:P→R", "aten.relu.default(%h) : f32[b, 8] tp:R"),
        (
            "fxpar.all_reduce[tp](%h) : f32[b, 8] tp:P→R",
            "fxpar.all_reduce[tp](%h) : f32[b, 8] tp:P→R {phase=parameter}",
        ),
        ("tp", "dp"),
    ],
    ids=["no collective", "once a step", "between shares of the batch"],
)
def test_without_a_collective_of_layers_nothing_changes(old: str, new: str) -> None:
    text = (_HEAD + _SUM + "return y=%y\n").replace(old, new)
    assert print_program(chunked(text)) == text


def test_a_number_of_the_forward_counts_the_rows() -> None:
    """What has the same number in the backward stands before it here; the forward may not read that."""
    late = "%later = aten.sym_size.int(%x, 0) : b {phase=backward}\n"
    text = _HEAD + late + "%rows = aten.sym_size.int(%x, 0) : b\n" + _SUM + "return y=%y\n"
    taken = [line for line in print_program(chunked(text)).splitlines() if "take_chunk" in line]
    assert len(taken) == 2
    assert all("(%x, 0, %rows, " in line for line in taken)


@pytest.mark.parametrize(("rows", "sizes"), [(3, [1, 2]), (7, [2, 2, 3]), (2, [0, 1, 0, 1]), (1, [0, 0, 1])])
def test_uneven_rows(rows: int, sizes: list[int]) -> None:
    """Three elements a row; where there are fewer rows than chunks, some have none."""
    x = torch.arange(6 * rows).view(2, 3 * rows)
    chunks = [chunk_taken(x, 1, rows, index, len(sizes)) for index in range(len(sizes))]
    assert [chunk.shape[1] for chunk in chunks] == [3 * size for size in sizes]
    assert torch.equal(chunks_joined(chunks, 1), x)
    assert [chunk_sized(2 * rows, 2, index, len(sizes)) for index in range(len(sizes))] == [2 * n for n in sizes]


# ---------------------------------------------------------------------- steps of models


@cache
def trial(build: Callable[[], nn.Module], rows: int, chunks: int, **plan: Any) -> Trial:
    """The step in chunks, of two ranks that share layers out."""
    return Trial(build, rows, communication=Communication(token_chunks=chunks), **{"tp": 2, **plan})


def in_chunks(step: Program) -> Counter[str]:
    """How many of each operator on chunks there are."""
    return Counter(str(node.target) for node in step.graph.nodes if node.target in CHUNKED)


class Masked(nn.Module):
    """Attention of heads that share keys, with a mask of the words of each row, and one of a window for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.out = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.keys = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns the loss."""
        x = self.embed(ids)
        length = ids.shape[1]
        places = torch.arange(length)
        window = (places[:, None] - places[None, :]).abs() < 3
        for mask in ((ids > 4)[:, None, None, :] & window, window[None, None]):
            q, k, v = (part(x).unflatten(2, (-1, 2)).transpose(1, 2) for part in (self.query, *self.keys))
            y = nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
        logits = nn.functional.linear(x, self.embed.weight)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


_FULL, _SELECTIVE = Recompute("full"), Recompute("selective")
_EVERY_TIME: tuple[tuple[Any, ...], ...] = (
    (Attentive, 3, 2, {}),
    (Attentive, 2, 4, {"sequence_parallel": True}),
    (Small, 6, 2, {"dp": 2, "sequence_parallel": True}),
    (Small, 5, 3, {"recompute": _FULL}),
    (Masked, 5, 3, {}),
)
_MORE: tuple[tuple[Any, ...], ...] = (
    (Attentive, 6, 2, {"dp": 2}),
    (Masked, 5, 2, {"sequence_parallel": True}),
    (Masked, 2, 3, {"recompute": _FULL}),
    (Attentive, 5, 3, {"tp": 4}),
    (Attentive, 3, 2, {"recompute": _FULL, "sequence_parallel": True}),
    (Attentive, 3, 2, {"recompute": _SELECTIVE}),
    (Small, 3, 2, {}),
    (Small, 2, 3, {"sequence_parallel": True}),
    (Small, 3, 4, {"recompute": _SELECTIVE, "sequence_parallel": True}),
    (Small, 10, 4, {"dp": 2, "recompute": _FULL}),
)


@pytest.mark.parametrize(("build", "rows", "chunks", "plan"), few((*_EVERY_TIME, *_MORE), _EVERY_TIME), ids=str)
def test_values_and_gradients_stay(
    build: Callable[[], nn.Module], rows: int, chunks: int, plan: dict[str, Any]
) -> None:
    """With uneven rows and with chunks that have none, against one device; and the text is the program."""
    own = trial(build, rows, chunks, **plan)
    verify_static(own.step)
    count = in_chunks(own.step)
    assert min(count["fxpar.take_chunk"], count["fxpar.join_chunks"], count["fxpar.chunk_size"]) > 0
    assert own.is_right(own.step)
    text = print_program(own.step)
    assert print_program(parse_program(text)) == text


def test_products_are_cut_but_gradients_of_attention() -> None:
    """Gradients of weights are added up; those of attention are computed of all rows, the forward chunk by chunk."""
    step = trial(Attentive, 3, 2).step
    assert [node.name for node, _ in matmul_flops(step) if "_chunk" not in node.name] == []
    attention = [node.name for node in step.graph.nodes if str(node.target).startswith("fxpar.attention")]
    assert attention == ["attention_forward_chunk0", "attention_forward_chunk1", "attention_backward"]
    weights = {name for name in step.outputs if name.endswith(".weight") and "norm" not in name and "embed" not in name}
    returned = step.output_nodes()
    assert {str(returned[name].target) for name in weights} == {"fxpar.add_chunks"}
    assert "add_chunks" not in str(returned["fxpar.gradient.embed.weight"].target)  # a table larger than the rows


def test_masks_of_rows_are_cut_and_those_of_all_rows_are_whole() -> None:
    step = trial(Masked, 5, 3).step
    masks = [node.args[3] for node in step.graph.nodes if str(node.target) == "fxpar.attention_forward"]
    assert len(masks) == 6
    shapes = [str(note(mask).type) for mask in masks if isinstance(mask, fx.Node)]
    rows = ("floor(b/3)", "-floor(b/3) + floor(2*b/3)", "b - floor(2*b/3)")
    assert Counter(shapes) == {"bool[1, 1, s, s]": 3, **{f"bool[{size}, 1, s, s]": 1 for size in rows}}


def test_gradients_of_weights_put_no_chunks_together() -> None:
    """What attention reads, and what is returned, alone is."""
    step = trial(Attentive, 3, 2).step
    joined = {node.name for node in step.graph.nodes if str(node.target) == "fxpar.join_chunks"}
    readers = {user for name in joined for user in step.node(name).users}
    assert not [user.name for user in readers if user.op == "call_function" and "mm" in user.name]


def costs(bandwidth: float) -> Cost:
    """Of ranks that send so many bytes while they compute a thousand operations; nothing else takes time."""
    free = Cost(least_copy=1.0, copy_latency=0.0, kernel_latency=0.0, latency=1e-12, memory=1e30)
    return replace(free, bandwidth=bandwidth, flops=1e3, multiprocessors=1)


def prices(bandwidth: float) -> dict[tuple[str, int, bool], ChunkPrice]:
    step = Trial(Attentive, 8, tp=2, cost=costs(bandwidth), communication=Communication("copy")).step
    rows = symbol(batch_symbol(step))
    found = chunk_prices(step, rows, ChunkChoice(step, rows))
    return {(price.phase, price.count, price.attention): price for price in found}


@pytest.mark.parametrize("bandwidth", [100, 400, 3000])
@pytest.mark.parametrize("count", [2, 4])
def test_a_forward_waits_as_long_as_the_price_says(bandwidth: float, count: int) -> None:
    """As the clock of the step in chunks says."""
    found, transport = prices(bandwidth), Communication("copy", token_chunks=count)
    step = Trial(Attentive, 8, tp=2, cost=costs(bandwidth), communication=transport).step
    waited = sum(
        travel.exposed
        for travel in travels(step)
        if travel.collective.phase == "forward" and "cross_entropy" not in travel.collective.node
    )
    assert found["", count, True].chunked == pytest.approx(waited, rel=0.15)
    assert found["", count, True].whole == pytest.approx(3 * 8 * (8 * 6 * 8) / bandwidth)


def test_each_phase_is_priced_and_attention_of_the_forward() -> None:
    """A backward has the gradients of weights to hide behind in any case."""
    found = prices(100)
    assert set(found) == {
        (phase, count, attention)
        for phase, attention in (("", False), ("", True), ("backward", False))
        for count in (2, 4, 8)
    }
    products = 2 * 48 * (4 * 8 * 8 + 2 * 8 * 12 + 8 * 20) / 2 / 1000  # of 48 tokens, on each of two ranks
    sums = found["", 2, False].whole
    assert found["backward", 2, False].whole == pytest.approx(sums - products)
    assert prices(1000)["backward", 2, False].whole == 0.0
    assert prices(1000)["backward", 2, False].gain == 0.0


def test_sums_of_the_output_s_products_travel_beside_attention() -> None:
    found = prices(200)
    assert found["", 4, True].chunked < found["", 4, False].chunked
    assert cheapest([*found.values()])[2]


def test_attention_of_few_heads_takes_as_long_for_a_chunk_as_for_all_rows() -> None:
    cost = replace(costs(200), multiprocessors=1000)
    step = Trial(Attentive, 8, tp=2, cost=cost, communication=Communication("copy")).step
    rows = symbol(batch_symbol(step))
    more = {
        price.attention: price.more
        for price in chunk_prices(step, rows, ChunkChoice(step, rows))
        if price.count == 4 and not price.phase
    }
    (seconds,) = (time for node, time in estimates(step).products.items() if "attention" in node.name)
    assert more[True] - more[False] == pytest.approx(3 * seconds)


def test_of_two_chunks_nothing_is_beside_a_gather() -> None:
    """The first chunk's scatter alone is hidden: its gather comes after the other's scatter. A third one hides all."""
    step = parse_program(_SCATTERED)
    step = step.with_(plan=replace(step.plan, cost=costs(1e4), communication=Communication("copy")))
    rows = symbol(batch_symbol(step))
    found = {price.count: price for price in chunk_prices(step, rows, ChunkChoice(step, rows))}
    assert found[2].whole == pytest.approx(2 * (4 * 10 * 8 * 4) / 2 / 1e4)
    assert found[2].chunked == pytest.approx(found[2].whole * 3 / 4)
    assert found[4].chunked == pytest.approx(0.0)


def test_the_cheapest_number_saves_most_over_the_phases() -> None:
    def price(count: int, phase: str, saved: float) -> ChunkPrice:
        return ChunkPrice(count, phase, False, products=100.0, whole=50.0, chunked=50.0 - saved, more=0.0)

    both = [price(2, "", 10.0), price(2, "backward", 5.0), price(4, "", 12.0), price(4, "backward", -9.0)]
    assert cheapest(both) == (2, ("", "backward"), False)
    assert cheapest([*both, price(8, "", 15.5), price(8, "backward", 1.0)]) == (8, ("",), False)
    assert cheapest([price(2, "", 1.0), price(4, "", 1.4)]) == (1, (), False)  # too little to be known
    assert cheapest([]) == (1, (), False)
    of_attention = replace(price(4, "", 18.0), attention=True)
    assert cheapest([*both, of_attention]) == (4, ("",), True)
    assert cheapest([*both, replace(of_attention, chunked=40.0)]) == (2, ("", "backward"), False)


@pytest.mark.parametrize(("bandwidth", "phases"), [(1000, {""}), (10, {"", "backward"}), (1e9, set())])
def test_auto_takes_the_phases_in_which_chunks_pay(bandwidth: float, phases: set[str]) -> None:
    """Chunks of the forward alone are what gradients of weights read, too."""
    auto = Trial(Attentive, 8, tp=2, cost=costs(bandwidth), communication=Communication("copy", token_chunks="auto"))
    sums = [node for node in auto.step.graph.nodes if "reduce" in str(node.target)]
    assert {note(node).phase for node in sums if "_chunk" in node.name} == phases
    assert {note(node).phase for node in sums if "_chunk" not in node.name} == {"", "backward"} - phases
    # Sums over rows of a backward that is whole are whole.
    assert ("backward" in phases) == bool(in_chunks(auto.step)["fxpar.add_chunks"])
    assert auto.is_right(auto.step)


def test_draws_are_of_all_rows() -> None:
    step = trial(Small, 3, 2).step
    draws = [node.name for node in step.graph.nodes if node.op == "call_function" and note(node).random]
    assert len(draws) == 4
    assert not any("_chunk" in name for name in draws)


def test_sums_at_the_end_of_a_layer_travel_beside_products() -> None:
    """At the end of a region all that is on its way is waited for: it ends in front of what is sent next."""
    loaded = load_model("hf:llama,num_hidden_layers=4,attention_dropout=0.0", 8, None, 1, True)
    plan = Plan(tp=2, communication=Communication(token_chunks=4))
    program = compile_model(loaded.model, loaded.batch, plan).program
    trained = [p.fqn for p in program.parameters if p.trainable]
    step = compile_step(program, program.outputs, (str(program.loss),), trained)
    assert sum(region_of(node) is not None and not note(node).phase for node in step.graph.nodes) > 1
    travelling = [travel for travel in travels(inlined(step)) if travel.collective.phase == "forward"]
    bare = {travel.collective.node for travel in travelling if not travel.beside}
    assert bare == {"embedding_reduce_from_chunk0", "cross_entropy_forward"}


def test_what_a_norm_sums_over_rows_is_added_up() -> None:
    """The gradients of its weight and bias, where its own gradient is computed in chunks."""
    step = trial(Small, 3, 2).step
    norms = [node for name, node in step.output_nodes().items() if name.startswith("fxpar.gradient.norms.")]
    assert [str(node.target) for node in norms] == ["fxpar.add_chunks"] * 4


@pytest.mark.parametrize(("build", "rows"), few([(Small, 4), (Attentive, 3)], [(Small, 4)]), ids=str)
def test_stages_of_a_pipeline(monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module], rows: int) -> None:
    """The steps of both stages after all their passes."""
    counts = []

    def step_of_stage(stage: Stage) -> Program:
        trained = [p.fqn for p in stage.program.parameters if p.trainable]
        step = inlined(compile_step(stage.program, stage.program.outputs, stage.tangents, trained))
        counts.append(in_chunks(step)["fxpar.join_chunks"])
        return step

    monkeypatch.setattr(simulate_ranks, "step_of_stage", step_of_stage)
    torch.manual_seed(3)
    model = build().double()
    batch = {"ids": torch.randint(0, 20, (rows, 6)), "labels": torch.randint(0, 20, (rows, 6))}
    plan = Plan(tp=2, pp=2, communication=Communication(token_chunks=2))
    compiled = compile_model(model, batch, plan)
    captured = compiled.captured.program
    inputs = call_inputs(compiled.captured, model, batch)
    assert verify_values(captured, compiled.program, program_state(captured, model), inputs).ok
    assert len(counts) == 2
    assert all(counts)


_ARCHITECTURES = (
    *("llama", "gpt2", "mistral", "qwen3", "gemma2", "olmo2", "phi3", "gpt_neox"),
    *("opt", "mixtral", "bloom", "t5", "bert"),
)
_PLANS: dict[str, dict[str, Any]] = {
    "tensor": {"tp": 2},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "data": {"tp": 2, "dp": 2},
    "four": {"tp": 4},
}
# Without dropout attention is in chunks: of shared heads, of a window, and with biases.
_UNDROPPED = (
    *("llama,attention_dropout=0.0", "mistral,attention_dropout=0.0,sliding_window=3", "gpt2,attn_pdrop=0.0"),
    *("qwen3,attention_dropout=0.0", "bert,attention_probs_dropout_prob=0.0", "t5,dropout_rate=0.0"),
)
_SOMETIMES = [(name, plan) for name in (*_ARCHITECTURES, *_UNDROPPED) for plan in _PLANS]


@pytest.mark.parametrize(("name", "plan"), few(_SOMETIMES, [(_UNDROPPED[0], "sequence"), ("bert", "tensor")]))
def test_architectures(name: str, plan: str) -> None:
    """Three chunks of five or, on ranks that share out the batch, of ten rows."""
    chosen = _PLANS[plan]
    loaded = load_model(f"hf:{name}", 5 * chosen.get("dp", 1), None, 1, True)
    model = loaded.model.double()
    compiled = compile_model(model, loaded.batch, Plan(**chosen, communication=Communication(token_chunks=3)))
    program, captured = compiled.program, compiled.captured.program
    trained = [p.fqn for p in program.parameters if p.trainable]
    assert program.loss is not None
    step = inlined(compile_step(program, program.outputs, (program.loss,), trained))
    assert in_chunks(step)["fxpar.join_chunks"] > 4
    attention = [node.name for node in step.graph.nodes if str(node.target) == "fxpar.attention_forward"]
    assert name not in _UNDROPPED or all("_chunk" in one for one in attention)
    inputs = call_inputs(compiled.captured, model, loaded.batch)
    report = verify_values(captured, step, program_state(captured, model), inputs)
    assert report.ok, report


def test_one_row_is_computed_as_it_is() -> None:
    """The words of the generator, which dropout reads, are no rows."""
    one = trial(Small, 1, 3)
    assert not any(in_chunks(one.step).values())
    assert one.is_right(one.step)


def test_one_rank_has_nothing_to_wait_for() -> None:
    assert not in_chunks(trial(Attentive, 3, 2, tp=1).step)


class Weighted(nn.Module):
    """Two matrices, and a constant for each of four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
        return {"loss": (self.down(torch.tanh(self.up(x))) * weights).sum()}


def test_rows_that_cannot_vary_are_refused() -> None:
    batch = {"x": torch.randn(4, 8)}
    chunks = Communication(token_chunks=2)
    program = compile_model(Weighted(), batch, Plan(tp=2, communication=chunks)).program
    message = (
        r"communication\.token_chunks: no input has rows whose number may vary: .* 4 alone; .*, or set token_chunks=1"
    )
    with pytest.raises(PlanError, match=message):
        compile_step(program, program.outputs, ("loss",), ["up.weight"])
    program = compile_model(Weighted(), batch, Plan(tp=2)).program
    assert not in_chunks(compile_step(program, program.outputs, ("loss",), ["up.weight"]))


class Doubled(nn.Module):
    """Computes all rows twice, one after the other, and takes the two apart."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.more = nn.Linear(8, 16), nn.Linear(8, 16)
        self.down, self.less = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        """[b, 8] to []."""
        h = self.down(torch.relu(self.up(torch.cat([x, 2 * x]))))
        h = h.reshape(2, -1, 8).relu()
        return (h + self.less(torch.relu(self.more(h)))).square().mean()


class Twice(nn.Module):
    """Computes a norm twice of one value: each has a derivative, and nothing adds up what comes to both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.up, self.gate, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns the loss."""
        x = self.embed(ids)
        x = x + self.down(torch.tanh(self.up(self.norm(x))) * self.gate(self.norm(x)))
        logits = nn.functional.linear(x, self.embed.weight)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_what_is_computed_twice_is_checked_as_two() -> None:
    step = trial(Twice, 3, 2)
    names = [str(node.target) for node in step.step.graph.nodes]
    assert names.count("aten.native_layer_norm_backward.default") == 4
    verify_static(step.step)
    assert step.is_right(step.step)


@pytest.mark.parametrize("chunks", [2, 3])
def test_groups_of_rows_are_cut_as_one_or_not_at_all(chunks: int) -> None:
    torch.manual_seed(1)
    model, batch = Doubled().double(), {"x": torch.randn(4, 8, dtype=torch.float64)}
    plan = Plan(tp=2, communication=Communication(token_chunks=chunks))
    compiled = compile_model(model, batch, plan, loss=lambda output, batch: output)
    captured, program = compiled.captured, compiled.program
    step = inlined(step_of(program))
    assert in_chunks(step)
    assert verify_values(
        captured.program, step, program_state(captured.program, model), call_inputs(captured, model, batch)
    ).ok
