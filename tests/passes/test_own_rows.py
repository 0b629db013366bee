"""Indexing by rows under data parallel ranks: what it becomes, and that it is what one device indexes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture.capture import capture
from fxpar.errors import LayoutError
from fxpar.manager import PassManager
from fxpar.passes import canonicalize, divide_batch
from fxpar.plan.plan import Plan
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from tests.products import few

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


EVERY_TIME = [*zip(INDEXED, itertools.cycle((1, 2)), strict=False)]


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
