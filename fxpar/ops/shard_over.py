"""Where a program says itself which dimension an axis cuts.

Enters: nothing. Leaves: the record of `fxpar.shard_over`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.layout.layout import Placement, shard
from fxpar.ops import process_group
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import Gradients, LoweredCall, OnShapes, Operator, Reverse
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.rule import Refusal, Rule, Signature


def demanded(call: OpCall) -> Placement:
    """What a call of `shard_over` has its value be on the axis that it names."""
    dim = int(call.get("dim"))
    return shard(dim, call.operands[0].shape[dim])


def _held(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal:
    required = demanded(call)
    return (required,) if tuple(placements) == (required,) else Refusal(f"its value has to be {required}")


def _seed(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    placements = _held(call, (placement,))
    return placements if isinstance(placements, Refusal) else Signature(placements, placements)


def _lower(node: fx.Node, rank: OnRank) -> LoweredCall:
    return LoweredCall(process_group.same, node.args[:1])


def _back(call: Reverse) -> Gradients:
    return (call.tangents[0],)


def _shape(call: OnShapes) -> Any:
    return call.args[0]


@partial(
    Operator,
    rule=Rule(seed=_seed, check=_held),
    like=torch.ops.aten.alias.default,
    shape=_shape,
    lower=_lower,
    derivative=_back,
)
def shard_over(self: Any, dim: int, *, axis: str) -> Any:
    """The value, cut on the axis in a dimension.

    Args:
        self: any shape.
        dim: the dimension, of whose size the axis has a divisor of ranks.
    """
