"""Schedules by name: what each is for, at all sizes, and the sizes that are refused."""

import time
from typing import Any

import pytest

from fxpar.errors import ScheduleError
from fxpar.pipeline.compiler.builtin_schedules import SCHEDULES, build_schedule, group_sizes
from fxpar.pipeline.compiler.schedules import Phase, Style
from fxpar.pipeline.compiler.simulation import Costs, verified


@pytest.mark.parametrize("pp", range(1, 9))
def test_every_schedule_runs_at_every_size_that_is_not_refused(pp: int) -> None:
    for microbatches in range(1, 18):
        for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "forward_only"):
            verified(build_schedule(name, pp=pp, microbatches=microbatches))
        if pp == 1:
            continue
        verified(build_schedule("zbv", pp=pp, virtual_stages=2, microbatches=microbatches))
        for virtual_stages in (2, 3):
            sizes = {"pp": pp, "virtual_stages": virtual_stages, "microbatches": microbatches}
            verified(build_schedule("gpipe", **sizes))
            for size in (1, microbatches, pp + 1):
                verified(build_schedule("forward_only", **sizes, group_size=size))
            for size in group_sizes(pp, microbatches):
                verified(build_schedule("zb_h1", **sizes, group_size=size))


@pytest.mark.parametrize("costs", [Costs(), Costs(1, 3, 2), Costs(5, 1, 1)])
@pytest.mark.parametrize(("pp", "virtual_stages", "microbatches"), [(4, 1, 8), (2, 1, 7), (4, 2, 8), (3, 4, 12)])
def test_the_bubble_is_that_of_the_formula(pp: int, virtual_stages: int, microbatches: int, costs: Costs) -> None:
    sizes = {"pp": pp, "virtual_stages": virtual_stages, "microbatches": microbatches}
    formula = (pp - 1) / (virtual_stages * microbatches + pp - 1)
    assert verified(build_schedule("interleaved_1f1b", **sizes), costs=costs).timeline.bubble == pytest.approx(formula)
    forwards = verified(build_schedule("forward_only", **sizes), costs=costs)
    assert forwards.timeline.bubble == pytest.approx(formula)
    if virtual_stages == 1:
        assert verified(build_schedule("gpipe", **sizes), costs=costs).timeline.bubble == pytest.approx(formula)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zero_bubble_schedules_idle_as_little_as_their_paper_says(pp: int) -> None:
    """Qi et al. 2024, table 2: (p - 1)(F + I - W) for ZB-H1, at the memory of 1F1B; ZB-V has none but that ranks begin
    one after the other."""
    microbatches = 3 * pp
    one = verified(build_schedule("1f1b", pp=pp, microbatches=microbatches))
    split = verified(build_schedule("zb_h1", pp=pp, microbatches=microbatches))
    turning = verified(build_schedule("zbv", pp=pp, virtual_stages=2, microbatches=microbatches))
    assert one.timeline.end == 3 * microbatches + 3 * (pp - 1)
    assert split.timeline.end == 3 * microbatches + (pp - 1)
    assert max(split.peaks) == max(one.peaks) == pp
    assert turning.timeline.end == 6 * microbatches + (pp - 1)
    assert turning.peaks == (2 * pp,) * pp  # of chunks half as large
    costs = Costs(10, 11, 9)
    split = verified(split.schedule, costs=costs)
    assert split.timeline.end == 30 * microbatches + 12 * (pp - 1)


def test_what_a_schedule_says_of_itself() -> None:
    schedule = build_schedule("zbv", pp=4, virtual_stages=2, microbatches=8)
    assert (schedule.pp, schedule.stages, schedule.style) == (4, 8, Style.V)
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert schedule.rank_of == (0, 1, 2, 3, 3, 2, 1, 0)
    assert schedule.split_backward
    schedule = build_schedule("interleaved_1f1b", pp=4, virtual_stages=2, microbatches=10, group_size=5)
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert (schedule.group_size, schedule.split_backward, schedule.forward_only) == (5, False, False)
    schedule = build_schedule("forward_only", pp=2, virtual_stages=2, microbatches=3)
    assert schedule.forward_only
    assert {action.phase for actions in schedule.ranks for action in actions} == {Phase.FORWARD}
    assert verified(schedule).peaks == (1, 1)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("chimera", {}, f"schedule: 'chimera' is unknown; choose {', '.join(SCHEDULES)}"),
        ("1f1b", {"pp": 0}, "pp: must be a positive integer, got 0"),
        ("1f1b", {"pp": True}, "pp: must be a positive integer, got True"),
        ("1f1b", {"microbatches": -1}, "microbatches: must be a positive integer, got -1"),
        ("1f1b", {"microbatches": 2.0}, "microbatches: must be a positive integer, got 2.0"),
        ("gpipe", {"virtual_stages": 0}, "virtual_stages: must be a positive integer, got 0"),
        ("zb_h1", {"virtual_stages": 2, "group_size": 0}, "group_size: must be a positive integer, got 0"),
        ("gpipe", {"pp": 10**9}, "are more than 1000000 forwards; check the three numbers"),
        ("gpipe", {"pp": 10**5000}, "an integer of 16610 bits ranks"),
        ("gpipe", {"pp": 1, "virtual_stages": 2}, "virtual_stages: 2 stages a rank need a pipeline, and pp=1"),
        ("1f1b", {"virtual_stages": 2}, "schedule: 1f1b has one stage a rank, and virtual_stages=2; choose interl"),
        ("zbv", {}, "schedule: zbv has two stages a rank, and virtual_stages=1; give virtual_stages=2"),
        ("zbv", {"virtual_stages": 3}, "schedule: zbv has two stages a rank, and virtual_stages=3"),
        ("gpipe", {"group_size": 4}, "group_size: gpipe has no groups of microbatches, and group_size=4; leave"),
        ("zbv", {"virtual_stages": 2, "group_size": 4}, "group_size: zbv has no groups of microbatches"),
        (
            "interleaved_1f1b",
            {"virtual_stages": 2, "microbatches": 3},
            "microbatches: interleaved_1f1b of 2 stages a rank needs a microbatch for each of the 4 ranks, and "
            "microbatches=3; give at least 4, leave virtual_stages=1, or choose gpipe",
        ),
        (
            "zb_h1",
            {"virtual_stages": 2, "microbatches": 10},
            "group_size: 10 microbatches cannot be run in groups of 4 by 4 ranks: the last group has 2 of them, fewer "
            "than pp=4; choose 5, 6 or 10",
        ),
        ("zb_h1", {"virtual_stages": 2, "group_size": 3}, "in groups of 3 by 4 ranks; choose 4 or 8"),
        ("zb_h1", {"virtual_stages": 2, "group_size": 9}, "in groups of 9 by 4 ranks; choose 4 or 8"),
        ("zb_h1", {"virtual_stages": 2, "microbatches": 41}, "choose 6, 7, 9, 11, 12, 14, 15, 16, … or 41"),
        ("zb_h1", {"virtual_stages": 2, "microbatches": 5}, "choose 5, or another number"),
    ],
)
def test_sizes_that_a_schedule_cannot_have_are_refused(name: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build_schedule(name, **{"pp": 4, "microbatches": 8, **sizes})
    assert message in str(caught.value)


@pytest.mark.parametrize("cost", [0, -1, 1.5, True, 2**31])
def test_costs_are_positive_integers(cost: Any) -> None:
    with pytest.raises(ScheduleError, match=r"cost backward_input: must be a positive integer below"):
        Costs(1, cost, 1)


def test_a_large_pipeline_takes_seconds_at_most() -> None:
    """Half a million actions; memory that is scanned again and again, or lists that are copied, would take minutes."""
    started = time.process_time()
    proof = verified(build_schedule("interleaved_1f1b", pp=64, virtual_stages=8, microbatches=512))
    assert time.process_time() - started < 20
    assert proof.timeline.bubble == pytest.approx(63 / (8 * 512 + 63))
