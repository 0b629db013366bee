"""FLOPs of matrix products, as torch counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fxpar.capture.capture import capture
from fxpar.cost.flops import matmul_flops, uncounted
from fxpar.layout.symbolic_sizes import evaluate


class Calls(nn.Module):
    """One call of its weights and the input, [3, 5, 12]."""

    def __init__(self, call: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.call = call
        self.weights = nn.ParameterList([torch.randn(shape) * 0.3 for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, *self.weights).square().mean()


def alone(x: Tensor, *weights: Tensor) -> Tensor:
    """Attention of three samples with two heads, causal."""
    q, k, v = (functional.linear(x, w).view(3, 5, 2, 8).transpose(1, 2) for w in weights)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


COUNTED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "linear": (lambda x, w, b: functional.linear(x, w, b), ((24, 12), (24,))),
    "two linears": (lambda x, w, v: functional.linear(functional.linear(x, w).relu(), v), ((24, 12), (7, 24))),
    "batches": (lambda x, w: x @ w, ((3, 12, 4),)),
    "sum with a product": (lambda x, b, w: torch.addmm(b, x.flatten(0, 1), w), ((24,), (12, 24))),
    "convolution": (lambda x, w, b: functional.conv1d(x.transpose(1, 2), w, b, padding=1), ((8, 12, 3), (8,))),
    "labels": (lambda x, w: torch.einsum("bsd,hde->bhse", x, w), ((2, 12, 8),)),
    "three operands": (lambda x, w, v: torch.einsum("bsd,de,ef->bsf", x, w, v), ((12, 9), (9, 7))),
    "an ellipsis": (lambda x, w: torch.einsum("...d,ed->...e", x, w), ((8, 12),)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([2], [1])), ((9, 12),)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_products_are_counted_as_torch_counts_them(name: str) -> None:
    torch.manual_seed(0)
    call, shapes = COUNTED[name]
    model, x = Calls(call, *shapes), torch.randn(3, 5, 12)
    with FlopCounterMode(display=False) as counter:
        model(x)
    program = capture(model, {"x": x}).program
    sizes = {s.name: s.example for s in program.symbols}
    assert sum(evaluate(flops, sizes) for _, flops in matmul_flops(program)) == counter.get_total_flops() > 0
    assert uncounted(program) == {}


def test_attention_counts_two_products() -> None:
    """torch's counter does not know the CPU's kernel: of 3 × 2 heads the 5 × 5 scores over 8, and as much again."""
    program = capture(Calls(alone, (16, 12), (16, 12), (16, 12)), {"x": torch.randn(3, 5, 12)}).program
    counts = [evaluate(flops, {s.name: s.example for s in program.symbols}) for _, flops in matmul_flops(program)]
    assert counts == [2 * 15 * 12 * 16] * 3 + [2 * 6 * 25 * 8 * 2]


def test_products_that_no_formula_knows_are_listed() -> None:
    model = Calls(lambda x, w: x @ torch.linalg.inv(w + 9 * torch.eye(12)), (12, 12))
    assert uncounted(capture(model, {"x": torch.randn(3, 5, 12)}).program) == {"aten.linalg_inv.default": 1}
