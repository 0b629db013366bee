"""Symmetric buffers between GPUs of one machine: copy engines write into the others' symmetric memory.

Enters: a process group whose GPUs reach each other's memory. Leaves: a `SymmetricBuffer` whose copies have a stream of
their own. Copy engines copy, and streams raise flags and wait for them by the driver's stream memory operations, which
needs no multiprocessor; in a graph, where such a wait is slow, a kernel of one warp waits. A sum alongside which
nothing is computed is a kernel (`push_kernels`), and so are rows of which values say where they go (`push_needed`). All
of it can be captured.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from fxpar.errors import InputError, RankError
from fxpar.peer_memory.compiler.row_programs import fits, sum_alone
from fxpar.peer_memory.compiler.symmetric_buffer import SymmetricBuffer, row_blocks, slot_stride

_WORD = 4
# Seconds for which the flags of a stopped buffer are raised again, and from one time to the next; and within which the
# first copy gets through.
_RAISING, _PAUSE, _THROUGH = 5.0, 2e-4, 3.0


@dataclass(kw_only=True)
class GpuSymmetricBuffer(SymmetricBuffer):
    """A rank's end in the memory of its GPU.

    Attributes:
        group: name of the process group.
        device: of this rank.
    """

    device: torch.device
    group: str = ""
    _words: list[int] = field(default_factory=list)
    _down: Sequence[Tensor] = ()
    _held: list[Any] = field(default_factory=list)
    # A stream for each other rank, and which of them is current.
    _lanes: Sequence[Any] = ()
    _lane: int | None = None
    # By buffer: what was queued in front of its copies, and the copies of each lane; and which lanes have some.
    _events: dict[int, tuple[Any, Sequence[Any]]] = field(default_factory=dict)
    _busy: dict[int, list[int]] = field(default_factory=dict)
    _under_way: dict[int, Tensor | Sequence[Tensor]] = field(default_factory=dict)
    _flags: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    # Words of this device and of the host, which waiting kernels read; and what raises all flags of the driver's waits.
    _stop: Sequence[Tensor] = ()
    _raised: Tensor = field(default_factory=lambda: torch.empty(0))
    _raising: Any = None
    _own_flags: Tensor = field(default_factory=lambda: torch.empty(0))

    def open(self) -> GpuSymmetricBuffer:
        """Makes the flags and the streams. A collective call."""
        words = self._create(self.flags * _WORD)
        self._lanes = [torch.cuda.Stream(self.device) for _ in self.others]
        self._raising = torch.cuda.Stream(self.device)
        word = torch.zeros(1, dtype=torch.int32)
        self._stop = word.to(self.device), word.pin_memory()
        self._raised = torch.ones(self.flags, dtype=torch.int32, pin_memory=True).view(torch.uint8)
        self._down = [words[self.rank], *(words[rank] for rank in self.others)]
        self._words = [rank_words.data_ptr() for rank_words in words]
        self._own_flags = words[self.rank].view(torch.int32)
        self._await(
            torch.ones_like(self._own_flags), 0
        )  # compiled and loaded, which cannot be while a graph is captured
        return self

    def _create(self, size: int) -> Sequence[Tensor]:
        if torch.cuda.is_current_stream_capturing():
            raise InputError(
                "needs more memory that all ranks reach, which cannot be had while a CUDA graph is captured",
                where="communication",
                remedy="call the model once with batches of these sizes before, or set Communication('nccl')",
            )
        local = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        # All ranks have zeroed their memory before any of them may write: a flag that came early would be wiped out. So
        # would one of `handle.barrier`: what zeroes the memory's own flags is queued here, too.
        local.zero_()
        torch.cuda.synchronize(self.device)
        group: Any = self.group  # newer versions of torch want a type of their own, which is a text
        handle = symmetric.rendezvous(local, group)
        self._held += [local, handle]
        return [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self.size)]

    @contextmanager
    def beside(self, buffer: int, sent: Tensor | Sequence[Tensor]) -> Iterator[None]:
        """Switches to the first of the buffer's streams."""
        # Events are made once a buffer: an uncaptured step of 1.2B spent a quarter of
        # the host's time around its 243 copies and sums.
        if buffer not in self._events:
            self._events[buffer] = torch.cuda.Event(), [torch.cuda.Event() for _ in self._lanes]
        before, done = self._events[buffer]
        before.record(current_stream(self.device))
        busy = self._busy[buffer] = []
        self._enter(buffer, 0)
        try:
            yield
        finally:  # what was sent stays until it is there, where another copy fails too
            self._lane = None
            for lane in busy:
                done[lane].record(self._lanes[lane])
            self._under_way[buffer] = sent

    def _enter(self, buffer: int, lane: int) -> None:
        if lane not in self._busy[buffer]:
            self._busy[buffer].append(lane)
            self._lanes[lane].wait_event(self._events[buffer][0])
        self._lane = lane

    @contextmanager
    def toward(self, rank: int, buffer: int) -> Iterator[None]:
        """Switches to the stream of a rank."""
        before = self._lane
        self._enter(buffer, self.others.index(rank))
        try:
            yield
        finally:
            self._lane = before

    def copy(self, area: Tensor, begin: int, block: Tensor) -> None:
        """Copies by a copy engine."""
        if block.is_contiguous():
            copy(self._stream, area.data_ptr() + begin, block.data_ptr(), block.nbytes)
            return
        (rows, width), (pitch, _), grain = block.shape, block.stride(), block.itemsize
        copy_rows(self._stream, area.data_ptr() + begin, block.data_ptr(), (rows, width * grain, pitch * grain))

    def join(self, buffer: int) -> None:
        """Lets the current stream wait for the copies; they took what they sent."""
        del self._under_way[buffer]
        stream, done = current_stream(self.device), self._events[buffer][1]
        for lane in self._busy.pop(buffer):
            stream.wait_event(done[lane])

    def signal(self, rank: int, buffer: int, stage: int) -> None:
        """Raises the flag on the buffer's stream in `beside`, else on the current one."""
        write_value(self._stream, self._words[rank] + _WORD * self.flag(buffer, stage, self.rank), 1)

    def wait(self, buffer: int, stage: int, senders: Sequence[int] = ()) -> None:
        """Waits on the stream of `signal`.

        The driver's wait takes 10 us of a graph, and a kernel that looks 3; a kernel takes the host longer to queue.
        """
        if self._lane is None and not senders and torch.cuda.is_current_stream_capturing():
            self._await(self._own_flags, self.flag(buffer, stage, 0))
            return
        base = self._words[self.rank]
        take_down(self._stream, [base + _WORD * self.flag(buffer, stage, rank) for rank in senders or self.others])

    def _await(self, flags: Tensor, first: int) -> None:
        from fxpar.peer_memory.runtime.push_kernels import take_flags

        take_flags(flags, first, self.rank, self.size, self._stop)

    def sum_of_slots(self, area: Tensor, step: int, local: Tensor) -> Tensor:
        """Sums by one kernel."""
        if local.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return super().sum_of_slots(area, step, local)
        from fxpar.peer_memory.runtime.push_kernels import add_slots

        return add_slots(area.view(local.dtype), step // local.itemsize, local, self.rank, self.size)

    def total(self, buffer: int, x: Tensor, is_sent: bool = False) -> Tensor:
        """Sums by one kernel, on the current stream: that of rows wherever they fit.

        Whether more is computed of them, the ranks may decide differently, and kernels of two kinds do not meet.
        """
        width = x.shape[1]
        if fits(width, x.dtype):
            return self.rows_of_total(buffer, x, sum_alone(width).text, (), is_sent)[0]
        if self.size > 2:
            return super().total(buffer, x, is_sent)
        from fxpar.peer_memory.runtime.push_kernels import push_sum

        there, here, flags_there, flags_here = self._ends(buffer, x)
        return push_sum(x.view(-1), there.view(-1), here.view(-1), flags_there, flags_here, self._stop).view(x.shape)

    def rows_of_total(
        self, buffer: int, x: Tensor, text: str, operands: Sequence[Tensor], is_sent: bool = False
    ) -> list[Tensor]:
        """Computes by one kernel too, after the copies if there are any."""
        if self.size == 2:
            from fxpar.peer_memory.runtime.push_kernels import push_rows

            return push_rows(text, x, *self._ends(buffer, x), self._stop, operands)
        from fxpar.peer_memory.runtime.push_kernels import push_blocks

        areas = self.areas(buffer, row_blocks(x, self.size).bytes)
        if is_sent:
            self.join(buffer)
            self.wait(buffer, 0)
        return push_blocks(text, x, self.rank, areas, self._kernel_flags(buffer), self._stop, operands, is_sent)

    def expanded(self, buffer: int, x: Tensor, chosen: Tensor, per_rank: int) -> Tensor:
        """Runs one kernel."""
        return self._needed("expand", buffer, x, chosen, per_rank)

    def summed(self, buffer: int, x: Tensor, chosen: Tensor, per_rank: int) -> Tensor:
        """Runs one kernel."""
        return self._needed("sum", buffer, x, chosen, per_rank)

    def _needed(self, way: str, buffer: int, x: Tensor, chosen: Tensor, per_rank: int) -> Tensor:
        from fxpar.peer_memory.runtime.push_needed import push_needed

        areas = self.areas(buffer, self.size * slot_stride(x if way == "expand" else x[0]))
        flags = self._kernel_flags(buffer)
        return push_needed(way, x, chosen, per_rank, self.rank, areas, flags, self._stop)

    def _ends(self, buffer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns, of two ranks, memory like `x` of the other and of this one, and the flags of both."""
        (other,) = self.others
        flags = self._kernel_flags(buffer)
        return self.whole(other, buffer, x), self.whole(self.rank, buffer, x), flags[other], flags[self.rank]

    def _kernel_flags(self, buffer: int) -> Sequence[Tensor]:
        """Returns the flags of all ranks that kernels raise, int32[FLAGS] each."""
        from fxpar.peer_memory.runtime.push_kernels import FLAGS

        if buffer not in self._flags:
            areas = self.areas(-buffer, FLAGS * _WORD)
            self._flags[buffer] = [area[: FLAGS * _WORD].view(torch.int32) for area in areas]
        return self._flags[buffer]

    def stop(self, error: RankError) -> None:
        """Ends the waits of kernels and of streams, those of graphs too; what they compute then is nothing."""
        super().stop(error)
        self._stop[1].fill_(1)
        through = threading.Event()
        threading.Thread(target=self._raise_flags, args=(through,), name="fxpar stop", daemon=True).start()
        threading.Thread(target=_expect, args=(through, error), name="fxpar stuck", daemon=True).start()

    def _raise_flags(self, through: threading.Event) -> None:
        """Waits of streams read their flags alone, and take them down: these are raised until no wait is left.

        By copies from the host's memory, which need no multiprocessor. Those of other ranks too: the host of a rank
        whose queue is full, as it waits for this one, gets nothing through to its device.
        """
        torch.cuda.set_device(self.device)
        allow_while_captured()
        end = time.monotonic() + _RAISING
        while time.monotonic() < end:
            try:
                with torch.cuda.stream(self._raising):
                    for flags in self._down:
                        flags.copy_(self._raised, non_blocking=True)
                self._raising.synchronize()
            finally:
                through.set()  # a device with an error lets nobody wait
            time.sleep(_PAUSE)

    @property
    def _stream(self) -> int:
        stream: int = raw_stream(self.device) if self._lane is None else self._lanes[self._lane].cuda_stream
        return stream

    def close(self) -> None:
        """Frees the memory; graphs that hold its addresses are gone by then.

        What has waited for the others' copies has seen the last of them: nobody writes here any more.
        """
        torch.cuda.synchronize(self.device)
        super().close()
        self._held.clear()
        self._under_way.clear()
        self._busy.clear()
        self._flags.clear()


def _expect(through: threading.Event, error: RankError) -> None:
    """Ends this process where nothing gets through to its device, as the rank that it waits for is gone."""
    if not through.wait(_THROUGH):
        end_process(error)


_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_ON_DEVICE, _LONGEST_PITCH = 2, (1 << 31) - 1  # CU_MEMORYTYPE_DEVICE; more bytes the driver refuses
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NAME = "libcuda.so.1"


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams of a wait or a write, which is a union of 48 bytes."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("alias", ctypes.c_uint64),
        ("rest", ctypes.c_uint64),
    ]


class _Rows(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        (side + name, kind)
        for side in ("from_", "to_")
        for name, kind in (
            ("x", ctypes.c_size_t),
            ("y", ctypes.c_size_t),
            ("type", ctypes.c_int),
            ("host", ctypes.c_void_p),
            ("device", ctypes.c_uint64),
            ("array", ctypes.c_void_p),
            ("pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("rows", ctypes.c_size_t)]


@cache
def _driver() -> Any:
    """Returns the driver.

    Raises:
        OSError: there is none.
    """
    library = ctypes.CDLL(_NAME)
    library.cuStreamWriteValue32_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    library.cuStreamWriteValue32_v2.restype = ctypes.c_int
    library.cuStreamBatchMemOp_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    library.cuStreamBatchMemOp_v2.restype = ctypes.c_int
    library.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    library.cuMemcpyDtoDAsync_v2.restype = ctypes.c_int
    library.cuMemcpy2DAsync_v2.argtypes = [ctypes.POINTER(_Rows), ctypes.c_void_p]
    library.cuMemcpy2DAsync_v2.restype = ctypes.c_int
    library.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(ctypes.c_int)]
    library.cuThreadExchangeStreamCaptureMode.restype = ctypes.c_int
    library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def copy(stream: int, there: int, here: int, size: int) -> None:
    """Lets the stream copy some bytes from `here` to `there`, which may be another device's.

    Raises:
        RuntimeError: the driver refuses.
    """
    if size:
        _check(_driver().cuMemcpyDtoDAsync_v2(there, here, size, stream))


def copy_rows(stream: int, there: int, here: int, size: tuple[int, int, int]) -> None:
    """Lets the stream copy rows from `here` to `there`, where they lie one after the other.

    Args:
        size: rows, bytes of a row, and bytes from one row to the next.

    Raises:
        RuntimeError: the driver refuses.
    """
    rows, width, pitch = size
    if rows * width == 0:
        return
    if pitch > _LONGEST_PITCH:
        for row in range(rows):
            copy(stream, there + row * width, here + row * pitch, width)
        return
    places = {"from_type": _ON_DEVICE, "from_device": here, "from_pitch": pitch, "to_type": _ON_DEVICE}
    places |= {"to_device": there, "to_pitch": width, "width": width, "rows": rows}
    _check(_driver().cuMemcpy2DAsync_v2(ctypes.byref(_Rows(**places)), stream))


def take_down(stream: int, addresses: Sequence[int]) -> None:
    """Lets the stream go on when all words are 1, and makes them 0: one operation, or one node of a graph.

    Raises:
        RuntimeError: the driver refuses.
    """
    waits = [_Operation(_WAIT, address, 1, _EQUAL) for address in addresses]
    operations = waits + [_Operation(_WRITE, address, 0) for address in addresses]
    batch = (_Operation * len(operations))(*operations)
    _check(_driver().cuStreamBatchMemOp_v2(stream, len(operations), batch, 0))


def write_value(stream: int, address: int, value: int) -> None:
    """Lets the stream write the word, after all that it wrote before; it may be another device's.

    Raises:
        RuntimeError: the driver refuses.
    """
    _check(_driver().cuStreamWriteValue32_v2(stream, address, value, 0))


def allow_while_captured() -> None:
    """Lets this thread ask for events while another captures a graph, which it takes no part in.

    Raises:
        RuntimeError: the driver refuses.
    """
    _check(_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED))))


def _check(status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"the CUDA driver refuses an operation of a stream: {(name.value or b'?').decode()}")


def end_process(error: RankError) -> Any:
    """Ends the process at once: its exit handlers would wait for the device."""
    print(f"fxpar: {error}", file=sys.stderr, flush=True)
    os._exit(1)


_KNOWN: dict[tuple[int, int], torch.cuda.Stream] = {}


def raw_stream(device: torch.device) -> int:
    """Returns the handle of a GPU's current stream; the device has a number."""
    handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a GPU's current stream; the device has a number."""
    key = device.index, raw_stream(device)
    if key not in _KNOWN:
        _KNOWN[key] = torch.cuda.current_stream(device)
    return _KNOWN[key]
