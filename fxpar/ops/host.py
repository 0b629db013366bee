"""Values that the author's model reads on the host.

Enters: nothing. Leaves: the record of `fxpar.item`. In a program what was read is a tensor again, so that all that
follows is computed on the device; the read itself stays where the author put it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import LoweredCall, OnShapes, Operator
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.rule import Labelling, Rule


@torch.library.custom_op("fxpar::item", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _item(x: Tensor) -> Tensor:
    return torch.full((), x.item(), dtype=torch.float64, device=x.device)


@_item.register_fake
def _item_on_shapes(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=x.device)


def _ends_gradients(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.mark_non_differentiable(output)


def _gradient(ctx: Any, gradient: Any) -> None:
    """There is none: to the author what was read is a number."""


# Without it autograd, by which a capture is compared with the model, refuses values that require gradients.
_item.register_autograd(_gradient, setup_context=_ends_gradients)


def _labels(call: OpCall) -> Labelling:
    return Labelling((tuple(None for _ in call.operands[0].shape),), ((),))


def _shape(call: OnShapes) -> Tensor:
    (x,) = call.args
    if not isinstance(x, Tensor) or x.numel() != 1:
        raise ValueError("reads a value of more than one element")
    return torch.empty((), dtype=torch.float64, device="meta")


def _lower(node: fx.Node, rank: OnRank) -> LoweredCall:
    return LoweredCall(torch.ops.fxpar.item.default, node.args)


@partial(
    Operator,
    rule=Rule(_labels, partial=(("self",),)),
    shape=_shape,
    lower=_lower,
    stops_gradient=True,
    uncaptured="reads a value on the host; keep it a tensor: leave item() out",
)
def item(self: Any) -> Any:
    """A value that is read on the host, f64[].

    Args:
        self: the value, of one element.
    """
