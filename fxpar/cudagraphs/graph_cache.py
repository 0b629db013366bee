"""Which graphs of a module there are, and for which calls.

Enters: calls of steps and forwards. Leaves: what runs them. The first time a call runs as it is, which also sets up
what kernels and collectives set up once; the second time it is recorded, and replayed from then on.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx

from fxpar.cudagraphs.partial import GraphedForward, GraphedStep, StageStep
from fxpar.cudagraphs.pool import CudaPool, Pool, StandInPool
from fxpar.errors import InputError
from fxpar.ir.program import describe, note
from fxpar.plan.plan_options import CudaGraphs
from fxpar.runtime.bound_batch import BoundBatch
from fxpar.runtime.calls import ForwardCalls, Runnable, StepCalls
from fxpar.runtime.grad_buffers import Buffers, Waiting
from fxpar.runtime.graph_modes import GraphFigures, MovingInputs, NoGraphs, Run, RunEvaluation, RunForward
from fxpar.runtime.microbatches import StepOptions, StepResult
from fxpar.runtime.random_state import RandomState


class _Graphed(Protocol):
    @property
    def graphs(self) -> int: ...

    def reset(self) -> None: ...


Variant = TypeVar("Variant", bound=_Graphed)
# What a rank says of a key that has come before and is not recorded.
_SEEN = 1


def new_pool(device: torch.device) -> Pool:
    """Returns an empty pool."""
    if device.type == "cuda":
        return CudaPool(device)
    return StandInPool()


class CachedGraphs(NoGraphs):
    """Graphs of one module, which are made when a call comes for the second time.

    Args:
        options: of the plan.
        device: on which they run.
        enter: called in front of what communicates, with a number; gives the smallest of all ranks.
    """

    is_on = True

    def __init__(self, options: CudaGraphs, device: torch.device, enter: Callable[[int], int] = int) -> None:
        self.options, self._enter = options, enter
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
            InputError: as of `is_known`.
        """
        # The first call runs as it is. Triton tunes kernels, and NCCL makes communicators at
        # their first use, none of which a capture may contain.
        return self.in_free_pool(key, make) if self.is_known(key) else plain

    def shared_variant(self, key: Hashable, make: Callable[[Pool], Variant]) -> Variant | None:
        """Returns what runs calls of a key, None the first time. All ranks record in the same call. A collective call.

        Raises:
            InputError: as of `is_known`.
        """
        # Ranks may differ in what they have seen: one of them has gradients to add to, or an optimizer's state,
        # where another trains nothing. The stand-in communicates while it records.
        recorded = [(known, known[key]) for _, known in self._pools if key in known and known[key].graphs]
        least = self._enter(int(self.is_known(key)) + bool(recorded))
        if not least:
            return None
        for known, variant in recorded if least == _SEEN else ():
            variant.reset()
            del known[key]
        return self.in_free_pool(key, make)

    def is_known(self, *keys: Hashable) -> bool:
        """Returns whether calls of all these keys have come before.

        Raises:
            InputError: there would be more variants than the plan admits, or the module is closed.
        """
        if self._closed:
            raise InputError("the module is closed", where="close()", remedy="close it behind its last call")
        new = {*keys} - self._seen
        if new and len(self._seen) + len(new) > self.options.variants:
            raise InputError(
                f"has {len(self._seen)} variants of graphs, and this call has other shapes, addresses or modes than "
                "all of them",
                where="cuda_graphs",
                remedy="pad batches to few lengths, keep parameters and gradients in their memory, or raise "
                "cuda_graphs.variants",
            )
        self._seen |= new
        return not new

    def in_free_pool(self, key: Hashable, make: Callable[[Pool], Variant]) -> Variant:
        """Returns what runs calls of a key, in a pool in which nothing is in flight."""
        # A pool whose forward waits for its backward holds what that backward
        # reads. A second forward in it would overwrite that.
        free = [(pool, known) for pool, known in self._pools if pool.flight is None]
        for _, known in free:
            if key in known:
                variant: Variant = known[key]
                return variant
        if not free:
            self._pools.append((new_pool(self._device), {}))
            free = self._pools[-1:]
        pool, known = free[0]
        known[key] = make(pool)
        return self.in_free_pool(key, make)

    @property
    def figures(self) -> GraphFigures:
        """Implements `NoGraphs.figures`."""
        graphs = sum(variant.graphs for _, known in self._pools for variant in known.values())
        # Several forwards in flight have graphs apart, which are of one variant.
        variants = {key for _, known in self._pools for key, variant in known.items() if variant.graphs}
        costs = [pool.cost for pool, _ in self._pools]
        seconds, size = (sum(column) for column in zip(*costs, strict=True)) if costs else (0.0, 0)
        slots = sum(any(variant.graphs for variant in known.values()) for _, known in self._pools)
        static = sum(pool.static_bytes for pool, _ in self._pools)
        return GraphFigures(graphs, len(variants), slots, seconds, size, static)

    def close(self) -> None:
        """Implements `NoGraphs.close`."""
        self._closed = True
        for _, known in self._pools:
            for variant in known.values():
                variant.reset()
        self._pools.clear()


class PartialGraphs(CachedGraphs):
    """Runs of calls that a graph can hold are one graph; what stands between them runs as it is.

    Args:
        options, device, enter: as for `CachedGraphs`.
    """

    def __init__(self, options: CudaGraphs, device: torch.device, enter: Callable[[int], int] = int) -> None:
        super().__init__(options, device, enter)
        self._stages: dict[int, StageGraphs] = {}

    def stage(self, number: int) -> NoGraphs:
        """Implements `NoGraphs.stage`."""
        if number not in self._stages:
            self._stages[number] = StageGraphs(self.options, self._device)
        return self._stages[number]

    def train(
        self,
        batches: Sequence[BoundBatch],
        run: Run,
        options: StepOptions,
        random: RandomState,
        buffers: Buffers,
        waiting: Waiting,
    ) -> StepResult:
        """Implements `NoGraphs.train`."""
        # In front of the first message: a stage that refused a call would leave the ranks in the middle of a schedule.
        if self._stages:
            self.is_known(*(("step", *key_of_batch(batch)) for batch in batches))
        result = super().train(batches, run, options, random, buffers, waiting)
        for stage in self._stages.values():
            stage.record()
        return result

    def evaluate(self, batch: BoundBatch, run: RunEvaluation, random: RandomState, key: Hashable) -> dict[str, Tensor]:
        """Implements `NoGraphs.evaluate`."""
        self.is_known(("evaluation", key, *key_of_batch(batch)))
        return super().evaluate(batch, run, random, key)

    @property
    def figures(self) -> GraphFigures:
        """Implements `NoGraphs.figures`; of a pipeline over the stages of this rank."""
        parts = [super().figures, *(stage.figures for stage in self._stages.values())]

        def together(name: str) -> Any:
            first, *rest = (getattr(part, name) for part in parts)
            return first + (max(rest, default=0) if name == "variants" else sum(rest))

        return GraphFigures(**{field.name: together(field.name) for field in fields(GraphFigures)})

    def close(self) -> None:
        """Implements `NoGraphs.close`."""
        super().close()
        for stage in self._stages.values():
            stage.close()

    def step(self, calls: StepCalls, values: Mapping[str, Any], inputs: MovingInputs, key: Hashable) -> Runnable:
        """Implements `NoGraphs.step`."""
        moving = inputs()
        key = ("step", id(calls), *key_of(values, moving), key)
        runnable: Runnable = self.variant(key, lambda pool: self._graphed(calls, moving, pool), calls)
        return runnable

    def _graphed(self, calls: StepCalls, inputs: Collection[str], pool: Pool) -> Any:
        return GraphedStep(calls, inputs, pool)


class StageGraphs(PartialGraphs):
    """Graphs of a pipeline's stage. Each of its microbatches in flight is in a pool, a *slot*, with graphs for it.

    A microbatch is in flight from its forward to the end of its backward, of the weight part where there are two. So
    there are as many slots as the schedule has in flight at once (`VerifiedSchedule.slots`). They share no memory.
    """

    def step(self, calls: StepCalls, values: Mapping[str, Any], inputs: MovingInputs, key: Hashable) -> Runnable:
        """Implements `NoGraphs.step`."""
        moving = inputs()
        key = ("step", id(calls), *key_of(values, moving), key)
        self.is_known(key)
        return self.in_free_pool(key, lambda pool: StageStep(calls, moving, pool))

    def record(self) -> None:
        """Records what has run as it is, when no microbatch is in flight."""
        for _, known in self._pools:
            for variant in known.values():
                if isinstance(variant, StageStep):
                    variant.record()


def refuse_uncaptured(node: fx.Node | None) -> None:
    """Refuses an operation that one graph is to hold and cannot.

    Raises:
        InputError: names the operation and the reason.
    """
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


def key_of_batch(batch: BoundBatch) -> tuple[Hashable, ...]:
    """Returns what is equal for batches that a graph of one of them can take; its stages ask for no more than this."""
    # Rows of all data ranks are in it, so that all ranks record in the same call. A capture on some
    # ranks alone would leave the others waiting in its collectives.
    names = batch.ready.moving(batch.others, batch.others)
    return id(batch.ready), batch.rows, batch.loss, batch.addresses, *key_of(batch.others, names)


# Those of this process: graphs hold communicators, which must outlive them.
_OPEN: weakref.WeakSet[CachedGraphs] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Frees the graphs of all modules."""
    for graphs in list(_OPEN):
        graphs.close()
