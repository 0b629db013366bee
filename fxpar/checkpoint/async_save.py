"""Writes a save while the training goes on.

Enters: a save whose files are there without values. Its tensors are copied to memory of the host, in the order of the
stream on which steps run: what a later step writes cannot be in them. Leaves: the save, written by a thread of its own
that communicates with no rank. Rank 0's makes it count as soon as it sees the documents of all ranks.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable
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


class AsyncSaver:
    """Writes the saves of one module, one after the other.

    Args:
        device: of the module.
        has_failed: tells whether the ranks cannot go on: then no save is completed any more.
    """

    def __init__(self, device: torch.device, has_failed: Callable[[], bool]) -> None:
        self._device, self._has_failed = device, has_failed
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
        self._writing = self._executor.submit(_write, copied, event)
        if save.rank == 0:
            self._completing = self._executor.submit(self._complete, copied, self._all_written, self._is_given_up)
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
        """Returns a save whose values lie in memory of the host, and when they do."""
        values = [block for _, blocks in save.blocks for _, _, block in blocks]
        sizes = [math.ceil(value.nbytes / _ALIGNMENT) * _ALIGNMENT for value in values]
        is_cuda = self._device.type == "cuda"
        if self._memory.nbytes < sum(sizes):
            self._memory = torch.empty(0, dtype=torch.uint8)  # given back first
            count = sum(sizes)
            self._memory = (
                registered_memory(count, torch.uint8, self._device)
                if is_cuda
                else torch.empty(count, dtype=torch.uint8)
            )
        if is_cuda and any(value.device.type == "cpu" for value in values):
            # States of the host are written by copies of the device.
            torch.cuda.current_stream(self._device).synchronize()
        copies: list[Tensor] = []
        for value, memory in zip(values, self._memory[: sum(sizes)].split(sizes), strict=True):
            copy = memory[: value.nbytes].view(value.dtype).view(value.shape)
            copies.append(copy.copy_(value, non_blocking=True))
        event = None
        if is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        remaining = iter(copies)
        blocks = [
            (file, [(name, box, next(remaining)) for name, box, _ in file_blocks]) for file, file_blocks in save.blocks
        ]
        return replace(save, blocks=blocks), event

    def _complete(self, save: BegunSave, all_written: threading.Event, is_given_up: threading.Event) -> None:
        """Makes a save count once all ranks have written."""
        deadline = math.inf
        while not save.is_written and not all_written.wait(_PAUSE):
            if deadline == math.inf and not threading.main_thread().is_alive():
                deadline = time.monotonic() + _LAST_WAIT
            if is_given_up.is_set() or self._has_failed() or time.monotonic() > deadline:
                return
        save.complete()


def _write(save: BegunSave, event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
    try:
        save.write()
    except CheckpointError as error:
        # The training may end before anybody waits for the save.
        warnings.warn(f"an asynchronous save failed: {error}", RuntimeWarning, stacklevel=1)
        raise
