"""Signals that end a training: all ranks end it after the same step.

Ranks get a signal at different times, or one alone gets it. So they compare about once a second whether any has one.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from fxpar.runtime.world import World

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MILLISECONDS = 1000  # between two comparisons
_MOST_STEPS = 1000


class Stop:
    """Notes SIGTERM and a first SIGINT while a training runs; a second SIGINT interrupts as usual.

    Handlers are set in the main thread alone, as Python has it, and the former ones come back at the end.
    """

    def __init__(self, world: World) -> None:
        self._world, self._is_requested = world, False
        self._former: dict[signal.Signals, Any] = {}
        # Counted from the last comparison.
        self._steps, self._next, self._since = 0, 1, time.perf_counter()

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            # None is a handler of C, which Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._is_requested:
            raise KeyboardInterrupt
        self._is_requested = True

    def is_agreed(self) -> bool:
        """Returns whether the training ends after this step, the same on all ranks. All ranks call it at each step."""
        if self._world.size == 1:
            return self._is_requested
        self._steps += 1
        if self._steps < self._next:
            return False
        now, agreement = time.perf_counter(), self._world.agreement
        of_one = int(1000 * (now - self._since) / self._steps)
        with agreement.call("train"):
            met = agreement.meet("looks for signals", [int(self._is_requested), of_one])
        assert met is not None, "there are several ranks"
        is_requested, slowest = met.largest[:2]
        self._steps, self._since = 0, now
        self._next = min(max(_MILLISECONDS // max(slowest, 1), 1), _MOST_STEPS)
        return bool(is_requested)
