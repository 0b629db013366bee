"""The worlds of processes that the other tests rely on: failures come through, and nothing hangs."""

import pytest

from tests.runtime import jobs
from tests.runtime.world import RankFailed, World


def test_a_rank_that_fails_is_named_and_the_world_starts_again(world2: World) -> None:
    with pytest.raises(RankFailed, match=r"rank 1: (.|\n)*ValueError: this rank fails"):
        world2.run(jobs.fail_on, 1)
    assert world2.run(jobs.fail_on, 2) == [0, 1]


def test_a_rank_that_hangs_is_ended(world2: World) -> None:
    with pytest.raises(RankFailed, match="rank 1: no answer in time"):
        world2.run(jobs.hang_on, 1, seconds=2)
    assert world2.run(jobs.fail_on, 2) == [0, 1]
