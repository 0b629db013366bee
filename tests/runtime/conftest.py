"""Worlds of real processes, one of each size for all tests of the session."""

from collections.abc import Iterator

import pytest

from tests.runtime.world import World

JOBS = "tests.runtime.jobs"


@pytest.fixture(scope="session")
def world2() -> Iterator[World]:
    world = World(2, JOBS)
    yield world
    world.stop()


@pytest.fixture(scope="session")
def world4() -> Iterator[World]:
    world = World(4, JOBS)
    yield world
    world.stop()
