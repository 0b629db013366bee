"""Where torch's versions differ in what a trace patches.

Enters: nothing. Leaves: the names and functions of the torch that runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint


def apply_of(cls: type, *args: Any, **kwargs: Any) -> Any:
    """`cls.apply` as torch has it, whatever stands in its place."""
    return torch._C._FunctionBase.__dict__["apply"].__get__(None, cls)(*args, **kwargs)


def owner_of_apply() -> type:
    """The class whose `apply` the calls of an autograd function reach.

    Up to torch 2.14 `Function.apply` is a `classmethod` of Python that calls its base class: so do the methods that
    were bound before, and they look the name up in each call. Later it is a descriptor in C, and what was bound before
    stays what it was.
    """
    is_python = hasattr(torch.autograd.Function.__dict__["apply"], "__func__")
    return torch.autograd.function._SingleLevelFunction if is_python else torch.autograd.Function


def checkpoint_generator() -> str:
    """The generator in `torch.utils.checkpoint` that `checkpoint` goes through, which torch 2.15 has renamed."""
    later = "_checkpoint_without_reentrant_generator_impl"
    return later if hasattr(torch.utils.checkpoint, later) else "_checkpoint_without_reentrant_generator"
