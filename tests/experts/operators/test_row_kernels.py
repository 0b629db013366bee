"""On a GPU: rows moved by one kernel are those of the plain form, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxpar.experts.operators.grouped import grouped_linear, grouped_outer, swiglu_gradient, swiglu_rows
from fxpar.experts.operators.permute import (
    dot_rows,
    moe_combine,
    moe_permute,
    moe_unpermute,
    sort_by_expert,
    take_weighed,
)
from fxpar.experts.operators.sent_rows import dispatch_indices

pytestmark = pytest.mark.gpu

# Leading dimensions, tokens, experts a token, rows, width.
SIZES = (
    ((), 5, 3, 15, 7),
    ((2,), 4, 2, 11, 33),
    ((1, 2), 3, 1, 6, 1),
    ((2,), 9, 8, 100, 1030),
    ((), 300, 8, 4000, 2048),
    ((), 4, 2, 0, 8),
)
TYPES = (torch.float64, torch.float32, torch.bfloat16)


def an_order(lead: tuple[int, ...], places: int, rows: int) -> Tensor:
    """Some pairs without a row, some rows without a pair."""
    generator = torch.Generator().manual_seed(rows)
    found = torch.full((*lead, rows), -1)
    for one in found.view(-1, rows) if found.numel() else ():
        count = max(0, min(places, rows) - 2)
        chosen = torch.randperm(places, generator=generator)[:count]
        one[torch.randperm(rows, generator=generator)[:count]] = chosen
    return found


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def assert_same(run: Callable[..., Tensor], operands: list[Tensor], others: list[Tensor]) -> None:
    """Results and gradients are those on the CPU."""
    found = []
    for device in ("cpu", "cuda"):
        own = [x.detach().clone().to(device).requires_grad_() for x in operands]
        result = run(*own, *(x.to(device) for x in others))
        scale = torch.linspace(0.5, 1.5, max(1, result.numel()), device=device, dtype=result.dtype)
        (result * scale[: result.numel()].view(result.shape)).sum().backward()
        found.append([result.detach().cpu(), *(x.grad.cpu() for x in own if x.grad is not None)])
    assert len(found[1]) == len(operands) + 1
    for wanted, got in zip(*found, strict=True):
        tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_are_those_of_the_plain_form(size: tuple[tuple[int, ...], int, int, int, int], dtype: torch.dtype) -> None:
    lead, tokens, k, rows, width = size
    order = an_order(lead, tokens * k, rows)
    x, y = normal(*lead, tokens, width, dtype=dtype), normal(*lead, rows, width, dtype=dtype)
    assert_same(lambda x, order: moe_permute(x, order, k), [x], [order])
    assert_same(lambda y, order: moe_unpermute(y, order, tokens, k), [y], [order])
    for kind in {dtype, torch.float32}:
        weights = normal(*lead, tokens, k, dtype=kind)
        assert_same(lambda y, w, order: moe_combine(y, w, order, dtype), [y, weights], [order])
        assert_same(lambda x, w, order: take_weighed(x, w, order, dtype), [x, weights], [order])
        assert_same(lambda x, y, order, kind=kind: dot_rows(x, y, order, k, kind), [x, y], [order])


def test_rows_of_nobody_are_read_by_nothing() -> None:
    order = torch.tensor([3, -1, 0], device="cuda")
    y = torch.full((3, 40), torch.nan, device="cuda")
    y[0], y[2] = 1.0, 2.0
    weights = torch.ones(2, 2, device="cuda")
    for found in (
        moe_unpermute(y, order, 2, 2),
        moe_combine(y, weights, order, y.dtype),
        dot_rows(y[::2], y, order, 2, y.dtype),
    ):
        assert not found.isnan().any()


@pytest.mark.parametrize("counts", [(3, 0, 5, 0), (0, 0, 0, 0), (0, 64, 0, 32)], ids=str)
@pytest.mark.parametrize(("width", "transposed"), [(64, False), (64, True), (60, False)])
def test_products_leave_zeros_behind_all_experts(counts: tuple[int, ...], width: int, transposed: bool) -> None:
    """In bfloat16 by one kernel, which leaves those rows as they are, and pads results of odd widths."""
    rows, weight = normal(96, 64, dtype=torch.bfloat16), normal(4, width, 64, dtype=torch.bfloat16)
    own = torch.tensor(counts)
    rows[sum(counts) :] = torch.nan
    assert_same(lambda x, w, own: grouped_linear(x, w, own, transposed), [rows.nan_to_num(), weight], [own])
    made = grouped_linear(rows.cuda(), weight.cuda(), own.cuda(), transposed)
    assert not made[sum(counts) :].any()
    assert made.is_contiguous()
    assert not grouped_outer(rows.cuda(), rows.cuda(), own.cuda(), 0).isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_that_nobody_reads_may_be_anything(dtype: torch.dtype) -> None:
    """What an allocator gives again holds no numbers: rows, products and gates of somebody are as where zeros are."""
    tokens, experts, k, width, places = 40, 4, 2, 64, 160
    x, first, second = (
        normal(*s, dtype=dtype).cuda() for s in ((tokens, width), (experts, 128, width), (4, width, 64))
    )
    indices = torch.randint(0, experts, (tokens, k), generator=torch.Generator().manual_seed(0)).cuda()
    order, counts = sort_by_expert(indices, experts)
    order = dispatch_indices(order, counts, 1, places)
    found = []
    for fill in (True, False):
        for size in (width, 128, 2 * width):  # of what is made below
            torch.full((places, size), torch.nan, dtype=dtype, device="cuda")
        rows = moe_permute(x, order, k, fill)
        made = grouped_linear(rows, first, counts, False, fill)
        gated = swiglu_rows(made.view(places, 2, 64), counts, fill)
        out = moe_unpermute(grouped_linear(gated, second, counts, False, fill), order, tokens, k)
        back = take_weighed(out, out[:, :k], order, dtype, fill)
        gates = swiglu_gradient(
            grouped_linear(back, second, counts, True, fill), made.view(places, 2, 64), counts, fill
        )
        grads = grouped_outer(gates.view(places, 128), rows, counts, 0), dot_rows(out, back, order, k, dtype)
        found.append(
            (
                out,
                moe_unpermute(grouped_linear(gates.view(places, 128), first, counts, True, fill), order, 40, k),
                *grads,
            )
        )
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()
