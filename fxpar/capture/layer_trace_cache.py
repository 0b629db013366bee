"""Layers that repeat are traced once: the others' nodes are copies of the first one's.

Enters: the calls of a model's modules while it is traced. Leaves: the same trace, in less time. A layer is copied only
where a trace of it could not give anything else: its modules hold equal values of all that the first call has read
(`fxpar.capture.layer_copies`), everything else that its code can name holds what it held then (`PythonState`), the same
lines call it in the same modes, and what goes in is known by the same descriptions (`fxpar.capture.layer_copies`). The
first call must have changed nothing, and have computed from what went in and from the layer's own parameters alone.
Whatever is otherwise is traced as if this file was not there.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.fx.traceback import get_current_meta

from fxpar.capture import patches
from fxpar.capture.functional import changes_statistics
from fxpar.capture.layer_copies import (
    Copied,
    Reads,
    Surrounding,
    UnknownValueError,
    described,
    has_hooks,
    new_like,
    node_of,
    pattern,
    rebuilt,
    storage,
)
from fxpar.capture.python_state import PythonState
from fxpar.capture.recording import RECOMPUTE_KEY, Recorder
from fxpar.torch_internals import FakeTensor, dispatch_mode_stack, function_mode_stack

# Whether layers do in the eager model what the first of them did: the proof of what a trace has copied.

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
        """Returns whether each copied call did what the one did that it repeats."""
        done = {(path, n): did for path, calls in self.calls.items() for n, did in enumerate(calls)}
        return all(copy in done and done[copy] == done.get(first) for copy, first in self.copied.items())

    def watching(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Notes what the layers do, while active."""
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


_P = ParamSpec("_P")
_T = TypeVar("_T")
_Call = tuple[Any, nn.Module, Any, tuple[Any, ...], dict[str, Any]]  # as of `patches.calls_of_modules`
_LEAST = 3  # equal siblings: of two, watching the first takes what the second would
_MOST = 4  # first calls of one class


def _apart(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns a function whose questions about tensors no mode of the trace is asked."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


@dataclass(frozen=True)
class _First:
    """A call that was traced, and whose like can be copied.

    Attributes:
        outputs: what it gave.
        inputs: which tensors went in.
        description: of all that went in.
        callers: the places of the calls around it, and annotations.
        calls: how often each module of the layer was called.
        regions: how many checkpointed regions were entered.
    """

    number: Number
    reads: Reads
    memory: PythonState
    description: Any
    callers: Any
    nodes: Copied
    inputs: list[Tensor]
    outputs: Any
    results: dict[int, fx.Node]
    calls: Counter[str]
    regions: int


class LayerTraceCache:
    """While a model is traced, its calls of layers.

    Args:
        root: the model.
        recorder: of the trace.

    Attributes:
        copied: calls that were copied, each with that which it repeats; paths are those under the root.
    """

    def __init__(self, root: nn.Module, recorder: Recorder) -> None:
        self._paths = {id(layer): path for path, layer in _candidates(root).items()}
        self._modules = {id(module): module for module in root.modules()}
        self._recorder = recorder
        self._first: dict[type, list[_First]] = defaultdict(list)
        self._tried: Counter[type] = Counter()
        self._is_inside = False
        self._alike: dict[int, bool] = {}  # by first call
        self._calls: Counter[int] = Counter()
        self.copied: dict[Number, Number] = {}

    def call(
        self, original: Callable[..., Any], tracer: Any, module: nn.Module, forward: Any, args: Any, kwargs: Any
    ) -> Any:
        """Calls a module of the trace, or copies what an equal call has left there."""

        def run() -> Any:
            return original(tracer, module, forward, args, kwargs)

        if id(module) not in self._paths:
            return run()
        self._calls[id(module)] += 1
        if self._is_inside or tracer.enable_attr_proxy:
            return run()
        call = (tracer, module, forward, args, kwargs)
        return self._layer(call, run)

    def _layer(self, call: _Call, run: Callable[[], Any]) -> Any:
        tracer, layer, _, args, kwargs = call
        try:
            if _apart(has_hooks)(layer) or _has_global_hooks():
                raise UnknownValueError
            inputs, description = _described(tracer, layer, args, kwargs)
        except UnknownValueError:
            return run()
        callers = (_callers(), _annotations())
        for first in self._first[type(layer)]:
            is_same = first.description == description and first.callers == callers
            if is_same and self._is_like(first, layer):
                try:
                    outputs = self._copy(first, call, inputs)
                except UnknownValueError:
                    break
                self.copied[self._number(layer)] = first.number
                return outputs
        if self._tried[type(layer)] == _MOST:
            return run()
        self._tried[type(layer)] += 1
        return self._watched(call, run, inputs, description, callers)

    def _number(self, layer: nn.Module) -> Number:
        return self._paths[id(layer)], self._calls[id(layer)] - 1

    def _is_like(self, first: _First, layer: nn.Module) -> bool:
        if not first.reads.is_equal(layer) or not first.memory.is_unchanged():
            return False
        if id(first) not in self._alike:  # what names the first layer is found from another one
            self._alike[id(first)] = not self._knows_others(PythonState(layer), layer)
        return self._alike[id(first)]

    def _knows_others(self, memory: PythonState, layer: nn.Module) -> bool:
        """Returns whether what the layer's code can name has a module of the model that is none of the layer's."""
        inside = {id(module) for module in layer.modules()}
        return memory.knows({key: module for key, module in self._modules.items() if key not in inside})

    def _around(self, tracer: Any, path: str) -> Surrounding:
        return Surrounding(
            path,
            len(tracer.module_stack),
            dict(tracer.num_calls),
            dict(get_current_meta().get("custom", {})),
            self._recorder.regions,
        )

    def _watched(
        self, call: _Call, run: Callable[[], Any], inputs: list[Tensor], description: Any, callers: Any
    ) -> Any:
        """Traces a call, and notes it where its like can be copied."""
        tracer, layer, _, args, kwargs = call
        reads, memory = Reads(layer), PythonState(layer)
        if memory.is_opaque or self._knows_others(memory, layer) or not reads.can_be_watched:
            return run()
        around = self._around(tracer, tracer.path_of_module(layer))
        before = [node_of(tracer, tensor) for tensor in inputs]
        versions = [tensor._version for tensor in inputs]
        last = next(iter(reversed(tracer.graph.nodes)))
        self._is_inside = True
        try:
            with reads.watched():
                outputs = run()
        finally:
            self._is_inside = False
        nodes = []
        for node in reversed(tracer.graph.nodes):
            if node is last:
                break
            nodes.append(node)
        try:
            if [tensor._version for tensor in inputs] != versions or not memory.is_unchanged():
                raise UnknownValueError
            if any(changes_statistics(node) for node in nodes):  # which change without a new version
                raise UnknownValueError
            if [node_of(tracer, tensor) for tensor in inputs] != before:
                raise UnknownValueError
            tensors, said = _described(tracer, layer, args, kwargs)
            if [*map(id, tensors)] != [*map(id, inputs)] or said != description:
                raise UnknownValueError
            containers = _containers(outputs)  # of a copy they are others, each by itself
            if len({*containers, *_containers((args, kwargs))}) < len(containers) + len({*_containers((args, kwargs))}):
                raise UnknownValueError
            copied = _apart(Copied)(tracer, nodes[::-1], inputs, around, RECOMPUTE_KEY)
            results = _results(tracer, outputs, inputs, nodes)
            saved = rebuilt(outputs, lambda tensor: tensor)  # whoever called may change the containers
        except UnknownValueError:
            return outputs
        calls = Counter(tracer.num_calls)
        calls.subtract(around.calls)
        regions = self._recorder.regions - around.regions
        number = self._number(layer)
        first = _First(number, reads, memory, description, callers, copied, inputs, saved, results, +calls, regions)
        self._first[type(layer)].append(first)
        return outputs

    @_apart
    def _copy(self, first: _First, call: _Call, inputs: list[Tensor]) -> Any:
        tracer, layer = call[:2]
        around = self._around(tracer, tracer.path_of_module(layer))
        replacements = {id(mine): other for mine, other in zip(first.inputs, inputs, strict=True)}
        copy = first.nodes.write([node_of(tracer, tensor) for tensor in inputs], around, first.calls)
        self._recorder.regions += first.regions

        def tensor(value: Tensor) -> Tensor:
            node = first.results.get(id(value))
            return replacements[id(value)] if node is None else first.nodes.result(value, copy(node))

        return rebuilt(first.outputs, tensor)


def _candidates(root: nn.Module) -> dict[str, nn.Module]:
    """Returns modules that have siblings of their class, and modules of their own, by path."""
    candidates = {}
    for path, parent in root.named_modules():
        counts = Counter(type(child) for child in parent.children())
        for name, child in parent.named_children():
            if counts[type(child)] >= _LEAST and any(True for _ in child.children()) and not has_hooks(child):
                candidates[f"{path}.{name}".lstrip(".")] = child
    return candidates


def _has_global_hooks() -> bool:
    of_torch: Any = torch.nn.modules.module
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return any(getattr(of_torch, f"_global_{kind}") for kind in kinds)


@_apart
def _described(tracer: Any, layer: nn.Module, args: Any, kwargs: Any) -> tuple[list[Tensor], Any]:
    """Returns all tensors that go into a call, and what is known of them and of what stands around it.

    Raises:
        UnknownValueError: something else goes in.
    """
    tensors: list[Tensor] = []
    arguments = described((args, kwargs), tensors)
    # A number that was drawn may decide a branch.
    if any(all(isinstance(size, int) and size == 1 for size in tensor.shape) for tensor in tensors):
        raise UnknownValueError
    layer_tensors: list[Tensor] = []
    for module in layer.modules():
        layer_tensors += [t for kind in (module._parameters, module._buffers) for t in kind.values() if t is not None]
    state = [described(tensor, tensors) for tensor in layer_tensors]
    nodes: dict[fx.Node, int] = {}
    places = tuple(nodes.setdefault(node_of(tracer, tensor), i) for i, tensor in enumerate(tensors))
    return tensors, (arguments, tuple(state), pattern(tensors), places, _modes())


def _modes() -> tuple[Any, ...]:
    """Returns what changes the meaning of operations."""
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices),
        tuple(map(id, function_mode_stack())),
        tuple(map(id, dispatch_mode_stack())),
    )


def _callers() -> tuple[tuple[int, int], ...]:
    """Returns the places of all calls around this one: their lines are written on nodes."""
    frame, callers = sys._getframe(3), []
    while frame is not None:
        callers.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(callers)


def _annotations() -> dict[str, Any]:
    """Returns what is written on nodes besides the number of their region."""
    return {key: value for key, value in get_current_meta().get("custom", {}).items() if key != RECOMPUTE_KEY}


def _containers(nest: Any) -> list[int]:
    """Returns identities of the lists, tuples and mappings of a nest, each as often as it is there."""
    if not isinstance(nest, (list, tuple, dict)) or nest == ():
        return []
    items = nest.values() if isinstance(nest, dict) else nest
    return [id(nest), *(identity for item in items for identity in _containers(item))]


@_apart
def _results(tracer: Any, outputs: Any, inputs: list[Tensor], nodes: list[fx.Node]) -> dict[int, fx.Node]:
    """Returns the nodes of tensors that a call gives, by their identities; what it hands on as it came has none.

    Raises:
        UnknownValueError: a tensor is a part of something else, or a copy could not be like it.
    """
    tensors: list[Tensor] = []
    described(outputs, tensors)
    created = [tensor for tensor in tensors if not any(tensor is argument for argument in inputs)]
    producers = {id(tensor): node_of(tracer, tensor) for tensor in created}
    shared = pattern([*inputs, *{id(tensor): tensor for tensor in created}.values()])[len(inputs) :]
    if any(memory != index + len(inputs) for index, (_, memory) in enumerate(shared)):
        raise UnknownValueError
    if len(set(producers.values())) < len(producers):
        raise UnknownValueError
    # Memory of the call's nodes: an output in that of another one would be told apart from it in a copy.
    values = (value for node in nodes for value in pytree.tree_leaves(node.meta.get("val")))
    memories = Counter(storage(value) for value in values if isinstance(value, Tensor))
    inside = set(nodes)
    for tensor in created:
        node = producers[id(tensor)]
        value = node.meta.get("val")
        if node not in inside or not isinstance(value, Tensor) or memories[storage(value)] > 1:
            raise UnknownValueError
        new_like(tensor)
    return producers
