"""What one stage of a pipeline sends to the next.

Enters: nothing. Leaves: the record of `fxpar.transfer`. The program of one stage has none: there what is received is an
input and what is sent an output (`fxpar.ir.stages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import fx

from fxpar.layout.layout import Placement
from fxpar.ops import process_group
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import Gradients, LoweredCall, OnShapes, Operator, Reverse
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import pointwise_labels
from fxpar.signatures.rule import Rule, Signature


def _as_held(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return (placements[0],)


def _alike(call: OpCall, index: int, placement: Placement) -> Signature:
    return Signature((placement,), (placement,))


def _lower(node: fx.Node, rank: OnRank) -> LoweredCall:
    return LoweredCall(process_group.same, node.args)


def _back(call: Reverse) -> Gradients:
    return (call.tangents[0],)


def _shape(call: OnShapes) -> Any:
    return call.args[0]


@partial(
    Operator,
    rule=Rule(pointwise_labels, seed=_alike, check=_as_held, padding=("self",)),
    shape=_shape,
    lower=_lower,
    derivative=_back,
)
def transfer(self: Any) -> Any:
    """A value as the next stage has it: each rank's part goes to the rank of the same place there, its gradient back.

    Args:
        self: the value, any shape, in the layout that it keeps.
    """
