"""What ranks write into is zeroed before any of them may write there."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fxpar.peer_memory.runtime import device
from fxpar.peer_memory.runtime.device import GpuSymmetricBuffer


def test_memory_is_zeroed_on_the_device_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is busy zeroes late: what another rank raised there until then would be lost."""
    seen: list[str] = []

    class Memory(Tensor):
        def zero_(self) -> Tensor:
            seen.append("zero")
            return self

    def get_buffer(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), rank, dtype=dtype)

    def rendezvous(local: Tensor, group: str) -> SimpleNamespace:
        seen.append("meet")
        return SimpleNamespace(get_buffer=get_buffer)

    empty = lambda size, dtype, device: torch.empty(size, dtype=dtype).as_subclass(Memory)  # noqa: E731
    monkeypatch.setattr(device, "symmetric", SimpleNamespace(empty=empty, rendezvous=rendezvous))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    buffer = GpuSymmetricBuffer(rank=0, size=2, buffers=1, device=torch.device("cpu"), group="g")
    areas = buffer._create(16)
    assert seen == ["zero", "synchronize", "meet"]
    assert [int(area[0]) for area in areas] == [0, 1]
