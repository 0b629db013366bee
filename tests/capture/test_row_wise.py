"""What the plan declares row-wise is run on all rows and on parts of them when the model is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.capture.capture import capture
from fxpar.errors import CaptureError
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Operators
from fxpar.verification import verify
from tests.rowwise import (
    BATCH,
    Model,
    averaged,
    bounded,
    centred,
    copied,
    even,
    grouped,
    many,
    paired,
    picked,
    quantised,
    scan,
    softened,
    unscaled,
)

ALL = Plan(dp=2, operators=Operators(batchwise_ops=("fxpar_rows.*",)))

MIXING: dict[str, tuple[Callable[..., Any], str]] = {
    "forward": (lambda h, w: centred(h), r"output 0 of rows 0…1 and 2…3 by themselves differs from that of all rows"),
    "backward": (lambda h, w: copied(h), r"the gradient of %\w+ of rows 0…1 and 2…3 by themselves differs"),
    "neighbours": (lambda h, w: paired(h), r"output 0 of rows 0 and 1…3 by themselves differs"),
    "a mean for a weight": (lambda h, w: averaged(h, w), r"the gradient of %w of rows 0…1 and 2…3 by themselves"),
    "pairs of rows": (lambda h, w: even(h), r"raises ValueError \(takes pairs of rows\) on 1 of 4 rows"),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_no_row_wise_operator(name: str) -> None:
    function, reason = MIXING[name]
    with pytest.raises(
        CaptureError, match=rf"%\w+ \(.*\): fxpar_rows\.\w+\.default is declared row-wise, and {reason}"
    ):
        capture(Model(function), BATCH, ALL)


# Each seems to compute rows apart for four or six of them, of the size that random numbers have.
HIDDEN: dict[str, tuple[Callable[..., Any], int, str]] = {
    "beyond a norm": (lambda h, w: bounded(h), 4, "output 0 of rows .* differs"),
    "in fours": (lambda h, w: grouped(h), 6, "output 0 of rows .* differs"),
    "of more than eight": (lambda h, w: many(h), 4, "output 0 of rows .* differs"),
    "in steps of the largest": (
        lambda h, w: quantised(h.bfloat16()).to(h),
        4,
        "of 4 rows output 0 changes by .* in the other rows where one becomes 1000 times as large",
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_other_numbers_of_rows_and_sizes_of_values_are_tried(name: str) -> None:
    function, rows, reason = HIDDEN[name]
    with pytest.raises(CaptureError, match=reason):
        capture(Model(function), {"x": torch.randn(rows, 5, 6)}, ALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_are_apart_stay_so_whatever_their_size(dtype: torch.dtype) -> None:
    assert verify(Model(lambda h, w: softened(h.to(dtype)).to(h)), BATCH, ALL, level="static").ok


def test_only_data_ranks_need_to_know() -> None:
    model = Model(lambda h, w: centred(h))
    assert verify(
        model, BATCH, Plan(tp=2, operators=Operators(batchwise_ops=("fxpar_rows.centred.*",))), level="static"
    ).ok


def test_rows_that_cannot_be_halved_are_cut_unevenly() -> None:
    capture(Model(scan), {"x": torch.randn(5, 5, 6)}, ALL)
    with pytest.raises(CaptureError, match="of rows 0…1 and 2…4 by themselves"):
        capture(Model(lambda h, w: centred(h)), {"x": torch.randn(5, 5, 6)}, ALL)


def test_an_operator_of_one_type_runs_in_it() -> None:
    assert verify(Model(lambda h, w: unscaled(h.float()).to(h)), BATCH, ALL, level="static").ok


class Picking(Model):
    """Elements of rows at places that are input: none of them is beyond the row."""

    def forward(self, x: Tensor, i: Tensor | None = None) -> Any:
        assert i is not None
        return self.down(picked(self.up(x), i - 10)).square().mean()


def test_integers_are_those_of_the_example() -> None:
    model = Picking(lambda h, w: h)
    capture(model, {**BATCH, "i": torch.tensor([11, 14, 10, 12])}, ALL)
    with pytest.raises(CaptureError, match=r"raises IndexError \(no such element\) on random operands"):
        capture(model, {**BATCH, "i": torch.tensor([11, 14, 10, 15])}, ALL)


def test_without_values_integers_are_small() -> None:
    model = Picking(lambda h, w: h).to("meta")
    batch = {"x": BATCH["x"].to("meta"), "i": torch.empty(4, dtype=torch.int64, device="meta")}
    capture(model, batch, ALL)


def test_generators_are_left_as_they_were() -> None:
    before = torch.random.get_rng_state()
    model = Model(scan)
    torch.random.set_rng_state(before)
    capture(model, BATCH, ALL)
    assert torch.equal(torch.random.get_rng_state(), before)
