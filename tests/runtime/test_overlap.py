"""Gradients are sent while layers are differentiated: on real processes, no bit changes."""

from __future__ import annotations

import itertools
import operator
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import fx

from fxpar.compile import compile_model
from fxpar.ir.program import Program, ScalarType, has_note, note, tensor_type, update
from fxpar.ir.regions import inlined
from fxpar.ops.collectives import all_gather, reduce_scatter
from fxpar.ops.layer_prefetch import move_between_layers
from fxpar.ops.lower import lower
from fxpar.ops.process_group import Group
from fxpar.plan.plan import SHARDS, Plan
from fxpar.plan.plan_options import CudaGraphs
from fxpar.runtime.calls import LoweredStep, StepCalls, UnitCall, once_calls
from tests.cudagraphs import graphed
from tests.products import few
from tests.runtime import overlap_jobs
from tests.runtime.world import World
from tests.zoo import step_of

CASES: list[tuple[str, int, str, bool]] = [
    (shard, micro, impl, compiled)
    for shard in SHARDS
    for micro in (1, 2)
    for impl in ("none", "full_iteration", "partial")
    for compiled in (False, True)
]
# Each shard, and with what is sent in layers both numbers of microbatches and both graphs; the matrix has all.
EVERY_TIME = [
    ("none", 1, "partial", False),
    ("optimizer", 1, "full_iteration", False),
    ("gradients", 2, "none", False),
    ("parameters", 1, "full_iteration", False),
    ("parameters", 2, "partial", False),
]


@pytest.mark.parametrize(("shard", "micro", "impl", "compiled"), few(CASES, EVERY_TIME))
def test_no_bit_changes(world2: World, shard: str, micro: int, impl: str, compiled: bool) -> None:
    assert all(world2.run(overlap_jobs.equal, shard, micro, impl, compiled, seconds=600.0))


def program_of(plan: Plan) -> Program:
    (batch,) = graphed.words(1)
    return compile_model(graphed.gpt2(layers=3).train(), batch, plan, None).program


def calls(shard: str, compiled: bool) -> list[fx.Node]:
    """A step as a rank runs it, without numbers and items."""
    with overlap_jobs.in_buckets():
        program = program_of(Plan(dp=2, shard=shard, compile=compiled))
        step = step_of(program)
        graph = lower(step, {"dp": Group("dp", 2)}).module.graph
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and has_note(node) and node.target is not operator.getitem
    ]


SENDS, WAITS = ("start_sum", "start_sums", "start_scatters"), ("arrived", "sums", "scattered")


def place(node: fx.Node) -> str:
    """What a node sends or waits for, or else of which call or phase it is."""
    name = getattr(node.target, "__name__", "")
    where = note(node).region or note(node).phase or "forward"
    known = {"put_in_places": "waits of parameters", "start_gathers": "gathers"}
    return known.get(name) or ("sends" if name in SENDS else "waits" if name in WAITS else where)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_a_bucket_is_sent_behind_its_last_layer_and_waited_for_behind_all(shard: str, compiled: bool) -> None:
    """Of three layers that are regions: each fills a bucket of parts. Units that are compiled send none."""
    nodes = [node for node in calls(shard, compiled) if note(node).phase]
    found = [(name, len(list(run))) for name, run in itertools.groupby(map(place, nodes))]
    layers = [name for i in (1, 2, 3) for name in (f"layer_backward_{i}", "sends")]
    assert [name for name, _ in found] == ["backward", *layers, "backward", "sends", "waits"]
    counts = [count for name, count in found if name == "sends"]
    assert counts == ([1] * 4 if shard == "optimizer" else [5, 5, 6, 2])
    assert {note(node).eager for node in nodes if note(node).phase == "parameter"} == {compiled}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_s_parameters_are_sent_while_the_layer_before_is_computed(compiled: bool) -> None:
    """In one call, forward and backward. A layer's gradients are waited for behind the next one, and freed then."""
    nodes = [node for node in calls("parameters", compiled) if not isinstance(note(node).type, ScalarType)]
    singles = ("start_gather", "start_scatter")  # of the embedding, the last norm and the head
    nodes = [n for n in nodes if getattr(n.target, "__name__", "") not in singles]
    found = [name for name, _ in itertools.groupby(map(place, nodes))]
    assert found[0] == "gathers"
    assert found[found.index("layer_1") - 2 : found.index("layer_3") + 1] == [
        *("gathers", "waits of parameters", "layer_1"),
        *("gathers", "waits of parameters", "layer_2", "waits of parameters", "layer_3"),
    ]
    assert found[found.index("layer_backward_1") - 2 :] == [
        *("gathers", "waits of parameters", "layer_backward_1", "sends"),
        *("gathers", "waits of parameters", "layer_backward_2", "waits", "sends"),
        *("waits of parameters", "layer_backward_3", "waits", "sends", "backward", "waits"),
    ]
    inside = [node for node in nodes if note(node).region]
    assert not [node for node in inside if place(node) != note(node).region]
    sent = [node for node in nodes if getattr(node.target, "__name__", "") in ("start_gathers", "start_scatters")]
    assert {note(node).eager for node in sent} == {compiled}


CUTS = [("partial", True, True), ("partial", False, False), ("full_iteration", True, False), ("none", True, False)]


@pytest.mark.parametrize(("impl", "ends", "stays"), CUTS)
def test_layers_send_for_themselves_where_a_graph_ends(impl: str, ends: bool, stays: bool) -> None:
    program = program_of(Plan(dp=2, shard="parameters", cuda_graphs=CudaGraphs(impl)))
    step = inlined(step_of(program))
    before = [node.name for node in step.graph.nodes]
    if ends:
        update(next(node for node in step.graph.nodes if note(node).region), uncaptured="reads a value")
    assert bool(move_between_layers(step)) != stays
    assert ([node.name for node in step.graph.nodes] == before) == stays


def test_what_ranks_copy_stays_in_its_layer() -> None:
    program = program_of(Plan(dp=2, shard="parameters"))
    step = inlined(step_of(program))
    sent = [node for node in step.graph.nodes if node.target in (all_gather, reduce_scatter) and note(node).region]
    copied = {node for node in sent if node.name.startswith(("layer_2_", "mm"))}
    for node in copied:
        update(node, buffer=1)
    assert copied
    assert set(move_between_layers(step)) == {*sent} - copied


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_parameters_are_gathered_in_the_order_of_use(shard: str) -> None:
    """A call that waits has what one call sends, of at least a bucket but for the last."""
    program = program_of(Plan(dp=2, shard=shard))
    with overlap_jobs.in_buckets():
        gathers = once_calls(lower(program, {"dp": Group("dp", 2)}).module.graph)
    assert gathers is not None
    readers = [node.name for node in program.graph.nodes if node.op == "call_function"]
    first = {name: min(readers.index(user.name) for user in program.node(name).users) for name in gathers.gives}
    assert sorted(first.values()) == list(first.values())
    assert sorted(name for call in gathers.finish for name in call.takes) == sorted(gathers.start.gives)
    sizes = [sum(4 * prod(tensor_type(program.node(name)).shape) for name in call.gives) for call in gathers.finish]
    assert len(sizes) > 5
    assert min(sizes[:-1]) >= overlap_jobs.BUCKET > max(sizes) - 4 * graphed.VOCABULARY * 32


def test_each_gather_is_waited_for_in_front_of_its_first_reader() -> None:
    """What only the backward reads, behind the forward; what the caller has waited for, not at all."""
    order: list[str] = []

    def call(name: str, takes: tuple[str, ...], gives: tuple[str, ...], frees: tuple[str, ...] = ()) -> UnitCall:
        def function(values: list[Any]) -> list[Any]:
            order.append(name)
            return [name] * len(gives)

        return UnitCall(function, takes, gives, frozenset(frees))

    waits = [call(f"wait {name}", (f"gathering {name}",), (name,), (f"gathering {name}",)) for name in "abc"]
    fields = {"results": {"loss": "y"}, "gradients": {}, "unfinished": (), "returned": {}, "arriving": tuple(waits)}
    forward = [call("first", ("x", "a"), ("h",)), call("second", ("h", "b", "a"), ("y",))]
    backward = [call("backward", ("y", "c"), ("g",))]
    step = StepCalls(cast(LoweredStep, SimpleNamespace(**fields)), forward, backward, {}, whole=True, early=1)
    started = {f"gathering {name}": name for name in "abc"}
    _, saved = step.forward({"x": 0, **started}, {})
    assert order == ["wait a", "first", "wait b", "second", "wait c"]
    assert saved.keys() == {"c", "y"}
    order.clear()
    step.forward({"x": 0, "a": 1, "b": 2, "c": 3}, {})
    assert order == ["first", "second"]
