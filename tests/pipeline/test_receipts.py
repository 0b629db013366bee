"""A rank frees what it sent when, and only when, the order of all ranks proves that it was received."""

from __future__ import annotations

from collections import Counter

from hypothesis import given

from fxpar.pipeline.compiler.builtin_schedules import build_schedule
from fxpar.pipeline.compiler.schedules import Schedule
from fxpar.pipeline.compiler.simulation import Channel, Kind, channel_of, received, sent, verified
from tests.pipeline.small import EXAMPLES, legal


def must_have_run(schedule: Schedule, rank: int, position: int) -> set[tuple[int, int]]:
    """All actions without which a rank cannot have run its actions up to a position, by rank and position."""
    senders = {
        sent(schedule, action): (other, at)
        for other, actions in enumerate(schedule.ranks)
        for at, action in enumerate(actions)
    }
    done: set[tuple[int, int]] = set()
    pending = [(rank, position)]
    while pending:
        other, at = pending.pop()
        if at < 0 or (other, at) in done:
            continue
        done.add((other, at))
        pending.append((other, at - 1))
        message = received(schedule, schedule.ranks[other][at])
        if message is not None:
            pending.append(senders[message])
    return done


@EXAMPLES
@given(legal())
def test_what_is_freed_is_what_must_have_been_received(schedule: Schedule) -> None:
    receipts = verified(schedule).receipts
    depths: dict[Channel, int] = {}
    for rank, actions in enumerate(schedule.ranks):
        freed, sends = Counter[Channel](), Counter[Channel]()
        for position, action in enumerate(actions):
            freed.update(receipts.released[rank][position])
            known = Counter[Channel]()
            for other, at in must_have_run(schedule, rank, position - 1):
                message = received(schedule, schedule.ranks[other][at])
                if message is not None and schedule.rank_of[message.sender] == rank:
                    known[channel_of(schedule, message)] += 1
            assert freed == known
            outgoing = sent(schedule, action)
            if outgoing is not None:
                channel = channel_of(schedule, outgoing)
                sends[channel] += 1
                depths[channel] = max(depths.get(channel, 0), sends[channel] - freed[channel])
    assert receipts.depths == depths


def test_messages_under_way_do_not_grow_with_the_microbatches() -> None:
    for name, virtual in (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2)):
        few, many = (
            verified(build_schedule(name, pp=4, microbatches=count, virtual_stages=virtual)).receipts.depths
            for count in (16, 64)
        )
        assert few == many
    gpipe = verified(build_schedule("gpipe", pp=2, microbatches=16)).receipts.depths
    assert gpipe == {Channel(0, 1, Kind.ACTIVATION): 16, Channel(1, 0, Kind.GRADIENT): 16}
