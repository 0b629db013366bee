"""Where graphs are recorded: what a pool of them is, and CUDA graphs; `stand_in` has what takes their place on CPUs.

Enters: work that computes with tensors of fixed addresses. Leaves: a recording of it, and the tensors that it gives,
into which each replay writes.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fxpar.errors import InputError
from fxpar.runtime.calls import Values

Result = TypeVar("Result")


class Recording(Protocol):
    """Work that is replayed."""

    def replay(self) -> None:
        """Does the work again, on what stands at the same addresses now, into the same results."""

    def reset(self) -> None:
        """Frees what it holds."""


class Pool(Protocol):
    """Memory that recordings share: what one leaves unused, a later one may overwrite.

    So recordings of one pool are replayed in the order in which they were made. One *flight*, a forward whose
    backward is to come, is in it at a time.

    Attributes:
        flight: what is in it; None where nothing is.
        cost: seconds that recording took, and bytes that it has taken of the device.
        static_bytes: of the tensors into which inputs are copied before a replay.
    """

    flight: Flight | None
    cost: tuple[float, int]
    static_bytes: int

    def record(self, work: Callable[[], Result]) -> tuple[Recording, Result]:
        """Records work, and what it gives. Nothing is computed yet where the device is a GPU.

        Raises:
            InputError: it does what a graph cannot hold, or memory has run out.
        """

    def scramble(self, static: Iterable[Tensor], later: Iterable[Recording], live: Iterable[Tensor]) -> None:
        """Fills all memory that nothing may read with what nobody computed, where recordings are tried, not on GPUs.

        Args:
            static: tensors from outside of the pool that are filled anew before the next replay.
            later: recordings that are still to be replayed, and read what they read.
            live: tensors that somebody else reads.
        """


class Flight:
    """A forward that has run and whose backward has not; whoever drops it ends it.

    Attributes:
        values: what it leaves for its backward outside of the pool, by name: values whose sizes the call decides.
    """

    def __init__(self) -> None:
        self.values: Values = {}


class OneFlight:
    """Knows what is in a pool without keeping it; and what the pool has cost."""

    def __init__(self) -> None:
        self._flight: weakref.ref[Flight] | None = None
        self.cost = (0.0, 0)
        self.static_bytes = 0

    @property
    def flight(self) -> Flight | None:
        """Returns what is in it."""
        return None if self._flight is None else self._flight()

    @flight.setter
    def flight(self, value: Flight | None) -> None:
        self._flight = None if value is None else weakref.ref(value)


class CudaPool(OneFlight):
    """Memory of CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], Result]) -> tuple[Recording, Result]:
        """Implements `Pool.record`."""
        graph: Any = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # memory of other pools is of no use here
        start, before = time.perf_counter(), torch.cuda.memory_reserved(self._device)
        try:
            # NCCL's watchdog asks events of its own meanwhile, which other modes would take for a fault.
            with torch.cuda.graph(graph, self._handle, self._stream, capture_error_mode="thread_local"):
                result = work()
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"the pool of CUDA graphs is out of memory: {_first_line(error)}",
                where="cuda_graphs",
                remedy="lower the batch, or cuda_graphs.variants, or set Recompute('selective')",
            ) from error
        except RuntimeError as error:
            raise InputError(
                f"a graph cannot hold what the step does: {_first_line(error)}",
                where="cuda_graphs",
                remedy="give the operator that does it torch.Tag.cudagraph_unsafe, leave it out by cuda_graphs.scope, "
                "or set cuda_graphs to CudaGraphs('none'); the error's cause has the line",
            ) from error
        # Reserved and not allocated memory: a graph's pool keeps whole segments, which no other allocation can use.
        taken = max(torch.cuda.memory_reserved(self._device) - before, 0)
        self.cost = self.cost[0] + time.perf_counter() - start, self.cost[1] + taken
        return graph, result

    def scramble(self, static: Iterable[Tensor], later: Iterable[Recording], live: Iterable[Tensor]) -> None:
        """Implements `Pool.scramble`."""


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
