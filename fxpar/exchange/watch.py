"""What ends the wait of a GPU for copies that do not come.

Enters: events behind what was queued, and a board on which all ranks leave signs. Leaves: nothing, or an error with the
ranks that did not come.

A GPU that waits for another's copy has no limit of its own, in a replayed graph least of all, and the host that waits
for it cannot be woken: so a thread looks on, as the one of NCCL's process groups does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fxpar.errors import RankError

# Looks in the time limit, and the most seconds from one to the next.
_LOOKS, _LONGEST = 20, 10.0
# Looks behind which a rank whose sign does not change is silent.
_SILENT = 3


class Event(Protocol):
    """A place in the work of a device."""

    def query(self) -> bool:
        """Whether the device has come there."""


class Board(Protocol):
    """Where ranks leave signs."""

    def post(self, calls: int, look: int) -> None:
        """Leaves this rank's sign: calls that it has begun, and how often it has looked."""

    def posted(self) -> Sequence[tuple[int, int] | None]:
        """The signs of all ranks, in order."""


@dataclass
class Watchdog:
    """Looks whether the device comes on.

    Attributes:
        rank: of this process.
        seconds: in which it comes to where an event is.
        board: of all ranks.
        calls: how many calls this rank has begun, which all ranks make.
        end: ends the wait, or the process.
        clock: seconds.
    """

    rank: int
    seconds: float
    board: Board
    calls: Callable[[], int]
    end: Callable[[RankError], None] = field(default_factory=lambda: end_process)
    clock: Callable[[], float] = time.monotonic
    _marked: tuple[Event, float] | None = None
    _look: int = 0
    _heard: dict[int, tuple[tuple[int, int] | None, int]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def mark(self, event: Event) -> None:
        """Gives it an event that was just recorded behind all that was queued; it looks at the last one alone.

        The one before may be recorded again: it is no longer looked at.
        """
        self._marked = event, self.clock()

    def look(self) -> None:
        """Calls `end` if the event is too long ago, at each look."""
        self._look += 1
        self.board.post(self.calls(), self._look)
        for rank, sign in enumerate(self.board.posted()):
            if rank not in self._heard or self._heard[rank][0] != sign:
                self._heard[rank] = sign, self._look
        marked = self._marked
        if marked is None:
            return
        event, since = marked
        # One that is no longer the last may have been recorded again right before it was asked, and is not late.
        if self.clock() - since > self.seconds and not event.query() and self._marked is marked:
            self.end(self._error())

    def _error(self) -> RankError:
        calls = self.calls()
        silent, behind = [], []
        for rank, (sign, look) in self._heard.items():
            if rank == self.rank:
                continue
            if sign is None or self._look - look >= _SILENT:
                silent.append(rank)
            elif sign[0] < calls:
                behind.append(f"rank {rank} has begun {sign[0] + 1} calls and this rank {calls + 1}")
        signs = [f"rank {', '.join(map(str, silent))} gives no sign: it ended, or stands still"] if silent else []
        signs += behind or ([] if silent else ["all ranks have begun the same calls or more"])
        return RankError(
            f"the GPU has waited for copies of other ranks for {self.seconds:g} s: {'; '.join(signs)}",
            where=f"rank {self.rank}, call {calls}",
            remedy="look at the output of the ranks that are named, or raise parallelize(timeout=…)",
        )

    def start(self, prepare: Callable[[], None]) -> Watchdog:
        """Looks from time to time, on a thread of its own.

        Args:
            prepare: runs on the thread before its first look.
        """
        pause = min(self.seconds / _LOOKS, _LONGEST)

        def run() -> None:
            prepare()
            while not self._stop.wait(pause):
                self.look()

        self._thread = threading.Thread(target=run, name="fxpar copies", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Looks no more."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_LONGEST)


def end_process(error: RankError) -> Any:
    """Ends the process at once: its exit handlers would wait for the device."""
    print(f"fxpar: {error}", file=sys.stderr, flush=True)
    os._exit(1)
