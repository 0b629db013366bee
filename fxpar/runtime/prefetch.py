"""Batches that are on the device when the step that takes them is.

Enters: any iterable of batches. Leaves: the same batches in the same order, each of which is copied to the device while
the step before it runs.

Memory is the allocator's: what a batch lies in is used again when nobody holds the batch and all is done that was
queued on the stream to which it was handed, replays too. So a batch may be kept, and none is ever overwritten.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor

# Steps that the host may be ahead of the device: enough that the device never waits for it, and few enough that batches
# do not pile up in memory, since a replayed step takes the host no time.
_MOST_QUEUED = 2
_END = object()
_POISON = 0xFF  # NaN in every floating type


class Side(Protocol):
    """Where batches are copied alongside the steps."""

    def begin(self, value: Tensor) -> Tensor:
        """Begins to copy a tensor; gives where it will be."""

    def sent(self) -> Any:
        """Returns what has begun since the last call, the tensors of one batch."""

    def synchronize(self) -> None:
        """Waits until what was copied may change where it came from."""

    def hand_over(self, sent: Any) -> None:
        """Has all that is queued from now on find what was sent."""

    def stepped(self) -> None:
        """Notes that the steps of what was handed over are queued; waits for one of those before."""


class _CudaSide:
    """A stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._begun: list[Tensor] = []
        # Pinned tensors of the source's that are being read, and until when.
        self._read: list[Tensor] = []
        self._until = torch.cuda.Event()
        self._queued: deque[torch.cuda.Event] = deque()

    def begin(self, value: Tensor) -> Tensor:
        if value.device.type != "cpu":
            # What made it is on the stream of the steps, and so is what will overwrite it, if anything does.
            return value.to(self._device, copy=True)
        host = value.contiguous()
        if host.is_pinned():
            self._read.append(host)
        else:
            host = host.pin_memory()  # a copy, in memory of a cache that knows until when it is read
        with torch.cuda.stream(self._stream):
            there = host.to(self._device, non_blocking=True)
        self._begun.append(there)
        return there

    def sent(self) -> tuple[torch.cuda.Event, list[Tensor]]:
        self._until = torch.cuda.Event()
        self._until.record(self._stream)
        begun, self._begun = self._begun, []
        return self._until, begun

    def synchronize(self) -> None:
        if self._read:
            self._until.synchronize()  # it began one step ago, and waits for no step
            self._read.clear()

    def hand_over(self, sent: tuple[torch.cuda.Event, list[Tensor]]) -> None:
        event, tensors = sent
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)

    def stepped(self) -> None:
        event = torch.cuda.Event(blocking=True)  # the host sleeps, and leaves the CPU to who makes batches
        event.record(torch.cuda.current_stream(self._device))
        self._queued.append(event)
        if len(self._queued) > _MOST_QUEUED:
            self._queued.popleft().synchronize()


@dataclass
class _Late:
    """A copy that has begun: where it goes, and what it reads."""

    there: Tensor
    value: Tensor


class _StandInSide:
    """Copies that read as late as they may, and arrive as late as they may."""

    def __init__(self) -> None:
        self._begun: list[_Late] = []
        self._unread: list[_Late] = []

    def begin(self, value: Tensor) -> Tensor:
        there = torch.empty_like(value, memory_format=torch.contiguous_format)
        poison(there)
        self._begun.append(_Late(there, value))
        return there

    def sent(self) -> list[_Late]:
        begun, self._begun = self._begun, []
        self._unread += begun
        return begun

    def synchronize(self) -> None:
        for late in self._unread:
            late.value = late.value.clone()
        self._unread.clear()

    def hand_over(self, sent: list[_Late]) -> None:
        for late in sent:
            late.there.copy_(late.value)

    def stepped(self) -> None:
        pass


def poison(value: Tensor) -> None:
    """Fills a tensor's storage with NaN, or with numbers that are no index."""
    storage_bytes(value).fill_(_POISON)


def storage_bytes(value: Tensor) -> Tensor:
    """Returns all of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


class Prefetched:
    """Batches, copied ahead. Made by `fxpar.prefetch`; each iteration is one of the source."""

    def __init__(self, batches: Iterable[Any], device: torch.device, is_graphed: bool) -> None:
        self._batches, self._device, self._is_graphed = batches, device, is_graphed

    def __len__(self) -> int:
        """Returns the length of the source; a `TypeError` where it has none."""
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches."""
        source = iter(self._batches)
        if self._device.type == "cuda":
            return _ahead(source, _CudaSide(self._device))
        return _ahead(source, _StandInSide()) if self._is_graphed else source


def _ahead(source: Iterator[Any], side: Side) -> Iterator[Any]:
    """Yields batches, each of which is handed over when the copy of the next one has begun."""
    present = _read(source, side)
    while present is not None:
        (batch, sent), following = present, None
        try:
            following = _read(source, side)
        except (KeyboardInterrupt, SystemExit):
            present = None
            raise
        finally:
            # An error of the source's is one of the following batch, and is raised where that is asked for.
            if present is not None:
                side.hand_over(sent)
                yield batch
                side.stepped()
        present = following


def _read(source: Iterator[Any], side: Side) -> tuple[Any, Any] | None:
    """Returns the next batch, whose copy has begun, and what was sent of it; None at the end."""
    side.synchronize()
    batch = next(source, _END)
    if batch is _END:
        return None
    with torch.inference_mode(False):  # a batch may be read ahead in an evaluation, and trained on after it
        return _moved(batch, side.begin, {}), side.sent()


def _moved(batch: Any, move: Callable[[Tensor], Tensor], known: dict[int, Tensor]) -> Any:
    """Returns a nest of the same kinds with other tensors; one that is in it twice is moved once."""

    def one(value: Any) -> Any:
        if isinstance(value, Mapping):
            items = {key: _moved(entry, move, known) for key, entry in value.items()}
            if type(value) is dict or not isinstance(value, MutableMapping):
                return items
            moved = copy.copy(value)  # a BatchEncoding stays one
            for key, entry in items.items():
                moved[key] = entry
            return moved
        if not isinstance(value, Tensor) or value.requires_grad or value.layout is not torch.strided or value.is_meta:
            return value  # with what no batch may hold, the call has its own words
        if id(value) not in known:
            known[id(value)] = move(value)
        return known[id(value)]

    return pytree.tree_map(one, batch, is_leaf=lambda value: isinstance(value, Mapping))
