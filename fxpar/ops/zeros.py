"""Zeros as gradients hold them.

Enters: nothing. Leaves: the record of `fxpar.zeros`. Where several ranks hold a block they hold summands of its
gradient: of zeros each holds zeros, and `aten.zeros_like` says of them that each holds the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.layout.layout import Placement
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import LoweredCall, Operator
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import pointwise_labels, same_values
from fxpar.signatures.rule import Rule, Signature


def _in_summands(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | None:
    if placements[0].is_shared:
        return (replace(placements[0], partial=True),)
    return same_values(call, placements)


def _alike(call: OpCall, index: int, placement: Placement) -> Signature:
    return Signature((placement,), (replace(placement, partial=placement.is_shared),))


def zeros_of(x: Tensor) -> Tensor:
    """`fxpar.zeros` as a lowered graph calls it."""
    return torch.zeros_like(x)


def _lower(node: fx.Node, rank: OnRank) -> LoweredCall:
    return LoweredCall(zeros_of, node.args)


@partial(
    Operator,
    rule=Rule(pointwise_labels, seed=_alike, check=_in_summands, padding=("self",), zeros=True),
    like=torch.ops.aten.zeros_like.default,
    lower=_lower,
    stops_gradient=True,
)
def zeros(self: Any) -> Any:
    """Zeros cut as a value is; of blocks that several ranks hold, summands.

    Args:
        self: the value, any shape.
    """
