"""Rows that are joined and taken apart again, and rows in groups: what they become, and that values stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.errors import FxparError, LayoutError
from fxpar.manager import PassManager
from fxpar.passes import canonicalize, divide_batch
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify

Halves = Callable[[Tensor, int], Any]


class Preferred(nn.Module):
    """The loss of pairs of rows that one call of the net scores together."""

    def __init__(self, halves: Halves) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 1)
        self.halves = halves

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        rows = torch.cat([chosen, rejected], 0)
        scores = self.down(torch.tanh(self.up(rows)))[..., 0].sum(1)
        first, second = self.halves(scores, chosen.shape[0])
        return -functional.logsigmoid(first - second).mean()


def pairs(rows: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, 5, 6, generator=generator) for name in ("chosen", "rejected")}


def lines(model: nn.Module, batch: dict[str, Tensor]) -> list[str]:
    program = PassManager([canonicalize, divide_batch]).run(capture(model, batch, Plan(dp=2)).program)
    text = print_program(program)
    assert print_program(parse_program(text)) == text
    return [line.split("  #")[0] for line in text.splitlines()]


def test_a_slice_between_numbers_of_rows_is_a_part_of_a_split() -> None:
    found = lines(Preferred(lambda x, n: (x[:n], x[n:])), pairs())
    assert [line for line in found if line.startswith("%slice")] == [
        "%slice_1_parts = aten.split_with_sizes.default(%sum_1, [%sym_size_int, %sym_size_int_1], 0) "
        ": (f32[2*b]; f32[2*b])",
        "%slice_1 = operator.getitem(%slice_1_parts, 0) : f32[2*b]",
        "%slice_2_parts = aten.split_with_sizes.default(%sum_1, [%sym_size_int_2, %sym_size_int_3], 0) "
        ": (f32[2*b]; f32[2*b])",
        "%slice_2 = operator.getitem(%slice_2_parts, 1) : f32[2*b]",
    ]


HALVES: dict[str, Halves] = {
    "slices": lambda x, n: (x[:n], x[n:]),
    "slices from the end": lambda x, n: (x[:-n], x[-n:]),
    "chunk": lambda x, n: x.chunk(2, 0),
    "split": lambda x, n: x.split(n),
    "view": lambda x, n: x.view(2, -1),
}


@pytest.mark.parametrize("halves", HALVES)
def test_halves_of_joined_rows_are_those_of_one_device(halves: str) -> None:
    expect(verify(Preferred(HALVES[halves]), pairs(), Plan(dp=2)))


def test_halves_of_what_one_input_brings_are_other_ranks_rows() -> None:
    class Half(Preferred):
        def forward(self, chosen: Tensor, rejected: Tensor) -> Any:
            n = chosen.shape[0] // 2
            return (self.up(chosen)[:n] - self.up(rejected)[n:]).square().mean()

    with pytest.raises(FxparError):
        verify(Half(HALVES["slices"]), pairs(8), Plan(dp=2), level="static")


class Grouped(nn.Module):
    """Advantages of rows within their group, and the loss that they weigh."""

    def __init__(self, advantages: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 1)
        self.advantages = advantages

    def forward(self, x: Tensor, rewards: Tensor) -> Any:
        scores = self.down(torch.tanh(self.up(x)))[:, 0]
        return -(self.advantages(rewards + scores) * scores).mean()


def rewarded(rows: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {"x": torch.randn(rows, 6, generator=generator), "rewards": torch.randn(rows, generator=generator)}


def normalised(r: Tensor) -> Tensor:
    groups = r.view(-1, 4)
    mean, deviation = groups.mean(1), groups.std(1)
    return (r - mean.repeat_interleave(4, 0)) / (deviation.repeat_interleave(4, 0) + 1e-4)


def reshaped(r: Tensor) -> Tensor:
    groups = r.reshape(r.shape[0] // 2, 2)
    return (groups - groups.mean(-1, keepdim=True)).flatten()


GROUPS: dict[str, Callable[[Tensor], Tensor]] = {
    "means and deviations": normalised,
    "by sizes": reshaped,
    "of all rows": lambda r: (r - r.mean()) / (r.std() + 1e-4),
    "of all rows, both": lambda r: (r - torch.var_mean(r, correction=0)[1]) * torch.var_mean(r, correction=0)[0],
}


@pytest.mark.parametrize("groups", GROUPS)
def test_advantages_are_those_of_one_device(groups: str) -> None:
    expect(verify(Grouped(GROUPS[groups]), rewarded(), Plan(dp=2)))


def test_rows_in_groups_are_a_multiple_of_the_group() -> None:
    found = lines(Grouped(normalised), rewarded())
    assert found[3] == "symbol b = x.0 / 8 in groups of 4 like 2"
    (view,) = [line for line in found if line.startswith("%view ")]
    assert view.endswith(": f32[2*b, 4]")


def test_groups_that_no_rank_has_whole_are_refused() -> None:
    with pytest.raises(FxparError, match=r"x has 12 in dimension 0, which 2 ranks cannot share out in whole groups"):
        verify(Grouped(normalised), rewarded(12), Plan(dp=2), level="static")
    with pytest.raises(LayoutError, match="needs the whole of dimension 0"):
        verify(Grouped(lambda r: (r.view(4, -1) - r.view(4, -1).mean(0)).view(-1)), rewarded(), Plan(dp=2))


def test_deviations_of_equal_rows_have_gradients_of_zero() -> None:
    alike = {"x": torch.ones(8, 6), "rewards": torch.ones(8)}
    expect(verify(Grouped(lambda r: (r - r.mean()) / (r.std() + 1e-4)), alike, Plan(dp=2)))


def test_a_question_about_the_number_of_rows_makes_no_groups() -> None:
    class Asking(Grouped):
        def forward(self, x: Tensor, rewards: Tensor) -> Any:
            return self.up(x).sum() if x.shape[0] % 4 == 0 else self.up(x).mean()

    asked, grouped = (capture(kind(normalised), rewarded()) for kind in (Asking, Grouped))
    assert [(s.multiple, s.group) for s in asked.program.symbols] == [(1, 1)]
    assert [(s.multiple, s.group) for s in grouped.program.symbols] == [(4, 4)]
    assert not asked.spec.admits({"b": 5})
    assert asked.spec.admits({"b": 8})
    assert grouped.spec.admits({"b": 2})
    assert grouped.spec.admits({"b": 3})
