"""Which kernels Inductor may make of two: none that would wait for more collectives than each of the two does.

Enters: nothing. Leaves: the heuristics that Inductor asks. What reads one value, as the norms of two half batches read
one weight, it would compute in one kernel, which starts when the last of what both read is there.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.choices import InductorChoices

from fxpar.ops import copied  # noqa: F401 - defines the operator

# Of each graph that is compiled, the names of its waits.
_WAITS: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()


class Waits(InductorChoices):
    """Inductor's own heuristics, but for kernels that depend on different collectives."""

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Whether two kernels of which neither needs the other may be one."""
        if _awaited(scheduler, node1) != _awaited(scheduler, node2):
            return False
        return bool(InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score))


def _awaited(scheduler: Any, node: Any) -> set[str]:
    """Names of the waits for collectives that a kernel depends on."""
    if scheduler not in _WAITS:
        _WAITS[scheduler] = frozenset(name for name, each in scheduler.name_to_node.items() if _is_wait(each.node))
    return {name for name in _WAITS[scheduler] if name in node.ancestors}


def _is_wait(node: Any) -> bool:
    if isinstance(node, ir._WaitKernel):
        return True
    return getattr(node, "op_overload", None) is torch.ops.fxpar.take_copies.default
