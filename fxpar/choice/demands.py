"""What a program says itself of its layouts (`fxpar.shard_over`).

Enters: a program and the name of an axis. Leaves: the operations that demand a cut there, and the parameters that are
held so.
"""

from __future__ import annotations

import operator

from torch import fx

from fxpar.ops.shard_over import shard_over
from fxpar.program.coercions import axes_of
from fxpar.program.program import Program, operands


def demands(node: fx.Node, axis: str) -> bool:
    """Whether the operation has its value cut on the axis."""
    return node.target is shard_over and axis in axes_of(node)


def held_over(program: Program, axis: str) -> dict[fx.Node, int]:
    """Parameters whose first dimension the axis cuts, as what is made of each alone demands it."""
    found: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if demands(node, axis):
            source = operands(node)[0]
            while source.op == "call_function" and len(operands(source)) == 1 and source.target is not operator.getitem:
                source = operands(source)[0]
            if source.op == "placeholder" and program.parameter(source) is not None:
                found[source] = 0
    return found
