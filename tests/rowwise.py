"""Operators that no rule knows: some compute rows of the batch apart, some do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCH = {"x": torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))}


def operator(name: str, *, alike: bool = True) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Registers a custom operator whose result has the first operand's shape, or, with `alike` false, as many rows."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        custom = torch.library.custom_op(f"fxpar_rows::{name}", mutates_args=())(function)
        custom.register_fake(lambda x, *more: torch.empty_like(x) if alike else x.new_empty(x.shape[0]))
        return custom

    return register


@operator("scan")
def scan(x: Tensor, w: Tensor) -> Tensor:
    """Running sums of x · w along each row."""
    return (x * w).cumsum(1)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _scanned(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    g = g.flip(1).cumsum(1).flip(1)
    return g * w, (g * x).flatten(0, 1).sum(0)


scan.register_autograd(_scanned, setup_context=_keep)  # type: ignore[attr-defined]


@operator("centred")
def centred(x: Tensor) -> Tensor:
    """Less the mean over all rows."""
    return x - x.mean(0, keepdim=True)


centred.register_autograd(lambda ctx, g: g - g.mean(0, keepdim=True))  # type: ignore[attr-defined]


@operator("copied")
def copied(x: Tensor) -> Tensor:
    """x, with a gradient that mixes rows."""
    return x.clone()


copied.register_autograd(lambda ctx, g: centred(g))  # type: ignore[attr-defined]


@operator("paired")
def paired(x: Tensor) -> Tensor:
    """Each row and its neighbour, which halves of four rows keep together."""
    rows = torch.arange(x.shape[0]) ^ 1
    return x + x[rows.clamp(max=x.shape[0] - 1)]


paired.register_autograd(lambda ctx, g: paired(g))  # type: ignore[attr-defined]


@operator("averaged")
def averaged(x: Tensor, w: Tensor) -> Tensor:
    """x + w, whose gradient is a mean over rows."""
    return x + w


averaged.register_autograd(lambda ctx, g: (g, g.flatten(0, 1).mean(0)))  # type: ignore[attr-defined]


@operator("unscaled")
def unscaled(x: Tensor) -> Tensor:
    """Of float32 alone."""
    if x.dtype != torch.float32:
        raise TypeError("takes float32")
    return 2 * x


unscaled.register_autograd(lambda ctx, g: 2 * g)  # type: ignore[attr-defined]


@operator("even")
def even(x: Tensor) -> Tensor:
    """Of an even number of rows alone."""
    if x.shape[0] % 2:
        raise ValueError("takes pairs of rows")
    return 2 * x


even.register_autograd(lambda ctx, g: 2 * g)  # type: ignore[attr-defined]


@operator("picked")
def picked(x: Tensor, i: Tensor) -> Tensor:
    """Of each row the same element, 4 at most, everywhere."""
    if int(i.max()) > 4:
        raise IndexError("no such element")
    return x[torch.arange(x.shape[0]), i].unsqueeze(1).expand_as(x).clone()


def _picked(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
    x, i = ctx.saved_tensors
    found = torch.zeros_like(x)
    found[torch.arange(x.shape[0]), i] = g.sum(1)
    return found, None


picked.register_autograd(_picked, setup_context=_keep)  # type: ignore[attr-defined]


@operator("clipped")
def clipped(x: Tensor) -> Tensor:
    """Known to nobody."""
    return x.clamp(-0.01, 0.01)


@operator("opaque")
def opaque(x: Tensor) -> Tensor:
    """x, with a backward that no trace proves linear."""
    return x.clone()


opaque.register_autograd(lambda ctx, g: clipped(g))  # type: ignore[attr-defined]


@operator("bounded")
def bounded(x: Tensor) -> Tensor:
    """Divided by the norm of all rows, where that is large."""
    found: Tensor = x / x.norm().clamp(min=100.0)
    return found


bounded.register_autograd(lambda ctx, g: g / 100.0)  # type: ignore[attr-defined]


@operator("grouped")
def grouped(x: Tensor) -> Tensor:
    """Less the mean of four rows, where these come in fours."""
    if x.shape[0] % 4:
        return x.clone()
    rows = x.unflatten(0, (-1, 4))
    found: Tensor = (rows - rows.mean(1, keepdim=True)).flatten(0, 1)
    return found


grouped.register_autograd(lambda ctx, g: grouped(g))  # type: ignore[attr-defined]


@operator("many")
def many(x: Tensor) -> Tensor:
    """Less the mean of all rows, where these are more than eight."""
    return x - x.mean(0, keepdim=True) if x.shape[0] > 8 else x.clone()


many.register_autograd(lambda ctx, g: many(g))  # type: ignore[attr-defined]


@operator("quantised")
def quantised(x: Tensor) -> Tensor:
    """127 steps of the largest value of all rows, in half precision alone."""
    if x.dtype != torch.bfloat16:
        raise TypeError("takes bfloat16")
    step = x.abs().max() / 127
    return (x / step).round() * step


quantised.register_autograd(lambda ctx, g: g.clone())  # type: ignore[attr-defined]


@operator("softened")
def softened(x: Tensor) -> Tensor:
    """The softmax of each row, in any type."""
    return x.softmax(-1)


def _softened(ctx: Any, g: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    y = x.softmax(-1)
    found: Tensor = y * (g - (g * y).sum(-1, keepdim=True))
    return found


softened.register_autograd(_softened, setup_context=_keep)  # type: ignore[attr-defined]


class Scan(torch.autograd.Function):
    """Running sums of x · w along each row, with differently shaped operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x * w).cumsum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _scanned(ctx, grads[0])


class Model(nn.Module):
    """up, an operator, down."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.w = nn.Parameter(torch.randn(8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        loss: Tensor = self.down(self.function(self.up(x), self.w)).square().mean()
        return loss
