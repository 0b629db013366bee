"""Mailboxes between GPUs of one machine: copy engines write into the others' symmetric memory.

Enters: a process group whose GPUs reach each other's memory. Leaves: a `Mailbox` whose copies run on a stream of their
own. Nothing of that needs a multiprocessor: copies are the copy engines', and streams wait for flags and raise them by
the driver's stream memory operations. A sum beside which nothing is computed is a kernel (`push_rows`, `push_kernels`,
of more than two ranks `push_blocks`), and so are rows of which values say where they go (`push_needed`). All of it can
be captured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from fxpar.errors import InputError, RankError
from fxpar.exchange.driver import allow_while_captured, copy, take_down, write_value
from fxpar.exchange.needed import slot_stride
from fxpar.exchange.row_programs import fits, sum_alone
from fxpar.exchange.streams import current_stream, raw_stream
from fxpar.exchange.sums import row_blocks
from fxpar.exchange.symmetric_buffer import Mailbox
from fxpar.exchange.watch import end_process

_WORD = 4
# Seconds for which the flags of a stopped mailbox are raised again, and from one time to the next; and within which the
# first copy gets through.
_RAISING, _PAUSE, _THROUGH = 5.0, 2e-4, 3.0


@dataclass(kw_only=True)
class DeviceMailbox(Mailbox):
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
    _beside: Any = None
    _is_beside: bool = False
    # By buffer: what was queued in front of its copy, and the copy.
    _events: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    _under_way: dict[int, Tensor] = field(default_factory=dict)
    _flags: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    # Words of this device and of the host, which waiting kernels read; and what raises all flags of the driver's waits.
    _stop: Sequence[Tensor] = ()
    _raised: Tensor = field(default_factory=lambda: torch.empty(0))
    _raising: Any = None

    def open(self) -> DeviceMailbox:
        """Makes the flags and the streams. A collective call."""
        words = self._create(self.flags * _WORD)
        self._beside = torch.cuda.Stream(self.device)
        self._raising = torch.cuda.Stream(self.device)
        word = torch.zeros(1, dtype=torch.int32)
        self._stop = word.to(self.device), word.pin_memory()
        self._raised = torch.ones(self.flags, dtype=torch.int32, pin_memory=True).view(torch.uint8)
        self._down = [words[self.rank], *(words[rank] for rank in self.others)]
        self._words = [rank_words.data_ptr() for rank_words in words]
        return self

    def _create(self, size: int) -> Sequence[Tensor]:
        if torch.cuda.is_current_stream_capturing():
            raise InputError(
                "needs more memory that all ranks reach, which cannot be had while a CUDA graph is captured",
                where="exchange",
                remedy="call the model once with batches of these sizes before, or set exchange='nccl'",
            )
        local = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        group: Any = self.group  # newer versions of torch want a type of their own, which is a text
        handle = symmetric.rendezvous(local, group)
        local.zero_()
        torch.cuda.synchronize(self.device)
        handle.barrier()
        torch.cuda.synchronize(self.device)
        self._held += [local, handle]
        return [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self.size)]

    @contextmanager
    def beside(self, buffer: int, sent: Tensor) -> Iterator[None]:
        """On the mailbox's stream."""
        if buffer not in self._events:
            self._events[buffer] = torch.cuda.Event(), torch.cuda.Event()
        before, done = self._events[buffer]
        before.record(current_stream(self.device))
        self._beside.wait_event(before)
        self._is_beside = True
        try:
            yield
        finally:
            self._is_beside = False
        done.record(self._beside)
        self._under_way[buffer] = sent

    def copy(self, area: Tensor, begin: int, block: Tensor) -> None:
        """By a copy engine."""
        copy(self._stream, area.data_ptr() + begin, block.data_ptr(), block.nbytes)

    def join(self, buffer: int) -> None:
        """The current stream waits for the copies; they took what they sent."""
        del self._under_way[buffer]
        current_stream(self.device).wait_event(self._events[buffer][1])

    def signal(self, rank: int, buffer: int, stage: int) -> None:
        """On the mailbox's stream in `beside`, else on the current one."""
        write_value(self._stream, self._words[rank] + _WORD * self.flag(buffer, stage, self.rank), 1)

    def wait(self, buffer: int, stage: int) -> None:
        """As `signal`."""
        base = self._words[self.rank]
        take_down(self._stream, [base + _WORD * self.flag(buffer, stage, rank) for rank in self.others])

    def total(self, buffer: int, x: Tensor, is_sent: bool = False) -> Tensor:
        """By one kernel, on the current stream: that of rows wherever they fit.

        Whether more is computed of them, the ranks may decide differently, and kernels of two kinds do not meet.
        """
        width = x.shape[1]
        if fits(width, x.dtype):
            return self.rows_of_total(buffer, x, sum_alone(width).text, (), is_sent)[0]
        if self.size > 2:
            return super().total(buffer, x, is_sent)
        from fxpar.exchange.push_kernels import push_sum

        there, here, flags_there, flags_here = self._ends(buffer, x)
        return push_sum(x.view(-1), there.view(-1), here.view(-1), flags_there, flags_here, self._stop).view(x.shape)

    def rows_of_total(
        self, buffer: int, x: Tensor, text: str, operands: Sequence[Tensor], is_sent: bool = False
    ) -> list[Tensor]:
        """By one kernel too, behind the copies if there are any."""
        if self.size == 2:
            from fxpar.exchange.push_rows import push_rows

            return push_rows(text, x, *self._ends(buffer, x), self._stop, operands)
        from fxpar.exchange.push_blocks import push_blocks

        areas = self.areas(buffer, row_blocks(x, self.size).bytes)
        if is_sent:
            self.join(buffer)
            self.wait(buffer, 0)
        return push_blocks(text, x, self.rank, areas, self._kernel_flags(buffer), self._stop, operands, is_sent)

    def expanded(self, buffer: int, x: Tensor, chosen: Tensor, per_rank: int) -> Tensor:
        """By one kernel."""
        from fxpar.exchange.push_needed import push_expanded

        areas = self._slots(buffer, x)
        return push_expanded(x, chosen, per_rank, self.rank, areas, self._kernel_flags(buffer), self._stop)

    def summed(self, buffer: int, x: Tensor, chosen: Tensor, per_rank: int) -> Tensor:
        """By one kernel."""
        from fxpar.exchange.push_needed import push_summed

        areas = self._slots(buffer, x[0])
        return push_summed(x, chosen, per_rank, self.rank, areas, self._kernel_flags(buffer), self._stop)

    def _slots(self, buffer: int, like: Tensor) -> Sequence[Tensor]:
        """The areas of all ranks, with a slot like that [t, f] for each of them."""
        return self.areas(buffer, self.size * slot_stride(like))

    def _ends(self, buffer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of two ranks memory like `x` of the other and of this one, and the flags of both."""
        (other,) = self.others
        flags = self._kernel_flags(buffer)
        return self.whole(other, buffer, x), self.whole(self.rank, buffer, x), flags[other], flags[self.rank]

    def _kernel_flags(self, buffer: int) -> Sequence[Tensor]:
        """Those of all ranks that kernels raise, int32[FLAGS] each."""
        from fxpar.exchange.push_kernels import FLAGS

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
        stream: int = self._beside.cuda_stream if self._is_beside else raw_stream(self.device)
        return stream

    def close(self) -> None:
        """Frees the memory; graphs that hold its addresses are gone by then.

        What has waited for the others' copies has seen the last of them: nobody writes here any more.
        """
        torch.cuda.synchronize(self.device)
        super().close()
        self._held.clear()
        self._under_way.clear()
        self._flags.clear()


def _expect(through: threading.Event, error: RankError) -> None:
    """Ends this process where nothing gets through to its device, as the rank that it waits for is gone."""
    if not through.wait(_THROUGH):
        end_process(error)
