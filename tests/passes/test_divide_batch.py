"""divide_batch: what it writes, and that sums over counts are the means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture import capture
from fxpar.errors import LayoutError, PlanError
from fxpar.manager import PassManager
from fxpar.passes import canonicalize
from fxpar.passes.divide_batch import divide_batch
from fxpar.plan.plan import Plan
from fxpar.program.program import Program
from fxpar.text.printing import print_program
from fxpar.verification import verify


class Rows(nn.Module):
    """Scores of rows, and a loss over them."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 5)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.loss(self.up(x), y)
        return found


def batch(rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 5, (rows,), generator=generator)
    y[1] = -100
    return {"x": torch.randn(rows, 6, generator=generator), "y": y}


def divided(loss: Any, plan: Plan, rows: int = 8) -> Program:
    captured = capture(Rows(loss), batch(rows), plan)
    return PassManager([canonicalize, divide_batch]).run(captured.program)


def test_a_mean_over_rows_is_a_sum_over_a_count() -> None:
    text = print_program(divided(lambda z, y: z.square().mean(), Plan(dp=2)))
    lines = [line.split("  #")[0] for line in text.splitlines()]
    assert lines[3] == "symbol b = x.0 / 2 like 4"
    assert lines[-7:] == [
        "%mean_sum = aten.sum.default(%square, dtype=dtype.f32) : f32[]",
        "%mean_row = aten.select.int(%square, 1, 0) : f32[2*b]",
        "%mean_ones = aten.ones_like.default(%mean_row, dtype=dtype.f32) : f32[2*b]",
        "%mean_count = aten.sum.default(%mean_ones) : f32[]",
        "%mean_elements = aten.mul.Tensor(%mean_count, 5) : f32[]",
        "%mean = aten.div.Tensor(%mean_sum, %mean_elements) : f32[]",
        "return output=%mean",
    ]


def test_nothing_changes_without_data_ranks() -> None:
    plain = PassManager([canonicalize]).run(capture(Rows(lambda z, y: z.mean()), batch(), Plan(tp=2)).program)
    after = PassManager([divide_batch]).run(plain)
    assert print_program(after) == print_program(plain)


WEIGHT = torch.tensor([1.0, 0.5, 2.0, 0.1, 3.0])
LOSSES = {
    "mean": lambda z, y: z.square().mean(),
    "mean over rows": lambda z, y: z.mean(0).square().sum(),
    "mean, kept": lambda z, y: (z - z.mean(0, keepdim=True)).abs().sum(),
    "mean over columns": lambda z, y: z.mean(1).square().sum(),
    "cross entropy": functional.cross_entropy,
    "smoothed": lambda z, y: functional.cross_entropy(z, y, label_smoothing=0.2),
    "weighted": lambda z, y: functional.cross_entropy(z, y, WEIGHT.to(z), label_smoothing=0.1),
    "sum": lambda z, y: functional.cross_entropy(z, y, reduction="sum"),
    "nll": lambda z, y: functional.nll_loss(z.log_softmax(-1), y),
    "squared": lambda z, y: functional.mse_loss(z, z.detach().roll(1, -1)),
    "absolute": lambda z, y: functional.l1_loss(z, torch.ones_like(z)),
    "binary": lambda z, y: functional.binary_cross_entropy_with_logits(z, torch.ones_like(z)),
    "two losses": lambda z, y: functional.cross_entropy(z, y) + 0.1 * z.square().mean(),
    "over the number of rows": lambda z, y: z.square().sum() / z.shape[0],
}


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_ranks_have_the_mean_of_all_rows(name: str, dp: int) -> None:
    found = verify(Rows(LOSSES[name]), batch(), Plan(dp=dp))
    assert found.ok, found.values


REFUSED = {
    "a softmax over rows": (lambda z, y: (z.softmax(0) ** 2).sum(), "the operation needs the whole of dimension 0"),
    "rows in another order": (lambda z, y: (z.flip(0) * z).sum(), "the operation needs the whole of dimension 0"),
    "the largest of all": (lambda z, y: z.max(), "needs the whole of dimension"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_is_refused(name: str) -> None:
    loss, reason = REFUSED[name]
    with pytest.raises(LayoutError, match=f"on axis dp: .*{reason}"):
        verify(Rows(loss), batch(), Plan(dp=2))


def test_rows_that_the_ranks_cannot_share_out_are_refused() -> None:
    with pytest.raises(PlanError, match="dp: x has 7 in dimension 0, which 2 ranks cannot share out"):
        divided(functional.cross_entropy, Plan(dp=2), rows=7)


class Two(nn.Module):
    """Two inputs with rows of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        found: Tensor = self.up(x).sum() + self.up(z).sum()
        return found


def test_inputs_with_different_rows_are_refused() -> None:
    captured = capture(Two(), {"x": torch.randn(4, 6), "z": torch.randn(6, 6)}, Plan(dp=2))
    with pytest.raises(PlanError, match="dp: inputs differ in their rows"):
        PassManager([canonicalize, divide_batch]).run(captured.program)
