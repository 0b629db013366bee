"""Inductor makes no kernel of two that wait for different collectives."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import layer_norm

from fxpar.plan.plan import Plan
from fxpar.runtime import inductor
from fxpar.runtime.inductor import Heuristics, Inductor

ops = torch.ops.fxpar

TAKE, OTHER = torch.ops.fxpar.take_copies.default, torch.ops.aten.mm.default


class Scheduler:
    """As much of Inductor's as is asked."""

    def __init__(self, nodes: dict[str, Any]) -> None:
        self.name_to_node = nodes


def kernel(*ancestors: str) -> Any:
    return SimpleNamespace(ancestors=set(ancestors))


@pytest.mark.parametrize(
    ("first", "second", "may"),
    [
        (kernel("take_0", "mm"), kernel("take_0"), True),
        (kernel("mm"), kernel(), True),
        (kernel("take_0"), kernel("take_1"), False),
        (kernel("take_0"), kernel("take_0", "take_1"), False),
        (kernel(), kernel("take_1"), False),
    ],
)
def test_kernels_that_wait_for_the_same_may_be_one(
    monkeypatch: pytest.MonkeyPatch, first: Any, second: Any, may: bool
) -> None:
    made = {name: TAKE if name.startswith("take") else OTHER for name in ("take_0", "take_1", "mm")}
    nodes = {name: SimpleNamespace(node=SimpleNamespace(op_overload=target)) for name, target in made.items()}
    monkeypatch.setattr(InductorChoices, "can_fuse_horizontal", staticmethod(lambda *_: True))
    assert Heuristics.can_fuse_horizontal(Scheduler(nodes), first, second, 100) is may


def test_otherwise_inductor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InductorChoices, "can_fuse_horizontal", staticmethod(lambda *_: False))
    assert not Heuristics.can_fuse_horizontal(Scheduler({}), kernel(), kernel(), 100)


@pytest.mark.parametrize(
    ("hint", "width", "cooperative", "once"),
    [
        (ReductionHint.INNER, 1536, False, True),
        (ReductionHint.INNER, 4096, False, True),
        (ReductionHint.INNER, 4097, False, False),
        (ReductionHint.OUTER, 1536, False, False),
        (ReductionHint.INNER, 1536, True, False),
    ],
)
def test_a_row_is_read_once(
    monkeypatch: pytest.MonkeyPatch, hint: ReductionHint, width: int, cooperative: bool, once: bool
) -> None:
    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(lambda *_: False))
    sizes = SimpleNamespace(statically_known_leq=lambda value, most: value <= most)
    features = SimpleNamespace(get_reduction_hint=lambda: hint, reduction_numel=width)
    with V.set_graph_handler(SimpleNamespace(sizevars=sizes)):  # type: ignore[arg-type]
        assert Heuristics.should_use_persistent_reduction(features, cooperative) is once


def test_what_arrived_is_read_by_one_kernel_and_nothing_is_put_there() -> None:
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        token = ops.send_copies(x, "sum", "nobody", 1)
        total = ops.added(x, ops.arrived(token, x, "nobody", 1), "nobody")
        norm = layer_norm(total + y, (32,))
        return [norm, (total @ y.t()).exp(), total * 2 - norm.amax()]

    with FakeTensorMode() as mode:
        fakes = [torch.empty(64, 32), torch.empty(64, 32)]

    def compiled() -> list[Tensor]:
        Inductor(Plan()).alone(step, fakes, mode, backward=False)
        return []

    with fresh_cache():
        _, codes = run_and_get_code(compiled)
    body = codes[-1].split("def call(", 1)[-1]
    name = re.search(r"(buf\d+) = torch.ops.fxpar.arrived", body)
    assert name is not None
    names = {name[1], *re.findall(rf"(buf\d+) = {name[1]}\b", body)}
    lines = [line.strip() for line in body.splitlines() if any(re.search(rf"\b{each}\b", line) for each in names)]
    readers = [line for line in lines if re.match(r"[\w.]+\(", line) and not line.startswith("assert")]
    assert len(readers) == 1, body
    assert not any("# reuse" in line for line in lines)


def cache_hits() -> int:
    """How much of a function compiled now comes from Inductor's cache on disk."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    before = counters["inductor"]["fxgraph_cache_hit"]
    fakes = [mode.from_tensor(torch.ones(3, 5))]
    Inductor(Plan()).alone(lambda x: (x.sin() + 1,), fakes, mode, backward=False)
    return int(counters["inductor"]["fxgraph_cache_hit"]) - before


def test_code_that_another_version_compiled_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's cache knows our operators by their names alone."""
    with fresh_cache():
        assert (cache_hits(), cache_hits()) == (0, 1)
        monkeypatch.setattr(inductor, "_fingerprint", lambda: "fxpar of another day")
        assert (cache_hits(), cache_hits()) == (0, 1)


def test_the_files_of_all_operators_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads each file that declares one, and so notices what changes in it."""
    read: set[Path] = set()
    plain = Path.read_bytes

    def noted(path: Path) -> bytes:
        read.add(path)
        return plain(path)

    monkeypatch.setattr(Path, "read_bytes", noted)
    inductor._fingerprint.__wrapped__()
    root = Path(inductor.__file__).parents[1]
    declaring = {file for file in root.rglob("*.py") if "@torch_operator(" in file.read_text()}
    assert root / "experts/operators/permute.py" in declaring
    assert declaring <= read


def test_code_for_other_vectors_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's key has no word of the processor's vectors: code for shorter ones writes behind its results."""
    with fresh_cache():
        for capability in ("avx512", "avx2", "default"):
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
            assert (cache_hits(), cache_hits()) == (0, 1)
