"""A training in chunks of tokens is the one without, on real ranks: rows that no number of chunks divides."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fxpar.plan.plan_options import Recompute
from tests.products import few
from tests.runtime.chunk_jobs import apart
from tests.runtime.world import World

_EVERY_TIME: list[tuple[int, int, dict[str, Any]]] = [
    (2, 2, {"layers": 1}),
    (2, 2, {"transport": "copy", "impl": "full_iteration", "micro": 2, "layers": 1}),
]
_MORE: list[tuple[int, int, dict[str, Any]]] = [
    (2, 2, {}),
    (2, 3, {"transport": "copy"}),
    (2, 4, {"transport": "copy", "impl": "partial"}),
    (2, 2, {"transport": "copy", "sequence_parallel": True}),
    (2, 2, {"transport": "copy", "recompute": Recompute("full")}),
    (2, 3, {"recompute": Recompute("selective"), "impl": "full_iteration"}),
    (2, 2, {"transport": "copy", "compile": True}),
    (4, 2, {"transport": "copy", "sequence_parallel": True}),
    (4, 2, {"transport": "copy", "dp": 2, "rows": 4}),
    (4, 2, {"transport": "copy", "pp": 2, "micro": 2, "rows": 4}),
]


@pytest.mark.parametrize(("ranks", "chunks", "how"), few([*_EVERY_TIME, *_MORE], _EVERY_TIME), ids=str)
def test_a_training_stays(request: pytest.FixtureRequest, ranks: int, chunks: int, how: dict[str, Any]) -> None:
    """Losses and weights of six steps with dropout; and so many more collectives that chunks have theirs."""
    world: World = request.getfixturevalue(f"world{ranks}")
    plan = {"tp": ranks // how.get("dp", 1) // how.get("pp", 1), **how}
    for result in world.run(partial(apart, chunks, **plan)):
        assert result.losses < 1e-6
        assert result.weights < 1e-4
        whole, in_chunks = result.collectives
        assert in_chunks >= 1.5 * whole
        assert (result.graphs > 0) == ("impl" in how)
