"""On a GPU: steps that are replayed are the steps, bit for bit, whatever other graphs leave in their memory."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpar
from fxpar.cudagraphs.full import Iteration
from fxpar.cudagraphs.graph_cache import CachedGraphs
from fxpar.cudagraphs.partial import GraphedForward, GraphedStep
from fxpar.runtime.prefetch import Prefetched
from tests.cudagraphs.graphed import Trained, gpt2, llama, prefetched, train, words

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
STEPS = 100
BUILDS: dict[str, Any] = {"gpt2": partial(gpt2, 128, 2), "llama": partial(llama, 128, 2)}
HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None
ENGINE = pytest.param("transformer_engine", marks=pytest.mark.skipif(not HAS_ENGINE, reason="needs Transformer Engine"))
_known: dict[Any, Trained] = {}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def plain(name: str, micro: int, **more: Any) -> Trained:
    """A training without graphs, made once."""
    key = (name, micro, str(more))
    if key not in _known:
        _known[key] = train(BUILDS[name], words(STEPS, micro), **more)
    return _known[key]


@pytest.mark.parametrize("impl", ["partial", "full_iteration", ENGINE])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_hundred_steps_are_the_same_to_the_bit(name: str, impl: str) -> None:
    found = train(BUILDS[name], words(STEPS, 4), impl)
    assert found == plain(name, 4)
    assert len(set(found.losses)) == len(found.losses)
    assert found.figures.graphs >= 2


IMPLS = ["partial", "full_iteration", *(["transformer_engine"] if HAS_ENGINE else [])]
ON_RANKS = {
    "replicas": [f"{name}:{impl}" for name in ("gpt2", "llama") for impl in IMPLS],
    "overflow": [f"overflow:{way}" for way in ("inside", "sgd", "after")],
    "experts": [f"{name}:partial" for name in ("mixtral", "deepseek_v3")],
    "stages": [
        *(f"{name}:partial" for name in ("1f1b", "interleaved", "zb_h1")),
        *(f"{name}:transformer_engine" for name in ("1f1b", "interleaved") if HAS_ENGINE),
    ],
    "pipelines": [f"{name}:full_iteration" for name in ("1f1b", "gpipe", "interleaved", "zb_h1", "zbv", "groups")],
}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("runs", ON_RANKS.values(), ids=list(ON_RANKS))
def test_a_hundred_steps_of_two_ranks_are_the_same_to_the_bit(runs: list[str]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(Path(__file__).with_name("graphs_worker.py")), *runs],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line.split()[:2] for line in done.stdout.splitlines() if line.partition(" ")[0] in runs]
    assert told == [[run, "equal"] for run in runs]


@pytest.mark.parametrize("impl", ["partial", "full_iteration", ENGINE])
def test_compiled_steps_in_half_precision_are_the_same_to_the_bit(impl: str) -> None:
    more: dict[str, Any] = {"compile": True, "precision": "bf16_weights"}
    assert train(BUILDS["gpt2"], words(STEPS), impl, **more) == plain("gpt2", 1, **more)


@pytest.mark.parametrize("impl", ["partial", "full_iteration"])
def test_the_optimizer_steps_inside(impl: str) -> None:
    assert train(BUILDS["gpt2"], words(STEPS), impl, inside=True) == plain("gpt2", 1, inside=True)


def _scramble(model: fxpar.ParallelModule, step: int) -> None:
    """Fills all static memory with NaN, as other graphs might."""
    torch.cuda.synchronize()
    assert isinstance(model._graphs, CachedGraphs)
    for pool, known in model._graphs._pools:
        handle: Any = pool._handle  # type: ignore[attr-defined]
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) == tuple(handle):
                device = model.world.device
                storage = torch._C._construct_storage_from_data_pointer(
                    segment["address"], device, segment["total_size"]
                )
                torch.empty(0, dtype=torch.uint8, device=device).set_(storage).fill_(255)
        for made in known.values():
            for static in _static(made):
                static.view(torch.uint8).fill_(255)
    torch.cuda.synchronize()


def _static(made: Any) -> list[Tensor]:
    if isinstance(made, Iteration):
        return [value for each in made._static for value in each.tensors.values()]
    assert isinstance(made, (GraphedStep, GraphedForward))
    parts = (made._static, getattr(made, "_tangents", None))
    return [value.reshape(-1) for each in parts if each is not None for value in each.tensors.values()]


@pytest.mark.parametrize("impl", ["partial", "full_iteration"])
@pytest.mark.parametrize("micro", [1, 4])
def test_nothing_in_static_memory_is_kept_from_step_to_step(impl: str, micro: int) -> None:
    assert train(BUILDS["gpt2"], words(STEPS, micro), impl, touch=_scramble) == plain("gpt2", micro)


@pytest.mark.parametrize("impl", ["none", "partial", "full_iteration", ENGINE])
@pytest.mark.parametrize("micro", [1, 4])
def test_batches_may_be_copied_ahead_from_pinned_memory_that_is_used_again(impl: str, micro: int) -> None:
    assert train(BUILDS["gpt2"], words(STEPS, micro), impl, feed=prefetched) == plain("gpt2", micro)


MEMORY: dict[str, Callable[[], Tensor]] = {
    "pinned": lambda: torch.empty(1 << 22, pin_memory=True),
    "pageable": lambda: torch.empty(1 << 22),
    "strided": lambda: torch.empty(1 << 11, 1 << 11, pin_memory=True).t(),
    "device": lambda: torch.empty(1 << 22, device="cuda"),
}


@pytest.mark.parametrize("kind", list(MEMORY))
def test_copies_ahead_do_not_race(kind: str) -> None:
    memory = MEMORY[kind]()

    def source() -> Iterator[Any]:
        for i in range(40):
            yield {"x": memory.fill_(i), "number": i}

    kept, sums = list[Any](), list[Tensor]()
    for batch in Prefetched(source(), torch.device("cuda", torch.cuda.current_device()), True):
        torch.cuda._sleep(2_000_000)  # the host is ahead
        sums.append(batch["x"].double().sum())
        if batch["number"] % 3 == 0:
            kept.append(batch)
    memory.fill_(-1)
    assert [float(each) for each in sums] == [i * 2.0**22 for i in range(40)]
    assert all(bool((batch["x"] == batch["number"]).all()) for batch in kept)
    assert len(kept) == 14


@pytest.mark.parametrize("impl", ["partial", ENGINE])
def test_gradients_that_hooks_keep_are_not_overwritten(impl: str) -> None:
    kept: dict[str, list[Tensor]] = {"none": [], impl: []}
    for which, seen in kept.items():

        def watch(model: fxpar.ParallelModule, step: int, seen: list[Tensor] = seen) -> None:
            if step == 1:
                next(model.parameters()).register_hook(seen.append)

        train(BUILDS["gpt2"], words(8), which, touch=watch, every=4)
    assert len(kept[impl]) == 7
    assert all(torch.equal(a, b) for a, b in zip(kept[impl], kept["none"], strict=True))


def test_what_a_graph_cannot_hold_is_told() -> None:
    class Asking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.linear(x)
            return {"loss": torch.linalg.solve(y.mT @ y + torch.eye(8, device=x.device), y.mT).sum()}

    plan = fxpar.Plan(cuda_graphs=fxpar.CudaGraphs("full_iteration"))
    model = fxpar.parallelize(Asking(), plan, {"x": torch.randn(4, 8)})
    with pytest.raises(fxpar.FxparError, match="cannot be part of a CUDA graph"):
        model.train_step({"x": torch.randn(4, 8)})
