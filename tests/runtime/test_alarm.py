"""The first error of a module: which stands, and how a rank that waits for its device learns of one that is gone."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest
from torch._C._distributed_c10d import HashStore

from fxpar.errors import RankError
from fxpar.runtime import alarm
from fxpar.runtime.alarm import Alarm


def waiting(rank: int) -> Alarm:
    """One in a long call, of whose connections one is gone."""
    rank_alarm = Alarm(7, rank, 2)
    rank_alarm.call = "train_step", time.monotonic() - 60.0
    rank_alarm._sockets = {(-1, "socket:[0]")}
    return rank_alarm


def test_the_first_of_two_errors_stands_on_all_ranks() -> None:
    store, alarms, seen = HashStore(), [Alarm(7, rank, 3) for rank in range(3)], list[str]()
    for rank_alarm in alarms:
        rank_alarm.on_stop(lambda error: seen.append(error.reason))
    assert not alarms[0].hear(store)
    alarms[1].tell(store, "rank 1", "one")
    alarms[2].tell(store, "rank 2", "other")
    assert alarms[0].hear(store)
    for rank_alarm in alarms:
        with pytest.raises(RankError, match=r"^rank 1: one; .*a new process group on all ranks"):
            rank_alarm.check()
    assert seen == ["one"] * 3


def test_a_wait_that_cannot_be_ended_keeps_no_other_from_ending(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(error: RankError) -> None:
        raise RuntimeError("the device is lost")

    store, heard, seen = HashStore(), Alarm(7, 0, 2), list[str]()
    for stop in (lambda error: seen.append(error.reason), broken):
        heard.on_stop(stop)
    Alarm(7, 1, 2).tell(store, "rank 1", "one")
    alarm._look([heard], store)
    assert seen == ["one"]
    assert "fxpar: rank 1: a wait could not be ended: the device is lost" in capsys.readouterr().err


@pytest.mark.parametrize("sign", ["none", "there", "left"])
def test_who_is_gone_is_called_by_name(sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, first, second = HashStore(), waiting(0), Alarm(7, 1, 2)
    first.look_around(store)
    first.answer(store)
    if sign == "there":
        second.answer(store)
    if sign == "left":
        second.leave(store, None)
    first.look_around(store)
    assert first.first is None  # there is time to answer
    monkeypatch.setattr(alarm, "_ROLL_CALL", 0.0)
    first.look_around(store)
    if sign == "none":
        assert first.first is not None
        assert str(first.first).startswith("rank 0, train_step: rank 1 gave no sign: ended")
        assert second.hear(store)
    else:
        assert first.first is None


def test_two_ranks_that_call_the_roll_answer_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store, both = HashStore(), [waiting(0), waiting(1)]
    for rank_alarm in both:
        rank_alarm.look_around(store)
    for rank_alarm in both:
        rank_alarm.answer(store)
    monkeypatch.setattr(alarm, "_ROLL_CALL", 0.0)
    for rank_alarm in both:
        rank_alarm.look_around(store)
    assert [rank_alarm.first for rank_alarm in both] == [None, None]


@pytest.mark.parametrize("sign", ["none", "there"])
def test_who_stands_still_is_called_by_name_when_the_time_is_over(sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection of a process that was stopped is closed."""
    store, first, second = HashStore(), Alarm(7, 0, 2, limit=20.0), Alarm(7, 1, 2)
    first.call = "train_step", time.monotonic() - 21.0
    first.look_around(store)
    assert store.num_keys() == 0  # what communicates has its own time-out first
    first.call = "train_step", time.monotonic() - 23.0
    first.look_around(store)
    first.answer(store)
    if sign == "there":
        second.answer(store)
    monkeypatch.setattr(alarm, "_LATE_ROLL_CALL", 0.0)
    first.look_around(store)
    if sign == "none":
        assert first.first is not None
        assert str(first.first).startswith("rank 0, train_step: rank 1 gave no sign for 20 s: stands still")
    else:
        assert first.first is None
        keys = store.num_keys()
        first.look_around(store)
        assert store.num_keys() == keys  # and not again for as long


def test_work_of_a_device_that_others_never_end_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    store, first = HashStore(), Alarm(7, 0, 2, limit=20.0)
    first.queued = "train_step", time.monotonic() - 23.0
    first.look_around(store)
    assert store.num_keys() == 0  # its results are there: the program does something else
    pending = Mock(query=lambda: False)  # an event that the device has not reached
    first._event = pending
    first.look_around(store)
    assert store.num_keys() > 0
    gone = Alarm(8, 1, 2)
    gone.queued, gone._event = first.queued, pending
    gone.look_around(None)
    assert gone.first is None
    monkeypatch.setattr(alarm, "_STORELESS", 0.0)
    gone.look_around(None)
    assert "the store is gone" in str(gone.first)


def test_short_calls_and_none_look_for_nobody() -> None:
    store, rank_alarm = HashStore(), waiting(0)
    for call in (None, ("train_step", time.monotonic())):
        rank_alarm.call = call
        rank_alarm.look_around(store)
        rank_alarm.look_around(None)
    assert store.num_keys() == 0
    assert rank_alarm.first is None


def test_who_has_done_with_a_module_is_not_missed_behind_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    store, rank_alarm = HashStore(), waiting(0)
    rank_alarm.queued, rank_alarm.call = rank_alarm.call, None
    lookout = alarm._Lookout()
    lookout.forget(7, 0, object())  # of a process group before this one
    lookout.forget(7, 1, lookout._group)
    lookout._say_done(store)
    assert store.num_keys() == 1
    monkeypatch.setattr(alarm, "_ROLL_CALL", 0.0)
    for _ in range(2):
        rank_alarm.look_around(store)
        rank_alarm.answer(store)
    assert rank_alarm.first is None
    rank_alarm.call = rank_alarm.queued  # in one it is
    for _ in range(2):
        rank_alarm.look_around(store)
        rank_alarm.answer(store)
    assert rank_alarm.first is not None


def test_who_waits_for_the_result_of_a_call_that_is_over_looks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    store, rank_alarm = HashStore(), waiting(0)
    rank_alarm.queued, rank_alarm.call = rank_alarm.call, None
    rank_alarm.look_around(None)  # as at the end of a program, whose processes end one after another
    assert rank_alarm.first is None
    rank_alarm.look_around(store)
    rank_alarm.answer(store)
    monkeypatch.setattr(alarm, "_ROLL_CALL", 0.0)
    rank_alarm.look_around(store)
    assert str(rank_alarm.first).startswith("rank 0, train_step: rank 1 gave no sign: ended")


def test_a_store_that_is_gone_ends_a_long_call() -> None:
    rank_alarm = waiting(1)
    rank_alarm.look_around(None)
    assert rank_alarm.first is not None
    assert "the store is gone, and so the process that kept it" in rank_alarm.first.reason


def test_an_error_that_nobody_caught_is_told_at_the_end() -> None:
    store, rank_alarm, other = HashStore(), Alarm(7, 0, 2), Alarm(7, 1, 2)
    rank_alarm.leave(store, ValueError("no file"))
    assert other.hear(store)
    assert other.error.reason == "ended by ValueError: no file"
    assert other.error.where == "rank 0"
