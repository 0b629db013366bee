"""What the code of a layer reads of its modules: two layers that differ in nothing of it compute the same.

Enters: a layer, as the tree of its modules, and what its forward has read by name. Leaves: whether another layer of
the same classes holds equal values of all that. Parameters and buffers are compared by what a trace knows of them.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.capture import patches
from fxpar.capture.places import is_foreign_file

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device, enum.Enum)
_TENSORS = ("_parameters", "_buffers")
_EVERYTHING = "__dict__"
# What calls of a module run besides its forward; those of a layer that is not traced would not run.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def is_of_torch(cls: type) -> bool:
    """Whether a class of modules is torch's own, whose code may read any attribute."""
    return cls.__module__.startswith("torch.")


class Reads:
    """The modules of a layer, and which of their attributes were read by name while it was active.

    Attributes:
        modules: of the layer, by path inside it, each once.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.modules = dict(layer.named_modules())
        self._index = {id(module): path for path, module in self.modules.items()}
        self._read: set[tuple[str, str]] = set()

    @property
    def can_be_watched(self) -> bool:
        """Whether all reads of the author's classes go through Python's own look-up."""
        classes: set[Any] = {type(module) for module in self.modules.values()}
        usual: Any = nn.Module.__getattribute__
        return all(is_of_torch(cls) or cls.__getattribute__ is usual for cls in classes)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While active, reads are noted."""
        classes = {type(module) for module in self.modules.values() if not is_of_torch(type(module))}
        with patches.attribute_reads(classes, self._see):
            yield

    def _see(self, module: Any, name: str) -> None:
        path = self._index.get(id(module))
        if path is None or (path, name) in self._read:
            return
        # torch reads the dictionary in each look-up; the author's code may find anything in it.
        if name != _EVERYTHING or is_foreign_file(sys._getframe(2).f_code.co_filename):
            self._read.add((path, name))

    def is_equal(self, layer: nn.Module) -> bool:
        """Whether another layer has the same modules, which hold equal values of all that was read."""
        others = dict(layer.named_modules())
        if others.keys() != self.modules.keys():
            return False
        pairs = {id(mine): others[path] for path, mine in self.modules.items()}
        return all(self._is_equal_module(path, mine, others[path], pairs) for path, mine in self.modules.items())

    def _is_equal_module(self, path: str, mine: nn.Module, other: nn.Module, pairs: Mapping[int, nn.Module]) -> bool:
        before, now = vars(mine), vars(other)
        if type(mine) is not type(other) or before.keys() != now.keys():
            return False
        reads_all = is_of_torch(type(mine)) or (path, _EVERYTHING) in self._read
        for name, value in before.items():
            if name in _TENSORS:
                if [(n, t is None) for n, t in value.items()] != [(n, t is None) for n, t in now[name].items()]:
                    return False
                continue
            # The dictionaries of torch's own that it reads without asking: modules, hooks, what is saved.
            is_read = reads_all or name in _OF_TORCH or (path, name) in self._read
            if is_read and not _is_equal(value, now[name], pairs):
                return False
        return True


_OF_TORCH = frozenset(vars(nn.Module())) - set(_TENSORS)


def has_hooks(layer: nn.Module) -> bool:
    """Whether calls of the layer's modules, or gradients of its parameters, run anything besides."""
    return any(
        any(vars(module).get(kind) for kind in _HOOKS)
        or any(_has_tensor_hooks(tensor) for kind in _TENSORS for tensor in vars(module)[kind].values())
        for module in layer.modules()
    )


def _has_tensor_hooks(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _is_equal(mine: Any, other: Any, pairs: Mapping[int, nn.Module]) -> bool:
    """Whether two values are the same to code that reads them: equal constants, or modules in the same places."""
    if mine is other:
        # A module or a tensor that both hold is the same value, one of a layer's own is not.
        return id(mine) not in pairs or pairs[id(mine)] is other
    if type(mine) is not type(other):
        return False
    if isinstance(mine, nn.Module):
        return pairs.get(id(mine)) is other
    if isinstance(mine, slice):
        return _is_equal((mine.start, mine.stop, mine.step), (other.start, other.stop, other.step), pairs)
    if isinstance(mine, float):
        return repr(mine) == repr(other)  # 0.0 and -0.0 are equal, and not the same
    if isinstance(mine, _VALUES):
        return bool(mine == other)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(other) and all(_is_equal(a, b, pairs) for a, b in zip(mine, other, strict=True))
    if isinstance(mine, dict):
        keys = _is_equal(list(mine), list(other), pairs)
        return keys and all(_is_equal(mine[key], other[key], pairs) for key in mine)
    if isinstance(mine, (set, frozenset)):
        return bool(mine == other) and all(isinstance(value, _VALUES) for value in mine)
    if isinstance(mine, types.MethodType):
        return mine.__func__ is other.__func__ and _is_equal(mine.__self__, other.__self__, pairs)
    if isinstance(mine, functools.partial):
        return all(_is_equal(getattr(mine, n), getattr(other, n), pairs) for n in ("func", "args", "keywords"))
    return False
