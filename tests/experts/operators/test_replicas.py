"""Replicas of hot experts: the plan is that of plain loops, and renumbered choices are undone to the router's."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxpar.errors import FxparError
from fxpar.experts.operators.permute import sort_by_expert
from fxpar.experts.operators.replicas import (
    ReplicaFigures,
    overlaps,
    pairs_of_sources,
    plan_replicas,
    reroute,
    router_choices,
    simulate_replicas,
    spill_and_room,
)
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.simulate_ranks import run_ranks, step_of
from fxpar.verify.static import verify_static

EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)
Counts = list[list[int]]


def of_one_source(loads: list[int], ranks: int) -> Tensor:
    """Counts of which the last source has all."""
    return torch.tensor([[0] * len(loads)] * (ranks - 1) + [loads])


# Loads of 8 experts on 4 ranks with one slot each: spills, rooms, the expert in each slot, how many pairs go there.
VECTORS = [
    ([100, 20, 30, 10, 10, 10, 10, 10], [70, 0, 0, 0], [0, 10, 30, 30], [-1, 0, 0, 0], [0, 10, 30, 30]),
    ([120, 80, 40, 40, 20, 20, 10, 30], [110, 0, 0, 0], [0, 10, 50, 50], [-1, 0, 0, 0], [0, 10, 50, 50]),
    ([10] * 8, [0] * 4, [0] * 4, [-1] * 4, [0] * 4),
]


@pytest.mark.parametrize(("loads", "spills", "rooms", "home", "moved"), VECTORS)
def test_vectors(loads: list[int], spills: list[int], rooms: list[int], home: list[int], moved: list[int]) -> None:
    counts = of_one_source(loads, 4)
    spill, room = spill_and_room(counts, 0.0)
    assert spill.view(4, 2).sum(-1).tolist() == spills
    assert room.tolist() == rooms
    slots, pairs = plan_replicas(counts, 1, 0.0)
    assert slots.tolist() == home
    assert pairs.tolist() == [[0] * 4] * 3 + [moved]


def test_the_fullest_experts_spill() -> None:
    counts = of_one_source([50, 100, 150, 200, 0, 0, 0, 0], 2)
    assert spill_and_room(counts, 0.0)[0].tolist() == [0, 0, 50, 200, 0, 0, 0, 0]
    home, moved = plan_replicas(counts, 3, 0.0)
    assert home.tolist() == [-1, -1, -1, 3, 2, -1]
    assert moved.tolist() == [[0] * 6, [0, 0, 0, 200, 50, 0]]


@pytest.mark.parametrize(
    ("chunks", "buckets", "common"),
    [
        ([100, 150], [80, 120], [[80, 20], [0, 100]]),
        ([100, 80, 50, 30], [120, 60], [[100, 0], [20, 60], [0, 0], [0, 0]]),
    ],
)
def test_sizes_end_to_end_on_a_line(chunks: list[int], buckets: list[int], common: Counts) -> None:
    rows, columns = torch.tensor(chunks), torch.tensor(buckets)
    assert overlaps(rows.cumsum(0), rows, columns.cumsum(0), columns).tolist() == common


@pytest.mark.parametrize(("capacity", "pairs"), [(80, [24, 40, 16]), (83, [26, 41, 16])])
def test_shares_of_sources_are_rounded_down_and_filled_in_order(capacity: int, pairs: list[int]) -> None:
    counts, replicas = torch.tensor([[30], [50], [20]]), torch.tensor([[capacity]])
    assert pairs_of_sources(counts, replicas).flatten().tolist() == pairs


def test_figures() -> None:
    figures = simulate_replicas(of_one_source([100, 20, 30, 10, 10, 10, 10, 10], 4), 1, 0.0, 1000)
    assert figures == ReplicaFigures((120, 40, 20, 20), (50, 50, 50, 50), 3, 3000)


# ---------------------------------------------------------------------- the plan by plain loops


def planned_by_loops(counts: Counts, slots: int, min_gain: Fraction) -> tuple[list[int], Counts]:
    """Plans as the text says, one pair of a chunk and a bucket after the other."""
    ranks, experts = len(counts), len(counts[0])
    per_rank = experts // ranks
    loads = [sum(source[expert] for source in counts) for expert in range(experts)]
    even = sum(loads) // ranks
    chunks, buckets = [], []
    for rank in range(ranks):
        local = range(rank * per_rank, (rank + 1) * per_rank)
        beyond = sum(loads[expert] for expert in local) - even
        buckets.append((max(0, -beyond), rank))
        if beyond < min_gain * even:
            continue
        # From the fullest down, of equal ones the last first, until an even load is left.
        for expert in sorted(local, key=lambda expert: (-loads[expert], -expert)):
            spill = max(0, min(loads[expert], beyond))
            beyond -= spill
            chunks.append((spill, expert))
    entries: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    waiting = sorted(chunks, key=lambda chunk: (-chunk[0], chunk[1]))
    for room, rank in sorted(buckets, key=lambda bucket: (-bucket[0], bucket[1])):
        while room and waiting:
            spill, expert = waiting.pop(0)
            common = min(spill, room)
            room -= common
            if common:
                entries[rank].append((common, expert))
            if spill > common:
                waiting.insert(0, (spill - common, expert))
    home, capacity = [], []
    for column in entries:
        largest = sorted(column, key=lambda entry: (-entry[0], entry[1]))[:slots]
        largest += [(0, -1)] * (slots - len(largest))
        home += [expert for _, expert in largest]
        capacity += [common for common, _ in largest]
    return home, shared_by_loops(counts, loads, home, capacity)


def shared_by_loops(counts: Counts, loads: list[int], home: list[int], capacity: list[int]) -> Counts:
    """Shares rounded down, and what is missing from the sources in order."""
    moved = [
        [source[expert] * most // loads[expert] if most else 0 for expert, most in zip(home, capacity, strict=True)]
        for source in counts
    ]
    left = [list(source) for source in counts]
    for source, row in enumerate(moved):
        for expert, count in zip(home, row, strict=True):
            left[source][expert] -= count if expert >= 0 else 0
    for slot, expert in enumerate(home):
        missing = capacity[slot] - sum(row[slot] for row in moved)
        for source, row in enumerate(moved):
            more = min(missing, left[source][expert]) if missing else 0
            row[slot] += more
            left[source][expert] -= more
            missing -= more
        assert not missing
    return moved


def balanced(rng: random.Random, ranks: int, experts: int) -> Counts:
    return [[rng.randint(40, 60) for _ in range(experts)] for _ in range(ranks)]


def hot(rng: random.Random, ranks: int, experts: int) -> Counts:
    """An eighth of the experts, anywhere, has eight times the pairs."""
    chosen = set(rng.sample(range(experts), max(1, experts // 8)))
    return [[rng.randint(0, 20) * (8 if expert in chosen else 1) for expert in range(experts)] for _ in range(ranks)]


def hot_rank(rng: random.Random, ranks: int, experts: int) -> Counts:
    first = rng.randrange(ranks) * (experts // ranks)
    near = range(first, first + experts // ranks)
    return [[rng.randint(0, 9) * (9 if expert in near else 1) for expert in range(experts)] for _ in range(ranks)]


def sparse(rng: random.Random, ranks: int, experts: int) -> Counts:
    """Most experts have no pairs, and equal loads are frequent."""
    return [[rng.choice([0, 0, 0, 1, 2]) for _ in range(experts)] for _ in range(ranks)]


def all_to_one(rng: random.Random, ranks: int, experts: int) -> Counts:
    expert = rng.randrange(experts)
    return [[rng.randint(0, 99) if other == expert else 0 for other in range(experts)] for _ in range(ranks)]


def ragged(rng: random.Random, ranks: int, experts: int) -> Counts:
    """Some sources have no tokens, others up to many more than the rest."""
    weights = [rng.choice([0, 1, 3, 1000]) for _ in range(ranks)]
    return [[int(rng.paretovariate(1)) * weight for _ in range(experts)] for weight in weights]


LOADS: tuple[Callable[[random.Random, int, int], Counts], ...] = (
    balanced,
    hot,
    hot_rank,
    sparse,
    all_to_one,
    ragged,
)


@pytest.mark.parametrize("draw", LOADS)
def test_the_plan_is_that_of_plain_loops(draw: Callable[[random.Random, int, int], Counts]) -> None:
    rng = random.Random(draw.__name__)
    replicas = 0
    for _ in range(1000 // len(LOADS) + 1):
        ranks = rng.randint(2, 16)
        per_rank = rng.choice([1, 2, 3, 8, 256 // ranks])
        slots = rng.randint(1, min(4, per_rank))
        min_gain = rng.choice([Fraction(0), Fraction(0), Fraction(1, 8), Fraction(1, 2)])
        counts = draw(rng, ranks, ranks * per_rank)
        home, moved = plan_replicas(torch.tensor(counts), slots, float(min_gain))
        assert (home.tolist(), moved.tolist()) == planned_by_loops(counts, slots, min_gain)
        replicas += int((home >= 0).sum())
    assert replicas > 100  # the draws do load ranks unevenly


def test_a_spill_below_the_least_gain_stays() -> None:
    counts = of_one_source([11, 10, 10, 9], 4)
    even, spill = 10, 1
    for min_gain, moved in ((spill / even, spill), (spill / even + 1e-6, 0)):
        home, pairs = plan_replicas(counts, 1, min_gain)
        assert home.tolist() == [-1, -1, -1, 0 if moved else -1]
        assert int(pairs.sum()) == moved


def test_plans_of_groups_are_apart() -> None:
    rng = random.Random(3)
    groups = [torch.tensor(hot(rng, 4, 16)) for _ in range(6)]
    home, moved = plan_replicas(torch.stack(groups).view(2, 3, 4, 16), 2, 0.0)
    for i, counts in enumerate(groups):
        alone = plan_replicas(counts, 2, 0.0)
        assert home[i // 3, i % 3].equal(alone[0])
        assert moved[i // 3, i % 3].equal(alone[1])


SIZES = [(2, 8, 1, 3), (3, 9, 2, 1), (4, 4, 1, 2), (8, 64, 2, 2), (16, 256, 4, 1), (64, 512, 4, 1), (65, 130, 1, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("draw", LOADS)
@pytest.mark.parametrize(("ranks", "experts", "slots", "groups"), SIZES)
def test_the_plan_of_a_gpu(
    ranks: int, experts: int, slots: int, groups: int, draw: Callable[[random.Random, int, int], Counts]
) -> None:
    rng = random.Random(ranks)
    for min_gain in (0.0, 0.125):
        counts = torch.tensor([draw(rng, ranks, experts) for _ in range(groups)])
        home, moved = plan_replicas(counts.cuda(), slots, min_gain)
        on_cpu = plan_replicas(counts, slots, min_gain)
        assert home.cpu().equal(on_cpu[0])
        assert moved.cpu().equal(on_cpu[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("most", [1, 3, 100])
@pytest.mark.parametrize(("ranks", "experts", "slots", "tokens"), [(2, 8, 2, 0), (4, 12, 2, 5000), (64, 512, 4, 70)])
def test_choices_are_renumbered_on_a_gpu(
    ranks: int, experts: int, slots: int, tokens: int, most: int, dtype: torch.dtype
) -> None:
    """Of one expert, of a few, and of many with some that are no expert's numbers."""
    top = min(most, experts + 1)
    choices = torch.randint(-(most > 3), top, (ranks, tokens, 3), generator=torch.Generator().manual_seed(most))
    home, moved = plan_replicas(sort_by_expert(choices, experts)[1], slots, 0.0)
    choices, homes = choices.to(dtype), home.expand(ranks, -1)
    rerouted = reroute(choices, homes, moved, experts, slots)
    on_gpu = reroute(choices.cuda(), homes.cuda(), moved.cuda(), experts, slots)
    assert on_gpu.dtype == dtype
    assert on_gpu.cpu().equal(rerouted)


@pytest.mark.gpu
def test_a_captured_plan_follows_the_choices() -> None:
    experts, slots = 16, 2
    choices = [torch.randint(0, top, (4, 64, 2), generator=torch.Generator().manual_seed(top)) for top in (3, 16, 7)]

    def run(chosen: Tensor) -> tuple[Tensor, ...]:
        counts = sort_by_expert(chosen, experts)[1]
        home, moved = plan_replicas(counts, slots, 0.0)
        return home, moved, reroute(chosen, home.expand(4, -1), moved, experts, slots)

    static = choices[0].cuda()
    run(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(static)
    for chosen in choices:
        static.copy_(chosen)
        graph.replay()
        for output, on_cpu in zip(outputs, run(chosen), strict=True):
            assert output.cpu().equal(on_cpu)


# ---------------------------------------------------------------------- what holds of every plan


@st.composite
def plans(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Counts of sources, and slots."""
    ranks, per_rank = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    pairs = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 200))
    source = st.lists(pairs, min_size=ranks * per_rank, max_size=ranks * per_rank)
    counts = draw(st.lists(st.one_of(source, st.just([0] * ranks * per_rank)), min_size=ranks, max_size=ranks))
    return torch.tensor(counts), draw(st.integers(1, per_rank))


@given(plans())
@EXAMPLES
def test_spills_and_rooms_differ_by_what_is_not_even(plan: tuple[Tensor, int]) -> None:
    counts, _ = plan
    ranks = len(counts)
    spill, room = spill_and_room(counts, 0.0)
    assert int(spill.sum() - room.sum()) == int(counts.sum()) % ranks
    assert not (spill.view(ranks, -1).sum(-1) * room).any()
    assert (spill <= counts.sum(0)).all()


@given(plans())
@EXAMPLES
def test_a_plan_moves_what_there_is_to_where_there_is_room(plan: tuple[Tensor, int]) -> None:
    counts, slots = plan
    ranks, experts = counts.shape
    home, moved = plan_replicas(counts, slots, 0.0)
    spill, room = spill_and_room(counts, 0.0)
    rank_of_slot = torch.arange(ranks).repeat_interleave(slots)
    used = home >= 0
    assert (moved.sum(0) > 0).equal(used)
    assert (moved >= 0).all()
    assert (home // (experts // ranks) != rank_of_slot)[used].all()
    for on_rank in home.view(ranks, slots).tolist():
        experts_there = [expert for expert in on_rank if expert >= 0]
        assert len({*experts_there}) == len(experts_there)
    by_expert = torch.zeros(ranks, experts + 1, dtype=torch.int64).index_add(1, torch.where(used, home, experts), moved)
    assert (by_expert[:, :-1] <= counts).all()
    assert (by_expert.sum(0)[:-1] <= spill).all()
    taken = moved.sum(0).view(ranks, slots).sum(-1)
    assert (taken <= room).all()
    load = counts.sum(0).view(ranks, -1).sum(-1)
    after = load - by_expert.sum(0)[:-1].view(ranks, -1).sum(-1) + taken
    assert int(after.sum()) == int(load.sum())
    assert int(after.max()) <= int(load.max())
    figures = simulate_replicas(counts, slots, 0.0, 352)
    assert (figures.before, figures.after) == (tuple(load.tolist()), tuple(after.tolist()))
    assert (figures.slots, figures.bytes) == (int(used.sum()), 352 * int(used.sum()))
    without_place = int(spill.sum() - moved.sum())
    assert int(after.max()) <= int(load.sum()) // ranks + without_place


# ---------------------------------------------------------------------- renumbered choices


def rerouted_by_loops(choices: Counts, home: list[int], moved: list[int], experts: int, slots: int) -> Counts:
    """Each pair goes to the first slot of its expert that has not had all of its pairs."""
    per_rank = experts // (len(home) // slots)
    left = list(moved)
    rows: Counts = []
    for token in choices:
        rows.append([])
        for expert in token:
            number = expert // per_rank * (per_rank + slots) + expert % per_rank
            if not 0 <= expert < experts:
                number = experts + len(home)
            for slot, at in enumerate(home):
                if at == expert and left[slot] and expert >= 0:
                    left[slot] -= 1
                    number = slot // slots * (per_rank + slots) + per_rank + slot % slots
                    break
            rows[-1].append(number)
    return rows


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Choices of all sources, of which some are nobody's; the number of experts, and slots."""
    ranks, per_rank = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    tokens, k = draw(st.integers(0, 12)), draw(st.integers(1, 3))
    some = draw(st.lists(st.integers(-1, ranks * per_rank), min_size=1, max_size=3))
    chosen = draw(st.lists(st.sampled_from(some), min_size=ranks * tokens * k, max_size=ranks * tokens * k))
    choices = torch.tensor(chosen, dtype=torch.int64).view(ranks, tokens, k)
    return choices, ranks * per_rank, draw(st.integers(1, per_rank))


@given(routings())
@EXAMPLES
def test_choices_are_renumbered_in_order_and_undone(routing: tuple[Tensor, int, int]) -> None:
    choices, experts, slots = routing
    ranks = len(choices)
    counts = sort_by_expert(choices, experts)[1]
    home, moved = plan_replicas(counts, slots, 0.0)
    homes = home.expand(ranks, -1)
    rerouted = reroute(choices, homes, moved, experts, slots)
    assert rerouted.tolist() == [
        rerouted_by_loops(choices[source].tolist(), home.tolist(), moved[source].tolist(), experts, slots)
        for source in range(ranks)
    ]
    is_choice = (choices >= 0) & (choices < experts)
    assert router_choices(rerouted, homes, experts, slots).equal(torch.where(is_choice, choices, experts))
    # What the numbers of a rank have is the load that the plan is for.
    numbers = experts + ranks * slots
    pairs = sort_by_expert(rerouted, numbers)[1]
    assert pairs.sum(0).view(ranks, -1)[:, experts // ranks :].flatten().equal(moved.sum(0))
    assert pairs.sum(-1).equal(counts.sum(-1))


def test_a_plan_of_other_counts_moves_no_pairs_of_others() -> None:
    choices = torch.tensor([[[2, 3], [3, 2], [0, 2]]], dtype=torch.int32)
    rerouted = reroute(choices, torch.tensor([[2, -1]]), torch.tensor([[9, 4]]), 4, 1)
    assert rerouted.dtype == torch.int32
    assert rerouted.tolist() == [[[2, 4], [4, 2], [0, 2]]]


@pytest.mark.parametrize(
    ("experts", "slots", "min_gain", "reason"),
    [
        (6, 1, 0.0, "6 experts on 4 ranks cannot have 1"),
        (8, 3, 0.0, "cannot have 3 spare slots"),
        (8, 0, 0.0, "cannot have 0 spare slots"),
        (8, 1, -0.1, "min_gain must be a share of the even load, got -0.1"),
        (8, 1, float("nan"), "got nan"),
    ],
)
def test_a_plan_that_there_cannot_be(experts: int, slots: int, min_gain: float, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plan_replicas(torch.ones(4, experts, dtype=torch.int64), slots, min_gain)


def test_slots_of_another_source_are_refused() -> None:
    home, moved = plan_replicas(torch.ones(2, 4, dtype=torch.int64), 1, 0.0)
    with pytest.raises(ValueError, match=r"slots \[2\], of \[2, 2\] pairs, for choices \[3, 2\]"):
        reroute(torch.zeros(3, 2, dtype=torch.int64), home, moved, 4, 1)


# ---------------------------------------------------------------------- a program of ranks

ON_RANKS = """fxpar 2
plan {"dp": 2, "ep": 2}
properties canonical coalesced collectives experts layouts local masks rng sequence vocabulary
%indices = input["indices"] : i64[2, 6, 2] dp:S(0)
%sorted = fxpar.sort_by_expert.default(%indices, 4) : (i64[2, 12] dp:S(0); i64[2, 4] dp:S(0))
%counts = operator.getitem(%sorted, 1) : i64[2, 4] dp:S(0)
%counts_all = fxpar.all_gather[dp](%counts) : i64[2, 4] dp:S(0)→R
%plan = fxpar.plan_replicas.default(%counts_all, 1, 0.0) : (i64[2] dp:R; i64[2, 2] dp:R)
%home = operator.getitem(%plan, 0) : i64[2] dp:R
%moved = operator.getitem(%plan, 1) : i64[2, 2] dp:R
%home_by_source = aten.expand.default(%home, [2, 2]) : i64[2, 2] dp:R
%home_here = fxpar.r_to_s[dp](%home_by_source) : i64[2, 2] dp:R→S(0)
%moved_here = fxpar.r_to_s[dp](%moved) : i64[2, 2] dp:R→S(0)
%rerouted = fxpar.reroute.default(%indices, %home_here, %moved_here, 4, 1) : i64[2, 6, 2] dp:S(0)
return rerouted=%rerouted
"""


def test_ranks_reroute_as_one_device_does() -> None:
    program = parse_program(ON_RANKS)
    assert print_program(program) == ON_RANKS
    verify_static(program)
    choices = torch.tensor([[[0, 1]] * 5 + [[2, 0]], [[3, 1]] * 3 + [[1, 0]] * 3])
    home, moved = plan_replicas(sort_by_expert(choices, 4)[1], 1, 0.0)
    one = reroute(choices, home.expand(2, -1), moved, 4, 1)
    ranks = run_ranks(step_of(program), {}, {"indices": choices}, {})
    assert torch.cat([rank.outputs["rerouted"] for rank in ranks]).equal(one)
    # To the slot of the second rank: the first has 20 of 24 pairs.
    assert int((one == 5).sum()) == 20 - 24 // 2


@pytest.mark.parametrize(
    ("line", "edited", "reason"),
    [
        ("replicas.default(%counts_all", "replicas.default(%counts", "needs the whole of dimension 0"),
        ("%home_here, %moved_here", "%home_here, %moved", "moved is R where S\\(0\\) fits"),
        ("%moved_here, 4, 1)", "%counts, 4, 1)", "slots \\[1, 2\\], of \\[1, 4\\] pairs"),
        ("%counts_all, 1, 0.0) : (i64[2]", "%counts_all, 3, 0.0) : (i64[6]", "3 spare slots"),
    ],
)
def test_another_program_is_refused(line: str, edited: str, reason: str) -> None:
    assert ON_RANKS.count(line) == 1
    with pytest.raises(FxparError, match=reason):
        verify_static(parse_program(ON_RANKS.replace(line, edited)))
