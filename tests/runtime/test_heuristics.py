"""Inductor makes no kernel of two that wait for different collectives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

from fxpar.runtime.heuristics import Heuristics

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
