"""Which collectives of a step are copies between the ranks' memories, and why the others are not.

Enters: a step behind the pass `exchange`. Leaves: a reason for each of its nodes that communicate; empty for copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxpar.analysis.buffer_reuse import copyable
from fxpar.ir.program import Program, note
from fxpar.ops.operator import Operator


@dataclass(frozen=True)
class Reach:
    """Which ranks can copy into each other's memory.

    Attributes:
        names: of the axes, and of joined ones (`dp-tp`), whose ranks can.
        reasons: by name why those of another cannot.
        bytes: of a rank's memory into which others copy so far.
    """

    names: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)
    bytes: int = 0


def why_not_copied(program: Program, reach: Reach | None) -> dict[str, str]:
    """By name of the node why the process group sends it; empty where it is copies.

    Args:
        program: a step, without calls of regions.
        reach: of its ranks; None where these are not known.
    """
    plan, could = program.plan, copyable(program)
    reasons: dict[str, str] = {}
    for node in program.graph.nodes:
        if not isinstance(node.target, Operator) or node.target.traffic is None:
            continue
        axis = str(node.kwargs["axis"])
        if note(node).buffer:
            why = ""
        elif plan.exchange == "nccl":
            why = "the plan's exchange is 'nccl'"
        elif node not in could:
            why = "once a step, or of a kind that is not copied"
        elif could[node] < plan.cost.least_copy:
            why = f"less than cost.least_copy, {plan.cost.least_copy:,.0f} bytes"
        elif reach is not None and axis not in reach.names:
            why = reach.reasons.get(axis, "") or "its ranks are no GPUs of one machine"
        elif reach is None and plan.exchange == "auto":
            why = "whether ranks can copy is known where they run"
        else:
            why = "what travels beside it leaves no buffer free"
        reasons[node.name] = why
    return reasons
