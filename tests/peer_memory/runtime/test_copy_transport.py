"""Copies between the memories of ranks give what collectives give.

What was read is overwritten at once, but by compiled steps where a kernel of theirs reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxpar.peer_memory.runtime import copy_transport
from fxpar.peer_memory.runtime.copy_transport import Watchdog, why_not_copy
from fxpar.plan.plan_options import Recompute
from tests.peer_memory.runtime import transport_jobs
from tests.runtime.world import World

PLANS: list[Any] = [
    ("norms", {"tp": 2, "compile": True}),
    ("blocks", {"tp": 2, "sequence_parallel": True}),
]
MORE_PLANS: list[Any] = [
    ("blocks", {"tp": 2, "compile": True, "recompute": Recompute("full")}),
    ("llama", {"tp": 2, "sequence_parallel": True}),
    ("gpt2", {"tp": 2}),
    ("gpt2", {"tp": 2, "compile": True}),
    ("gpt2", {"tp": 2, "recompute": Recompute("full")}),
    ("gpt2", {"tp": 4}),
    ("llama", {"tp": 4, "sequence_parallel": True}),
    ("gpt2", {"tp": 2, "dp": 2}),
    ("gpt2", {"tp": 2, "pp": 2, "microbatches": 2}),
]


@pytest.mark.parametrize(
    ("name", "plan"), [*PLANS, *(pytest.param(*row, marks=pytest.mark.matrix) for row in MORE_PLANS)], ids=str
)
def test_training_is_the_same(request: pytest.FixtureRequest, name: str, plan: dict[str, Any]) -> None:
    ranks = plan.get("dp", 1) * plan.get("tp", 1) * plan.get("pp", 1)
    for losses, gradients, size in request.getfixturevalue(f"world{ranks}").run(transport_jobs.differences, name, plan):
        assert losses < 1e-9
        assert gradients < 1e-7  # transformers computes norms in float32
        assert size > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_each_kind_on_two_ranks(world2: World, dtype: torch.dtype) -> None:
    assert world2.run(transport_jobs.each_kind, dtype, (8, 4, 3)) == [[], []]


@pytest.mark.parametrize("shape", [(8, 4, 3), (4, 4, 1)], ids=str)
def test_each_kind_on_four_ranks(world4: World, shape: tuple[int, ...]) -> None:
    assert world4.run(transport_jobs.each_kind, torch.float64, shape) == [[], [], [], []]


def test_in_one_shot(world2: World) -> None:
    for size in (0, 1, 7, 4096):
        assert world2.run(transport_jobs.one_shot, size) == [True, True]


def test_a_rank_that_sends_nothing_is_named(world2: World) -> None:
    said, _ = world2.run(transport_jobs.lost)
    assert "rank 1 has sent nothing for 1 s" in said
    assert "rank 0, buffer 2" in said


def test_the_report_tells_which_are_copies(world2: World) -> None:
    (copied, size, text), (sent, none, why), (_, nothing, known) = world2.run(transport_jobs.told)[1]
    assert size > 0 == none == nothing
    assert sum(count for count, _ in copied) > 0 == sum(count for count, _ in sent)
    assert [count for _, count in copied] == [count for _, count in sent]
    assert "of each rank's memory" in text
    assert "in one shot are one kernel each" in text
    assert "Communication('nccl')" in why
    assert "its ranks are no GPUs of one machine" in known


def test_a_closed_module_says_so(world2: World) -> None:
    for said in world2.run(transport_jobs.closed):
        assert "the memory into which ranks copy is freed: the module is closed" in said


def test_a_step_behind_one_that_was_broken_off_says_so(world2: World) -> None:
    for said in world2.run(transport_jobs.broken_off):
        assert "an earlier call failed: MemoryError: no more" in said


def _gpu(name: str, *reaches: str) -> dict[str, Any]:
    return {"machine": "a", "gpu": name, "reaches": reaches, "triton": True}


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ([{"machine": "a"}, {"machine": "a"}], ""),
        ([{"machine": "a"}, {"machine": "b"}], "ranks 0 and 1 are on two machines"),
        ([_gpu("x", "y"), _gpu("y", "x")], ""),
        ([_gpu("x", "y"), _gpu("y")], "the GPU of rank 1 does"),
        ([_gpu("x", "y")] * 2, "does not reach or does not see"),
        ([_gpu("x", "y"), {**_gpu("y", "x"), "triton": False}], "rank 1 has no Triton"),
    ],
    ids=str,
)
def test_who_can_copy(places: list[dict[str, Any]], reason: str) -> None:
    for asked in (True, False):
        found = why_not_copy([(0, 1)], places, asked)
        assert reason in found
        assert bool(reason) == bool(found)


def test_more_than_two_copy_where_they_are_asked_to() -> None:
    places = [_gpu(own, *(other for other in "xyz" if other != own)) for own in "xyz"]
    assert why_not_copy([(0, 1, 2)], places, is_requested=True) == ""
    assert "NCCL is faster" in why_not_copy([(0, 1, 2)], places, is_requested=False)


class _Board:
    def post(self, calls: int, look: int) -> None:
        """Nobody reads it."""

    def posted(self) -> list[tuple[int, int] | None]:
        return [(0, 0), None]


class _Event:
    """An event of a device that comes nowhere; while it is recorded the host waits for long, its queue being full."""

    def __init__(self) -> None:
        self.during: Callable[[], None] = lambda: None

    def record(self, stream: object) -> None:
        self.during()

    def query(self) -> bool:
        return False


def test_a_host_that_waits_to_mark_a_place_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[Exception]()
    watch = Watchdog(0, 10.0, _Board(), lambda: 0, said.append, lambda: now[0])
    events = _Event(), _Event()
    marks: Any = copy_transport._Marks(torch.device("cpu"), watch, itertools.cycle(events))  # type: ignore[arg-type]
    monkeypatch.setattr(copy_transport, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def wait() -> None:
        now[0] += 11.0
        watch.look()

    for event in events:
        marks.mark()
        assert said == []
        event.during = wait
    marks.mark()
    assert len(said) == 1
