"""On a GPU: the dropout kernel draws the bits of the plain form, forward and backward, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.ops import counter

pytestmark = pytest.mark.gpu

ORIGIN = 0xFFFFFFF1
# Shapes with a cut: whole, a plain cut, several runs, and runs that are no multiple of a counter's four elements.
CASES: tuple[tuple[tuple[int, ...], tuple[int, int, int, int] | None], ...] = (
    ((5, 7, 9), None),
    ((2, 3000), None),
    ((4, 6, 8), (1, 1, 2, 1)),
    ((4, 6, 8), (1, 3, 4, 2)),
    ((3, 5, 6), (2, 3, 2, 1)),
    ((3, 5, 7), (2, 1, 2, 1)),
)


def state(seed: int = (1 << 40) + 5) -> Tensor:
    return torch.tensor([seed, 3, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "cut"), CASES, ids=str)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_kernel_draws_the_bits_of_the_plain_form(
    shape: tuple[int, ...], cut: tuple[int, int, int, int] | None, dtype: torch.dtype, is_compiled: bool
) -> None:
    from fxpar.ops import kernels

    torch.compiler.reset()  # the cases share one code, whose variants are counted
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    cuts: list[Any] = [] if cut is None else [(*cut[:3], torch.tensor(cut[3]))]
    wanted = counter.dropout(x, state(), 0.3, ORIGIN, cuts)
    ours = x.cuda().requires_grad_()
    on_device = [(*c[:3], c[3].cuda()) for c in cuts]

    def call(value: Tensor, rng: Tensor) -> Tensor:
        return kernels.dropout(value, rng, 0.3, ORIGIN, on_device)

    found = (torch.compile(call, fullgraph=True) if is_compiled else call)(ours, state().cuda())
    assert torch.equal(found.cpu(), wanted)
    found.sum().backward()
    assert ours.grad is not None
    assert torch.equal(ours.grad.cpu() == 0, wanted == 0)


def test_a_large_tensor_is_dropped_at_its_rate() -> None:
    from fxpar.ops import kernels

    x = torch.ones(1 << 24, device="cuda")
    found = kernels.dropout(x, state().cuda(), 0.1, ORIGIN, [])
    assert abs(float((found == 0).double().mean()) - 0.1) < 5 * (0.09 / x.numel()) ** 0.5
