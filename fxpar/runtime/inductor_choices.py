"""Which kernels Inductor makes: what it is asked, where its own answer is not the best for a step on several ranks.

Enters: nothing. Leaves: the heuristics that Inductor asks, and how it lowers sums of copies.

- None of two kernels that would wait for more collectives than each of the two does. What reads one value it would
  compute in one kernel, which starts when the last of what both read is there.
- Rows of up to 4096 elements are reduced in registers, read once: a norm of 8192 rows of 1536 takes 40 us on an H100
  where they are read twice.
- What is sent is one buffer until it is taken: nothing is put there while copy engines read it.
- What another rank copied is read by the kernel that adds it, and by no other; the sum is computed once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._inductor import config, ir, lowering
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

from fxpar.ops import needed_copies, peer_memory  # noqa: F401 - define the operators

# Elements of a row that a kernel holds at once.
_ROW = 4096

_ops = torch.ops.fxpar
# Operators that wait for other ranks.
_WAITING = (
    _ops.take_copies.default,
    _ops.arrived.default,
    _ops.one_shot_sum.default,
    _ops.one_shot_rows.default,
    _ops.taken_sum.default,
    _ops.taken_rows.default,
    _ops.gather_needed.default,
    _ops.scatter_needed.default,
)
# Of each graph that is compiled, the names of its waits; and by what a send gives, the name of what it sends.
_WAITS: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
_SENT: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


class Heuristics(InductorChoices):
    """Inductor's own, but for the above."""

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Whether two kernels of which neither needs the other may be one."""
        if _awaited(scheduler, node1) != _awaited(scheduler, node2):
            return False
        return bool(InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score))

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Whether a row is read once."""
        if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        is_row = config.triton.persistent_reductions and not cooperative_reduction
        is_row = is_row and features.get_reduction_hint() == ReductionHint.INNER
        return is_row and bool(V.graph.sizevars.statically_known_leq(features.reduction_numel, _ROW))


def _awaited(scheduler: Any, node: Any) -> set[str]:
    """Names of the waits for collectives that a kernel depends on."""
    if scheduler not in _WAITS:
        _WAITS[scheduler] = frozenset(name for name, kernel in scheduler.name_to_node.items() if _is_wait(kernel.node))
    return {name for name in _WAITS[scheduler] if name in node.ancestors}


def _is_wait(node: Any) -> bool:
    return isinstance(node, ir._WaitKernel) or getattr(node, "op_overload", None) in _WAITING


def _extern(op: Any, *args: Any) -> Any:
    return lowering.fallback_handler(op, add_to_fallback_set=False)(*args)


def _held(x: Any) -> Any:
    """A value in memory of its own, contiguous: whoever takes it has the same memory."""
    x.realize()
    return ir.ExternKernel.require_contiguous(x)


@lowering.register_lowering(_ops.send_copies.default, type_promotion_kind=None)
def _send_copies(x: Any, *more: Any) -> Any:
    """What is sent stays as it is until it is taken, which reads the same memory."""
    buffer = _held(x)
    token = _extern(_ops.send_copies.default, buffer, *more)
    _SENT.setdefault(V.graph, {})[token.get_name()] = buffer.get_name()
    return token


def _taken(token: Any, x: Any) -> Any:
    """What was sent, as it was sent."""
    buffer = _held(x)
    sent = _SENT[V.graph][token.get_name()]
    if sent != buffer.get_name():  # two copies were made of it: nothing else reads the first
        V.graph.never_reuse_buffers.add(sent)
    return buffer


@lowering.register_lowering(_ops.take_copies.default, type_promotion_kind=None)
def _take_copies(token: Any, x: Any, *more: Any) -> Any:
    """The other ranks' values."""
    return _extern(_ops.take_copies.default, token, _taken(token, x), *more)


@lowering.register_lowering(_ops.taken_sum.default, type_promotion_kind=None)
def _taken_sum(token: Any, x: Any, *more: Any) -> Any:
    """The sum over more than two ranks."""
    return _extern(_ops.taken_sum.default, token, _taken(token, x), *more)


@lowering.register_lowering(_ops.taken_rows.default, type_promotion_kind=None)
def _taken_rows(token: Any, x: Any, *more: Any) -> Any:
    """What is computed of its rows."""
    return _extern(_ops.taken_rows.default, token, _taken(token, x), *more)


@lowering.register_lowering(_ops.arrived.default, type_promotion_kind=None)
def _arrived(token: Any, x: Any, *more: Any) -> Any:
    """Memory into which another rank will write again: nothing else is put there."""
    arrived = _extern(_ops.arrived.default, token, _taken(token, x), *more)
    V.graph.never_reuse_buffers.add(arrived.get_name())
    return arrived


@lowering.register_lowering(_ops.added.default, type_promotion_kind=None)
def _added(x: Any, came: Any, name: str) -> Any:
    """An addition, in a kernel with what reads it; whatever else reads it reads the sum."""
    total = lowering.lowerings[torch.ops.aten.add.Tensor](x, came)
    total.realize()
    return total
