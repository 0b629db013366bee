"""Whether layers do in the eager model what the first of them did: the proof of what a trace has copied.

Enters: a model that runs on fakes, and which layer each copied one repeats. Leaves: whether the calls of each pair
computed the same: the same operators on the same tensors and constants in the same order, in the same submodules. What
code has read, or where it has found it, does not matter to that: it has run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.capture import patches

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ATOMS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


# A call of a layer: its path, and how many calls of it there were before.
Number = tuple[str, int]


@dataclass
class Observed:
    """What calls of layers did.

    Attributes:
        copied: calls that were copied, each with that which it repeats.
        calls: what each did, by path of the layer in order.
    """

    copied: Mapping[Number, Number] = field(default_factory=dict)
    calls: dict[str, list[list[Hashable]]] = field(default_factory=dict)

    @property
    def is_proven(self) -> bool:
        """Whether each copied call did what the one did that it repeats."""
        done = {(path, n): did for path, calls in self.calls.items() for n, did in enumerate(calls)}
        return all(each in done and done[each] == done.get(first) for each, first in self.copied.items())

    def watching(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """While active, what the layers do is noted."""
        if not self.copied:
            return contextlib.nullcontext()
        modules = dict(model.named_modules())
        watched = {id(modules[path]): path for pair in self.copied.items() for path, _ in pair}
        active: list[_Call] = []

        def call(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            for each in active:
                each.enters(module)
            path = watched.get(id(module))
            if path is None:
                return original(module, *args, **kwargs)
            own = _Call(module, (args, kwargs))
            self.calls.setdefault(path, []).append(own.done)
            active.append(own)
            try:
                with own:
                    found = original(module, *args, **kwargs)
            finally:
                active.pop()
            own.gives(found)
            return found

        patched: contextlib.AbstractContextManager[Any] = patches.eager_calls_of_modules(call)
        return patched


class _Call(TorchDispatchMode):
    """While active, notes each operator with its operands: what goes into the call, is its module's, or it has made.

    Attributes:
        done: what it did.
    """

    def __init__(self, module: nn.Module, given: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[Hashable] = []
        # Tensors are held, so that no later one has the identity of one that is gone.
        self._names: dict[int, tuple[Hashable, Tensor]] = {}
        self._paths = {id(each): path for path, each in module.named_modules()}
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                self._called(tensor, ("own", name))
        self.done.append(("given", self._said(given)))

    def _called(self, tensor: Tensor, name: Hashable) -> Hashable:
        return self._names.setdefault(id(tensor), (name, tensor))[0]

    def enters(self, module: nn.Module) -> None:
        """Notes the call of another module inside."""
        self.done.append(("module", self._paths.get(id(module), id(module)), module.training))

    def gives(self, value: Any) -> None:
        """Notes what the call has given."""
        self.done.append(("gives", self._said(value)))

    def _said(self, nest: Any) -> Hashable:
        values, spec = pytree.tree_flatten(nest)
        return str(spec), tuple(self._word(value) for value in values)

    def _word(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            known = self._names.get(id(value))
            # One that nobody has given or made is the same to two calls where it is one tensor.
            name = self._called(value, ("new", len(self._names))) if known is None else known[0]
            outside = (id(value),) if known is None and self.done else ()
            # Strides, and whether it is a view, show in what code that asks for them does.
            facts = (value.dtype, value.device, value.requires_grad)
            return "tensor", name, outside, facts, tuple([self._word(size) for size in value.shape])
        if isinstance(value, _SYMBOLIC):
            return type(value), str(value.node.expr)
        if isinstance(value, _ATOMS):
            return type(value), repr(value)
        return type(value), id(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":  # asks what a tensor is, not of each call anew
            return func(*args, **(kwargs or {}))
        with _unprofiled():
            self.done.append((func, torch.is_grad_enabled(), self._said((args, dict(kwargs or {})))))
        found = func(*args, **(kwargs or {}))
        with _unprofiled():
            for value in pytree.tree_leaves(found):
                if isinstance(value, Tensor):
                    self._called(value, ("made", len(self.done), len(self._names)))
        return found


@contextlib.contextmanager
def _unprofiled() -> Iterator[None]:
    """The walk of the eager model sees each call of Python by the profiler; those in here are none of the author's."""
    profiler = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profiler)
