"""Where graphs are recorded: what a pool of them is, CUDA graphs, and what stands in for them where there is no GPU.

Enters: work that computes with tensors of fixed addresses. Leaves: a recording of it, and the tensors that it gives,
into which each replay writes. The stand-in's is a tape of operators, so that all but the graphs themselves is tried
on CPUs.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.errors import InputError
from fxpar.ops.small_operators import Destination, destinations, into
from fxpar.runtime.calls import Boxed, Values
from fxpar.runtime.graph_modes import recorder
from fxpar.runtime.prefetch import poison, storage_bytes
from fxpar.torch_internals import Work, disable_current_modes

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


_REFUSED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe)
# Makes a tensor of numbers of the host: a copy that is not pinned.
_FROM_HOST = torch.ops.aten.lift_fresh.default


class Tape:
    """Calls, and the tensors they were made with.

    Attributes:
        reads: of storages of others that it reads, by number, its own views.
        writes: storages that it fills, by number; it keeps them.
    """

    def __init__(self, pool: StandInPool) -> None:
        self.pool = pool
        self._before: list[tuple[Tensor, Tensor]] = []
        self._calls: list[Callable[[], None]] = []
        self.reads: dict[int, dict[Any, Tensor]] = {}
        self.writes: dict[int, Tensor] = {}

    def keep(self, function: Any, args: Sequence[Any], kwargs: Any) -> None:
        """Remembers what a call is about to change of the tensors of others."""
        for i, argument in enumerate(function._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            self.keep_values([leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)])

    def keep_values(self, values: Iterable[Tensor]) -> None:
        """Remembers values that are about to be changed, if they are others'."""
        known = {_number(storage) for storage, _ in self._before} | self.writes.keys()
        for tensor in values:
            # All of the storage is saved once: a view and its base are one memory,
            # and a second copy would save changed bytes.
            if _number(tensor) not in known:
                known.add(_number(tensor))
                whole = storage_bytes(tensor)
                self._before.append((whole, whole.clone()))

    def put_back(self) -> None:
        """Makes what others have as before the recording, which computes nothing on a GPU."""
        # The stand-in has to run work to learn its calls. Undone, a sum in place does not count twice.
        for whole, before in self._before:
            whole.copy_(before)
        self._before.clear()

    def add(self, function: Callable[..., Any], args: Any, kwargs: Any, returned: Any) -> None:
        """Adds a call that was run."""
        there = {_number(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        results = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        fresh = {i: tensor for i, tensor in enumerate(results) if _number(tensor) not in there}
        args, kwargs = pytree.tree_map_only(Tensor, self._own, (args, kwargs))
        self.writes.update({_number(tensor): tensor for tensor in fresh.values()})
        is_collective = getattr(function, "namespace", "") == "c10d"

        def again() -> None:
            everything = pytree.tree_leaves(function(*args, **kwargs))
            if is_collective:  # in place: the caller's wait is no operator, so it is on no tape
                Work.unbox(everything.pop()).wait()
            leaves = [leaf for leaf in everything if isinstance(leaf, Tensor)]
            for i, static in fresh.items():
                # A functional collective may still be under way when it returns. Reading its
                # result through copy_ without the wait would read memory that gloo has yet to
                # fill. For all other tensors the wait does nothing.
                static.copy_(torch.ops._c10d_functional.wait_tensor(leaves[i]))

        self._calls.append(again)

    def run_opaque(self, function: Boxed, operands: list[Any]) -> Sequence[Any]:
        """Runs a function whose kernels no mode sees, and adds it as one call."""
        inputs, places = list(operands), destinations()
        operands.clear()
        # What it writes apart from its results are operands for the tape.
        written = [place.tensor for place in places if place is not None and place.tensor is not None]

        def again(*args: Any) -> Sequence[Any]:
            targets = iter(args[len(inputs) :])
            # A place without memory is of a stage that has failed: nobody reads what is written there.
            there = [None if place is None or place.tensor is None else next(targets) for place in places]
            with into([place and Destination(tensor, place.adds) for place, tensor in zip(places, there, strict=True)]):
                return function(list(args[: len(inputs)]))

        with disable_current_modes():
            self.keep_values(written)
            outputs = function(list(inputs))
        self.add(again, [*inputs, *written], {}, outputs)
        return outputs

    def _own(self, value: Tensor) -> Tensor:
        """Returns what a call takes: of the tensors of others a view, so that it is seen whether anyone else keeps
        them."""
        if _number(value) in self.writes:
            return value
        geometry = tuple(value.shape), value.stride(), value.storage_offset(), value.dtype
        views = self.reads.setdefault(_number(value), {})
        if geometry not in views:
            # The view is made outside of the recorder, or it would be a call on the tape itself.
            with disable_current_modes():
                views[geometry] = value.detach()
        return views[geometry]

    def check(self, pooled: Set[int]) -> None:
        """Refuses to read memory that nobody keeps, where a graph would find something else.

        Args:
            pooled: numbers of storages that are the pool's.
        """
        for number, views in self.reads.items():
            # One more is the storage's object of Python.
            # A CUDA graph reads an address whether or not anybody still has the tensor. The tape's views keep the
            # storage alive, so only the count tells that the owner is gone.
            if number not in pooled and torch._C._storage_Use_Count(number) <= len(views) + 1:
                value = next(iter(views.values()))
                raise AssertionError(f"a graph reads {value.dtype}{list(value.shape)}, which nobody keeps")

    def replay(self) -> None:
        """Makes the calls again."""
        self.check(self.pool.written)
        with torch.no_grad():
            for call in self._calls:
                call()

    def reset(self) -> None:
        """Frees what it holds."""
        self._calls.clear()
        self.reads.clear()
        self.writes.clear()


def _number(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _needs_host(function: Any) -> InputError:
    return InputError(
        f"a graph cannot hold what the step does: {function} needs the host",
        where="cuda_graphs",
        remedy="give the operator that does it torch.Tag.cudagraph_unsafe, leave it out by cuda_graphs.scope, "
        "or set cuda_graphs to CudaGraphs('none')",
    )


class _NoLists(TorchFunctionMode):
    """Refuses to read elements of a CPU's tensor as a list or an array, for which torch calls no operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy):
            raise _needs_host(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Puts calls of operators onto a tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, Tensor) and kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # the subclass's own calls come here
        if func is _FROM_HOST or any(tag in func.tags for tag in _REFUSED):
            raise _needs_host(func)
        if func._schema.is_mutable:
            self.tape.keep(func, args, kwargs)
        returned = func(*args, **kwargs)
        self.tape.add(func, args, kwargs, returned)
        return returned


class StandInPool(OneFlight):
    """Memory of tapes.

    Attributes:
        tapes: all that were recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tapes: list[Tape] = []

    def record(self, work: Callable[[], Result]) -> tuple[Tape, Result]:
        """Implements `Pool.record`."""
        tape, start = Tape(self), time.perf_counter()
        with self._onto(tape):
            result = work()
        tape.put_back()
        self.cost = self.cost[0] + time.perf_counter() - start, 0
        self.tapes.append(tape)
        return tape, result

    @contextmanager
    def _onto(self, tape: Tape) -> Iterator[None]:
        token = recorder.set(tape.run_opaque)
        try:
            with _Recorder(tape), _NoLists():
                yield
        finally:
            recorder.reset(token)

    @property
    def written(self) -> set[int]:
        """Returns numbers of the storages that tapes have written."""
        return {number for tape in self.tapes for number in tape.writes}

    def scramble(self, static: Iterable[Tensor], later: Iterable[Any], live: Iterable[Tensor]) -> None:
        """Implements `Pool.scramble`."""
        live_numbers = {_number(tensor) for tensor in live}
        # What later recordings read counts as live even where Python has dropped it: a graph has no references.
        live_numbers = live_numbers.union(*(tape.reads for tape in later))
        written = (value for tape in self.tapes for value in tape.writes.values())
        for value in (*static, *written):
            if _number(value) not in live_numbers:
                poison(value)
