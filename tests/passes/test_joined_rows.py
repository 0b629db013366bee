"""Rows that are joined and taken apart again, and rows in groups: what they become, and that values stay."""

from __future__ import annotations

import itertools
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
from tests.products import alternate, few

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


@pytest.mark.parametrize("halves", alternate(HALVES, 0))
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


# Indexing by rows under data parallel ranks: what it becomes, and that it is what one device indexes.


Indexing = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rows(nn.Module):
    """Something of each row of up(x), and down."""

    def __init__(self, index: Indexing) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 7)
        self.index = index

    def forward(self, x: Tensor, i: Tensor, k: Tensor) -> Any:
        return self.down(self.index(self.up(x), i, k)).square().sum()


BATCH = {
    "x": torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)),
    "i": torch.tensor([1, 4, 0, 2]),
    "k": torch.tensor([[0, 0, 3], [4, 2, 1], [1, 1, 1], [3, 4, 0]]),
}


def row(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0])


def column(h: Tensor) -> Tensor:
    return torch.arange(h.shape[1])


def divided(index: Indexing) -> list[str]:
    program = PassManager([canonicalize, divide_batch]).run(capture(Rows(index), BATCH, Plan(dp=2)).program)
    lines = [line.split("  #")[0] for line in print_program(program).splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("%linear_bias"))
    last = next(i for i, line in enumerate(lines) if line.startswith("%linear_1 "))
    return lines[first + 1 : last]


def test_an_element_of_each_row_is_gathered() -> None:
    assert divided(lambda h, i, k: h[row(h), h.sum(-1).argmax(-1)]) == [
        "%sum_1 = aten.sum.dim_IntList(%linear_bias, [-1]) : f32[2*b, s]",
        "%argmax = aten.argmax.default(%sum_1, -1) : i64[2*b]",
        "%index_of = aten.unsqueeze.default(%argmax, 1) : i64[2*b, 1]",
        "%index_of_1 = aten.unsqueeze.default(%index_of, 2) : i64[2*b, 1, 1]",
        "%index_all = aten.expand.default(%index_of_1, [-1, -1, 8]) : i64[2*b, 1, 8]",
        "%index_own = aten.gather.default(%linear_bias, 1, %index_all) : f32[2*b, 1, 8]",
        "%index = aten.squeeze.dim(%index_own, 1) : f32[2*b, 8]",
    ]


def test_an_index_that_may_be_negative_counts_from_the_end() -> None:
    lines = divided(lambda h, i, k: h[row(h), i])
    assert lines[:4] == [
        "%index_is_back = aten.lt.Scalar(%i, 0) : bool[2*b]",
        "%index_size = aten.sym_size.int(%x, 1) : s",
        "%index_later = aten.add.Tensor(%i, %index_size) : i64[2*b]",
        "%index_from_start = aten.where.self(%index_is_back, %index_later, %i) : i64[2*b]",
    ]


def test_a_mask_of_transformers_is_a_view() -> None:
    assert divided(lambda h, i, k: h[row(h)[:, None, None], column(h)[None, None]].squeeze()) == [
        "%index = aten.unsqueeze.default(%linear_bias, 1) : f32[2*b, 1, s, 8]",
        "%squeeze = aten.squeeze.dims(%index, [1]) : f32[2*b, s, 8]",
    ]


def test_two_indices_of_one_position_are_no_view() -> None:
    lines = divided(lambda h, i, k: (h[:, 0] @ h[:, 1].T)[row(h), row(h)].unsqueeze(1).expand(-1, 8))
    assert any("aten.gather.default" in line for line in lines)


INDEXED: dict[str, Indexing] = {
    "an element": lambda h, i, k: h[row(h), i],
    "from the end": lambda h, i, k: h[torch.arange(0, h.shape[0], dtype=torch.int64), i - 5],
    "the last": lambda h, i, k: h[row(h), -1],
    "all": lambda h, i, k: h[row(h)],
    "several": lambda h, i, k: h[row(h)[:, None], k],
    "several of rows in their shape": lambda h, i, k: h[row(h)[:, None].expand(-1, 3), k],
    "the same of each row": lambda h, i, k: h[row(h)[:, None], torch.tensor([0, 2])],
    "in 32 bits": lambda h, i, k: h[row(h), i.int()],
    "of two dimensions": lambda h, i, k: h.unflatten(2, (2, 4))[row(h), i, i % 2].repeat(1, 2),
    "several of two dimensions": lambda h, i, k: h.unflatten(2, (2, 4))[row(h)[:, None], k, i[:, None] % 2].repeat(
        1, 1, 2
    ),
    "no rest": lambda h, i, k: h[row(h), i, i].unsqueeze(1).expand(-1, 8),
    "rows behind": lambda h, i, k: h.transpose(0, 1)[i, row(h)],
    "positions": lambda h, i, k: h.transpose(0, 1)[column(h)[None], row(h)[:, None]],
    "the position before": lambda h, i, k: h[row(h)[:, None, None], (column(h) - 1)[None, None]][:, 0],
    "with units": lambda h, i, k: h[row(h)[:, None, None], k[:, :, None]][:, :, 0],
}


EVERY_TIME = [*zip([*INDEXED][::2], itertools.cycle((1, 2)), strict=False)]


@pytest.mark.parametrize(("name", "tp"), few(itertools.product(INDEXED, (1, 2)), EVERY_TIME))
def test_ranks_index_their_own_rows(name: str, tp: int) -> None:
    expect(verify(Rows(INDEXED[name]), BATCH, Plan(tp=tp, dp=2)))


OTHERS: dict[str, Indexing] = {
    "other rows": lambda h, i, k: h[h.shape[0] - 1 - row(h), i],
    "rows of a larger dimension": lambda h, i, k: torch.cat([h, h])[row(h), i],
}


@pytest.mark.parametrize("name", OTHERS)
def test_rows_that_are_not_a_row_s_own_stay_indexed(name: str) -> None:
    assert any("aten.index.Tensor" in line for line in divided(OTHERS[name]))
    with pytest.raises(LayoutError, match="on axis dp"):
        verify(Rows(OTHERS[name]), BATCH, Plan(dp=2), level="static")


def test_nothing_changes_without_data_ranks() -> None:
    program = PassManager([canonicalize]).run(capture(Rows(INDEXED["all"]), BATCH, Plan(tp=2)).program)
    assert print_program(PassManager([divide_batch]).run(program)) == print_program(program)
