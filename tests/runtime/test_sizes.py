"""Models that need a program for each length: steps are those of the model, and there is an end to programs."""

from __future__ import annotations

import pytest

from tests.runtime import size_jobs
from tests.runtime.world import World


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.matrix), 1], ids=["tp", "dp"])
def test_each_length_has_a_program_up_to_the_most(world2: World, tp: int) -> None:
    for found in world2.run(size_jobs.steps, tp):
        assert found["worst"] < 1e-12
        assert "Programs for sizes of their own: ids [" in found["report"]
        assert "needs a program for sizes of its own" in found["refused"]
        assert "there are 2 already" in found["refused"]
        assert "size_programs" in found["refused"]
