"""What a forward remembers outside of its module: a trace must neither fill it nor take from it what a call computes.

Enters: a model about to be traced. Leaves: the author's process as it was: globals, attributes of classes, functions
and objects, closures and containers that its code can name hold what they held, and memoised functions
(`functools.lru_cache`) have forgotten nothing and learnt nothing.
"""

from __future__ import annotations

import array
import contextlib
import functools
import gc
import inspect
import io
import itertools
import operator
import queue
import random
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextvars import ContextVar
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.capture.places import is_own
from fxpar.errors import CaptureError
from fxpar.torch_internals import FakeTensor

# State that a model keeps by assignment, which a trace would freeze or carry off (DESIGN section 9).

# Exact types: a class derived from one of them may not be emptied and filled without consequences.
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_ASSIGNED_CONTAINERS = (*_MAPPINGS, list, set, deque)
_KEPT = frozenset({*_ASSIGNED_CONTAINERS, tuple})
_PLAIN_NUMBERS = (bool, int, float, complex, str)
_MISSING = object()


class State:
    """The attributes of a model's modules with the contents of their lists, dicts and sets, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, module, dict(vars(module))) for name, module in model.named_modules()]
        self._tensors = [
            (name, kind, store, dict(store))
            for name, module in model.named_modules()
            for kind, store in (("buffer", module._buffers), ("parameter", module._parameters))
        ]
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._names: dict[int, str] = {}
        for name, module, attributes in self._modules:
            for cls in type(module).__mro__:
                if not cls.__module__.startswith("torch."):
                    self._keep_all(vars(cls), name)
            self._keep_all(attributes, name)

    def _keep_all(self, attributes: Mapping[str, Any], name: str) -> None:
        for key, value in attributes.items():
            if type(value) in _KEPT:  # few are, and each module of a model is asked
                self._keep(value, f"{name}.{key}")

    def _keep(self, value: Any, name: str) -> None:
        pending = [(value, name)]
        while pending:
            value, name = pending.pop()
            if id(value) in self._kept:
                continue
            # A tuple is kept too: it holds what must stay alive for the identities to mean something.
            self._kept[id(value)] = (value, value if type(value) is tuple else type(value).copy(value))
            self._names[id(value)] = name
            inner = value.items() if type(value) in _MAPPINGS else enumerate(value)
            pending += [(item, f"{name}[{key!r}]") for key, item in inner if type(item) in _KEPT]

    def restore(self) -> None:
        """Puts back attributes and contents, in the containers that held them."""
        for _, module, attributes in self._modules:
            vars(module).clear()
            vars(module).update(attributes)
        for value, entries in self._kept.values():
            if type(value) is list:
                value[:] = entries
            elif type(value) is deque:
                value.clear()
                value.extend(entries)
            elif type(value) is not tuple:
                value.clear()
                value.update(entries)

    def check(self, prefix: str, read: Set[int]) -> None:
        """Refuses a forward that has given another value to what the model already had.

        What it has made anew (no attribute before, or None) is a cache.

        Args:
            prefix: what module paths begin with besides the author's names.
            read: identities of the tensors that the forward has used: an attribute that it only writes tells the next
                call nothing.

        Raises:
            CaptureError: names the buffer, parameter or attribute.
        """
        holders = Counter(id(old) for *_, before in self._tensors for old in before.values() if old is not None)
        for path, kind, store, before in self._tensors:
            for name, old in before.items():
                new = store.get(name)
                if old is None or new is old or (kind == "buffer" and _is_new_value(old, new, holders)):
                    continue
                _refuse(f"changes this {kind}", f"{path}.{name}", prefix)
        for path, module, before in self._modules:
            now = vars(module)
            for name in before.keys() | now.keys():
                new = now.get(name, _MISSING)
                if before.get(name, _MISSING) is new:
                    continue
                old = _old(module, before, name)
                if _is_changed(old, new, _PLAIN_NUMBERS) or (id(old) in read and _is_changed(old, new, (Tensor,))):
                    _refuse("changes this attribute", f"{path}.{name}", prefix)
        for key, (value, before) in self._kept.items():
            # A tensor in a dict may be a cache that is filled anew.
            for entry in before if type(value) in _MAPPINGS else ():
                if _is_changed(before[entry], value.get(entry, _MISSING), _PLAIN_NUMBERS):
                    _refuse("changes this entry", f"{self._names[key]}[{entry!r}]", prefix)


def _is_new_value(old: Tensor, new: Any, holders: Mapping[int, int]) -> bool:
    """Returns whether a buffer was assigned what could have been written into it: nothing else has either.

    Args:
        holders: how many names of the model each of its tensors has, by identity.
    """
    is_alike = isinstance(new, Tensor) and (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)
    return is_alike and holders[id(old)] == 1 and not holders.get(id(new))


def _old(module: nn.Module, attributes: Mapping[str, Any], name: str) -> Any:
    return attributes[name] if name in attributes else inspect.getattr_static(type(module), name, _MISSING)


def check_assignment(root: nn.Module, module: nn.Module, name: str, new: Any, prefix: str) -> None:
    """Refuses one assignment that has been seen and not been carried out; otherwise as `State.check`.

    Args:
        new: the value, or any other object where it is not known.

    Raises:
        CaptureError: names the buffer, parameter or attribute.
    """
    where = next((f"{path}.{name}" for path, submodule in root.named_modules() if submodule is module), name)
    for kind, store in (("buffer", module._buffers), ("parameter", module._parameters)):
        if store.get(name) is not None and store[name] is not new:
            _refuse(f"changes this {kind}", where, prefix)
    if _is_changed(_old(module, vars(module), name), new, (*_PLAIN_NUMBERS, Tensor)):
        _refuse("changes this attribute", where, prefix)


def _is_changed(old: Any, new: Any, kinds: tuple[type, ...]) -> bool:
    if new is old or not isinstance(old, kinds):
        return False
    # A symbolic size is not compared: that would make it a constant.
    return not (isinstance(old, _PLAIN_NUMBERS) and type(new) in _PLAIN_NUMBERS and bool(new == old))


def _refuse(what: str, name: str, prefix: str) -> NoReturn:
    raise CaptureError(
        f"the forward {what}, so that each call depends on the one before",
        where=name.removeprefix(".").removeprefix(prefix),
        remedy="pass it as an argument, compute it in each call, or update it outside of the forward",
    )


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Puts back the attributes that a traced forward assigns: a trace must leave neither counts nor fake tensors."""
    state = State(model)
    try:
        yield
    finally:
        state.restore()


@contextlib.contextmanager
def watched(module: nn.Module, prefix: str, read: set[int]) -> Iterator[None]:
    """Checks the state at the end of each call: later an export has put its own tensors out of the model.

    Args:
        prefix: what module paths begin with besides the author's names.
        read: identities of the tensors that functions were called with, filled meanwhile.

    Raises:
        CaptureError: in the call, as `State.check`.
    """
    states: list[State] = []

    def begin(module: nn.Module, args: Any) -> None:
        states.append(State(module))

    def end(module: nn.Module, args: Any, outputs: Any) -> None:
        states.pop().check(prefix, read | {id(value) for value in pytree.tree_leaves(outputs)})

    handles = [module.register_forward_pre_hook(begin, prepend=True), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_EVER_MISSING = itertools.repeat(_MISSING)
_PLAIN = (Tensor, str, bytes, int, float, complex, bool, type(None), types.ModuleType, types.BuiltinFunctionType)
_Memo = type(functools.lru_cache(lambda: None))
# Classes of the standard library that keep what they are given in attributes.
_HOLDERS = (
    types.SimpleNamespace,
    UserDict,
    UserList,
    threading.local,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
)
# What may change without a name that holds another object.
_OPAQUE = (bytearray, array.array, np.ndarray, random.Random, queue.Queue, io.IOBase)
_CONTAINERS = (OrderedDict, defaultdict, dict, list, set, deque)


class PythonState:
    """What the author's code can name, as it is now.

    The code is that of `forward` and of the functions that it names, by global names and by attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {"forward"}
        self._seen: dict[int, Any] = {}  # kept, so that identities stay theirs
        self._own: dict[type, bool] = {}
        self._globals: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._objects: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._cells: dict[int, tuple[Any, Any]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._slotted: dict[int, tuple[Any, list[tuple[Any, Any]]]] = {}
        # Classes, of whose attributes those that some function names are of interest.
        self._open: list[tuple[Any, set[str]]] = []
        pending: list[Any] = list(model.modules())
        while pending:
            while pending:
                value = pending.pop()
                if id(value) not in self._seen and not isinstance(value, _PLAIN):
                    self._seen[id(value)] = value
                    pending += self._inside(value)
            for attributes, done in self._open:
                new = (attributes.keys() & self._names) - done
                done |= new
                pending += [attributes[name] for name in new]
        of_context = [value for value in self._seen.values() if isinstance(value, ContextVar)]
        self._variables = [(variable, variable.get(_MISSING)) for variable in of_context]

    def _inside(self, value: Any) -> Iterator[Any]:
        if isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, _Memo):
            yield value.__wrapped__
        elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
            yield value.__func__
            yield getattr(value, "__self__", None)
        elif isinstance(value, property):
            yield value.fget
        elif isinstance(value, (functools.partial, functools.cached_property)):
            yield value.func
        elif isinstance(value, type):
            yield from self._class(value)
        elif type(value) in _CONTAINERS:
            yield from self._container(value)
        elif type(value) is tuple:
            yield from value
        elif isinstance(value, (nn.Module, *_HOLDERS)) or self._is_own(type(value)):
            yield type(value)
            if isinstance(value, (dict, list, set, deque)):
                yield from self._container(value)
            if hasattr(value, "__dict__"):
                self._objects[id(value)] = (value, dict(vars(value)))
                yield from vars(value).values()
            slots = [(slot, _slot(slot, value)) for slot in _slots(type(value))]
            if slots:
                self._slotted[id(value)] = (value, slots)
                yield from (content for _, content in slots)

    def _container(self, value: Any) -> list[Any]:
        """Returns contents as they are kept: a class may make something else of them when it is asked."""
        entries = dict(_base(value).items(value)) if isinstance(value, dict) else list(_base(value).__iter__(value))
        self._containers[id(value)] = (value, entries)
        return list(entries.values()) if isinstance(entries, dict) else entries

    def _function(self, value: types.FunctionType) -> Iterator[Any]:
        if not is_own(value.__code__.co_filename):
            return
        names = _names_in(value.__code__)
        self._names |= names
        for cell in value.__closure__ or ():
            self._cells[id(cell)] = (cell, _contents(cell))
            yield _contents(cell)
        yield from self._named(value.__globals__, names)
        for module in [value.__globals__.get(name) for name in names]:
            if isinstance(module, types.ModuleType) and is_own(getattr(module, "__file__", None) or ""):
                yield from self._named(vars(module), names)
        self._objects[id(value)] = (value, dict(vars(value)))
        yield from vars(value).values()

    def _named(self, space: dict[str, Any], names: frozenset[str]) -> Iterator[Any]:
        """Yields what stands under names in which no function before asked for it."""
        saved = self._globals.setdefault(id(space), (space, {}))[1]
        for name in names - saved.keys():
            saved[name] = space.get(name, _MISSING)
            yield saved[name]

    def _class(self, value: type) -> Iterator[Any]:
        if type(value) is not type and self._is_own(type(value)):
            yield type(value)
        for cls in value.__mro__:
            if self._is_own(cls) and id(cls) not in self._objects:
                self._objects[id(cls)] = (cls, dict(vars(cls)))
                special = {name for name in vars(cls) if name.startswith("__")}  # which operators call
                self._open.append((vars(cls), special))
                yield from [vars(cls)[name] for name in special]

    def _is_own(self, cls: type) -> bool:
        if cls not in self._own:
            self._own[cls] = is_own(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")
        return self._own[cls]

    def restore(self) -> None:
        """Puts back what held another value or held none."""
        for space, saved in self._globals.values():
            for name, before in saved.items():
                if space.get(name, _MISSING) is before:
                    continue
                if before is _MISSING:
                    del space[name]
                else:
                    space[name] = before
        for owner, attributes in self._objects.values():
            _undo_attributes(owner, attributes)
        for owner, slots in self._slotted.values():
            _undo_slots(owner, slots)
        for cell, before in self._cells.values():
            if _contents(cell) is before:
                continue
            if before is _MISSING:
                del cell.cell_contents
            else:
                cell.cell_contents = before
        for value, entries in self._containers.values():
            _undo(value, entries)

    @property
    def is_opaque(self) -> bool:
        """Returns whether there is something among it that can change and does not show it."""
        return any(isinstance(value, _OPAQUE) or hasattr(type(value), "__next__") for value in self._seen.values())

    def knows(self, modules: Mapping[int, nn.Module]) -> bool:
        """Returns whether the code can find one of some modules: which one it has itself may then matter."""
        keys = [key for _, entries in self._containers.values() for key in entries]
        named = [value() if isinstance(value, weakref.ref) else value for value in (*self._seen.values(), *keys)]
        return any((value if isinstance(value, int) else id(value)) in modules for value in named)

    def is_unchanged(self) -> bool:
        """Returns whether everything holds, as the same objects, what it held."""
        # Asked after each layer of a model, of thousands of names: what loops does it in one call.
        return (
            all(_all_are(map(space.get, saved, _EVER_MISSING), saved) for space, saved in self._globals.values())
            # Most of these are functions without attributes.
            and all(_same_entries(vars(o), saved) if saved else not vars(o) for o, saved in self._objects.values())
            and all(_slot(s, owner) is value for owner, slots in self._slotted.values() for s, value in slots)
            and all(_contents(cell) is before for cell, before in self._cells.values())
            and all(_holds(value, entries) for value, entries in self._containers.values())
            and all(variable.get(_MISSING) is before for variable, before in self._variables)
        )

    def replace_memos(self, new: Callable[[Any], Any]) -> None:
        """Puts something else in the place of memoised functions."""
        for space, saved in self._globals.values():
            for name, value in saved.items():
                if _is_memo(value):
                    space[name] = new(value)
        for owner, attributes in self._objects.values():
            for name, value in attributes.items():
                if _is_memo(value):
                    setattr(owner, name, new(value))


def _is_memo(value: Any) -> bool:
    if not isinstance(value, _Memo):
        return False
    function = value.__wrapped__
    # The symbols of a trace remember a great deal, and nothing of the author's.
    is_symbols = str(getattr(function, "__module__", "")).startswith("sympy.")
    return not is_symbols and is_own(str(getattr(getattr(function, "__code__", None), "co_filename", "")))


def _undo_attributes(owner: Any, before: dict[str, Any]) -> None:
    now = vars(owner)
    for name in now.keys() - before.keys():
        if not name.startswith("__") and not isinstance(now[name], types.ModuleType):
            delattr(owner, name)
    for name, value in before.items():
        if now.get(name, _MISSING) is not value:
            setattr(owner, name, value)


def _slots(cls: type) -> list[Any]:
    """Returns what objects of a class have without a dictionary, as the descriptors that read and write it."""
    bases = [base for base in cls.__mro__ if "__slots__" in vars(base)]
    return [slot for base in bases for slot in vars(base).values() if isinstance(slot, types.MemberDescriptorType)]


def _slot(slot: Any, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:  # an empty one
        return _MISSING


def _undo_slots(owner: Any, before: list[tuple[Any, Any]]) -> None:
    for slot, value in before:
        if _slot(slot, owner) is value:
            continue
        if value is _MISSING:
            slot.__delete__(owner)
        else:
            slot.__set__(owner, value)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty one
        return _MISSING


@functools.lru_cache(maxsize=1 << 16)
def _names_in(code: types.CodeType) -> frozenset[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
        elif isinstance(constant, str):  # of getattr and hasattr
            names.add(constant)
    return frozenset(names)


def _base(value: Any) -> Any:
    """Returns the builtin class of a container."""
    return next(cls for cls in _CONTAINERS if isinstance(value, cls))


def _same_entries(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    return len(now) == len(before) and _all_are(map(now.get, before, _EVER_MISSING), before)


def _all_are(values: Iterable[Any], saved: Mapping[Any, Any]) -> bool:
    """Returns whether the values are, as objects, those that are held."""
    return all(map(operator.is_, values, saved.values()))


def _holds(value: Any, entries: Any) -> bool:
    """Returns whether a container holds the entries, and no others."""
    is_plain = type(value) in _CONTAINERS  # and no class of the author's, which may answer otherwise
    if isinstance(value, dict):
        return _same_entries(value if is_plain else dict(_base(value).items(value)), entries)
    now = value if is_plain else list(_base(value).__iter__(value))
    return len(now) == len(entries) and all(map(operator.is_, now, entries))


def _undo(value: Any, entries: Any) -> None:
    """Takes out what was added and puts back what was replaced, each entry by itself."""
    base = _base(value)
    if isinstance(value, dict):
        for key in [key for key in base.keys(value) if key not in entries]:
            base.__delitem__(value, key)
        for key, entry in entries.items():
            if base.get(value, key, _MISSING) is not entry:
                base.__setitem__(value, key, entry)
    elif isinstance(value, set):
        base.difference_update(value, base.difference(value, entries))
        base.update(value, entries)
    else:
        now = list(base.__iter__(value))
        if len(now) != len(entries) or any(a is not b for a, b in zip(now, entries, strict=True)):
            base.clear(value)
            base.extend(value, entries)


def _computed(memo: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function itself where it gives tensors; else what it remembers."""
    function = memo.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return result if any(isinstance(v, Tensor) for v in pytree.tree_leaves(result)) else memo(*args, **kwargs)

    return call


@contextlib.contextmanager
def nothing_remembered(model: nn.Module, others: OtherMemos | None = None, plain: bool = False) -> Iterator[None]:
    """Makes memoised functions compute, while active; at the end everything holds what it held before.

    Args:
        others: of the capture; None where nothing runs on fakes.
        plain: memoised functions are replaced by the very functions that they wrap, which Dynamo follows.
    """
    memory = PythonState(model)
    try:
        memory.replace_memos((lambda memo: memo.__wrapped__) if plain else _computed)
        yield
    finally:
        memory.restore()
        if others is not None:
            others.forget()


class OtherMemos:
    """Memoised functions of the whole process, which the author's code may reach in ways `PythonState` does not see.

    They are looked for at most once in a capture, after its first run, and only where there may be others than before:
    that takes as long as a small trace.
    """

    _all: list[Any] | None = None
    # Of the process: those of the last search, and how many references to the class below were none of theirs.
    _found: ClassVar[list[weakref.ref[Any]]] = []
    _rest: ClassVar[int] = -1

    def forget(self) -> None:
        """Empties those that hold what a trace made."""
        if self._all is None:
            self._all = [value for value in self._present() if _is_memo(value)]
        for value in self._all:
            if value.cache_info().currsize and _holds_fakes(value):
                value.cache_clear()

    @classmethod
    def _present(cls) -> list[Any]:
        """Returns all that there are. Each refers once to the class of what `cache_info` gives, which counts them."""
        info = type(functools.lru_cache(lambda: None).cache_info())
        memos = [value for value in (reference() for reference in cls._found) if value is not None]
        if sys.getrefcount(info) - len(memos) != cls._rest:
            memos = [value for value in gc.get_referrers(info) if isinstance(value, _Memo)]
            cls._found = [weakref.ref(value) for value in memos]
            cls._rest = sys.getrefcount(info) - len(memos)
        return memos


def _holds_fakes(memo: Any) -> bool:
    # Its function names all globals of a module, which are nothing that it remembers.
    reached = [item for item in gc.get_referents(memo) if item is not memo.__wrapped__]
    for level in range(3):  # the table, its entries, what they hold
        if any(issubclass(kind, FakeTensor) for kind in set(map(type, reached))):
            return True
        if level < 2:
            reached = gc.get_referents(*(item for item in reached if not isinstance(item, (type, types.ModuleType))))
    return False
