"""Values that are written at masks: as on one device, with gradients of what is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.plan.plan import Plan
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from tests.products import alternate

Write = Callable[["Net", Tensor, Tensor], None]


class Net(nn.Module):
    """Words, of which some are written over, and a layer."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.up, self.down = nn.Embedding(64, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.row, self.factor = nn.Parameter(torch.randn(8)), nn.Parameter(torch.tensor(0.3))
        self.write = write

    def forward(self, x: Tensor) -> Any:
        h = self.words(x)
        self.write(self, h, x)
        return (h + self.down(self.up(h).relu())).square().mean()


def _set(mask: Callable[[Tensor], object], value: Callable[[Net], object]) -> Write:
    def write(net: Net, h: Tensor, x: Tensor) -> None:
        h[mask(x)] = value(net)  # type: ignore[index, assignment]

    return write


def _add(h: Tensor, mask: Tensor, row: Tensor) -> None:
    h.index_put_((mask,), row, accumulate=True)


WRITES: dict[str, Write] = {
    "a row": _set(lambda x: x > 40, lambda net: net.row * 2),
    "a row of one": _set(lambda x: x > 40, lambda net: net.row[None]),
    "a number": _set(lambda x: x > 40, lambda net: net.factor.exp()),
    "whole samples": _set(lambda x: (x > 50).any(1), lambda net: net.row),
    "behind a dimension": _set(lambda x: (slice(None), x[0] > 20), lambda net: net.row),
    "a row of each sample": lambda net, h, x: h.__setitem__((slice(None), x[0] > 20), net.words(x[:, :1])),
    "features": lambda net, h, x: h.__setitem__(h > 0.5, net.factor),
    "added": lambda net, h, x: _add(h, x > 40, net.row),
}


@pytest.mark.parametrize("name", alternate(WRITES, 0))
def test_what_is_written_at_a_mask_gets_its_gradient(name: str) -> None:
    batch = {"x": torch.randint(64, (4, 6), generator=torch.Generator().manual_seed(3))}
    found = expect(verify(Net(WRITES[name]), batch, Plan(tp=2)))
    assert "aten.index_put" not in print_program(found.program)
