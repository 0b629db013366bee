"""Which graphs of a module there are, and for which calls.

Enters: calls of steps and forwards. Leaves: what runs them. The first time a call runs as it is, which also sets up
what kernels and collectives set up once; the second time it is recorded, and replayed from then on.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from fxpar.cudagraphs.partial import GraphedForward, GraphedStep
from fxpar.cudagraphs.pool import Pool, new_pool
from fxpar.errors import InputError
from fxpar.ir.program import describe, note
from fxpar.plan.option_groups import CudaGraphs
from fxpar.runtime.calls import ForwardCalls, LoweredStep, Runnable, StepCalls
from fxpar.runtime.graph_modes import GraphFigures, MovingInputs, NoGraphs, RunForward


class _Graphed(Protocol):
    @property
    def graphs(self) -> int: ...

    def reset(self) -> None: ...


Variant = TypeVar("Variant", bound=_Graphed)


class CachedGraphs(NoGraphs):
    """Graphs of one module, which are made when a call comes for the second time.

    Args:
        options: of the plan.
        device: on which they run.
        enter: called in front of what communicates.
    """

    is_on = True

    def __init__(self, options: CudaGraphs, device: torch.device, enter: Callable[[], None] = lambda: None) -> None:
        self.options, self.enter = options, enter
        self._device = device
        self._seen: set[Hashable] = set()
        self._pools: list[tuple[Pool, dict[Hashable, Any]]] = []
        self._closed = False
        _OPEN.add(self)

    def forward(
        self, calls: ForwardCalls, values: Mapping[str, Any], inputs: MovingInputs, key: Hashable
    ) -> RunForward:
        """Implements `NoGraphs.forward`."""
        moving = inputs()
        key = ("forward", id(calls), *key_of(values, moving), key)
        forward: RunForward = self.variant(key, lambda pool: GraphedForward(calls, moving, pool), calls)
        return forward

    def variant(self, key: Hashable, make: Callable[[Pool], Variant], plain: Any) -> Any:
        """Returns what runs calls of a key; `plain` the first time.

        Raises:
            InputError: there are as many variants as the plan admits, or the module is closed.
        """
        if self._closed:
            raise InputError("the module is closed", where="close()", remedy="close it behind its last call")
        # The first call runs as it is. Triton tunes kernels, and NCCL makes communicators at
        # their first use, none of which a capture may contain.
        if key not in self._seen:
            self._check_room(len(self._seen))
            self._seen.add(key)
            return plain
        # A pool whose forward waits for its backward holds what that backward
        # reads. A second forward in it would overwrite that.
        free = [(pool, known) for pool, known in self._pools if pool.flight is None]
        for _, known in free:
            if key in known:
                return known[key]
        if not free:
            self._pools.append((new_pool(self._device), {}))
            free = self._pools[-1:]
        pool, known = free[0]
        self._check_room(sum(len(variants) for _, variants in self._pools))
        known[key] = make(pool)
        return known[key]

    def _check_room(self, count: int) -> None:
        if count < self.options.variants:
            return
        raise InputError(
            f"has {count} variants of graphs, and this call has other shapes, addresses or modes than all of them, or "
            "comes while their backwards are to come",
            where="cuda_graphs",
            remedy="pad batches to few lengths, keep parameters and gradients in their memory, run each backward "
            "before the next forward, or raise cuda_graphs.variants",
        )

    @property
    def figures(self) -> GraphFigures:
        """Implements `NoGraphs.figures`."""
        variants = [variant for _, known in self._pools for variant in known.values()]
        costs = [pool.cost for pool, _ in self._pools]
        seconds, size = (sum(column) for column in zip(*costs, strict=True)) if costs else (0.0, 0)
        return GraphFigures(sum(variant.graphs for variant in variants), len(variants), seconds, size)

    def close(self) -> None:
        """Implements `NoGraphs.close`."""
        self._closed = True
        for _, known in self._pools:
            for variant in known.values():
                variant.reset()
        self._pools.clear()


class PartialGraphs(CachedGraphs):
    """Runs of calls that a graph can hold are one graph; what stands between them runs as it is."""

    def step(self, calls: StepCalls, values: Mapping[str, Any], inputs: MovingInputs, key: Hashable) -> Runnable:
        """Implements `NoGraphs.step`."""
        moving = inputs()
        key = ("step", id(calls), *key_of(values, moving), key)
        runnable: Runnable = self.variant(key, lambda pool: self._graphed(calls, moving, pool), calls)
        return runnable

    def _graphed(self, calls: StepCalls, inputs: Collection[str], pool: Pool) -> Any:
        return GraphedStep(calls, inputs, pool)


def refuse_uncaptured(step: LoweredStep) -> None:
    """Refuses a step that one graph is to hold and cannot.

    Raises:
        InputError: names the operation and the reason.
    """
    node = step.uncaptured
    if node is not None:
        reason = note(node).uncaptured
        remedy = "set CudaGraphs('partial'), whose graphs end there"
        raise InputError(f"cannot be part of a CUDA graph: it {reason}", where=describe(node), remedy=remedy)


def key_of(values: Mapping[str, Any], inputs: Collection[str]) -> tuple[Hashable, Hashable]:
    """Returns shapes of what is copied in, and addresses and strides of all else."""
    shapes = tuple((name, tuple(values[name].shape), values[name].dtype) for name in inputs)
    rest = [value for name, value in values.items() if name not in inputs]
    # Strides too: a transposed view has the address of its base, and a graph would read it in the wrong order.
    return shapes, tuple((value.data_ptr(), value.stride()) for value in rest)


# Those of this process: graphs hold communicators, which must outlive them.
_OPEN: weakref.WeakSet[CachedGraphs] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Frees the graphs of all modules."""
    for graphs in list(_OPEN):
        graphs.close()
