"""Seconds of a training step on one rank, besides what it sends (`ring`).

Enters: FLOPs, bytes and elements. Leaves: seconds by the constants of `Cost`.
"""

from __future__ import annotations

from fxpar.plan.cost import Cost

# Forward, and gradients of both operands.
_PASSES = 3
# Bytes that the optimizer moves for each parameter: weight, gradient and two moments, in 4 bytes each.
_OPTIMIZER = 16
# An activation is written and read in the forward pass, and its gradient in the backward pass.
_ACCESSES = 4


def product_seconds(flops: float, part: float, cost: Cost) -> float:
    """Of a matrix product and its backward, of which a rank computes a part.

    Args:
        flops: of the whole forward.
    """
    return _PASSES * flops * part / cost.flops


def access_seconds(size: float, part: float, cost: Cost) -> float:
    """In which an activation is stored and read, and its gradient.

    Args:
        size: bytes of the whole.
        part: what a rank holds of it.
    """
    return _ACCESSES * size * part / cost.memory


def optimizer_seconds(elements: float, part: float, cost: Cost) -> float:
    """In which the optimizer moves a parameter.

    Args:
        elements: of the whole.
        part: what a rank holds of it.
    """
    return _OPTIMIZER * elements * part / cost.memory


def again_seconds(flops: float, moved: float, cost: Cost) -> float:
    """In which an operation of the forward is computed once more.

    Args:
        flops: those of a rank.
        moved: bytes that a rank reads and writes.
    """
    return flops / cost.flops + moved / cost.memory
