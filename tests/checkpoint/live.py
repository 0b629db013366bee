"""Counts the memory of tensors that are alive at a time: exact, whatever the allocator keeps."""

from __future__ import annotations

import weakref
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations make while the mode is active.

    Attributes:
        now: alive at this moment.
        peak: alive at most.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(t.untyped_storage()) for t in pytree.tree_leaves((args, kwargs)) if _has_memory(t)}
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if _has_memory(value):
                storage = value.untyped_storage()
                if id(storage) not in self._known and id(storage) not in before:
                    self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        size = storage.nbytes()
        self._known.add(id(storage))
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, id(storage), size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta
