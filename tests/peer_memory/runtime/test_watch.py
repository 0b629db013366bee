"""A process whose GPU waits for copies that do not come ends, and says of whom."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from fxpar.errors import RankError
from fxpar.peer_memory.runtime.copy_transport import Watchdog


@dataclass
class Reached:
    """A place to which the device has come or not."""

    done: bool = False

    def query(self) -> bool:
        return self.done


@dataclass
class Signs:
    """Of three ranks, the first of which looks."""

    others: list[tuple[int, int] | None]
    own: tuple[int, int] | None = None

    def post(self, calls: int, look: int) -> None:
        self.own = calls, look

    def posted(self) -> Sequence[tuple[int, int] | None]:
        return [self.own, *self.others]


@dataclass
class Looking:
    """A watch whose time is a number."""

    signs: Signs
    now: float = 0.0
    said: list[RankError] = field(default_factory=list)
    watch: Watchdog = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watchdog(0, 10.0, self.signs, lambda: 7, self.said.append, lambda: self.now)

    def look(self, times: int, alive: Sequence[int] = ()) -> None:
        for _ in range(times):
            self.now += 1.0
            for rank in alive:
                calls, look = self.signs.others[rank - 1] or (7, 0)
                self.signs.others[rank - 1] = calls, look + 1
            self.watch.look()


def test_who_comes_in_time_is_left_alone() -> None:
    looking = Looking(Signs([None, None]))
    looking.look(20)
    for event in (Reached(), Reached(), Reached()):
        looking.watch.mark(event)
        looking.look(9)
        event.done = True
        looking.look(20)
    assert looking.said == []


def test_the_last_place_counts() -> None:
    """Whatever is queued behind a place to which the device has come, or comes, is looked at too."""
    looking = Looking(Signs([None, None]))
    for event in (Reached(True), Reached(True), Reached()):
        looking.watch.mark(event)
    looking.look(10)
    assert looking.said == []
    looking.look(1)
    assert len(looking.said) == 1


def test_a_place_that_moves_on_while_it_is_looked_at_is_not_late() -> None:
    """Events are recorded again: what was reached may be asked for right behind its next record."""
    looking = Looking(Signs([None, None]))

    class Moving(Reached):
        def query(self) -> bool:
            looking.watch.mark(self)
            return False

    looking.watch.mark(Moving())
    looking.look(40)
    assert looking.said == []


@pytest.mark.parametrize(
    ("others", "alive", "what"),
    [
        ([(7, 3), (7, 3)], [2], "rank 1 gives no sign"),
        ([(7, 3), None], [1], "rank 2 gives no sign"),
        ([(7, 3), (7, 3)], [], "rank 1, 2 gives no sign"),
        ([(7, 3), (5, 3)], [1, 2], "rank 2 has begun 6 calls and this rank 8"),
        ([(7, 3), (9, 3)], [1, 2], "all ranks have begun the same calls or more"),
    ],
)
def test_who_does_not_come_is_named(others: list[tuple[int, int] | None], alive: list[int], what: str) -> None:
    looking = Looking(Signs(others))
    looking.watch.mark(Reached())
    looking.look(10, alive)
    assert looking.said == []
    looking.look(1, alive)
    (error,) = looking.said
    assert "has waited for copies of other ranks for 10 s" in str(error)
    assert re.search(what, str(error))
    assert "rank 0, call 7" in str(error)


_ENDING = """
import time
from fxpar.peer_memory.runtime.copy_transport import Watchdog
class Never:
    def query(self): return False
class Alone:
    def post(self, calls, look): pass
    def posted(self): return [(0, 0), None]
watch = Watchdog(0, 0.2, Alone(), lambda: 0).start(lambda: None)
watch.mark(Never())
time.sleep(60)
"""


def test_the_process_ends() -> None:
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", _ENDING], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1
    assert "rank 1 gives no sign" in ended.stderr
    assert time.monotonic() - start < 45


def test_a_watch_that_is_stopped_looks_no_more() -> None:
    signs = Signs([None])
    watch = Watchdog(0, 0.1, signs, lambda: 0).start(lambda: None)
    time.sleep(0.1)
    watch.stop()
    before = signs.own
    time.sleep(0.1)
    assert before is not None
    assert signs.own == before
