"""The orders of SPEC section 3, number by number, and what it says of all legal sizes."""

from collections.abc import Iterator, Sequence

import pytest

from fxpar.errors import ScheduleError
from fxpar.pipeline.compiler.builtin_schedules import build_schedule, group_sizes
from fxpar.pipeline.compiler.schedules import Schedule, from_arrays, order_array
from fxpar.pipeline.compiler.simulation import ChannelGrouping, verified

Sizes = tuple[int, int, int | None, int]

# (p, rank, v, N, M): warmup, order.
VECTORS: dict[tuple[int, int, int, int | None, int], tuple[int, list[int]]] = {
    (4, 0, 1, None, 8): (3, [1, 1, 1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, -1, -1, -1]),
    (4, 3, 1, None, 8): (0, [1, -1] * 8),
    (2, 0, 2, 2, 4): (4, [1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1]),
    (2, 1, 2, 2, 4): (2, [1, 1, 2, -2, 2, -2, 1, -1, 1, -1, 2, -2, 2, -2, -1, -1]),
    (4, 0, 2, 4, 8): (
        10,
        [1] * 4 + [2] * 4 + [1, 1, 1, -2, 1, -2, 2, -2, 2, -2, 2, -1, 2, -1] + [-1] * 2 + [-2] * 4 + [-1] * 4,
    ),
    (4, 1, 2, 4, 8): (8, [1] * 4 + [2] * 4 + [1, -2] * 4 + [2, -1] * 4 + [-2] * 4 + [-1] * 4),
    (4, 2, 2, 4, 8): (
        6,
        [1] * 4 + [2, 2, 2, -2, 2, -2, 1, -2, 1, -2, 1, -1, 1, -1, 2, -1, 2, -1, 2, -2, 2, -2] + [-2] * 2 + [-1] * 4,
    ),
    (4, 3, 2, 4, 8): (4, [1] * 4 + [2, -2] * 4 + [1, -1] * 4 + [2, -2] * 4 + [-1] * 4),
    (2, 0, 2, 3, 5): (5, [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]),
    (2, 1, 2, 3, 5): (3, [1, 1, 1, 2, -2, 2, -2, 2, -2, 1, -1, 1, -1, 2, -1, 2, -2, -2, -1, -1]),
    (2, 0, 2, 4, 6): (6, [1] * 4 + [2, 2, 2, -2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -1, -2, -2, -1, -1]),
    (2, 0, 3, 2, 4): (
        6,
        [1, 1, 2, 2, 3, 3, 1, -3, 1, -3, 2, -2, 2, -2, 3, -1, 3, -1, -3, -3, -2, -2, -1, -1],
    ),
    (4, 0, 2, 4, 4): (8, [1] * 4 + [2] * 4 + [-2] * 4 + [-1] * 4),
}
# A widely read text has this for (4, 0, 2, 4, 8).
DEADLOCKING = [1] * 4 + [2] * 4 + [1, 1, 1, -1, 1, -1, 2, -2, 2, -2, 2, -1, 2, -1] + [-2, -2, -1, -1] * 2 + [-2, -2]


def interleaved(p: int, v: int, n: int | None, m: int) -> Schedule:
    return build_schedule("interleaved_1f1b", pp=p, virtual_stages=v, microbatches=m, group_size=n)


def legal() -> Iterator[Sizes]:
    for p in range(2, 9):
        for v in range(1, 5):
            for m in range(1, 17):
                legal_sizes: Sequence[int | None] = [None] if v == 1 else group_sizes(p, m)
                yield from ((p, v, n, m) for n in legal_sizes)


def runs_merged(schedule: Schedule) -> bool:
    try:
        verified(schedule, channels=ChannelGrouping.MERGED)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("sizes", VECTORS, ids=str)
def test_orders_and_warmups_are_those_of_the_table(sizes: tuple[int, int, int, int | None, int]) -> None:
    p, rank, v, n, m = sizes
    schedule = interleaved(p, v, n, m)
    assert (schedule.warmup[rank], order_array(schedule, rank)) == VECTORS[sizes]
    if v == 1:
        assert build_schedule("1f1b", pp=p, microbatches=m).ranks == schedule.ranks


def test_all_916_cases_end_keep_the_order_of_their_channels_and_hold_what_is_stated() -> None:
    cases = list(legal())
    assert (len(cases), sum(v == 1 for _, v, _, _ in cases)) == (916, 112)
    for p, v, n, m in cases:
        proof = verified(interleaved(p, v, n, m))
        schedule = proof.schedule
        steps = [p - 1 - rank for rank in range(p)]
        warmup = tuple(min(step if v == 1 else 2 * step + (v - 1) * (n or p), m * v) for step in steps)
        assert schedule.warmup == warmup
        assert proof.peaks == tuple(min(ahead + 1, m * v) for ahead in warmup), (p, v, n, m)
        arrays = [order_array(schedule, rank) for rank in range(p)]
        assert from_arrays(arrays, virtual_stages=v, microbatches=m).ranks == schedule.ranks


def test_merged_channels_are_rejected_in_243_of_the_cases_of_two_ranks() -> None:
    rejected = {sizes for sizes in legal() if sizes[0] == 2 and not runs_merged(interleaved(*sizes))}
    assert len(rejected) == 243
    assert (2, 2, 3, 5) in rejected


def test_merged_channels_name_the_message_that_comes_instead() -> None:
    with pytest.raises(ScheduleError) as caught:
        verified(interleaved(2, 2, 3, 5), channels=ChannelGrouping.MERGED)
    assert caught.value.where == "rank 1, position 9 (1F3)"
    assert caught.value.remedy.endswith("or give activations and gradients channels of their own")
    assert caught.value.reason == (
        "waits for the activation of microbatch 3 from stage 0, and message 6 of the messages from rank 0 to rank 1 is "
        "the gradient of microbatch 0 from stage 2"
    )


def test_the_deadlocking_order_is_rejected_with_what_each_rank_of_the_circle_waits_for() -> None:
    schedule = interleaved(4, 2, 4, 8)
    arrays: list[Sequence[int | float]] = [DEADLOCKING, *(order_array(schedule, rank) for rank in (1, 2, 3))]
    # The usual counts say nothing against it.
    assert sorted(DEADLOCKING) == sorted(order_array(schedule, 0))
    with pytest.raises(ScheduleError) as caught:
        verified(from_arrays(arrays, virtual_stages=2, microbatches=8))
    assert caught.value.where == "rank 0, position 11 (0B0)"
    assert caught.value.reason == (
        "waits forever for the gradient of microbatch 0 from stage 1 on rank 1: the ranks wait in a circle: "
        "rank 1, position 14 (1F7), waits for the activation of microbatch 7 from stage 0 on rank 0"
    )
    assert caught.value.remedy == "run 0B0 later on rank 0, or 1B0 earlier on rank 1"


def test_graphs_need_as_many_slots_as_section_5_says() -> None:
    proof = verified(interleaved(4, 2, 4, 8))
    assert [sum(slots) for slots in proof.slots] == [12, 12, 10, 6]
    assert proof.slots[0] == (8, 4)
    for microbatches in (16, 64, 256):
        assert [sum(slots) for slots in verified(interleaved(4, 2, 4, microbatches)).slots] == [12, 12, 10, 6]
        plain = build_schedule("1f1b", pp=4, microbatches=microbatches)
        assert verified(plain).slots == ((4,), (3,), (2,), (1,))


def test_weight_parts_are_halves() -> None:
    schedule = build_schedule("zb_h1", pp=2, microbatches=2)
    assert [order_array(schedule, rank) for rank in (0, 1)] == [[1, 1, -1, -1.5, -1, -1.5], [1, -1, 1, -1, -1.5, -1.5]]
    arrays = [order_array(schedule, rank) for rank in (0, 1)]
    assert from_arrays(arrays, virtual_stages=1, microbatches=2).ranks == schedule.ranks


@pytest.mark.parametrize("number", [0, 3, -3, 0.5, -0.5, 1.5, -1.25, float("inf"), float("nan")])
def test_a_number_that_is_no_action_is_refused(number: float) -> None:
    with pytest.raises(ScheduleError, match=r"rank 1, position 1: must be an action of a rank with 2 chunks"):
        from_arrays([[1], [1, number]], virtual_stages=2, microbatches=1)


def test_an_array_cannot_say_that_microbatches_change_places() -> None:
    schedule = from_arrays([[1, 1, -1, -1]], virtual_stages=1, microbatches=2)
    actions = schedule.ranks[0]
    turned = Schedule("custom", (actions[:2] + actions[:1:-1],), 1, 2, (2,))
    assert verified(turned).peaks == (2,)
    with pytest.raises(ScheduleError, match=r"rank 0, position 2 \(0B1\): an order array cannot say it"):
        order_array(turned, 0)
