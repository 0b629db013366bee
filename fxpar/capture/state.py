"""State that a model keeps by assignment, which a trace would freeze or carry off (DESIGN section 9).

Enters: a model that is about to be traced. Leaves: the model with the attributes that it had, or an error that names
the attribute whose next value would be lost.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Set
from typing import Any, NoReturn

import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.errors import CaptureError

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
    """Whether a buffer was assigned what could have been written into it: nothing else has the one or the other.

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
