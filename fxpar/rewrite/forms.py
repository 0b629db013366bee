"""Forms of traced operations that rules know: zeros cut as values of the forward are, one result at a time.

Enters: a node of a trace that stands in a program's backward. Leaves: the node that computes it there.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxpar.errors import InputError
from fxpar.ir.grad_flow import plain
from fxpar.ir.program import (
    Note,
    ScalarType,
    TensorType,
    changed,
    describe,
    note,
    operands,
    output_layouts,
    output_types,
)
from fxpar.ir.step import BACKWARD, is_forward
from fxpar.layout.symbolic_sizes import Size, simplify
from fxpar.rewrite.emit import BackwardEmitter

if TYPE_CHECKING:
    from fxpar.rewrite.derive import Derived

# What was emitted for a call's derivative is emitted for equal calls, as equal layers have them, without asking
# rules.

aten = torch.ops.aten


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
    """Derivatives that were put into a program."""

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
        """What a call's derivative depends on.

        Args:
            items: nodes of the results, by index.
            tangents: gradients of the results that have one.
            needed: for each operand whether a gradient is.
        """
        gradients = [t for t in tangents if t is not None]
        # A form reads what was turned, where that is turned back.
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
        """The gradients of a call's operands as those of an equal call before; None where there was none.

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
                read in known or _is_number(read) for read in node.all_input_nodes
            ):
                return
            known.add(node)
            is_zero = self._emit.is_zero(node)
            steps.append(_EmittedNode(node, name, node.target, node.args, node.kwargs, note(node), is_zero))
        if known.issuperset(gradients.values()):
            self._known[request.key] = _Recipe(request.inputs, tuple(steps), tuple(gradients.items()))


def _is_number(node: fx.Node) -> bool:
    """Whether a node is a size, which one node gives in the entire program."""
    return isinstance(note(node).type, ScalarType)


def _is_hashable(key: Hashable) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


Form = Callable[["Derived", fx.Node], fx.Node | None]

# What is known by its results, each of which is computed by itself.
BY_ITEM = frozenset({aten.convolution_backward.default})
_FACTORIES = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default, aten._efficientzerotensor.default)


def form_of(traced: fx.Node) -> Form | None:
    """The form of a traced node, None where it stands as it is."""
    target: Any = traced.target
    if target is operator.getitem and isinstance(traced.args[0], fx.Node):
        return _ITEMS.get(traced.args[0].target)
    return _FORMS.get(target)


def _is_zero(traced: Any) -> bool:
    if not isinstance(traced, fx.Node):
        return False
    return bool(traced.target is aten.scalar_tensor.default and traced.args[0] == 0)


def _turned(derived: Derived, traced: fx.Node) -> fx.Node | None:
    """What is turned twice is what it was."""
    source = derived.value(traced.all_input_nodes[0])
    return source.args[0] if source.target is aten.t.default and not is_forward(source) else None


def _where(derived: Derived, traced: fx.Node) -> fx.Node | None:
    """Zero as a number: as a tensor it would be one that every rank adds."""
    condition, first, second = traced.args
    if _is_zero(second):
        args = (derived.value(condition), derived.value(first), 0.0)  # type: ignore[arg-type]
        return derived.call(aten.where.ScalarOther, args, {}, derived.kind(traced))
    if _is_zero(first):
        args = (derived.value(condition), 0.0, derived.value(second))  # type: ignore[arg-type]
        return derived.call(aten.where.ScalarSelf, args, {}, derived.kind(traced))
    return None


def _zeros(derived: Derived, traced: fx.Node) -> fx.Node:
    """Zeros in the shape of a value of the forward are cut as it is; others are whole."""
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
    """Zeros on both sides; those of a dimension that is cut are cut as the forward's value is."""
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
    """Each element at a place among `step`, the others zero."""
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
    """Zeros cut as a part of a value is."""
    shape = (*kind.shape[:dim], simplify(last - first), *kind.shape[dim + 1 :])
    bounds = (derived.emit.number(first), derived.emit.number(last))
    part = derived.call(aten.slice.Tensor, (source, dim, *bounds), {}, TensorType(kind.dtype, shape))
    return derived.emit.zeros_like(part, derived.like)


def _runs(source: fx.Node, dim: int, first: Size, last: Size) -> Iterator[tuple[Size, Size]]:
    """A range of a dimension in parts that are either cut or whole."""
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
    """Zeros around one element."""
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
    """What is written to before it is read may as well be zero."""
    return derived.call(aten.zeros_like.default, (derived.value(traced.all_input_nodes[0]),), {}, derived.kind(traced))


def _of_convolution(derived: Derived, traced: fx.Node) -> fx.Node:
    """One gradient of a convolution by itself, as kernels compute it; that of the bias is a sum."""
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
    """A diagonal among zeros, which takes no sizes."""
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
