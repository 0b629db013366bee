"""Layer dropping that is switched off folds; one that may drop, and draws on the host, are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.errors import CaptureError
from fxpar.verify.values import check_capture


class Dropping(nn.Module):
    def __init__(self, skips: Callable[[], bool | Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.skips = skips

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x)
        if not self.skips():
            hidden = functional.dropout(hidden * hidden, 0.2)
        return self.down(hidden).square().sum()


def changed() -> Tensor:
    drawn = torch.rand([])
    drawn.mul_(-3.0)
    return drawn < 0.0


OFF: dict[str, Callable[[], bool | Tensor]] = {
    "a tensor below zero": lambda: torch.rand([]) < 0.0,
    "zero above a tensor": lambda: 0.0 > torch.rand(1),  # noqa: SIM300
    "a number of the host": lambda: random.uniform(0, 1) < 0.0,
    "not below one": lambda: not random.random() < 1.0,
}
ON: dict[str, tuple[Callable[[], bool | Tensor], str]] = {
    "a tensor": (lambda: torch.rand([]) < 0.1, "a random number decides what runs .compared with 0.1."),
    "a changed tensor": (changed, "branches on values of tensors"),
    "the host": (lambda: random.random() < 0.1, "draws random numbers on the host"),
    "a number of the host": (lambda: bool(torch.ones(()) * random.random() > 2), "draws random numbers on the host"),
}


@pytest.mark.parametrize("name", OFF)
def test_what_never_drops_folds(name: str) -> None:
    torch.manual_seed(0)
    model, example = Dropping(OFF[name]), {"x": torch.randn(3, 5, 8)}
    captured = capture(model, example)
    check_capture(captured, model, example)


@pytest.mark.parametrize("name", ON)
def test_what_may_drop_is_refused(name: str) -> None:
    skips, reason = ON[name]
    with pytest.raises(CaptureError, match=reason):
        capture(Dropping(skips), {"x": torch.randn(3, 5, 8)})


class Counting(nn.Module):
    """In front of the first region stands one result, and what is computed of it beside for a branch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up = nn.Embedding(19, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Any:
        positions = torch.arange(ids.shape[1])[None]
        if not (positions.expand(ids.shape[0], -1) == torch.arange(ids.shape[1])).all():
            raise ValueError("positions are not counted one by one")
        with torch.no_grad():
            waves = positions.to(torch.float32).cos()
        return self.up(self.words(ids) + waves[..., None]).square().sum()


def test_what_a_branch_alone_reads_is_no_part_of_the_program() -> None:
    torch.manual_seed(0)
    model, example = Counting(), {"ids": torch.randint(19, (3, 5))}
    captured = capture(model, example)
    check_capture(captured, model, example)
    assert not any("eq" in str(node.target) for node in captured.program.graph.nodes)


class Padding(nn.Module):
    """Traces of itself go another way, which fails; what trains by itself has sizes that need a program each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(x.shape[:2])
        assert mask is not None
        missing = -x.shape[1] % 4
        hidden = functional.pad(self.up(x) * mask[..., None], (0, 0, 0, missing)).unflatten(1, (-1, 4))
        return hidden.amax(2).square().sum()


def test_the_reason_of_the_way_that_trains_is_told() -> None:
    torch.manual_seed(0)
    model, example = Padding(), {"x": torch.randn(3, 6, 8)}
    captured = capture(model, example)
    check_capture(captured, model, example)
