"""A rank of a pipeline that ends in the middle of its schedule: the others say which microbatch they waited for."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.pipeline.runtime import pipeline_jobs
from tests.runtime import faults
from tests.runtime.world import JOBS, RankFailed, World


@pytest.fixture(scope="module")
def short() -> Iterator[World]:
    """Collectives do not wait for long."""
    world = World(2, JOBS, group_seconds=faults.COLLECTIVE_SECONDS)
    yield world
    world.stop()


def test_who_waits_for_an_ended_rank_names_stage_and_microbatch(short: World) -> None:
    with pytest.raises(RankFailed) as caught:
        short.run(pipeline_jobs.ends_in_the_schedule, seconds=60.0)
    first, odd = str(caught.value).split("rank 1: ")
    # Its next receive fails, or a send before: the system says which first.
    assert re.search(
        r"fxpar\.errors\.RankError: rank 0, train_step: a collective failed: "
        r"the (backward of microbatch [01]|forward of microbatch [12]) on stage 0: ",
        first,
    ), first
    assert "rank 1 gave no sign" in first
    assert "died with exit status -9" in odd
