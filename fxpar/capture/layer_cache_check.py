"""Whether layers do in the eager model what the first of them did: the proof of what a trace has copied.

Enters: a model that runs on fakes, and which layer each copied one repeats. Leaves: whether the calls of each pair
computed the same: the same operators on the same tensors and constants in the same order, in the same submodules. What
code has read, or where it has found it, does not matter to that: it has run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fxpar.capture import patches

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LEAVES = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})  # most arguments
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
    _active: list[_OpRecorder] = field(default_factory=list)

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operator, which the calls note that are running."""
        if not self._active or func.namespace == "prim":  # asks what a tensor is, not of each call anew
            return func(*args, **kwargs)
        for call in self._active:
            call.sees(func, args, kwargs)
        outputs = func(*args, **kwargs)
        for call in self._active:
            call.made(outputs)
        return outputs

    @property
    def is_proven(self) -> bool:
        """Whether each copied call did what the one did that it repeats."""
        done = {(path, n): did for path, calls in self.calls.items() for n, did in enumerate(calls)}
        return all(copy in done and done[copy] == done.get(first) for copy, first in self.copied.items())

    def watching(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """While active, what the layers do is noted."""
        if not self.copied:
            return contextlib.nullcontext()
        modules = dict(model.named_modules())
        watched = {id(modules[path]): path for pair in self.copied.items() for path, _ in pair}
        active = self._active

        def call(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            for outer in active:
                outer.enters(module)
            path = watched.get(id(module))
            if path is None:
                return original(module, *args, **kwargs)
            current = _OpRecorder(module, (args, kwargs))
            self.calls.setdefault(path, []).append(current.done)
            active.append(current)
            try:
                outputs = original(module, *args, **kwargs)
            finally:
                active.pop()
            current.gives(outputs)
            return outputs

        patched: contextlib.AbstractContextManager[Any] = patches.eager_calls_of_modules(call)
        return patched


class _OpRecorder:
    """Notes each operator with its operands: what goes into the call, is its module's, or it has made.

    Attributes:
        done: what it did.
    """

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        self.done: list[Hashable] = []
        # Tensors are held, so that no later one has the identity of one that is gone.
        self._names: dict[int, tuple[Hashable, Tensor]] = {}
        self._paths = {id(submodule): path for path, submodule in module.named_modules()}
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                self._called(tensor, ("own", name))
        self.done.append(("given", self._said(arguments)))

    def _called(self, tensor: Tensor, name: Hashable) -> Hashable:
        return self._names.setdefault(id(tensor), (name, tensor))[0]

    def enters(self, module: nn.Module) -> None:
        """Notes the call of another module inside."""
        self.done.append(("module", self._paths.get(id(module), id(module)), module.training))

    def gives(self, value: Any) -> None:
        """Notes what the call has given."""
        self.done.append(("gives", self._said(value)))

    def _said(self, nest: Any) -> Hashable:
        kind = type(nest)
        if kind is tuple or kind is list:
            return kind, tuple([self._said(value) for value in nest])
        if kind is dict:
            return kind, tuple([(self._word(key), self._said(value)) for key, value in nest.items()])
        if isinstance(nest, Tensor) or kind in _LEAVES:
            return self._word(nest)
        values, spec = pytree.tree_flatten(nest)
        return str(spec), tuple([self._word(value) for value in values])

    def _word(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            known = self._names.get(id(value))
            # One that nobody has given or made is the same to two calls where it is one tensor.
            name = self._called(value, ("new", len(self._names))) if known is None else known[0]
            outside = (id(value),) if known is None and self.done else ()
            # Strides, and whether it is a view, show in what code that asks for them does.
            # To ask a fake for its device runs an operator.
            device: Any = value.fake_device if isinstance(value, FakeTensor) else value.device
            facts = (value.dtype, device, value.requires_grad)
            shape = tuple(value.shape)
            is_plain = all(type(size) is int for size in shape)
            return "tensor", name, outside, facts, shape if is_plain else tuple([self._word(size) for size in shape])
        if isinstance(value, _SYMBOLIC):
            return type(value), str(value.node.expr)
        if isinstance(value, _ATOMS):
            return type(value), repr(value)
        return type(value), id(value)

    def sees(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes an operator that runs now."""
        self.done.append((func, torch.is_grad_enabled(), self._said((args, dict(kwargs)))))

    def made(self, outputs: Any) -> None:
        """Notes what that has given."""
        for value in (outputs,) if isinstance(outputs, Tensor) else pytree.tree_leaves(outputs):
            if isinstance(value, Tensor):
                self._called(value, ("made", len(self.done), len(self._names)))
