"""A step behind one node of autograd: outputs that the caller differentiates.

Enters: a step whose forward has run, and the parameters. Leaves: outputs with a `grad_fn`. What is differentiated is
known in the backward alone: it is that of the outputs that got a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpar.errors import InputError

# From the tangents by name of the output to the gradients by name of the parameter.
Backward = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass
class PendingBackward:
    """A backward that is to come, once.

    Attributes:
        names: of the outputs.
        parameters: names of the leaves.
        run: the backward; None when it has run.
    """

    names: tuple[str, ...]
    parameters: tuple[str, ...]
    run: Backward | None


class StepNode(torch.autograd.Function):
    """The outputs of a step; its backward."""

    @staticmethod
    def forward(ctx: Any, pending: PendingBackward, outputs: Sequence[Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
        """The outputs, which are there already."""
        ctx.set_materialize_grads(False)
        ctx.pending = pending
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        """The gradients of the leaves.

        Raises:
            InputError: the backward is to be differentiated, or it has run.
        """
        pending: PendingBackward = ctx.pending
        if torch.is_grad_enabled():
            raise InputError(
                "its gradients cannot be differentiated again: a step has no second derivative",
                where="backward(create_graph=True)",
                remedy="leave create_graph out; for a penalty on gradients run the model without fxpar",
            )
        if pending.run is None:
            raise InputError(
                "the backward of this call has run, and what it needs is freed: no graph is retained",
                where="backward(retain_graph=True)",
                remedy="add the losses and call backward() once, or call the model again",
            )
        run, pending.run = pending.run, None
        named = {name: tangent for name, tangent in zip(pending.names, tangents, strict=True) if tangent is not None}
        gradients = run(named) if named else {}
        return None, None, *(gradients.get(name) for name in pending.parameters)


def differentiable(
    outputs: Mapping[str, Tensor], names: Sequence[str], leaves: Mapping[str, Tensor], run: Backward
) -> dict[str, Tensor]:
    """The outputs, some of which can be differentiated.

    Args:
        names: those that can.
        leaves: the tensors whose gradients the backward gives, by name of the parameter.
    """
    pending = PendingBackward(tuple(names), tuple(leaves), run)
    tracked: Any = StepNode.apply(pending, [outputs[name] for name in names], *leaves.values())  # type: ignore[no-untyped-call]
    return {**outputs, **dict(zip(names, tracked, strict=True))}
