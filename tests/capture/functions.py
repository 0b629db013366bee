"""Autograd functions whose backward is not the derivative of their forward, so that losing it shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Seven(torch.autograd.Function):
    """x², with the gradient 7x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 7 * x  # type: ignore[no-any-return]


class Scaled(torch.autograd.Function):
    """(x · scale, x + 1), with arguments that are no tensors and other gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, flag: bool, name: str) -> tuple[Tensor, Tensor]:
        assert flag
        assert name == "scaled"
        return x * scale, x + 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 5 + grads[1] * 3, None, None, None


class Product(torch.autograd.Function):
    """x · w in the style of `setup_context`, with doubled and tripled gradients."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return 2 * grads[0] * w, 3 * grads[0] * x


class Largest(torch.autograd.Function):
    """2x and the place of the largest, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        place = x.argmax(-1)
        ctx.mark_non_differentiable(place)
        return x * 2, place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 5


class Outer(torch.autograd.Function):
    """Calls another function in its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Seven.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 11


class Counting(torch.autograd.Function):
    """x · sin x, and a count of forwards and backwards."""

    forwards = 0
    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counting.forwards += 1
        ctx.save_for_backward(x)
        return x * x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        Counting.backwards += 1
        (x,) = ctx.saved_tensors
        return grads[0] * (x.sin() + x * x.cos())


class InPlace(torch.autograd.Function):
    """Changes its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 5


class Noisy(torch.autograd.Function):
    """Draws random numbers of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Pair(torch.autograd.Function):
    """Returns a number beside its tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2, 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 5


class Shaped(torch.autograd.Function):
    """Takes a size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.shape = x.shape
        return x.reshape(rows, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].reshape(ctx.shape), None


class Scope:
    """A class around a function: no path of a module leads to it."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 5
