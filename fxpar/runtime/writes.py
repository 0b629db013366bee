"""What may be written to the modules of a parallel model: what a program sees, and what no code of the author's reads.

Enters: a write to an attribute, or to the table of a module's parameters, buffers or submodules. Leaves: an error that
names it, where the programs, which are compiled, would not see the new value.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import nn

from fxpar.errors import InputError
from fxpar.runtime.classes import original_of

# Under which a module has its record.
RECORD = "_fxpar"
TABLES = ("_parameters", "_buffers", "_modules")
# Names that every module's class has, and those of the attributes that a constructor makes.
_OF_ALL = frozenset(dir(nn.Module))
BOOKKEEPING = frozenset(vars(nn.Module()))
# What of it may be set: modes, which each call looks at, and hooks, of which none is called.
FREE = BOOKKEEPING - set(TABLES)
_PLAIN = (bool, int, float, str, type(None))
_MISSING = object()
_COMPILED = "the programs are compiled, and would not see it"
_BEFORE = "change the model before parallelize; pass what changes from call to call as an argument"


class Table(dict[str, Any]):
    """The parameters, buffers or submodules of a module of a parallel model, which stay what they are.

    Args:
        entries: by name.
        path: the module's name.
        elsewhere: what stands for an entry of None: parameters that other ranks hold.
        exchanged: whether another object may take an entry's place, as of buffers, which each call looks at.
    """

    def __init__(
        self, entries: Mapping[str, Any], path: str, elsewhere: Mapping[str, Any], exchanged: bool = False
    ) -> None:
        super().__init__(entries)
        self._path, self._elsewhere, self._exchanged = path, elsewhere, exchanged

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self or not (self._exchanged or value is self._elsewhere.get(name, self[name])):
            self._refuse(name)
        if self._exchanged:
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> NoReturn:
        self._refuse(name)

    def pop(self, name: str, *default: Any) -> NoReturn:
        """Refused, as all that changes what a module has."""
        self._refuse(name)

    def popitem(self) -> NoReturn:
        """Refused, as `pop`."""
        self._refuse("*")

    def clear(self) -> NoReturn:
        """Refused, as `pop`."""
        self._refuse("*")

    def update(self, *entries: Any, **named: Any) -> None:
        """Sets entries one by one."""
        for name, value in dict(*entries, **named).items():
            self[name] = value

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Returns an entry; one that is not there is refused."""
        return self[name] if name in self else self._refuse(name)

    def __ior__(self, other: Any) -> Table:  # type: ignore[override,misc]
        self.update(other)
        return self

    def _refuse(self, name: str) -> NoReturn:
        where = f"{self._path}.{name}".lstrip(".")
        reason = f"cannot be added, removed or replaced: {_COMPILED}"
        raise InputError(reason, where=where, remedy=_BEFORE)


@dataclass(frozen=True)
class Record:
    """What is known of a module of a parallel model.

    Attributes:
        path: its name; empty for the model itself.
        author: the author's class.
        settings: the author's attributes.
        ours: names of attributes that are fxpar's, and go before the author's.
        elsewhere: the module's parameters that other ranks of the pipeline hold.
        device: on which programs run.
    """

    path: str
    author: type
    settings: Mapping[str, Any]
    ours: frozenset[str]
    elsewhere: Mapping[str, nn.Parameter]
    device: torch.device

    def check(self, name: str, value: Any) -> None:
        """Refuses a write to an attribute that the author's code reads, where no program would see it."""
        default = inspect.getattr_static(self.author, name, _MISSING)
        if name in self.settings:
            allowed = is_same(self.settings[name], value)
        elif default is _MISSING:
            allowed = not _asks_for(self.author, name)
        elif inspect.isdatadescriptor(default):
            allowed = name != "__class__"  # a setter writes attributes, and these are judged
        else:
            allowed = is_same(default, value) or (name in _OF_ALL and name != "forward")
        if not allowed:
            self.refuse(name)

    def refuse(self, name: str) -> NoReturn:
        """Refuses a write."""
        where = f"{self.path}.{name} = …".lstrip(".")
        raise InputError(f"cannot be changed: {_COMPILED}", where=where, remedy=_BEFORE)


def is_same(before: Any, after: Any) -> bool:
    """Whether a value is another's equal for the programs that were compiled of that."""
    return before is after or (isinstance(before, _PLAIN) and type(before) is type(after) and bool(before == after))


def _asks_for(author: type, name: str) -> bool:
    """Whether a class's code asks whether there is an attribute of the name: `getattr(self, "scale", 1.0)`."""
    methods = [value for cls in author.__mro__ if cls not in nn.Module.__mro__ for value in vars(cls).values()]
    functions = [getattr(value, "__func__", None) or getattr(value, "fget", None) or value for value in methods]
    pending = [inspect.unwrap(value).__code__ for value in functions if inspect.isfunction(value)]
    while pending:
        code = pending.pop()
        if name in code.co_consts:
            return True
        pending += [item for item in code.co_consts if isinstance(item, CodeType)]
    return False


def names_of(root: type) -> frozenset[str]:
    """Names of what a class of ours has and modules have not, the author's class behind it aside."""
    author = original_of(root).__mro__ if original_of(root) is not root else ()
    return frozenset(n for cls in root.__mro__[:-1] if cls not in author for n in vars(cls) if n not in _OF_ALL)


def check_free(root: nn.Module, name: str) -> None:
    """Refuses an attribute of ours whose name the author's class or modules need.

    Raises:
        InputError: it is a property of the class, or a name of a parameter, buffer or submodule.
    """
    author = original_of(type(root))
    is_property = author is not type(root) and inspect.isdatadescriptor(inspect.getattr_static(author, name, None))
    tables = (root.__dict__.get(table, {}) for table in TABLES)
    if (is_property and name not in _OF_ALL) or any(name in table for table in tables):
        raise InputError(f"the name is taken by ParallelModule.{name}", where=name, remedy="rename it in the model")
