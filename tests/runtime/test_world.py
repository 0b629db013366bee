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


def test_groups_of_modules_that_are_gone_are_closed(world2: World) -> None:
    for found in world2.run(jobs.abandoned):
        assert len(set(found["counts"])) == 1, "the groups of each are closed when the next one comes"
        assert len(set(found["losses"])) == 1
        assert found["same"], "parts of a module that is gone still have their groups"
