"""Copies of what one call of a layer has left in a trace, for another call.

Enters: the tracer, the nodes of a call, what goes in and comes out. Leaves: the same nodes behind the others, on other
operands, as a trace of the second call would have made them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, extract_val, track_tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from fxpar.capture.functional import COMPARED
from fxpar.capture.layer_values import UnknownValueError, new_like, of_tensor, storage

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def node_of(tracer: Any, tensor: Tensor) -> fx.Node:
    """The node of a tensor of the trace.

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
        """The modules around a node: those of the other call, then the layer's under their other names."""
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
        """Annotations of a node's copy."""
        key, custom = self._region_key, dict(node.meta.get("custom", {}))
        region, before = custom.pop(key, None), self._around.custom.get(key)
        if region != before and (region is None or region <= self._around.regions):
            raise UnknownValueError
        now = around.custom.get(key) if region == before else region - self._around.regions + around.regions
        return custom if now is None else {**custom, key: now}

    def result(self, value: Tensor, node: fx.Node) -> Tensor:
        """A tensor for what a call gives, of which the trace knows as much as of the first call's.

        Raises:
            UnknownValueError: there is none like it.
        """
        tensor = new_like(value)
        proxy = fx.Proxy(node, self._tracer)
        # As the trace does; what it says besides of shape and strides is written already, from a tensor like this one.
        node.meta["val"] = extract_val(tensor)
        track_tensor(tensor, proxy, constant=None, tracer=self._tracer)
        return tensor
