"""The graphs of a module: which are there, and for which calls.

Enters: calls of steps, and all by which graphs differ. Leaves: what runs them: the first time as they are, which also
sets up what kernels and collectives set up once; the second time they are recorded, and replayed from then on.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from fxpar.errors import InputError
from fxpar.plan.option_groups import CudaGraphs
from fxpar.runtime.calls import ForwardCalls, Runnable, StepCalls
from fxpar.runtime.graphs.partial import GraphedForward, GraphedStep
from fxpar.runtime.graphs.pool import Pool, new_pool
from fxpar.runtime.graphs.transformer_engine import EngineStep, check_engine


class _Graphed(Protocol):
    @property
    def graphs(self) -> int: ...

    def reset(self) -> None: ...


Made = TypeVar("Made", bound=_Graphed)


@dataclass(frozen=True)
class GraphFigures:
    """What graphs take.

    Attributes:
        graphs: how many there are.
        variants: sets of shapes, addresses and modes that they are for.
        seconds: that recording took.
        bytes: memory that recording has left occupied; 0 where there is no GPU.
    """

    graphs: int
    variants: int
    seconds: float
    bytes: int

    def __str__(self) -> str:
        size = f", for which they have taken {self.bytes / 2**20:,.0f} MiB of the device" if self.bytes else ""
        return f"CUDA graphs: {self.graphs} for {self.variants} variants, recorded in {self.seconds:.2f} s{size}."


class Graphs:
    """Graphs of one module.

    Args:
        options: of the plan.
        device: on which they run.
        enter: called in front of what communicates.
    """

    def __init__(self, options: CudaGraphs, device: torch.device, enter: Callable[[], None] = lambda: None) -> None:
        if options.impl == "transformer_engine":
            check_engine(device)
        self.options, self.enter = options, enter
        self._device = device
        self._seen: set[Hashable] = set()
        self._pools: list[tuple[Pool, dict[Hashable, Any]]] = []
        self._closed = False
        _OPEN.add(self)

    def step(self, calls: StepCalls, values: Mapping[str, Any], inputs: Collection[str], key: Hashable) -> Runnable:
        """What runs a step.

        Args:
            values: of the program's inputs, by name.
            inputs: names of those whose addresses change from call to call.
            key: by what its graphs differ besides shapes and addresses.
        """
        key = ("step", id(calls), *key_of(values, inputs), key)
        kind = EngineStep if self.options.impl == "transformer_engine" else GraphedStep
        runnable: Runnable = self.variant(key, lambda pool: kind(calls, inputs, pool), calls)
        return runnable

    def forward(
        self, calls: ForwardCalls, values: Mapping[str, Any], inputs: Collection[str], key: Hashable
    ) -> GraphedForward | ForwardCalls:
        """What runs a forward alone; as for `step`."""
        key = ("forward", id(calls), *key_of(values, inputs), key)
        forward: GraphedForward | ForwardCalls = self.variant(
            key, lambda pool: GraphedForward(calls, inputs, pool), calls
        )
        return forward

    def variant(self, key: Hashable, make: Callable[[Pool], Made], plain: Any) -> Any:
        """What runs calls of a key; `plain` the first time.

        Raises:
            InputError: there are as many variants as the plan admits, or the module is closed.
        """
        if self._closed:
            raise InputError("the module is closed", where="close()", remedy="close it behind its last call")
        if key not in self._seen:
            self._check_room(len(self._seen))
            self._seen.add(key)
            return plain
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
        """What they take by now."""
        variants = [variant for _, known in self._pools for variant in known.values()]
        costs = [pool.cost for pool, _ in self._pools]
        seconds, size = (sum(column) for column in zip(*costs, strict=True)) if costs else (0.0, 0)
        return GraphFigures(sum(variant.graphs for variant in variants), len(variants), seconds, size)

    def close(self) -> None:
        """Frees all graphs; no call can be made any more."""
        self._closed = True
        for _, known in self._pools:
            for variant in known.values():
                variant.reset()
        self._pools.clear()


def key_of(values: Mapping[str, Any], inputs: Collection[str]) -> tuple[Hashable, Hashable]:
    """Shapes of what is copied in, and addresses and strides of all else."""
    shapes = tuple((name, tuple(values[name].shape), values[name].dtype) for name in inputs)
    rest = [value for name, value in values.items() if name not in inputs]
    return shapes, tuple((value.data_ptr(), value.stride()) for value in rest)


# Those of this process: graphs hold communicators, which must outlive them.
_OPEN: weakref.WeakSet[Graphs] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Frees the graphs of all modules."""
    for graphs in list(_OPEN):
        graphs.close()
