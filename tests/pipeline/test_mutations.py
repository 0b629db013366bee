"""Changed schedules are legal by brute force, or rejected for what is wrong with them."""

import pytest
from hypothesis import given

from fxpar.errors import ScheduleError
from fxpar.pipeline.compiler.schedules import Action, Phase, Schedule, parse_schedule, print_schedule
from fxpar.pipeline.compiler.simulation import verified
from tests.pipeline.small import EXAMPLES, SAID, faults, legal, mutated


@EXAMPLES
@given(mutated())
def test_a_changed_schedule_is_legal_or_rejected_for_its_fault(schedule: Schedule) -> None:
    wrong = faults(schedule)
    if wrong:
        with pytest.raises(ScheduleError) as caught:
            verified(schedule)
        assert any(SAID[fault] in caught.value.reason for fault in wrong), (wrong, str(caught.value))
        assert caught.value.where.startswith("rank ")
        assert caught.value.remedy
        return
    proof = verified(schedule)
    for rank, actions in enumerate(schedule.ranks):
        forwards = sum(action.phase is Phase.FORWARD for action in actions)
        assert 1 <= proof.peaks[rank] <= forwards
        assert max(proof.slots[rank]) <= proof.peaks[rank] <= sum(proof.slots[rank])


def test_every_fault_and_none_come_up() -> None:
    seen: set[str] = set()

    @EXAMPLES
    @given(mutated())
    def gather(schedule: Schedule) -> None:
        seen.update(faults(schedule) or {"none"})

    gather()
    assert seen == {*SAID, "none"}


@EXAMPLES
@given(legal())
def test_what_is_printed_is_what_is_read(schedule: Schedule) -> None:
    assert not faults(schedule)
    read = parse_schedule(print_schedule(schedule), pp=schedule.pp, microbatches=schedule.microbatches)
    assert read.ranks == schedule.ranks
    assert (read.virtual_stages, read.style) == (schedule.virtual_stages, schedule.style)
    assert verified(read).timeline == verified(schedule).timeline


@EXAMPLES
@given(legal())
def test_the_timeline_leaves_no_time_unused(schedule: Schedule) -> None:
    """Each action starts when its rank is free and what it needs is there, not later."""
    timeline = verified(schedule).timeline
    ended = {
        action: end
        for actions, ends in zip(schedule.ranks, timeline.ends, strict=True)
        for action, end in zip(actions, ends, strict=True)
    }
    for actions, starts in zip(schedule.ranks, timeline.starts, strict=True):
        free = 0
        for (stage, phase, mb), start in zip(actions, starts, strict=True):
            source = stage - 1 if phase is Phase.FORWARD else stage + 1
            makers = {Phase.FORWARD: "F", Phase.BACKWARD_WEIGHT: ""}.get(phase, "BI")
            waited = max((ended.get(Action(source, Phase(maker), mb), 0) for maker in makers), default=0)
            assert start == max(free, waited)
            free = start + (2 if phase is Phase.BACKWARD else 1)
