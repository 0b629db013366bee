"""The derivative of one operation of PyTorch, as autograd makes it.

Enters: a call over global shapes. Leaves: a graph of what its forward and its backward compute, on shapes alone.

Autograd's formulas are torch's own; none is written here. A call is traced once for its operator, numbers and types:
equal layers repeat them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import map_arg

from fxpar.ir.program import TensorType
from fxpar.layout.symbolic_sizes import Size
from fxpar.rewrite.composed import COMPOSED
from fxpar.rewrite.symints import SymbolicSizes
from fxpar.torch_internals import get_decompositions

aten = torch.ops.aten

# Of which PyTorch's function of shapes takes no symbolic sizes.
_DECOMPOSED: Any = get_decompositions([aten.baddbmm, aten.addmm, aten.addbmm, aten.addmv, aten.addr, aten.lerp])


@dataclass(frozen=True)
class Operand:
    """A tensor argument of a call.

    Attributes:
        index: which of the call's tensors it is.
        kind: its type.
        differentiated: whether its gradient is wanted.
    """

    index: int
    kind: TensorType
    differentiated: bool


@dataclass(frozen=True)
class Number:
    """A symbolic number among the arguments of a call."""

    size: Size


@dataclass(frozen=True)
class Derivative:
    """A traced call.

    Attributes:
        graph: placeholders are the call's tensors, then the gradients of its outputs.
        tensors: placeholders of the call's tensors.
        tangents: placeholders of the gradients of its outputs, those that were given.
        outputs: what the forward returns; None for what is no tensor.
        forward: nodes of the forward.
        gradients: by index of the operand, None where there is none.
        sizes: reads sizes off the values that nodes have under `meta["val"]`.
    """

    graph: fx.Graph
    module: fx.GraphModule
    tensors: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]
    forward: frozenset[fx.Node]
    gradients: Mapping[int, fx.Node | None]
    sizes: SymbolicSizes
    _types: dict[fx.Node, TensorType | tuple[TensorType, ...]] = field(default_factory=dict, repr=False)

    def type_of(self, node: fx.Node) -> Any:
        """The type of a value of the trace, a tuple of several; each call of a program that was traced once asks."""
        if node not in self._types:
            value = node.meta["val"]
            if isinstance(value, Tensor):
                self._types[node] = self.sizes.type_of(value)
            else:
                dtype = next(item.dtype for item in value if item is not None)
                absent = TensorType(dtype, (0,))  # a gradient that nobody asks for
                self._types[node] = tuple(absent if item is None else self.sizes.type_of(item) for item in value)
        return self._types[node]

    @cached_property
    def needed(self) -> tuple[fx.Node, ...]:
        """Nodes of the backward on which a gradient depends, in order."""
        needed: set[fx.Node] = {node for node in self.gradients.values() if node is not None}
        for node in reversed(self.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        backward = (node for node in self.graph.nodes if node.op == "call_function")
        return tuple(node for node in backward if node in needed and node not in self.forward)


def trace(
    function: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
    operands: Sequence[Operand],
    tangents: Sequence[bool],
    sizes: SymbolicSizes,
) -> Derivative:
    """Traces forward and backward of a call.

    Args:
        function: of tensors and numbers.
        args: its arguments, `Operand` in place of tensors and `Number` of symbolic sizes, each tensor as often as it
            occurs.
        kwargs: likewise.
        operands: each once, in the order of their index.
        tangents: for each output whether it has a gradient.

    Raises:
        RuntimeError, TypeError, ValueError, NotImplementedError: PyTorch cannot differentiate it on symbolic shapes.
    """
    function = COMPOSED.get(function, function)
    inputs = [sizes.tensor(operand.kind, False) for operand in operands]
    numbers = [leaf.size for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Number)]
    integers = [sizes.integer(size) for size in numbers]
    differentiated = [operand.index for operand in operands if operand.differentiated]
    forward: set[str] = set()
    upstream: list[str] = []

    def run(tensors: list[Tensor], integers: list[Any]) -> Any:
        graph = get_proxy_mode().tracer.graph  # type: ignore[union-attr]
        remaining = iter(integers)
        leaves = [
            t.detach().requires_grad_(operand.differentiated) for t, operand in zip(tensors, operands, strict=True)
        ]

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Operand):
                return leaves[leaf.index]
            return next(remaining) if isinstance(leaf, Number) else leaf

        def tangent(output: Tensor) -> Tensor:
            with torch.no_grad():
                direction = torch.empty_like(output)
            upstream.append(next(iter(reversed(graph.nodes))).name)
            return direction

        positional, named = pytree.tree_map(value, (args, kwargs))
        with torch.enable_grad():
            result = function(*positional, **named)
            outputs = list(result) if isinstance(result, (list, tuple)) else [result]
            forward.update(node.name for node in graph.nodes)
            pairs = [(o, tangent(o)) for o, flag in zip(outputs, tangents, strict=True) if flag]
            # Some operations give values beside their results that PyTorch lets no gradient through.
            pairs = [(o, g) for o, g in pairs if o.requires_grad]
            sources = [leaves[i] for i in differentiated]
            gradients: list[Tensor | None] = [None for _ in differentiated]
            if pairs:
                ends, directions = zip(*pairs, strict=True)
                gradients = list(torch.autograd.grad(ends, sources, directions, allow_unused=True))
        return [o if isinstance(o, Tensor) else None for o in outputs], gradients

    with sizes.tracing(), torch.enable_grad():
        module = make_fx(run, decomposition_table=_DECOMPOSED)(inputs, integers)
    graph = module.graph
    sizes.check(leaf for node in graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val")))
    _functional(graph, forward)
    _conjugate_numbers(graph)
    incoming = tuple(_as_placeholder(graph, name) for name in upstream)
    nodes = list(graph.nodes)
    places = [node for node in nodes if node.op == "placeholder" and node not in incoming]
    (returned,) = next(node for node in nodes if node.op == "output").args
    results, gradients = returned[: len(tangents)], returned[len(tangents) :]
    return Derivative(
        graph,
        module,
        tuple(places[: len(inputs)]),
        incoming,
        tuple(results),
        frozenset(node for node in nodes if node.name in forward),
        dict(zip(differentiated, gradients, strict=True)),
        sizes,
    )


def _as_placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """A value that is given, in place of one that was made to have its shape; it is gone where nothing reads it."""
    with graph.inserting_before(next(iter(graph.nodes))):
        place = graph.placeholder(f"{name}_given")
    for node in [node for node in graph.nodes if node.name == name]:
        place.meta = dict(node.meta)
        node.replace_all_uses_with(place)
        graph.erase_node(node)
    return place


def _functional(graph: fx.Graph, forward: set[str]) -> None:
    """Operations in place become those that give a new tensor; what is read later reads that.

    Autograd's formulas and PyTorch's composite operators write into tensors that they have just made.

    Args:
        forward: names of the nodes of the forward; those that are made are added.

    Raises:
        NotImplementedError: there is no such operation, or what is written to is seen through a view.
    """
    for node in list(graph.nodes):
        target = node.target
        if target is aten._unsafe_view.default:
            node.target = aten.view.default
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            continue
        written = node.args[0]
        functional = _functional_form(target)
        if functional is None or any(_is_view(user) for user in written.users):
            raise NotImplementedError(f"{target} writes in place")
        node.target = functional
        later = set()
        at = node.next
        while at.op != "root":
            later.add(at)
            at = at.next
        written.replace_all_uses_with(node, lambda user, later=later: user in later)
        _write_through(graph, written, node, later, forward)


# What a tensor is whose part has other values, by the view that takes the part.
_SCATTERS: Mapping[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}


def _write_through(
    graph: fx.Graph, view: fx.Node, value: fx.Node | None, later: set[fx.Node], forward: set[str]
) -> None:
    """What is read later of the tensor that a view is of has the view's new values.

    Args:
        value: that in place of the view.
        forward: names of the nodes of the forward.

    Raises:
        NotImplementedError: it is read, and the view is no part of it that can be written.
    """
    while _is_view(view):
        base = view.all_input_nodes[0]
        if any(user in later for user in base.users):
            scatter = _SCATTERS.get(view.target)
            if scatter is None or value is None:
                raise NotImplementedError(f"writes in place through {view.target}")
            with graph.inserting_after(value):
                new = graph.call_function(scatter, (base, value, *view.args[1:]), dict(view.kwargs))
            new.meta = dict(base.meta)
            forward |= {new.name} if value.name in forward else set()
            base.replace_all_uses_with(new, lambda user: user in later)
            value = new
        else:
            value = None
        view = base


def _conjugate_numbers(graph: fx.Graph) -> None:
    """A complex factor is a tensor to autograd and a number in the trace, whose conjugate is a number too."""
    numbers: dict[fx.Node, complex] = {}
    for node in graph.find_nodes(op="call_function", target=aten._conj.default):
        if isinstance(node.args[0], complex):
            numbers[node] = node.args[0].conjugate()

    def value(arg: fx.Node) -> Any:
        return numbers.get(arg, arg)

    for user in [user for node in numbers for user in node.users]:
        user.args = map_arg(user.args, value)
    for node in numbers:
        graph.erase_node(node)


def _functional_form(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operation that gives a new tensor of the same arguments: overloads of the two may have different names."""
    name = target._schema.name.split("::")[1]
    packet = getattr(aten, name.removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        return None
    arguments = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    for overload in packet.overloads():
        form: torch._ops.OpOverload = getattr(packet, overload)
        if [(argument.name, str(argument.type)) for argument in form._schema.arguments] == arguments:
            return form
    return None


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.is_view
