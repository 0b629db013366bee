"""Experts on other ranks are trained as on one process: losses, norms, every gradient, the weights behind it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fxpar.plan.plan_options import Communication, CudaGraphs, Experts, Recompute
from tests.runtime import expert_jobs
from tests.runtime.expert_jobs import Found
from tests.runtime.test_training import assert_same
from tests.runtime.world import World

# Whatever exceeds an even load goes to replicas.
SPARE = Experts(spare_experts=1, min_gain=0)
PLANS: list[Any] = [
    {"tp": 2, "ep": 2, "etp": 1},
    pytest.param({"dp": 4, "ep": 2}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "ep": 2, "compile": True}, marks=pytest.mark.matrix),
    pytest.param({"tp": 2, "ep": 2, "etp": 1, "compile": True}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "ep": 2, "compile": True, "recompute": Recompute("full")}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "ep": 2}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "ep": 2, "experts": Experts("alltoall")}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "ep": 2, "communication": Communication("copy")}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "tp": 2, "ep": 4, "etp": 1}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "tp": 2, "ep": 2}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "ep": 2, "pp": 2}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "ep": 2, "recompute": Recompute("full")}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "ep": 2, "experts": SPARE, "recompute": Recompute("full")}, marks=pytest.mark.matrix),
    {"dp": 2, "ep": 2, "experts": SPARE},
    pytest.param({"dp": 2, "ep": 2, "experts": SPARE, "compile": True}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "tp": 2, "ep": 2, "experts": SPARE}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "ep": 2, "pp": 2, "experts": SPARE}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "ep": 2, "experts": replace(SPARE, dispatch="dropless")}, marks=pytest.mark.matrix),
    {"dp": 2, "ep": 2, "experts": Experts("dropless")},
    pytest.param({"tp": 2, "ep": 2, "etp": 1, "experts": Experts("dropless")}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "tp": 2, "ep": 4, "etp": 1, "experts": Experts("dropless")}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "tp": 2, "ep": 2, "experts": Experts("dropless")}, marks=pytest.mark.matrix),
    pytest.param(
        {"dp": 2, "ep": 2, "experts": Experts("dropless"), "recompute": Recompute("full")},
        marks=pytest.mark.matrix,
    ),
    pytest.param({"dp": 2, "ep": 2, "pp": 2, "experts": Experts("dropless")}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "ep": 2, "experts": Experts("dropless"), "compile": True}, marks=pytest.mark.matrix),
    pytest.param(
        {"dp": 2, "tp": 2, "ep": 2, "experts": Experts("dropless"), "compile": True}, marks=pytest.mark.matrix
    ),
    pytest.param(
        {"dp": 2, "tp": 2, "ep": 4, "etp": 1, "experts": Experts("dropless"), "compile": True},
        marks=pytest.mark.matrix,
    ),
]


@cache
def alone(layers: int) -> Found:
    return expert_jobs.train({"layers": layers})


_within: dict[str, list[Found]] = {}


def within_budget(world: World, plan: dict[str, Any], ways: str) -> list[Found]:
    """What a plan without a budget trains, once for all budgets."""
    key = str((plan, ways))
    if key not in _within:
        _within[key] = world.run(expert_jobs.budgeted, plan, ways)
    return _within[key]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(f"{k}{v}" for k, v in plan.items()))
def test_ranks_train_what_one_process_trains(request: pytest.FixtureRequest, plan: dict[str, Any]) -> None:
    stages = plan.get("pp", 1)
    layers = 2 if "recompute" in plan else stages  # of one layer nothing is like another
    wanted = alone(layers)
    ranks = plan.get("dp", 1) * plan.get("tp", 1) * stages
    for found in request.getfixturevalue(f"world{ranks}").run(expert_jobs.train, {**plan, "layers": layers}):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)  # float32 in transformers
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
        assert_same(found["gradients"], {name: wanted["gradients"][name] for name in found["gradients"]}, 1e-6)
        assert_same(found["state"], wanted["state"], 1e-5)
        assert found["held"] < wanted["held"]


@pytest.mark.matrix
def test_replicas_change_no_training(world2: World, tmp_path: Path) -> None:
    """Twenty steps, and two that go on from a save: those to the bit."""
    plan = {"dp": 2, "ep": 2, "layers": 2}
    without = world2.run(expert_jobs.train, plan, 20, 1e-3)
    spare = {**plan, "experts": SPARE}
    for found, wanted in zip(world2.run(expert_jobs.train, spare, 20, 1e-3), without, strict=True):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
        assert_same(found["state"], wanted["state"], 1e-6)
    saved = world2.run(expert_jobs.saved, spare, tmp_path)
    assert world2.run(expert_jobs.resumed, spare, tmp_path) == [(losses, True) for losses in saved]


MOVES: list[Any] = [
    pytest.param({"dp": 2, "ep": 2, "experts": SPARE}, [{"tp": 2}, {}], marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "ep": 2}, [{"tp": 2}, {}], marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "tp": 2, "ep": 4, "etp": 1}, [{"dp": 4, "ep": 2}, {"tp": 2}, {}], marks=pytest.mark.matrix),
    ({"dp": 2, "pp": 2, "ep": 2}, [{"dp": 2, "tp": 2, "ep": 2, "shard": "parameters"}]),
    pytest.param({"pp": 2, "tp": 2}, [{"dp": 4, "shard": "parameters"}, {"pp": 2}], marks=pytest.mark.matrix),
    pytest.param({"dp": 4, "shard": "parameters"}, [{"tp": 2, "pp": 2}, {"dp": 2, "ep": 2}], marks=pytest.mark.matrix),
    pytest.param(
        {"dp": 2, "shard": "optimizer"},
        [{"dp": 4, "dp_shard": 2, "shard": "parameters"}, {"pp": 2}],
        marks=pytest.mark.matrix,
    ),
]


def _run(request: pytest.FixtureRequest, plan: dict[str, Any], job: Any, *given: Any) -> list[Any]:
    """What each rank of a plan finds; none are one process."""
    ranks = plan.get("dp", 1) * plan.get("tp", 1) * plan.get("pp", 1)
    found: list[Any] = (
        [job(plan, *given)] if ranks == 1 else request.getfixturevalue(f"world{ranks}").run(job, plan, *given)
    )
    return found


@pytest.mark.parametrize(("plan", "others"), MOVES)
def test_a_training_goes_on_under_other_plans(
    request: pytest.FixtureRequest, tmp_path: Path, plan: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    layers = max(one.get("pp", 1) for one in (plan, *others))
    wanted = _run(request, {**plan, "layers": layers}, expert_jobs.saved, tmp_path)[0]
    assert wanted[1] != wanted[0]
    for other in [{**one, "layers": layers} for one in others]:
        for losses, is_read in _run(request, other, expert_jobs.resumed, tmp_path):
            assert losses == pytest.approx(wanted, rel=1e-6)
            assert is_read


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        ({"dp": 2, "ep": 2}, 2),
        pytest.param({"dp": 2, "ep": 2, "experts": Experts("dropless")}, 1, marks=pytest.mark.matrix),
        pytest.param({"tp": 2, "ep": 2, "etp": 1}, 1, marks=pytest.mark.matrix),
        pytest.param({"dp": 2, "ep": 2, "cuda_graphs": CudaGraphs("full_iteration")}, 2, marks=pytest.mark.matrix),
        pytest.param({"dp": 2, "ep": 2, "compile": True}, 1, marks=pytest.mark.matrix),
        pytest.param({"tp": 2, "dp": 2, "ep": 2}, 1, marks=pytest.mark.matrix),
        pytest.param({"dp": 4, "ep": 2}, 1, marks=pytest.mark.matrix),
    ],
)
def test_the_load_of_the_last_step_is_in_the_report(
    request: pytest.FixtureRequest, plan: dict[str, Any], parts: int
) -> None:
    """Of a router that sends all tokens to the first two of four experts."""
    ranks, tokens = plan.get("dp", 1) * plan.get("tp", 1), 8 * 5 * parts
    rows = {2: (2 * tokens, 0), 4: (tokens, 0, tokens, 0)}[ranks]
    if plan.get("tp", 1) * plan.get("dp", 1) == 4 and plan.get("tp") == 2:
        rows = (2 * tokens, 2 * tokens, 0, 0)  # tensor ranks have the same rows, and a half of each expert
    for (before, behind), text in request.getfixturevalue(f"world{ranks}").run(expert_jobs.loads, plan, "one", parts):
        assert before == ()
        (found,) = behind
        assert (found.experts, found.ranks) == ((tokens, tokens, 0, 0), rows)
        assert found.imbalance == (2.0, 2.0)
        assert "load of experts" in text
        assert f"{tokens} {tokens} 0 0" in text


@pytest.mark.parametrize(
    ("plan", "before", "ranks", "replicas"),
    [
        ({"dp": 2, "ep": 2}, (160, 0), (80, 80), 2),
        pytest.param({"tp": 2, "ep": 2, "etp": 1}, (160, 0), (80, 80), 2, marks=pytest.mark.matrix),
        pytest.param({"dp": 4, "ep": 2}, (80, 0, 80, 0), (40,) * 4, 4, marks=pytest.mark.matrix),
        pytest.param({"dp": 2, "tp": 2, "ep": 2}, (160, 160, 0, 0), (80,) * 4, 2, marks=pytest.mark.matrix),
    ],
)
def test_replicas_of_hot_experts_take_rows_of_theirs(
    request: pytest.FixtureRequest, plan: dict[str, Any], before: Any, ranks: Any, replicas: int
) -> None:
    """The ranks with the two experts of 80 rows share them with others, which have a replica in each microbatch."""
    world = request.getfixturevalue(f"world{len(ranks)}")
    for (_, behind), text in world.run(expert_jobs.loads, {**plan, "experts": SPARE}, "one", 2):
        (found,) = behind
        assert (found.experts, found.before, found.ranks) == ((80, 80, 0, 0), before, ranks)
        assert found.replicas == replicas
        assert f"experts 2.00 ({replicas})" in " ".join(text.split())


def test_a_training_takes_its_slots_from_the_report_of_another(world2: World, tmp_path: Path) -> None:
    """All rows are of the two experts of one rank, and links are free."""
    for plan, saved, (load,) in world2.run(expert_jobs.with_slots_by_loads, tmp_path):
        assert plan == Experts(spare_experts=1)
        assert saved == {"spare_experts": 1}
        assert (load.before, load.ranks, load.replicas) == ((80, 0), (40, 40), 1)


def test_the_report_says_how_many_rows_were_dropped(world2: World) -> None:
    """Of a router that sends all of a source's 20 tokens to the first two experts, which take ceil(20 * 2 / 4)."""
    plan = {"dp": 2, "ep": 2, "experts": Experts(capacity_factor=1)}
    for (_, behind), text in world2.run(expert_jobs.loads, plan, "one", 2):
        (found,) = behind
        assert (found.experts, found.dropped) == ((40, 40, 0, 0), 80)
        assert "Dropped beyond capacity_factor: experts 80." in " ".join(text.split())


@pytest.mark.parametrize("over", [False, True], ids=["full", "over"])
@pytest.mark.parametrize(
    ("ways", "options"),
    [
        ("plain", {}),
        pytest.param("plain", {"experts": Experts("alltoall")}, marks=pytest.mark.matrix),
        pytest.param("list", {}, marks=pytest.mark.matrix),
        pytest.param("no_sync", {}, marks=pytest.mark.matrix),
        pytest.param("plain", {"compile": True}, marks=pytest.mark.matrix),
        pytest.param("plain", {"cuda_graphs": CudaGraphs("partial")}, marks=pytest.mark.matrix),
    ],
)
def test_a_step_with_rows_over_the_budget_is_repeated(
    world2: World, ways: str, options: dict[str, Any], over: bool
) -> None:
    """Buffers that are exactly full are enough; with one place less the step is taken again, as if for the first time.

    A balanced load are 20 rows of each of two sources for each of two holders, which have places for both together
    where they gather tokens.
    """
    plan = {"dp": 2, "ep": 2, **options}
    dispatch = options.get("experts", Experts()).dispatch
    together = dispatch == "static"
    even = 40 if together else 20
    most = expert_jobs.most_rows(together)
    assert even + 1 < most < 2 * even
    wanted = within_budget(world2, plan, ways)
    budget = (most - over) / even
    for found, same in zip(
        world2.run(expert_jobs.budgeted, {**plan, "experts": Experts(dispatch, recv_capacity_factor=budget)}, ways),
        wanted,
        strict=True,
    ):
        assert found["losses"] == pytest.approx(same["losses"], rel=1e-12)
        assert_same(found["gradients"], same["gradients"], 1e-12)
        assert_same(found["state"], same["state"], 1e-12)
        assert found["output"] == pytest.approx(same["output"], rel=1e-12)
        steps = 2 if ways == "no_sync" else 1
        assert f"Of {steps} steps {steps * over} were repeated" in " ".join(found["report"].split())


@pytest.mark.parametrize(
    "options",
    [
        {"ep": 2, "experts": Experts(capacity_factor=0.5, pad_to_capacity=True)},
        pytest.param({"ep": 2}, marks=pytest.mark.matrix),
        pytest.param({"ep": 2, "experts": Experts("dropless", capacity_factor=0.5)}, marks=pytest.mark.matrix),
        pytest.param(
            {"ep": 2, "compile": True, "experts": Experts(capacity_factor=0.5, pad_to_capacity=True)},
            marks=pytest.mark.matrix,
        ),
        pytest.param({"ep": 2, "recompute": Recompute("selective")}, marks=pytest.mark.matrix),
        pytest.param({"ep": 2, "cuda_graphs": CudaGraphs("partial")}, marks=pytest.mark.matrix),
    ],
    ids=lambda plan: "-".join(f"{k}{v}" for k, v in plan.items()),
)
def test_rows_are_dropped_wherever_experts_lie(world2: World, options: dict[str, Any]) -> None:
    """Each data rank drops its own: two of them with all experts are the reference, whose values are a loop's.

    By this capacity experts take half of all rows or less.
    """
    limit = {"dp": 2, "experts": Experts(capacity_factor=0.5)}
    wanted = world2.run(expert_jobs.budgeted, limit, "list")
    for found, same in zip(world2.run(expert_jobs.budgeted, {**limit, **options}, "list"), wanted, strict=True):
        assert found["losses"] == pytest.approx(same["losses"], rel=1e-12)
        assert_same(found["state"], same["state"], 1e-12)
        assert found["output"] == pytest.approx(same["output"], rel=1e-12)


def test_data_ranks_that_bring_other_rows_are_refused(world2: World) -> None:
    for kind, _, reason, remedy in world2.run(expert_jobs.other_rows, {"dp": 2, "ep": 2}):
        assert kind == "InputError"
        assert "the data ranks bring 4, 3" in reason
        assert remedy == "pass as many rows on each data rank"
