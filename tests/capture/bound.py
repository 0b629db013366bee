"""Functions and models whose gradients only a walk of autograd's graph, or a proof about their operations, gets right.

`apply` is bound here as tutorials do it: when the module is imported, long before a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.capture.functions import Product, Seven
from tests.capture.models import Net

seven = Seven.apply
product = functools.partial(Product.apply)
TABLE = {"product": Product.apply}


class Own(Net):
    """Holds what it applies."""

    def __init__(self) -> None:
        super().__init__()
        self.function = None
        self.apply_seven = Seven.apply

    def forward(self, x: Tensor) -> Any:
        return self.down(self.apply_seven(self.up(x))).sum()  # type: ignore[no-untyped-call]


class Kept(torch.autograd.Function):
    """2x; keeps its operand for a backward."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0] * 2


def function(
    name: str, backward: Callable[[Any, Any], Any], forward: Callable[[Any, Any], Tensor] | None = None
) -> Any:
    """Defines an autograd function of this module by its backward, and by its forward where that is not 2x."""
    methods = {"backward": staticmethod(backward)} | ({"forward": staticmethod(forward)} if forward else {})
    return type(name, (Kept,), {"__module__": __name__, "__qualname__": name, **methods})


def differentiated_anew(ctx: Any, gradient: Tensor) -> Tensor:
    """Returns the gradient of tanh, found by differentiating it in the backward."""
    with torch.enable_grad():
        x = ctx.saved_tensors[0].detach().requires_grad_()
        y = x.tanh()
    return torch.autograd.grad(y, x, gradient)[0]  # type: ignore[no-any-return]


def keeping_a_size(ctx: Any, x: Tensor) -> Tensor:
    """Leaves a size for the backward."""
    ctx.count = x.shape[1]
    return x * 2


# Element-wise, and not linear in the gradient.
Clipped = function("Clipped", lambda ctx, g: g.clamp(-0.01, 0.01))
Signs = function("Signs", lambda ctx, g: g.sign())
Squared = function("Squared", lambda ctx, g: g * g.abs())
Shifted = function("Shifted", lambda ctx, g: g + 1)
Unasked = function("Unasked", lambda ctx, g: ctx.saved_tensors[0] * 3)
Normalised = function("Normalised", lambda ctx, g: g / g.norm())
# Linear in the gradient; all but the last are no work for a shard.
Centred = function("Centred", lambda ctx, g: g - g.mean(-1, keepdim=True))
Turned = function("Turned", lambda ctx, g: g @ (ctx.saved_tensors[0].transpose(-1, -2) @ ctx.saved_tensors[0]))
Recomputed = function("Recomputed", differentiated_anew)
# What a size, or the device, decides.
ByShape = function("ByShape", lambda ctx, g: g * 2, lambda ctx, x: x / x.shape[-1])
ByNumel = function("ByNumel", lambda ctx, g: g / g.numel())
ByLength = function("ByLength", lambda ctx, g: g / len(g))
BySize = function("BySize", lambda ctx, g: g * (2 if g.size(-1) > 4 else 3))  # the traced size never meets the branch
ByStride = function("ByStride", lambda ctx, g: g * g.stride(0))  # a size of another dimension
ByShapeOfSaved = function("ByShapeOfSaved", lambda ctx, g: g / ctx.count, keeping_a_size)
ByMean = function("ByMean", lambda ctx, g: g * 2, lambda ctx, x: x * x.mean(-1, keepdim=True))
ByPosition = function("ByPosition", lambda ctx, g: g * 2, lambda ctx, x: x * torch.ones_like(x).cumsum(-1))
ByDevice = function("ByDevice", lambda ctx, g: g * (3 if g.is_cuda else 2))
ByView = function("ByView", lambda ctx, g: g * 2, lambda ctx, x: (x.reshape(2, -1) * 2).reshape(x.shape))
# What no program can hold as it is.
RandomBackward = function("RandomBackward", lambda ctx, g: g + torch.rand_like(g))
Deciding = function("Deciding", lambda ctx, g: g * 2 if float(g.norm()) > 0 else g)


class SignsOfOne(torch.autograd.Function):
    """x · w: linear only where both operands ask for a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        first, second = ctx.needs_input_grad
        g = grads[0] if first and second else grads[0].sign()
        return g * w if first else None, g * x if second else None


class Overridden(Seven):
    """Has an `apply` of its own."""

    @classmethod
    def apply(cls, x: Tensor) -> Any:
        return super().apply(x * 2)  # type: ignore[no-untyped-call]


class Named(torch.autograd.Function):
    """Takes its scale by name or leaves it out."""

    @staticmethod
    def forward(x: Tensor, scale: float = 3.0) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.scale * 2, None


def takes_names() -> bool:
    """Whether this version of torch passes arguments of autograd functions by name; 2.11 does not."""
    try:
        Named.apply(torch.ones(1), scale=2.0)  # type: ignore[no-untyped-call]
    except TypeError:
        return False
    return True
