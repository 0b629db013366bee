"""A step of a pipeline that is replayed as one graph is the step, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import fxpar
from tests.cudagraphs import stages
from tests.cudagraphs.graphed import mixtral, train, two_layers
from tests.runtime.world import World

COPY: dict[str, Any] = {"communication": fxpar.Communication("copy")}
INTERLEAVED: dict[str, Any] = {"pp": 2, "virtual_stages": 2, "microbatches": 4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zb_h1": ({"pp": 2, "schedule": "zb_h1", **COPY}, {"evaluate": 3}),
    # The first rank has neither gradients nor an optimizer's state, and must record when the second does.
    "frozen inside": ({"pp": 2, **COPY}, {"build": stages.frozen, "inside": True}),
}
MORE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "inside": (INTERLEAVED, {"inside": True}),
    "1f1b": ({"pp": 2, **COPY}, {}),
    "frozen": ({"pp": 2, **COPY}, {"build": stages.frozen}),
    "gpipe": ({"pp": 2, "schedule": "gpipe", **COPY}, {"evaluate": 3}),
    "interleaved": ({**INTERLEAVED, **COPY}, {"evaluate": 3}),
    "zbv": ({"pp": 2, "virtual_stages": 2, "schedule": "zbv", **COPY}, {}),
    "accumulated": ({"pp": 2, **COPY}, {"every": 2, "set_to_none": False}),
    "compiled": ({"pp": 2, "compile": True}, {"build": two_layers}),
    "frozen groups": ({"pp": 2}, {"build": stages.frozen}),
}


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.matrix) for name, case in MORE_CASES.items()),
    ],
)
def test_a_whole_step_is_one_graph_on_each_rank(world2: World, plan: dict[str, Any], options: dict[str, Any]) -> None:
    counts = (4, 4, 6, 4, 6, 4)
    job = partial(stages.compare, impl="full_iteration", **options)
    for compared in world2.run(job, counts, plan, (5, 7)):
        assert compared.is_equal
        # Steps of four and of six microbatches, each recorded the second time, and evaluations.
        accumulated = options.get("every", 1) > 1
        assert (
            compared.graphs[-1]
            == compared.figures.variants
            >= (2 if accumulated else 2 + bool(options.get("evaluate")))
        )


@pytest.mark.matrix
@pytest.mark.parametrize(
    "plan", [{"pp": 2}, INTERLEAVED, {"pp": 2, "schedule": "zb_h1"}, {"pp": 2, "schedule": "gpipe"}]
)
def test_many_microbatches_overwrite_nothing(world2: World, plan: dict[str, Any]) -> None:
    job = partial(stages.compare, impl="full_iteration")
    for compared in world2.run(job, (8, 16, 64, 64, 16, 8, 16), {**plan, **COPY}):
        assert compared.is_equal
        assert compared.graphs == [0, 0, 0, 1, 2, 3, 3]


@pytest.mark.matrix
@pytest.mark.parametrize("more", [{"dp": 2}, {"tp": 2, "sequence_parallel": True}, {"dp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("transport", ["copy", "nccl"])
def test_axes_of_several_ranks_are_in_the_graph(world4: World, more: dict[str, Any], transport: str) -> None:
    plan = {"pp": 2, "communication": fxpar.Communication(transport), **more}
    build = partial(mixtral, layers=2) if "ep" in more else two_layers
    job = partial(stages.compare, build=build, impl="full_iteration", inside=True)
    for compared in world4.run(job, (4, 4, 4), plan, (8,)):
        assert compared.is_equal
        assert compared.graphs[-1] == 1


@pytest.mark.matrix
@pytest.mark.parametrize("more", [{}, {"compile": True}, {"compile": True, "schedule": "zb_h1"}], ids=str)
def test_experts_without_drops_stand_between_graphs_of_stages(world4: World, more: dict[str, Any]) -> None:
    plan = {"pp": 2, "dp": 2, "ep": 2, "experts": fxpar.Experts("dropless"), **more}
    job = partial(stages.compare, build=partial(mixtral, layers=2), evaluate=3)
    for compared in world4.run(job, (4, 4, 6, 4), plan, (8,)):
        assert compared.is_equal
        assert compared.graphs[-1] > 2 * compared.figures.slots  # several regions a stage


def test_a_message_that_would_overwrite_another_is_refused(world2: World) -> None:
    first, _ = world2.run(stages.crowded)
    assert "an earlier call was broken off between a copy and its use" in first


@pytest.mark.parametrize("transport", ["copy", "nccl"])
def test_stages_without_gradients_train_as_on_one_process(world2: World, transport: str) -> None:
    job = partial(train, stages.frozen, stages.microbatches((4, 4, 3)))
    communication = fxpar.Communication(transport)
    for trained in world2.run(partial(job, pp=2, communication=communication)):
        assert trained.losses == pytest.approx(job().losses, rel=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("impl", ["full_iteration", "partial"])
def test_data_ranks_may_bring_other_numbers_of_rows(world4: World, impl: str) -> None:
    for plain, graphed in zip(world4.run(stages.uneven, "none"), world4.run(stages.uneven, impl), strict=True):
        assert graphed[:-1] == plain[:-1]
        assert graphed[-1][0] >= 4  # of two numbers of rows, a step and an evaluation


def test_a_rank_records_again_with_one_that_has_other_variants(world2: World) -> None:
    # The last rank alone has gradients, none in front of every other step: its variants take turns.
    job = partial(stages.compare, impl="full_iteration", build=stages.frozen, every=2)
    first, last = world2.run(job, (2,) * 6, {"pp": 2})
    assert first.is_equal
    assert last.is_equal
    assert first.graphs == [0, 0, 1, 1, 1, 1]
    assert last.graphs == [0, 0, 1, 2, 2, 2]
    assert last.figures.static_bytes == 2 * first.figures.static_bytes  # what was recorded before is freed


def test_what_one_stage_cannot_capture_is_refused_by_all_in_front_of_the_schedule(world2: World) -> None:
    for said in world2.run(stages.uncaptured):
        for kind, where, reason, remedy in said:
            assert kind == "InputError"  # no RankError: the module goes on
            assert "%item" in where
            assert "reads a value on the host" in reason
            assert "CudaGraphs('partial')" in remedy


def test_what_is_too_much_for_one_rank_is_refused_by_all(world2: World) -> None:
    for text, is_equal in world2.run(stages.refused_by_one):
        assert "rank 1, cuda_graphs: has 2 variants of graphs" in text or text.startswith("cuda_graphs: has 2 variants")
        assert is_equal
