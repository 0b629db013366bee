"""How operations on parts reach what is defined of them, whatever torch does with subclasses of DTensor.

Enters: the class of parts. Leaves: a context in which torch's functions run `sharded_ops` for operations on parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.state import sharded_ops
from fxpar.state.operand import is_sharded

# Before torch 2.13 operations on a DTensor go to a fast path in C++, also of a subclass that defines them by itself.
IS_DISPATCHED = TorchVersion(torch.__version__) >= "2.13"


class _Route(TorchDispatchMode):
    """Modes come before that fast path."""

    def __init__(self, wrap: sharded_ops.Wrap) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wrap = wrap

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_sharded(value) for value in pytree.tree_leaves((args, kwargs))):
            return sharded_ops.run(func, args, kwargs or {}, self._wrap)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def routed(wrap: sharded_ops.Wrap) -> Iterator[None]:
    """While active, functions of torch are called as if parts were no subclass with functions of its own.

    Args:
        wrap: makes a tensor of a part and its place.
    """
    with torch._C.DisableTorchFunctionSubclass(), contextlib.nullcontext() if IS_DISPATCHED else _Route(wrap):
        yield
