"""Functions and models whose gradients only a walk of autograd's graph, or a proof about their operations, gets right.

`apply` is bound here as tutorials do it: when the module is imported, long before a trace.
"""

from __future__ import annotations

import functools
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
    """2x; the backward is set below. It keeps its operands."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0] * 2


class Clipped(Kept):
    """Clips the gradient."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(-0.01, 0.01)


class Signs(Kept):
    """The gradient's signs."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].sign()


class Normalised(Kept):
    """The gradient over its norm."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / grads[0].norm()


class Squared(Kept):
    """The gradient times itself."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * grads[0].abs()


class Shifted(Kept):
    """The gradient and one more."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + 1


class Unasked(Kept):
    """A gradient that does not depend on the result's."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0] * 3


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


class Centred(Kept):
    """Takes the mean off the gradient: linear, and no work for a shard."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] - grads[0].mean(-1, keepdim=True)


class Turned(Kept):
    """The gradient by a matrix made of its own operand: linear in it."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] @ (x.transpose(-1, -2) @ x)


class Recomputed(Kept):
    """The derivative of tanh, found by differentiating it anew."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = x.tanh()
        return torch.autograd.grad(y, x, grads[0])[0]


class ByShape(Kept):
    """Over the last size, forward."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return tensors[0] / tensors[0].shape[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class ByNumel(Kept):
    """Over the count of elements, backward."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / grads[0].numel()


class ByLength(Kept):
    """Over the first size, as `len` gives it."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / len(grads[0])


class BySize(Kept):
    """Branches on a size that the traced one never meets."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (2 if grads[0].size(-1) > 4 else 3)


class ByStride(Kept):
    """A stride is a size of another dimension."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * grads[0].stride(0)


class ByShapeOfSaved(Kept):
    """A size that the forward leaves for the backward."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.count = tensors[0].shape[1]
        return tensors[0] * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / ctx.count


class ByMean(Kept):
    """A mean over the last dimension."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return tensors[0] * tensors[0].mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class ByPosition(Kept):
    """Positions along the last dimension."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return tensors[0] * torch.ones_like(tensors[0]).cumsum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class ByDevice(Kept):
    """What it does may differ on another device than the traced one."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (3 if grads[0].is_cuda else 2)


class ByView(Kept):
    """Folds rows in pairs, whatever their number."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        x = tensors[0]
        return (x.reshape(2, -1) * 2).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class RandomBackward(Kept):
    """Rounds its gradient stochastically."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + torch.rand_like(grads[0])


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


class Deciding(Kept):
    """Looks at the gradient's values."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2 if float(grads[0].norm()) > 0 else grads[0]
