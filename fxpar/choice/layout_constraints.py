"""What a program says itself of its layouts (`fxpar.shard_over`, `fxpar.expand_over`, `fxpar.expand_needed`, …).

Enters: a program and the name of an axis. Leaves: the operations that demand a cut there, and the parameters that are
held so.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxpar.ops import rank_dim, selective_dispatch
from fxpar.ops.operator import Operator
from fxpar.ops.rank_dim import Demand, Held, expand_over, sum_over
from fxpar.ops.shard_over import demanded, shard_over
from fxpar.program.placements import axes_of
from fxpar.program.program import Program, operands
from fxpar.rules import Refusal, call_of

aten = torch.ops.aten
_HELD: Mapping[Any, Demand] = {**rank_dim.HELD, **selective_dispatch.HELD}


def demands(node: fx.Node, axis: str) -> bool:
    """Whether the operation has its values held in one way on the axis."""
    return (node.target is shard_over or node.target in _HELD) and axis in axes_of(node)


def demanded_by(node: fx.Node, n: int) -> Held:
    """How an operation that demands it has its operands, and its result, held on an axis of n ranks."""
    call = call_of(node, n)
    if node.target is shard_over:
        return (demanded(call),), demanded(call)
    assert isinstance(node.target, Operator)
    placements = _HELD[node.target](call)
    assert not isinstance(placements, Refusal), placements.reason
    return placements


def without_demand(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What such an operation is to other axes, over what a rank has: an operation of torch, and its arguments.

    What moves tokens between ranks is no operation of torch on one of them: it stays.
    """
    if node.target in selective_dispatch.HELD:
        return node.target, node.args, node.kwargs
    if node.target is expand_over:
        return aten.unsqueeze.default, node.args, {}
    if node.target is sum_over:
        return aten.squeeze.dim, node.args, {}
    return aten.alias.default, node.args[:1], {}


def held_over(program: Program, axis: str) -> dict[fx.Node, int]:
    """Parameters whose first dimension the axis cuts, as what is made of each alone demands it."""
    dims: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if node.target is shard_over and demands(node, axis):
            source = operands(node)[0]
            while source.op == "call_function" and len(operands(source)) == 1 and source.target is not operator.getitem:
                source = operands(source)[0]
            if source.op == "placeholder" and program.parameter(source) is not None:
                dims[source] = 0
    return dims
