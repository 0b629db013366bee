"""Python's cyclic garbage collector, at rest while a graph grows.

Enters: nothing. Leaves: the collector as it was. Tracing and the passes make millions of objects that refer to one
another, and all of them stay: every full collection would visit the whole graph and find nothing, which makes the time
grow faster than the graph.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """The collector is off inside; afterwards as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
