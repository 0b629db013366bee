"""Copies of what one call of a layer has left in a trace, for another call.

Enters: the tracer, the nodes of a call, what goes in and comes out. Leaves: the same nodes after the others, on other
operands, as a trace of the second call would have made them.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, extract_val, track_tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from fxpar.capture import patches
from fxpar.capture.functional import COMPARED
from fxpar.capture.places import is_foreign_file
from fxpar.torch_internals import FakeTensor

# What a trace knows of the values that go into a call of a layer and come out of it.

# Containers and constants of exactly these types: any other object may be told apart in ways of its own, and to compare
# symbolic numbers would be a question of the trace's.
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


class UnknownValueError(Exception):
    """A value of which no description says all."""


def described(value: Any, tensors: list[Tensor]) -> Any:
    """Returns the structure and the constants of a nest, whose tensors are appended.

    Raises:
        UnknownValueError: it holds something else than tensors and constants.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", of_tensor(value)
    if kind in (tuple, list):
        return kind, tuple(described(item, tensors) for item in value)
    if kind is dict:
        # Equal keys may be of other types (1 and True).
        return kind, tuple((type(key), key, described(item, tensors)) for key, item in value.items())
    if kind in _CONSTANTS and value == value:  # a number that is none is equal to nothing
        return kind, str(value) if kind is float else value  # -0.0 is 0.0
    raise UnknownValueError


def rebuilt(value: Any, tensors: Callable[[Tensor], Tensor]) -> Any:
    """Returns a nest that `described` takes, with other tensors."""
    if isinstance(value, Tensor):
        return tensors(value)
    if type(value) in (tuple, list):
        return type(value)(rebuilt(item, tensors) for item in value)
    if type(value) is dict:
        return {key: rebuilt(item, tensors) for key, item in value.items()}
    return value


def of_tensor(value: Tensor) -> tuple[Any, ...]:
    """Returns what can be known of one tensor without values.

    Raises:
        UnknownValueError: it is no plain tensor of a trace.
    """
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_inference():
        raise UnknownValueError
    if value.constant is not None or value.is_conj() or value.is_neg() or _has_more(value):
        raise UnknownValueError
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return (
        value.dtype,
        value.device,
        value.dim(),
        tuple(size if isinstance(size, int) else size.node.expr for size in sizes),
        value.requires_grad,
        value.is_leaf,
        value._is_view(),  # what reshapes or converts it makes other operations of a view
        isinstance(value, torch.nn.Parameter),
    )


_KNOWN = frozenset(
    {"fake_mode", "fake_device", "_fake_device", "constant", "pytype", "dispatch_keys", "real_tensor", "_is_param"}
)


def _has_more(value: Tensor) -> bool:
    """Returns whether somebody has given the tensor an attribute; the known ones are of a mode of fakes."""
    return any(name not in _KNOWN and "_memo" not in name for name in vars(value))


def pattern(tensors: list[Tensor]) -> tuple[tuple[int, int], ...]:
    """Returns for each tensor the first one that it is, and the first one whose memory it has."""
    same: dict[int, int] = {}
    memory: dict[int, int] = {}
    return tuple(
        (same.setdefault(id(value), index), memory.setdefault(storage(value), index))
        for index, value in enumerate(tensors)
    )


def storage(value: Tensor) -> int:
    """Returns the identity of a tensor's memory."""
    return int(value.untyped_storage()._cdata)


def new_like(value: Tensor) -> Tensor:
    """Returns a tensor of its own memory, of which a trace knows as much as of another one.

    Raises:
        UnknownValueError: there is none like it.
    """
    with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing(), torch.enable_grad():
        new = torch.empty_like(value)
        if value.requires_grad:
            new = new.requires_grad_()
            if not value.is_leaf:
                new = new.clone()
    if of_tensor(new) != of_tensor(value):
        raise UnknownValueError
    return new


# What the code of a layer reads of its modules: two layers that differ in nothing of it compute the same.

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
    """Returns whether a class of modules is torch's own, whose code may read any attribute."""
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
        """Returns whether all reads of the author's classes go through Python's own look-up."""
        classes: set[Any] = {type(module) for module in self.modules.values()}
        usual: Any = nn.Module.__getattribute__
        return all(is_of_torch(cls) or cls.__getattribute__ is usual for cls in classes)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes reads, while active."""
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
        """Returns whether another layer has the same modules, which hold equal values of all that was read."""
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
    """Returns whether calls of the layer's modules, or gradients of its parameters, run anything besides."""
    return any(
        any(vars(module).get(kind) for kind in _HOOKS)
        or any(_has_tensor_hooks(tensor) for kind in _TENSORS for tensor in vars(module)[kind].values())
        for module in layer.modules()
    )


def _has_tensor_hooks(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _is_equal(mine: Any, other: Any, pairs: Mapping[int, nn.Module]) -> bool:
    """Returns whether code reads the same of two values: equal constants, or modules in the same places."""
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


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def node_of(tracer: Any, tensor: Tensor) -> fx.Node:
    """Returns the node of a tensor of the trace.

    Raises:
        UnknownValueError: it has none, or the trace knows its value.
    """
    slot = tracer.tensor_tracker.get(tensor)
    if slot is None or slot.constant is not None:
        raise UnknownValueError
    return slot.proxy.node  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Surrounding:
    """What stands around a call and is written on its nodes.

    Attributes:
        path: of the layer from the root of the trace.
        depth: how many modules are around it.
        calls: how often each module was called before.
        custom: annotations.
        regions: how many checkpointed regions were entered before.
    """

    path: str
    depth: int
    calls: Mapping[str, int]
    custom: Mapping[str, Any]
    regions: int


class Copied:
    """A call whose nodes can be copied.

    Args:
        tracer: of the trace.
        nodes: that the call has left.
        inputs: what went in, parameters and buffers included; each once.
        around: of the call.
        region_key: the annotation that numbers regions.

    Raises:
        UnknownValueError: its nodes hold something else than what went in.
    """

    def __init__(
        self, tracer: Any, nodes: list[fx.Node], inputs: list[Tensor], around: Surrounding, region_key: str
    ) -> None:
        self._tracer, self._nodes, self._around, self._region_key = tracer, nodes, around, region_key
        self._inputs = [node_of(tracer, tensor) for tensor in inputs]
        memory = {storage(tensor): index for index, tensor in reversed(list(enumerate(inputs)))}
        memory |= {storage(n.meta["val"]): i for i, n in reversed(list(enumerate(self._inputs)))}
        inside, outside = set(nodes), set(self._inputs)
        # Results that lie in the memory of an input, and are compared with it. The others' may be the first call's.
        self._views: dict[fx.Node, int] = {}
        for node in nodes:
            value: Any = node.meta.get("val")
            if node.op != "call_function" or not all(
                n in inside or n in outside or isinstance(n.meta.get("val"), _SYMBOLIC) for n in node.all_input_nodes
            ):
                raise UnknownValueError
            values = value if isinstance(value, (tuple, list)) else [value]
            if any(free_unbacked_symbols(v) for v in values if isinstance(v, (Tensor, *_SYMBOLIC))):
                raise UnknownValueError
            if node.target in COMPARED and node.args[0] in outside and storage(value) in memory:
                self._views[node] = memory[storage(value)]
                if of_tensor(self._view(node, self._inputs)) != of_tensor(value):
                    raise UnknownValueError
            self._custom(node, around)  # for what it raises
        self._stacks: dict[int, Any] = {}

    def write(self, inputs: list[fx.Node], around: Surrounding, calls: Counter[str]) -> Callable[[fx.Node], fx.Node]:
        """Copies the nodes.

        Args:
            inputs: nodes of what goes in.
            around: of the other call.
            calls: how often the first one called each module of the layer.

        Returns:
            The copy of a node, or the input in the place of one.
        """
        mapping = dict(zip(self._inputs, inputs, strict=True))
        stacks: dict[Any, Any] = {}
        graph = self._tracer.graph

        def swap(node: fx.Node) -> fx.Node:
            return mapping.get(node, node)

        for node in self._nodes:
            name = node.name.rstrip("0123456789").removesuffix("_") or node.name
            new = graph.create_node(node.op, node.target, map_arg(node.args, swap), map_arg(node.kwargs, swap), name)
            mapping[node] = new
            new.meta = dict(node.meta)
            key = tuple(node.meta["nn_module_stack"].items())
            if key not in stacks:
                stacks[key] = self._stack(key, around)
            new.meta["nn_module_stack"] = stacks[key].copy()
            if "custom" in new.meta:
                new.meta["custom"] = self._custom(node, around)
            if node in self._views:
                new.meta["val"] = self._view(node, inputs)
        for path, count in calls.items():
            # A trace numbers the calls of a module, and names on later nodes go by that: a copied call counts as one.
            moved = around.path + path[len(self._around.path) :]
            self._tracer.num_calls[moved] = self._tracer.num_calls.get(moved, 0) + count
        return swap

    def _view(self, node: fx.Node, inputs: list[fx.Node]) -> Tensor:
        value: Tensor = node.meta["val"]
        base: Tensor = inputs[self._views[node]].meta["val"]
        if of_tensor(base) == of_tensor(value):
            return base
        with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing(), torch.no_grad():
            return base.as_strided(value.shape, value.stride(), value.storage_offset())

    def _stack(self, entries: tuple[Any, ...], around: Surrounding) -> Any:
        """Returns the modules around a node: those of the other call, then the layer's under their other names."""
        stack = OrderedDict(list(self._tracer.module_stack.items())[: around.depth])
        for key, (path, kind) in entries[self._around.depth :]:
            moved = around.path + path[len(self._around.path) :]
            number = int(key.rpartition("@")[2]) if "@" in key else 0
            number += around.calls.get(moved, 0) - self._around.calls.get(path, 0)
            stack[f"{moved}@{number}" if number else moved] = (moved, kind)
        for key, (path, kind) in stack.items():
            if isinstance(kind, type):
                stack[key] = (path, f"{kind.__module__}.{kind.__qualname__}")
        return stack

    def _custom(self, node: fx.Node, around: Surrounding) -> dict[str, Any]:
        """Returns the annotations of a node's copy."""
        key, custom = self._region_key, dict(node.meta.get("custom", {}))
        region, before = custom.pop(key, None), self._around.custom.get(key)
        if region != before and (region is None or region <= self._around.regions):
            raise UnknownValueError
        now = around.custom.get(key) if region == before else region - self._around.regions + around.regions
        return custom if now is None else {**custom, key: now}

    def result(self, value: Tensor, node: fx.Node) -> Tensor:
        """Returns a tensor for what a call gives, of which the trace knows as much as of the first call's.

        Raises:
            UnknownValueError: there is none like it.
        """
        tensor = new_like(value)
        proxy = fx.Proxy(node, self._tracer)
        # As the trace does; what it says besides of shape and strides is written already, from a tensor like this one.
        node.meta["val"] = extract_val(tensor)
        track_tensor(tensor, proxy, constant=None, tracer=self._tracer)
        return tensor
