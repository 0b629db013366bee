"""SwiGLU of rows: what it gives, its gradient, and on a GPU that one kernel computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fxpar.experts.operators.grouped import halves, swiglu_gradient, swiglu_rows

# Leading dimensions, rows, columns, experts.
SIZES = (((), 7, 5, 3), ((2,), 9, 33, 2), ((1, 2), 4, 1030, 1), ((), 0, 4, 2))


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def counted(lead: tuple[int, ...], rows: int, experts: int) -> Tensor:
    """Fewer rows than there are."""
    return torch.randint(0, rows // experts + 1, (*lead, experts), generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_gate_of_somebodys_rows(size: tuple[tuple[int, ...], int, int, int]) -> None:
    lead, rows, width, experts = size
    x, counts = normal(*lead, rows, 2 * width), counted(lead, rows, experts)
    is_row = torch.arange(rows).expand(*lead, rows) < counts.sum(-1, keepdim=True)
    x[~is_row] = torch.nan
    gate, up = x.requires_grad_().chunk(2, -1)
    made = swiglu_rows(halves(x), counts)
    assert torch.equal(made[is_row], (functional.silu(gate) * up)[is_row])
    assert not made[~is_row].any()
    made.sum().backward()
    assert x.grad is not None
    assert not x.grad[~is_row].any()


def test_its_gradient_is_that_of_numbers() -> None:
    counts = torch.tensor([[2, 1], [0, 1]])
    x = normal(2, 4, 2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: swiglu_rows(x, counts), (x,))
    assert torch.autograd.gradgradcheck(lambda x: swiglu_rows(x, counts), (x,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_computes_the_plain_form(size: tuple[tuple[int, ...], int, int, int], dtype: torch.dtype) -> None:
    lead, rows, width, experts = size
    x, gradient = normal(*lead, rows, 2, width, dtype=dtype), normal(*lead, rows, width, dtype=dtype)
    counts = counted(lead, rows, experts)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    runs: list[tuple[Any, tuple[torch.Tensor, ...]]]
    runs = [(swiglu_rows, (x, counts)), (swiglu_gradient, (gradient, x, counts))]
    for run, operands in runs:
        found = run(*(each.cuda() for each in operands)).cpu()
        torch.testing.assert_close(found, run(*operands), rtol=tolerance, atol=tolerance)
