"""Writes the traced derivative of a call into a program's backward; equal calls repeat what was written first.

Operations of a trace become forms that rules know: zeros cut as values of the forward are, one result at a time.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fxpar.errors import InputError
from fxpar.ir.grad_flow import plain
from fxpar.ir.program import (
    Note,
    ScalarType,
    TensorType,
    changed,
    describe,
    has_note,
    note,
    operands,
    output_layouts,
    output_types,
)
from fxpar.ir.step import BACKWARD, is_forward
from fxpar.layout.symbolic_sizes import Size, simplify
from fxpar.rewrite.derive import Derivative
from fxpar.rewrite.emit import BackwardEmitter

aten = torch.ops.aten

# Nothing is written to: a copy is what it is a copy of.
_SAME = frozenset({aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh_copy.default})
# Of what the backward needs these are made again there: they cost nothing, and a saved view would keep two names.
_VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
    }
)
_LITERALS = frozenset({"device", "pin_memory", "layout"})

_REMEDY = "detach its operand, or write it with other operations"


@dataclass(frozen=True)
class DerivativeRequest:
    """A call whose derivative is wanted.

    Attributes:
        inputs: the nodes on which it depends, in an order that is the same for equal calls.
        key: equal for calls whose derivatives are the same nodes; None where nothing says so.
    """

    inputs: tuple[fx.Node, ...]
    key: Hashable


@dataclass(frozen=True)
class _EmittedNode:
    """A node that was emitted, as it was then: its operands may be replaced later."""

    node: fx.Node
    name: str
    target: Any
    args: Any
    kwargs: Any
    noted: Note
    is_zero: bool


@dataclass(frozen=True)
class _Recipe:
    inputs: tuple[fx.Node, ...]
    steps: tuple[_EmittedNode, ...]
    gradients: tuple[tuple[fx.Node, fx.Node], ...]


class DerivativeCache:
    """Derivatives that were put into a program: equal layers repeat them, without asking rules."""

    def __init__(self, emit: BackwardEmitter) -> None:
        self._emit = emit
        self._known: dict[Hashable, _Recipe] = {}

    def asked(
        self,
        node: fx.Node,
        items: Mapping[int, fx.Node],
        tangents: Sequence[fx.Node | None],
        needed: Sequence[bool],
    ) -> DerivativeRequest:
        """Returns what a call's derivative depends on.

        Args:
            items: nodes of the results, by index.
            tangents: gradients of the results that have one.
            needed: for each operand whether a gradient is.
        """
        gradients = [t for t in tangents if t is not None]
        # `_turned` cancels two transposes, and then reads the operand of the first: it counts as an input.
        turned = [t.args[0] for t in gradients if t.target is aten.t.default and isinstance(t.args[0], fx.Node)]
        inputs = (*operands(node), *items.values(), *gradients, *turned)
        places: dict[fx.Node, int] = {}
        for source in inputs:
            places.setdefault(source, len(places))
        if any(note(source).phase not in ("", BACKWARD) for source in places):
            return DerivativeRequest(inputs, None)
        args = plain((node.args, node.kwargs), lambda read: places.get(read, note(read).type))
        which = tuple(items), tuple(t is not None for t in tangents), tuple(needed)
        turns = tuple(t.target is aten.t.default for t in gradients)
        descriptions = tuple([(i, *self._described(source)) for source, i in places.items()])
        key = node.target, args, which, turns, tuple([places[source] for source in inputs]), descriptions
        return DerivativeRequest(inputs, key if _is_hashable(key) else None)

    def _described(self, node: fx.Node) -> tuple[Hashable, ...]:
        return (
            output_types(node),
            output_layouts(node),
            self._emit.flags[node],
            note(node).phase,
            self._emit.is_zero(node),
        )

    def again(self, request: DerivativeRequest, like: Note) -> dict[fx.Node, fx.Node] | None:
        """Returns the gradients of a call's operands as those of an equal call before; None where there was none.

        Args:
            like: note of the call.
        """
        recipe = self._known.get(request.key)
        if recipe is None:
            return None
        copies = dict(zip(recipe.inputs, request.inputs, strict=True))
        for step in recipe.steps:
            args, kwargs = map_arg((step.args, step.kwargs), lambda read: copies.get(read, read))
            noted = changed(step.noted, fqn=like.fqn, source=like.source, recompute=like.recompute)
            copies[step.node] = self._emit.repeated(step.target, args, kwargs, step.name, noted, step.is_zero)
        return {copies[operand]: copies[gradient] for operand, gradient in recipe.gradients}

    def learn(self, request: DerivativeRequest, start: int, gradients: Mapping[fx.Node, fx.Node]) -> None:
        """Remembers what was emitted of a call.

        Args:
            start: how many nodes `emit.made` had before.
        """
        emitted = self._emit.made[start:]
        if request.key is None or any(entry is None for entry in emitted):
            return
        steps, known = list[_EmittedNode](), set(request.inputs)
        for node, name in (entry for entry in emitted if entry is not None):
            if note(node).phase != BACKWARD or not all(
                read in known or _is_size(read) for read in node.all_input_nodes
            ):
                return
            known.add(node)
            is_zero = self._emit.is_zero(node)
            steps.append(_EmittedNode(node, name, node.target, node.args, node.kwargs, note(node), is_zero))
        if known.issuperset(gradients.values()):
            self._known[request.key] = _Recipe(request.inputs, tuple(steps), tuple(gradients.items()))


def _is_size(node: fx.Node) -> bool:
    """Returns whether a node is a size, which one node gives in the entire program."""
    return isinstance(note(node).type, ScalarType)


def _is_hashable(key: Hashable) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


class Derived:
    """One call's derivative, put into a program.

    Args:
        node: the call.
        derivative: its trace.
        outputs: nodes of its results, in the order of the trace's; None for those that nothing uses.
        tangents: gradients of those results that have one.
    """

    def __init__(
        self,
        emit: BackwardEmitter,
        node: fx.Node,
        derivative: Derivative,
        outputs: Sequence[fx.Node | None],
        tangents: Sequence[fx.Node],
    ) -> None:
        self.emit, self.node, self.derivative, self.like = emit, node, derivative, note(node)
        self.sources = list(dict.fromkeys(operands(node)))
        self.env: dict[fx.Node, Any] = dict(zip(derivative.tensors, self.sources, strict=True))
        self.env.update(zip(derivative.tangents, tangents, strict=True))
        for traced, output in zip(derivative.outputs, outputs, strict=True):
            if traced is not None and output is not None:
                self.env[origin_of(traced)] = output
        self.is_decomposed = False
        self._shapes = [*self.sources, *(output for output in outputs if output is not None)]

    def saved(self) -> list[fx.Node]:
        """Returns values of the traced forward that the backward reads, and that the program lacks."""
        saved: dict[fx.Node, None] = {}
        for traced in self.derivative.needed:
            for read in traced.all_input_nodes:
                origin = origin_of(read)
                if origin in self.derivative.forward and not self._is_at_hand(origin):
                    saved[origin] = None
        return list(saved)

    def _is_at_hand(self, traced: fx.Node) -> bool:
        """Returns whether a value is there, or a view of what is."""
        traced = origin_of(traced)
        if traced in self.env or not isinstance(traced.meta.get("val"), Tensor) or traced.op == "get_attr":
            return True
        return traced.target in _VIEWS and all(self._is_at_hand(read) for read in traced.all_input_nodes)

    def gradients(self) -> dict[fx.Node, fx.Node]:
        """Returns the gradient of each operand that has one; nodes of the backward are made."""
        for traced in self.derivative.needed:
            is_value = isinstance(traced.meta.get("val"), (Tensor, tuple, list))
            if origin_of(traced) is traced and is_value and traced.target not in BY_ITEM:
                self.value(traced)
        ends = self.derivative.gradients.items()
        return {self.sources[index]: self.value(traced) for index, traced in ends if traced is not None}

    def value(self, traced: fx.Node) -> Any:
        """Returns what stands for a traced value in the program; nodes of the backward are made."""
        traced = origin_of(traced)
        if traced not in self.env:
            self.env[traced] = self._number(traced) if _is_number(traced) else self._emitted(traced)
        return self.env[traced]

    def _number(self, traced: fx.Node) -> Any:
        value = traced.meta["val"]
        if isinstance(value, (torch.SymFloat, float)):
            raise InputError("its derivative computes a number of sizes", where=describe(self.node), remedy=_REMEDY)
        return self.emit.number(self.derivative.sizes.size(value))

    def _emitted(self, traced: fx.Node) -> fx.Node:
        if traced.op == "get_attr":
            return self._constant(getattr(self.derivative.module, str(traced.target)))
        special = form_of(traced)
        emitted = special(self, traced) if special is not None else None
        if emitted is not None:
            return emitted
        args, kwargs = self.arguments(traced)
        return self.call(traced.target, args, kwargs, self.kind(traced))

    def arguments(self, traced: fx.Node) -> tuple[Any, dict[str, Any]]:
        """Returns a traced call's arguments in the program."""
        args, kwargs = map_arg((traced.args, traced.kwargs), self.value)
        return args, {name: value for name, value in kwargs.items() if name not in _LITERALS}

    def kind(self, traced: fx.Node) -> Any:
        """Returns the type of a traced value."""
        return self.derivative.type_of(traced)

    def call(self, target: Any, args: Sequence[Any], kwargs: Any, kind: Any) -> fx.Node:
        """Adds a node of the backward."""
        return self.emit.call(target, args, kwargs, kind, self.like)

    def like_one(self, kind: TensorType) -> fx.Node | None:
        """Returns a value of the forward that has this type."""
        return next((node for node in self._shapes if output_types(node) == (kind,)), None)

    def sizes(self, kind: TensorType) -> list[Any]:
        """Returns the shape of a type as a call takes it."""
        return [self.emit.number(size) for size in kind.shape]

    def _constant(self, value: Tensor) -> fx.Node:
        if value.numel() != 1:
            raise InputError("its derivative has a constant tensor", where=describe(self.node), remedy=_REMEDY)
        kind = TensorType(value.dtype, tuple(value.shape))
        return self.call(aten.full.default, (list(value.shape), value.item()), {"dtype": value.dtype}, kind)

    def replaced(self) -> list[fx.Node | None]:
        """Puts the traced forward in place of the call, whose results are then those that are returned."""
        needed = {node for node in (*self.derivative.outputs, *self.saved()) if node is not None}
        for node in reversed(self.derivative.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        count = 0
        for traced in self.derivative.graph.nodes:
            is_made = traced in self.derivative.forward and traced in needed and traced.op == "call_function"
            if not is_made or origin_of(traced) is not traced or _is_number(traced):
                continue
            if traced not in self.derivative.tensors:
                args, kwargs = self.arguments(traced)
                self.env[traced] = self.emit.forward(traced.target, args, kwargs, self.kind(traced), self.node)
                count += traced.target is not operator.getitem
        # With one operation in the call's place nothing new has to be differentiated.
        self.is_decomposed = count > 1
        return [None if traced is None else self.env[origin_of(traced)] for traced in self.derivative.outputs]


def _is_number(traced: fx.Node) -> bool:
    return isinstance(traced.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat))


def origin_of(traced: fx.Node) -> fx.Node:
    """Returns what a traced value is the same as."""
    while traced.target in _SAME:
        traced = traced.all_input_nodes[0]
    return traced


def items_of(node: fx.Node) -> dict[int, fx.Node]:
    """Returns the nodes that take a result of several."""
    return {int(user.args[1]): user for user in node.users if user.target is operator.getitem and has_note(user)}  # type: ignore[arg-type]


Form = Callable[[Derived, fx.Node], fx.Node | None]

# What is known by its results, each of which is computed by itself.
BY_ITEM = frozenset({aten.convolution_backward.default})
_FACTORIES = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default, aten._efficientzerotensor.default)


def form_of(traced: fx.Node) -> Form | None:
    """Returns the form of a traced node, None where it stands as it is."""
    target: Any = traced.target
    if target is operator.getitem and isinstance(traced.args[0], fx.Node):
        return _ITEMS.get(traced.args[0].target)
    return _FORMS.get(target)


def _is_zero(traced: Any) -> bool:
    if not isinstance(traced, fx.Node):
        return False
    return bool(traced.target is aten.scalar_tensor.default and traced.args[0] == 0)


def _turned(derived: Derived, traced: fx.Node) -> fx.Node | None:
    """Matches a transpose of a transpose, and reads its input."""
    source = derived.value(traced.all_input_nodes[0])
    return source.args[0] if source.target is aten.t.default and not is_forward(source) else None


def _where(derived: Derived, traced: fx.Node) -> fx.Node | None:
    """Writes zero as a number: as a tensor it would be one that every rank adds."""
    condition, first, second = traced.args
    if _is_zero(second):
        args = (derived.value(condition), derived.value(first), 0.0)  # type: ignore[arg-type]
        return derived.call(aten.where.ScalarOther, args, {}, derived.kind(traced))
    if _is_zero(first):
        args = (derived.value(condition), 0.0, derived.value(second))  # type: ignore[arg-type]
        return derived.call(aten.where.ScalarSelf, args, {}, derived.kind(traced))
    return None


def _zeros(derived: Derived, traced: fx.Node) -> fx.Node:
    """Cuts zeros in the shape of a value of the forward as it is cut; others are whole."""
    kind = derived.kind(traced)
    like = derived.like_one(kind)
    if like is not None:
        return derived.emit.zeros_like(like, derived.like)
    filled = derived.call(aten.full.default, (derived.sizes(kind), 0.0), {"dtype": kind.dtype}, kind)
    return derived.emit.made_of_zeros(filled)


def _unknown(derived: Derived, reason: str) -> InputError:
    return InputError(
        f"has no derivative for all sizes: {reason}",
        where=describe(derived.node),
        remedy="slice with numbers, or write it with other operations",
    )


def _slice_backward(derived: Derived, traced: fx.Node) -> fx.Node:
    """Writes zeros on both sides; those of a dimension that is cut are cut as the forward's value is."""
    gradient, _, dim, start, _, step = traced.args
    source, middle = derived.sources[0], derived.value(gradient)  # type: ignore[arg-type]
    kind = derived.kind(traced)
    dim = int(dim) % len(kind.shape)  # type: ignore[arg-type]
    low = _clamped(derived, start, kind.shape[dim])
    if step != 1:
        if not isinstance(low, int) or not isinstance(step, int):
            raise _unknown(derived, f"its slices begin at {low} and take every {step}th element")
        middle = _stretched(derived, middle, dim, step, low % step)
        low -= low % step
        rest = simplify(kind.shape[dim] - low)
        excess = simplify(output_types(middle)[0].shape[dim] - rest)
        if not isinstance(excess, int):
            raise _unknown(derived, f"whether {step} divides {rest} is not known")
        if excess > 0:
            shape = (*kind.shape[:dim], rest, *kind.shape[dim + 1 :])
            args = (middle, dim, 0, derived.emit.number(rest))
            middle = derived.call(aten.slice.Tensor, args, {}, TensorType(kind.dtype, shape))
    behind = derived.emit.number(simplify(kind.shape[dim] - low - output_types(middle)[0].shape[dim]))
    return _between(derived, middle, source, dim, low, behind, kind)


def _stretched(derived: Derived, values: fx.Node, dim: int, step: int, place: int) -> fx.Node:
    """Returns each element at a place among `step`, the others zero."""
    kind = output_types(values)[0]
    shape = list(kind.shape)
    apart = [*shape[: dim + 1], 1, *shape[dim + 1 :]]
    values = derived.call(aten.unsqueeze.default, (values, dim + 1), {}, TensorType(kind.dtype, tuple(apart)))
    pads = [0] * (2 * (len(shape) - 1 - dim)) + [place, step - 1 - place]
    apart[dim + 1] = step
    values = derived.call(aten.constant_pad_nd.default, (values, pads, 0.0), {}, TensorType(kind.dtype, tuple(apart)))
    shape[dim] = simplify(shape[dim] * step)
    kind = TensorType(kind.dtype, tuple(shape))
    return derived.call(aten.view.default, (values, derived.sizes(kind)), {}, kind)


def _clamped(derived: Derived, bound: Any, size: Any) -> Any:
    """Returns where a slice begins, counted from the front: a bound below zero counts from the end.

    The sign of a symbolic bound is that of the trace, which has made sure that it is the same for all sizes.
    """
    value = bound.meta["val"] if isinstance(bound, fx.Node) else bound
    if value is None:
        return size
    sizes = derived.derivative.sizes
    offset = sizes.size(value)
    if not _is_negative(value):
        return offset
    return 0 if _is_negative(sizes.integer(size) + value) else simplify(size + offset)


def _is_negative(value: Any) -> bool:
    return bool((value if isinstance(value, int) else value.node.hint) < 0)


def _between(
    derived: Derived, middle: fx.Node, source: fx.Node, dim: int, before: Size, behind: Any, kind: TensorType
) -> fx.Node:
    if before == 0 and behind == 0:
        return middle
    if not derived.emit.is_cut(middle, dim) and not derived.emit.is_cut(source, dim):
        pads: list[Any] = [0] * (2 * (len(kind.shape) - 1 - dim)) + [derived.emit.number(before), behind]
        return derived.call(aten.constant_pad_nd.default, (middle, pads, 0.0), {}, kind)
    size = kind.shape[dim]
    end = simplify(before + output_types(middle)[0].shape[dim])
    parts = [_zero_part(derived, source, dim, a, b, kind) for a, b in _runs(source, dim, 0, before)]
    parts.append(middle)
    if behind != 0:
        parts += [_zero_part(derived, source, dim, a, b, kind) for a, b in _runs(source, dim, end, size)]
    return derived.call(aten.cat.default, (parts, dim), {}, kind)


def _zero_part(derived: Derived, source: fx.Node, dim: int, first: Size, last: Size, kind: TensorType) -> fx.Node:
    """Returns zeros cut as a part of a value is."""
    shape = (*kind.shape[:dim], simplify(last - first), *kind.shape[dim + 1 :])
    bounds = (derived.emit.number(first), derived.emit.number(last))
    part = derived.call(aten.slice.Tensor, (source, dim, *bounds), {}, TensorType(kind.dtype, shape))
    return derived.emit.zeros_like(part, derived.like)


def _runs(source: fx.Node, dim: int, first: Size, last: Size) -> Iterator[tuple[Size, Size]]:
    """Yields a range of a dimension in parts that are either cut or whole."""
    bounds = {first, last} if isinstance(first, int) and isinstance(last, int) else set()
    for layout in output_layouts(source) if bounds else ():
        for _, placement in layout:
            position: Size = 0
            for piece in placement.pieces if placement.is_shared and placement.dim == dim else ():
                position = simplify(position + piece.length)
                bounds |= {position} if isinstance(position, int) and first < position < last else set()
    if not bounds:
        yield first, last
    yield from itertools.pairwise(sorted(bounds))


def _select_backward(derived: Derived, traced: fx.Node) -> fx.Node:
    """Returns zeros around one element."""
    gradient, _, dim, index = traced.args
    kind = derived.kind(traced)
    rank = len(kind.shape)
    dim = int(dim) % rank  # type: ignore[arg-type]
    size = kind.shape[dim]
    first = _clamped(derived, index, size)
    element = derived.value(gradient)  # type: ignore[arg-type]
    shape = (*kind.shape[:dim], 1, *kind.shape[dim + 1 :])
    element = derived.call(aten.unsqueeze.default, (element, dim), {}, TensorType(kind.dtype, shape))
    pads = [0] * (2 * (rank - 1 - dim)) + [derived.emit.number(first), derived.emit.number(size - first - 1)]
    return derived.call(aten.constant_pad_nd.default, (element, pads, 0.0), {}, kind)


def _empty(derived: Derived, traced: fx.Node) -> fx.Node:
    """Writes zeros for what is written to before it is read."""
    return derived.call(aten.zeros_like.default, (derived.value(traced.all_input_nodes[0]),), {}, derived.kind(traced))


def _of_convolution(derived: Derived, traced: fx.Node) -> fx.Node:
    """Returns one gradient of a convolution by itself, as kernels compute it; that of the bias is a sum."""
    source, index = traced.args
    assert isinstance(source, fx.Node)
    kind = derived.kind(traced)
    gradient = derived.value(source.args[0])  # type: ignore[arg-type]
    if index == 2:
        images = [dim for dim in range(len(output_types(gradient)[0].shape)) if dim != 1]
        return derived.call(aten.sum.dim_IntList, (gradient, images), {}, kind)
    args, _ = derived.arguments(source)
    absent = TensorType(kind.dtype, (0,))
    kinds = tuple(kind if i == index else absent for i in range(3))
    mask = [i == index for i in range(3)]
    gradients = derived.call(aten.convolution_backward.default, (*args[:3], None, *args[4:10], mask), {}, kinds)
    return derived.call(operator.getitem, (gradients, index), {}, kind)


def _diagonal_backward(derived: Derived, traced: fx.Node) -> fx.Node:
    """Returns a diagonal among zeros, which takes no sizes."""
    gradient, _, offset, first, second = traced.args
    kind = derived.kind(traced)
    if offset != 0 or kind.shape[first] != kind.shape[second]:
        raise _unknown(derived, "its diagonal is not that of a square")
    args = (derived.value(gradient), 0, first, second)  # type: ignore[arg-type]
    return derived.call(aten.diag_embed.default, args, {}, kind)


_FORMS: Mapping[Any, Form] = {
    aten.t.default: _turned,
    aten.where.self: _where,
    **dict.fromkeys(_FACTORIES, _zeros),
    aten.empty_like.default: _empty,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.diagonal_backward.default: _diagonal_backward,
}
_ITEMS: Mapping[Any, Form] = {aten.convolution_backward.default: _of_convolution}
