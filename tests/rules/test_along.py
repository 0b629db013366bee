"""Operations along some dimensions, in models: rows apart, channels cut, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.errors import LayoutError
from fxpar.plan.plan import Plan
from fxpar.testing.check import check_operation, sample
from fxpar.verification import expect, verify


class Along(nn.Module):
    """A function of what a layer makes of each token, and another layer behind it."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mid, self.down = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(width, 3)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.down(self.function(self.mid(torch.tanh(self.up(x))))).square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(6, 5, 6, generator=torch.Generator().manual_seed(1))}


def scanned(y: Tensor) -> Tensor:
    """Running extrema, moments over tokens, distances, repetition, order."""
    around = (y - y.mean(1, keepdim=True)) / (y.std(1, keepdim=True) + 0.1)
    near = functional.cosine_similarity(y[:, :, None], y[:, None], dim=-1).sum(2, keepdim=True)
    far = torch.cdist(y, y.flip(1)).sum(2, keepdim=True)
    turned = y.repeat_interleave(2, 1)[:, ::2] + y.cummax(1).values + y.cummin(1).values
    return around + near + far + turned + y.median(-1, keepdim=True).values + functional.glu(torch.cat([y, y], -1), -1)


def resampled(y: Tensor) -> Tensor:
    """Pooling and resampling of images, [b, 3, 5, 8], whose rows and channels are apart."""
    image = torch.stack([y, y.flip(1), 2 * y], 1)
    small = functional.avg_pool2d(image, (1, 2)) + functional.max_pool2d(image, (1, 2))
    large = functional.interpolate(small, size=(5, 8), mode="bilinear")
    wide = functional.interpolate(functional.avg_pool1d(y, 2), scale_factor=2, mode="linear")
    read = functional.grid_sample(image, image[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False)
    return (large + read + functional.instance_norm(image)).sum(1) + wide + y.unfold(2, 1, 1)[..., 0]


@pytest.mark.parametrize("function", [scanned, resampled])
def test_rows_are_apart_and_features_may_be_cut(function: Callable[[Tensor], Tensor]) -> None:
    expect(verify(Along(function), batch(), Plan(dp=2, tp=2)))


def test_composites_without_a_rule_are_taken_apart() -> None:
    program = capture(
        Along(lambda y: functional.cosine_similarity(y, y.flip(1), dim=-1)[..., None], 1), batch()
    ).program
    named = {str(node.target) for node in program.graph.nodes}
    assert "aten.cosine_similarity.default" not in named
    assert "aten.linear.default" in named


def test_torchs_operations_that_mix_rows_are_not_to_be_declared_row_wise() -> None:
    def scattered(y: Tensor) -> Tensor:
        return y.masked_scatter(y.detach() > 0, y.flip(1))

    with pytest.raises(LayoutError, match="no rule says") as caught:
        verify(Along(scattered), batch(), Plan(dp=2), level="static")
    assert "row_wise" not in str(caught.value)
    assert "write it with operations that have rules" in str(caught.value)


class Biased(nn.Module):
    """Rows of a table at fixed places, as of relative positions, beside values that all axes cut."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.query = nn.Linear(6, 8), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(9, 4))
        self.register_buffer("places", torch.arange(25).view(5, 5) % 9)

    def forward(self, x: Tensor) -> Any:
        query = self.query(self.up(x)).unflatten(-1, (4, 2)).transpose(1, 2)
        bias = self.table[self.places.view(-1)].view(5, 5, -1).permute(2, 0, 1)
        return ((query @ query.mT + bias).softmax(-1) @ query).square().mean()


def test_zeros_are_summands_of_each_axis_whose_summands_they_meet() -> None:
    expect(verify(Biased(), batch(), Plan(dp=2, tp=2)))


def test_a_number_at_the_places_of_a_mask_is_a_fill() -> None:
    def filled(y: Tensor) -> Tensor:
        y = y.clone()
        y[y[..., 0] > 0] = 0.5
        return y

    expect(verify(Along(filled), batch(), Plan(dp=2)))


# Norms and sums keep what they can of shards and partial values.


aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.linalg_vector_norm.default, (2, [1], True)),
        (aten.linalg_vector_norm.default, (3, [-1])),
        (aten.linalg_vector_norm.default, ()),
        (aten._weight_norm.default, (torch.rand(1, 4, 1).double(), 1)),
        (aten._weight_norm.default, (torch.rand(()).double(), -1)),
    ],
)
def test_norms_keep_shards_of_the_dimensions_that_stay(target: Any, args: tuple[Any, ...]) -> None:
    report = check_operation(target, [sample(torch.randn(6, 4, 12).double(), *args)])
    assert (report.false_accepts, report.missed) == ([], [])
    assert report.has_shard == (len(args) > 0 and args[-1] != -1)


@pytest.mark.parametrize(("target", "args"), [(aten.sum.default, ()), (aten.sum.dim_IntList, ([1],))])
def test_partial_values_are_not_summed_as_integers(target: Any, args: tuple[Any, ...]) -> None:
    draw = torch.Generator().manual_seed(0)  # about one draw in 300 has fractions that sum to whole numbers
    fractions = sample(5 * torch.randn(6, 4, generator=draw).double(), *args, dtype=torch.int64, fixed=(0,))
    report = check_operation(target, [fractions])
    assert (report.false_accepts, report.missed) == ([], [])
    assert "self P → P" not in report.accepted
    assert "self P → P" in check_operation(target, [sample(torch.arange(24).view(6, 4), *args)]).accepted
