"""What the author's modules have in attributes that are no plain values: configurations, lists, tensors without a name.

Enters: the modules of a parallel model. Leaves: an error that names what was changed behind the programs' back: a write
to `model.config.use_cache` is none to the module, so that nobody sees it until the next call.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import chain
from operator import attrgetter, is_
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.errors import InputError
from fxpar.runtime.writes import RECORD, is_same

_LEAVES = (bool, int, float, complex, str, bytes, type(None), type, Enum, PurePath)
_TORCH_LEAVES = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_PLAIN = (*_LEAVES, *_TORCH_LEAVES, *_FUNCTIONS)
_VERSION = attrgetter("_version")


class Settings:
    """The settings of a model's modules as they were when it was made.

    Settings are what consists of plain values alone, and is not empty: a configuration, a list of window sizes. What
    has something else in it (a tokenizer, a logger), or nothing yet (a history), may change from call to call.

    Args:
        root: the model; its modules have their records.
        authors: its own attributes that are the author's.
    """

    def __init__(self, root: nn.Module, authors: Mapping[str, Any]) -> None:
        named = {id(t) for t in chain(root.parameters(), root.buffers())}
        self._boxes: dict[int, tuple[str, Any]] = {}
        self._tensors: dict[str, Tensor] = {}
        for path, module in root.named_modules():
            for name, value in (vars(module)[RECORD].settings if path else authors).items():
                place = f"{path}.{name}".lstrip(".")
                if isinstance(value, Tensor) and id(value) not in named and not isinstance(value, nn.Parameter):
                    self._tensors[place] = value
                elif not isinstance(value, _PLAIN) and id(value) not in self._boxes:
                    self._boxes |= _boxes(place, value) or {}
        self._look()

    def _look(self) -> None:
        self._views = [_values(box) for _, box in self._boxes.values()]
        self._sizes = list(map(len, self._views))
        self._entries = list(chain.from_iterable(self._views))
        self._versions = list(map(_VERSION, self._tensors.values()))

    def check(self) -> None:
        """Compares them with what they were.

        Raises:
            InputError: one is another.
        """
        # In one call each: a loop over the entries is a part of a replay.
        if not (
            list(map(len, self._views)) == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._entries))
            and list(map(_VERSION, self._tensors.values())) == self._versions
        ):
            self._compare()

    def _compare(self) -> None:
        before = iter(self._entries)
        for (place, box), size in zip(self._boxes.values(), self._sizes, strict=True):
            entries = [next(before) for _ in range(size)]
            now = list(_values(box))
            names = [*_names(box), *range(len(now), size)]
            odd = [name for name, *pair in zip(names, entries, now, strict=False) if not is_same(*pair)]
            odd += names[min(size, len(now)) :]
            if odd:
                _refuse(f"{place}.{odd[0]}" if _has_attributes(box) else f"{place}[{odd[0]!r}]")
        for (place, tensor), version in zip(self._tensors.items(), self._versions, strict=True):
            if tensor._version != version:
                _refuse(place)
        self._look()


def _boxes(place: str, value: Any) -> dict[int, tuple[str, Any]] | None:
    """What holds values in a value, itself first; None where there is something besides settings, or nothing."""
    boxes: dict[int, tuple[str, Any]] = {}
    pending, has_leaf = [(place, value)], False
    while pending:
        place, value = pending.pop()
        if isinstance(value, _PLAIN):
            has_leaf = True
        elif id(value) not in boxes:
            if isinstance(value, (Tensor, nn.Module)) or not (_is_container(value) or _has_attributes(value)):
                return None
            boxes[id(value)] = (place, value)
            sign = ".{}" if _has_attributes(value) else "[{!r}]"
            pending += [(place + sign.format(n), v) for n, v in zip(_names(value), _values(value), strict=True)]
    lasting = {key: box for key, box in boxes.items() if not isinstance(box[1], (tuple, frozenset))}
    return lasting if has_leaf else None


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, set, frozenset, deque))


def _has_attributes(value: Any) -> bool:
    return not _is_container(value) and isinstance(getattr(value, "__dict__", None), dict)


def _values(value: Any) -> Any:
    """A view of the values: as long as they are, and iterated anew each time."""
    if _has_attributes(value):
        value = vars(value)
    return value.values() if isinstance(value, Mapping) else value


def _names(value: Any) -> Iterable[Any]:
    if _has_attributes(value):
        value = vars(value)
    return list(value) if isinstance(value, Mapping) else list(range(len(value)))


def _refuse(place: str) -> None:
    raise InputError(
        "was changed after parallelize: the programs are compiled, and do not see it",
        where=place,
        remedy="change it before, or put it back; what changes from call to call can be an argument of the model",
    )
