"""Writes a save while the training goes on.

Enters: a save whose files are there without values. Its tensors are copied in the order of the stream on which steps
run: what a later step writes cannot be in them. A copy stays on the device where that has room, which takes a hundredth
of the time to the host, else it is in the host's memory. Leaves: the save, written by a thread of its own that
communicates with no rank. Rank 0's makes it count as soon as it sees the documents of all ranks.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fxpar.checkpoint.state_dicts import Agree
from fxpar.checkpoint.training_saves import BegunSave
from fxpar.errors import CheckpointError
from fxpar.runtime.chunked_step import registered_memory

# What begins at a multiple of it can be read as any element type.
_ALIGNMENT = 16
# Seconds between two looks at what other ranks have written, and in which a process that ends waits for them.
_PAUSE, _LAST_WAIT = 0.2, 60.0
# Bytes of a device that copies leave free: for what a later step may need more than those before it.
_RESERVE = 4 << 30


class AsyncSaver:
    """Writes the saves of one module, one after the other.

    Args:
        device: of the module.
        has_failed: tells whether the ranks cannot go on: then no save is completed any more.
    """

    def __init__(self, device: torch.device, has_failed: Callable[[], bool]) -> None:
        self._device, self._has_failed = device, has_failed
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._executor = ThreadPoolExecutor(1, "fxpar-save")
        self._save: BegunSave | None = None
        self._writing, self._completing = Future[None](), Future[None]()
        self._all_written, self._is_given_up = threading.Event(), threading.Event()

    def start(self, save: BegunSave) -> None:
        """Copies what this rank writes, and has it written. No save may be under way."""
        assert self._save is None, "one at a time"
        copied, event = self._copied(save)
        self._all_written, self._is_given_up = threading.Event(), threading.Event()
        self._writing = self._executor.submit(_write, copied, event, self._stream)
        del copied  # the thread alone has it, and gives back its memory when it has written
        if save.rank == 0:
            self._completing = self._executor.submit(self._complete, save, self._all_written, self._is_given_up)
        self._save = save

    def wait(self, agree: Agree) -> Path | None:
        """Waits until the save that is under way counts, and returns its folder. A collective call.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._save is None:
            return None
        save, self._save = self._save, None
        try:
            self._writing.result()
            agree({}, "")  # all have written
            self._all_written.set()
            if save.rank == 0:
                self._completing.result()
            agree({}, "")  # it counts
        finally:
            self._is_given_up.set()
        return save.path

    def _copied(self, save: BegunSave) -> tuple[BegunSave, torch.cuda.Event | None]:
        """Returns a save whose values no step changes, and when they are there."""
        values = [block for _, blocks in save.blocks for _, _, block in blocks]
        is_cuda = self._device.type == "cuda"
        if is_cuda and any(value.device.type == "cpu" for value in values):
            # States of the host are written by copies of the device.
            torch.cuda.current_stream(self._device).synchronize()
        # What the allocator keeps is for the steps. One block for all: two thousand take a second to get.
        room = torch.cuda.mem_get_info(self._device)[0] - _RESERVE if is_cuda else 0
        order = sorted(range(len(values)), key=lambda index: not values[index].is_cuda)
        ordered = [values[index] for index in order]
        ends = list(itertools.accumulate(map(_aligned, ordered)))
        count = min(sum(value.is_cuda for value in values), bisect.bisect_right(ends, room))
        memory = torch.empty(ends[count - 1] if count else 0, dtype=torch.uint8, device=self._device)
        on_host = ordered[count:]
        filled = [*_filled(memory, ordered[:count]), *_filled(self._host_memory(on_host), on_host)]
        copies = iter([copy for _, copy in sorted(zip(order, filled, strict=True), key=lambda pair: pair[0])])
        event = None
        if is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        blocks = [
            (file, [(name, box, next(copies)) for name, box, _ in file_blocks]) for file, file_blocks in save.blocks
        ]
        return replace(save, blocks=blocks), event

    def _host_memory(self, values: Sequence[Tensor]) -> Tensor:
        """Returns memory of the host, which the next save takes again."""
        count = sum(map(_aligned, values))
        if self._memory.nbytes < count:
            self._memory = torch.empty(0, dtype=torch.uint8)  # given back first
            self._memory = (
                registered_memory(count, torch.uint8, self._device)
                if self._device.type == "cuda"
                else torch.empty(count, dtype=torch.uint8)
            )
        return self._memory

    def _complete(self, save: BegunSave, all_written: threading.Event, is_given_up: threading.Event) -> None:
        """Makes a save count once all ranks have written."""
        deadline = math.inf
        while not save.is_written and not all_written.wait(_PAUSE):
            if deadline == math.inf and not threading.main_thread().is_alive():
                deadline = time.monotonic() + _LAST_WAIT
            if is_given_up.is_set() or self._has_failed() or time.monotonic() > deadline:
                return
        save.complete()


def _aligned(value: Tensor) -> int:
    """Returns the bytes that a copy takes."""
    return math.ceil(value.nbytes / _ALIGNMENT) * _ALIGNMENT


def _filled(memory: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies of tensors, one after the other in memory."""
    sizes = [_aligned(value) for value in values]
    parts = zip(values, memory[: sum(sizes)].split(sizes) if sizes else (), strict=True)
    copies = [(value, part[: value.nbytes].view(value.dtype).view(value.shape)) for value, part in parts]
    return [copy.copy_(value, non_blocking=True) for value, copy in copies]


def _write(save: BegunSave, event: torch.cuda.Event | None, stream: torch.cuda.Stream | None) -> None:
    if event is not None:
        event.synchronize()
    try:
        # Not on the stream of the steps, which would wait for each of these copies to the host.
        with torch.cuda.stream(stream):
            save.write()
    except CheckpointError as error:
        # The training may end before anybody waits for the save.
        warnings.warn(f"an asynchronous save failed: {error}", RuntimeWarning, stacklevel=1)
        raise
