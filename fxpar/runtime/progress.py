"""A line on the terminal that tells how far a compilation is.

Enters: how many regions are compiled, of how many. Leaves: one line on stderr, where that is a terminal, of the first
process of a job.
"""

from __future__ import annotations

import os
import sys
import time


class Progress:
    """Tells of regions that are being compiled."""

    def __init__(self) -> None:
        self._start = 0.0

    def __call__(self, done: int, count: int) -> None:
        """Writes the line anew; the last one stays."""
        if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
            return
        if done == 0:
            self._start = time.monotonic()
        seconds = time.monotonic() - self._start
        what = f"compiling region {done + 1} of {count}" if done < count else f"compiled {count} regions"
        sys.stderr.write(f"\r\x1b[Kfxpar: {what} ({seconds:.0f} s)" + ("\n" if done == count else ""))
        sys.stderr.flush()
