"""Fused attention and its gradient are those of the plain form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fxpar.ops import sdpa
from fxpar.ops.sdpa import SdpaCall, kernel

CASES = {
    "plain": (8, 8, False, None),
    "causal": (8, 8, True, None),
    "grouped": (8, 2, True, None),
    "masked": (8, 8, False, "float"),
    "boolean": (8, 8, False, "bool"),
}


def values(name: str, device: str, dtype: torch.dtype, length: int) -> tuple[SdpaCall, Tensor]:
    """A call, and the gradient of its result."""
    heads, shared, causal, kind = CASES[name]
    generator = torch.Generator().manual_seed(length)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    query, gradient = made(2, heads, length, 64), made(2, heads, length, 64)
    key, value = made(2, shared, length, 64), made(2, shared, length, 64)
    mask = None if kind is None else made(2, 1, length, length)
    if kind == "bool" and mask is not None:
        mask = (mask > -1) | torch.eye(length, dtype=torch.bool, device=device)
    return SdpaCall(query, key, value, mask, causal, None, heads != shared), gradient


def fused(call: SdpaCall, gradient: Tensor) -> list[Tensor]:
    """The result and the gradients."""
    out, log_sum = sdpa.forward(call)
    assert log_sum.shape == call.query.shape[:-1]
    return [out, *sdpa.backward(call, gradient, out, log_sum)]


def plain(call: SdpaCall, gradient: Tensor) -> list[Tensor]:
    """By autograd of PyTorch's own operator, in float64."""
    query, key, value = leaves = [t.double().requires_grad_() for t in (call.query, call.key, call.value)]
    mask = call.mask.double() if call.mask is not None and call.mask.is_floating_point() else call.mask
    out = functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=call.is_causal, enable_gqa=call.enable_gqa
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient.double())]


def assert_alike(mine: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    for a, b in zip(mine, right, strict=True):
        assert float((a.double() - b).abs().max()) <= tolerance * float(b.abs().max())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [16, 33])
def test_on_the_cpu(name: str, length: int) -> None:
    case = values(name, "cpu", torch.float32, length)
    assert_alike(fused(*case), plain(*case), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [64, 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(name: str, length: int, dtype: torch.dtype) -> None:
    case = values(name, "cuda", dtype, length)
    assert_alike(fused(*case), plain(*case), 1e-4 if dtype == torch.float32 else 3e-2)


def test_no_rows_have_no_kernel() -> None:
    """Those of GPUs refuse them, and a chunk of tokens may have none."""
    query = torch.empty(0, 2, 6, 8, device="meta", dtype=torch.float16)
    assert kernel(SdpaCall(query, query, query)) is None
    out, log_sum = sdpa.forward(SdpaCall(query, query, query, is_causal=True))
    assert (out.shape, log_sum.shape) == (query.shape, query.shape[:-1])


@pytest.mark.gpu
def test_long_rows_in_half_precision_have_a_fused_kernel() -> None:
    query = torch.empty(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16)
    assert kernel(SdpaCall(query, query, query, is_causal=True)) is not None
