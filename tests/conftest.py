import gc
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

# torch reads it when it is first imported; the workers of pytest-xdist share the cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Inductor takes the vectors that the processor names for granted: to try each takes a build and a process of its own.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Inductor's cache on disk has no word of the vectors that code was compiled for: what `torch.compile` made of a test
# for others would be read.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_tests_{capability}")

import pytest
import torch

from tests.captures import captured_once
from tests.models.table import pytest_terminal_summary
from tests.runtime.jobs import forget
from tests.runtime.world import GARBAGE, JOBS, World

__all__ = [
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_runtest_setup",
    "pytest_terminal_summary",
]

torch.set_num_threads(1)
gc.set_threshold(*GARBAGE)

# Rooms whose files are long start first, so that no worker waits at the end for one that the other began late.
LONG = ("samples", "packaging", "runtime", "cudagraphs", "peer_memory", "testing", "checkpoint", "models")


@pytest.fixture(scope="session", autouse=True)
def captures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where captures are for all workers and ranks of the session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "captures"
    folder.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(base / "cache")  # where commands leave traces
    with captured_once(folder):
        yield folder


@pytest.fixture(scope="session")
def worlds(captures: Path) -> Iterator[dict[int, World]]:
    """Real processes, one world of each size for all tests of the session."""
    found = {size: World(size, JOBS, captures=captures) for size in (2, 4)}
    yield found
    for world in found.values():
        world.stop()


@pytest.fixture
def world2(worlds: dict[int, World]) -> World:
    return worlds[2]


@pytest.fixture
def world4(worlds: dict[int, World]) -> World:
    return worlds[4]


@pytest.fixture(scope="module", autouse=True)
def no_module_outlives_its_tests(worlds: dict[int, World]) -> Iterator[None]:
    """What the ranks hold of one file's tests would take time from those of all others."""
    yield
    for world in worlds.values():
        world.forget(forget)


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs from tests that are not marked `gpu`: a module takes the device that is there, and their values
    are those of CPUs. torch asks how many there are when it first needs one, which no import does.
    """
    if re.search(r"(?<!not )\bgpu\b", config.option.markexpr) is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Gives models of one configuration the same weights in all tests: captures of equal models are shared."""
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """Takes what was imported by now out of all collections: none of it is ever garbage."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rooms = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: rooms.get(item.path.parent.name, len(LONG)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and -m gpu")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
