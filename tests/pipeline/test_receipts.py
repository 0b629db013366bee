"""A rank frees what it sent when, and only when, the order of all ranks proves that it was received."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given

from fxpar.pipeline.compiler.builtin_schedules import build_schedule
from fxpar.pipeline.compiler.schedules import Schedule
from fxpar.pipeline.compiler.simulation import Channel, Kind, Message, Receipts, channel_of, received, sent, verified
from tests.pipeline.small import EXAMPLES, legal


def must_have_run(schedule: Schedule, rank: int) -> Iterator[set[tuple[int, int]]]:
    """Gives for each action of a rank in turn all actions without which the ones before it cannot have run, by rank
    and position."""
    senders = {
        sent(schedule, action): (other, at)
        for other, actions in enumerate(schedule.ranks)
        for at, action in enumerate(actions)
    }
    done: set[tuple[int, int]] = set()
    for position in range(len(schedule.ranks[rank])):
        yield done
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


@EXAMPLES
@given(legal())
def test_what_is_freed_is_what_must_have_been_received(schedule: Schedule) -> None:
    receipts = verified(schedule).receipts
    depths: dict[Channel, int] = {}
    for rank, actions in enumerate(schedule.ranks):
        freed, sends = Counter[Channel](), Counter[Channel]()
        for action, released, done in zip(actions, receipts.released[rank], must_have_run(schedule, rank), strict=True):
            freed.update(released)
            known = Counter[Channel]()
            for other, at in done:
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


def overlaps(schedule: Schedule, receipts: Receipts) -> list[Message]:
    """The messages that would be written over one that may be unread, where each channel has as many places as it is
    deep and messages take them in turn."""
    found = []
    for rank, actions in enumerate(schedule.ranks):
        under_way: dict[Channel, list[Message]] = {channel: [] for channel in receipts.depths}
        for action, released, done in zip(actions, receipts.released[rank], must_have_run(schedule, rank), strict=True):
            for channel, count in released.items():
                read = {received(schedule, schedule.ranks[other][at]) for other, at in done}
                found += [message for message in under_way[channel][:count] if message not in read]
                del under_way[channel][:count]
            outgoing = sent(schedule, action)
            if outgoing is not None:
                before = under_way[channel_of(schedule, outgoing)]
                before.append(outgoing)
                found += [outgoing] * (len(before) > receipts.depths[channel_of(schedule, outgoing)])
    return found


SCHEDULES = [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2), ("gpipe", 1)]


@pytest.mark.parametrize("microbatches", [8, 16, 64])
@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
def test_no_message_is_written_over_another(name: str, virtual: int, microbatches: int) -> None:
    proof = verified(build_schedule(name, pp=2, microbatches=microbatches, virtual_stages=virtual))
    schedule, receipts = proof.schedule, proof.receipts
    assert not overlaps(schedule, receipts)
    for channel, depth in receipts.depths.items():
        assert overlaps(schedule, replace(receipts, depths={**receipts.depths, channel: depth - 1}))
    for rank, released in enumerate(receipts.released):
        if any(released):  # some messages are known to be received in front of the end
            early = (*receipts.released[:rank], (*released[1:], {}), *receipts.released[rank + 1 :])
            assert overlaps(schedule, replace(receipts, released=early))
