"""The elements that aten operators compute.

Enters: nodes in graph order. Leaves: the `Element` of each node whose elements follow from sizes alone. Only what
stands in `_OPERATIONS` is understood, and of that only calls whose result is certain.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.elements.numbers import (
    FALSE,
    TRUE,
    Element,
    Leaf,
    Numbers,
    Predicate,
    UnknownElements,
    as_numbers,
    as_predicate,
    at_least_zero,
    both,
    chosen,
    combined,
    constant,
    either,
    gathered,
    index,
    is_at_most,
    is_equal,
    negated,
    never_negative,
    normal_form,
    rounded,
    where,
)
from fxpar.ir.program import Program, ScalarType, TensorType, is_tensor, note, tensor_type
from fxpar.layout.symbolic_sizes import Size, simplify
from fxpar.rules import bind_arguments

# One call of an operator, seen by its elements.

_SHORT = (torch.float16, torch.bfloat16)


def spread(element: Element, shape: Sequence[Size], onto: Sequence[Size]) -> Element:
    """Broadcasts the elements of a tensor of one shape to another.

    Raises:
        UnknownElements: the shapes do not broadcast for every size.
    """
    offset = len(onto) - len(shape)
    if offset < 0 or any(a != 1 and simplify(a) != simplify(b) for a, b in zip(shape, onto[offset:], strict=True)):
        raise UnknownElements
    moved = element.replaced({index(dim): index(dim + offset) for dim in range(len(shape))})
    return normal(moved, onto)


def normal(element: Element, shape: Sequence[Size]) -> Element:
    """Puts 0 for the index of each dimension of size 1."""
    element = element.replaced({index(dim): 0 for dim, size in enumerate(shape) if size == 1})
    if isinstance(element, Predicate):
        return normal_form(element.clauses, shape)
    return gathered([(normal_form(c.clauses, shape), x) for c, x in element.cases], shape)


@dataclass(frozen=True)
class ElementCall:
    """The type of its result, its arguments by name, what is known of the operands."""

    kind: TensorType
    given: Mapping[str, Any]
    found: Mapping[fx.Node, Element]

    @property
    def shape(self) -> tuple[Size, ...]:
        """Returns the result's shape."""
        return self.kind.shape

    @property
    def dtype(self) -> torch.dtype:
        """Returns the result's element type."""
        return self.kind.dtype

    def own(self, name: str = "self") -> tuple[Element, TensorType]:
        """Returns a tensor operand in its own indices, with its type."""
        value = self.given.get(name)
        if not isinstance(value, fx.Node) or value not in self.found:
            raise UnknownElements
        return self.found[value], tensor_type(value)

    def element(self, name: str) -> Element:
        """Returns a tensor operand broadcast to the result, or a number."""
        value = self.given.get(name)
        if isinstance(value, (bool, int, float)):
            return (TRUE if value else FALSE) if isinstance(value, bool) else constant(value)
        if isinstance(value, fx.Node) and isinstance(note(value).type, ScalarType):
            return constant(self.size(name))
        element, kind = self.own(name)
        return spread(element, kind.shape, self.shape)

    def numbers(self, name: str) -> Numbers:
        """Returns what `element` does, in the type in which the result is computed: 16 bits are computed in 32."""
        numbers = as_numbers(self.element(name), self.shape)
        if isinstance(self.given[name], fx.Node):
            return exactly(numbers, self.dtype, self.shape)
        return converted(numbers, torch.float32 if self.dtype in _SHORT else self.dtype, self.shape)

    def predicate(self, name: str) -> Predicate:
        """Holds where what `element` returns is true."""
        return as_predicate(self.element(name), self.shape)

    def size(self, name: str, default: Size | None = None) -> Size:
        """Returns an argument that is a size or a position."""
        value = self.given.get(name)
        value = default if value is None else value
        kind = note(value).type if isinstance(value, fx.Node) else None
        if isinstance(kind, ScalarType):
            return simplify(kind.value)
        if type(value) is not int:
            raise UnknownElements
        return value

    def dim(self, name: str, rank: int) -> int:
        """Returns an argument that names a dimension, counted from the start."""
        value = self.given.get(name)
        if type(value) is not int or not -rank <= value < max(rank, 1):
            raise UnknownElements
        return value % rank if rank else 0


def converted(numbers: Numbers, dtype: torch.dtype, shape: Sequence[Size]) -> Numbers:
    """Returns the numbers as elements of another type."""
    return gathered([(condition, rounded(leaf, dtype)) for condition, leaf in numbers.cases], shape)


def exactly(numbers: Numbers, dtype: torch.dtype, shape: Sequence[Size]) -> Numbers:
    """Returns the numbers in a type that changes none of them.

    Raises:
        UnknownElements: it changes one. In which order torch rounds and computes is left open.
    """
    result = converted(numbers, dtype, shape)
    if [x for _, x in result.cases] != [x for _, x in numbers.cases]:
        raise UnknownElements
    return result


def filled(value: Any, dtype: torch.dtype) -> Element:
    """Puts the same literal everywhere, in a tensor of that type."""
    if not isinstance(value, (bool, int, float)):
        raise UnknownElements
    if dtype == torch.bool:
        return TRUE if value else FALSE
    return constant(rounded(float(value) if isinstance(value, float) else int(value), dtype))


# What operators that make, move or take apart tensors do to elements: factories, views, indexing, triangles.


def _arange(call: ElementCall) -> Element:
    step = call.size("step", 1)
    return constant(rounded(simplify(call.size("start", 0) + step * index(0)), call.dtype))


def _fill(value: Any) -> Callable[[ElementCall], Element]:
    return lambda call: filled(call.given["fill_value"] if value is None else value, call.dtype)


def _same(call: ElementCall) -> Element:
    return call.own()[0]


def _cast(call: ElementCall) -> Element:
    element, kind = call.own()
    if call.dtype == torch.bool:
        return as_predicate(element, kind.shape)
    if kind.dtype.is_floating_point and not call.dtype.is_floating_point:
        raise UnknownElements
    return converted(as_numbers(element, kind.shape), call.dtype, kind.shape)


def _expand(call: ElementCall) -> Element:
    return call.element("self")


def _regrouped(call: ElementCall) -> Element:
    """Follows views that only add or drop dimensions of size 1, and any view of what is the same everywhere."""
    element, kind = call.own()
    if kind.dtype != call.dtype:  # the bits, as another type
        raise UnknownElements
    if not element.indices:
        return element
    before = [dim for dim, size in enumerate(kind.shape) if size != 1]
    after = [dim for dim, size in enumerate(call.shape) if size != 1]
    if [simplify(kind.shape[d]) for d in before] != [simplify(call.shape[d]) for d in after]:
        raise UnknownElements
    return element.replaced({index(a): index(b) for a, b in zip(before, after, strict=True)})


def _permuted(call: ElementCall) -> Element:
    element, kind = call.own()
    rank = len(kind.shape)
    order = list(range(rank))
    if "dims" in call.given:
        order = [int(dim) % rank for dim in call.given["dims"]]
    else:
        a, b = call.dim("dim0", rank), call.dim("dim1", rank)
        order[a], order[b] = b, a
    return element.replaced({index(source): index(dim) for dim, source in enumerate(order)})


def _transposed(call: ElementCall) -> Element:
    element, kind = call.own()
    return element.replaced({index(0): index(1), index(1): index(0)}) if len(kind.shape) == 2 else element


def _from_start(position: Size, length: Size) -> Size:
    """Counts a position from the start that may count from the end."""
    if never_negative(position, ()):
        return position
    if never_negative(simplify(-position - 1), ()) and never_negative(simplify(position + length), ()):
        return simplify(position + length)
    raise UnknownElements


def _sliced(call: ElementCall) -> Element:
    """Slices: a start after the end leaves no element; one before the first would be moved, and is not accepted."""
    element, kind = call.own()
    dim = call.dim("dim", len(kind.shape))
    start = _from_start(call.size("start", 0), kind.shape[dim])
    return element.replaced({index(dim): simplify(start + call.size("step", 1) * index(dim))})


def _selected(call: ElementCall) -> Element:
    element, kind = call.own()
    dim = call.dim("dim", len(kind.shape))
    position = _from_start(call.size("index"), kind.shape[dim])
    later = {index(d): index(d - 1) for d in range(dim + 1, len(kind.shape))}
    return element.replaced({index(dim): position, **later})


def _indexed(call: ElementCall) -> Element:
    """Indexes all leading dimensions with integer tensors, each proved to lie inside its dimension."""
    element, kind = call.own()
    tensors = call.given["indices"]
    if any(not isinstance(t, fx.Node) or t not in call.found for t in tensors):
        raise UnknownElements
    behind = len(kind.shape) - len(tensors)
    common = call.shape[: len(call.shape) - behind]
    values: dict[Any, Size] = {index(len(tensors) + i): index(len(common) + i) for i in range(behind)}
    for dim, tensor in enumerate(tensors):
        position = spread(call.found[tensor], tensor_type(tensor).shape, common)
        leaf = position.cases[0][1] if isinstance(position, Numbers) and len(position.cases) == 1 else None
        if leaf is None or isinstance(leaf, float):
            raise UnknownElements
        if not (never_negative(leaf, common) and never_negative(simplify(kind.shape[dim] - 1 - leaf), common)):
            raise UnknownElements
        values[index(dim)] = leaf
    return element.replaced(values)


def _triangle(sign: int) -> Callable[[ElementCall], Element]:
    """Keeps `col - row <= diagonal` for tril (sign 1), `col - row >= diagonal` for triu (sign -1)."""

    def operation(call: ElementCall) -> Element:
        rows, cols = index(len(call.shape) - 2), index(len(call.shape) - 1)
        inside = at_least_zero(simplify(sign * (rows - cols + call.size("diagonal", 0))), call.shape)
        element = call.element("self")
        if isinstance(element, Predicate):
            return both(inside, element, call.shape)
        return chosen(inside, element, constant(rounded(0, call.dtype)), call.shape)

    return operation


SHAPING: Mapping[str, Callable[[ElementCall], Element]] = {
    "arange": _arange,
    **dict.fromkeys(("full", "new_full", "full_like"), _fill(None)),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _fill(1)),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _fill(0)),
    **dict.fromkeys(("alias", "clone", "contiguous", "detach", "lift_fresh_copy"), _same),
    **dict.fromkeys(("_to_copy", "to"), _cast),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    **dict.fromkeys(("unsqueeze", "squeeze", "view", "reshape", "_unsafe_view"), _regrouped),
    **dict.fromkeys(("transpose", "permute"), _permuted),
    "t": _transposed,
    "slice": _sliced,
    "select": _selected,
    "index": _indexed,
    "tril": _triangle(1),
    "triu": _triangle(-1),
}


def elements(program: Program | None, nodes: Iterable[fx.Node]) -> dict[fx.Node, Element]:
    """Returns what is known of the nodes' elements, by node; `nodes` are in graph order, with all their operands.

    Inputs, parameters and buffers are unknown, and so is all that depends on their values. A program's constants are
    known where they have one value everywhere; without a program there are none.
    """
    known: dict[fx.Node, Element] = {}
    for node in nodes:
        if not is_tensor(node):
            continue
        try:
            if node.op == "placeholder":
                known[node] = _constant(program, node)
            else:
                known[node] = _called(node, known)
        except UnknownElements:
            continue
    return known


def broadcast(element: Element, shape: Sequence[Size], onto: Sequence[Size]) -> Element | None:
    """Broadcasts the elements of a tensor of one shape to another; None if it is not certain that they can be."""
    try:
        return spread(element, shape, onto)
    except UnknownElements:
        return None


def _constant(program: Program | None, node: fx.Node) -> Element:
    if program is None:
        raise UnknownElements
    owned = program.parameter(node)
    value = program.constants.get(owned.fqn) if owned is not None and owned.kind == "constant" else None
    if value is None or value.is_meta or value.is_complex() or not value.numel():
        raise UnknownElements
    first = value.reshape(-1)[0]
    if not bool((value == first).all()):
        raise UnknownElements
    return filled(first.item(), tensor_type(node).dtype)


def _called(node: fx.Node, known: Mapping[fx.Node, Element]) -> Element:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        raise UnknownElements
    operation = _OPERATIONS.get(target._schema.name.removeprefix("aten::"))
    if operation is None:
        raise UnknownElements
    call = ElementCall(tensor_type(node), bind_arguments(node), known)
    return normal(operation(call), call.shape)


def _cumulated(call: ElementCall) -> Element:
    """Returns the multiples of an integer that is the same in the whole dimension."""
    element, kind = call.own()
    dim = call.dim("dim", len(kind.shape))
    if index(dim) in element.indices or call.dtype.is_floating_point or not kind.shape:
        raise UnknownElements
    count = constant(simplify(index(dim) + 1))
    return combined(operator.mul, as_numbers(element, call.shape), count, call.dtype, call.shape)


def _difference(call: ElementCall) -> Element:
    """Computes `x[i] - x[i - 1]`, before the first element `x[0] - prepended`."""
    element, kind = call.own()
    dim = call.dim("dim", len(kind.shape))
    if call.given["n"] != 1 or call.given.get("append") is not None or not isinstance(element, Numbers):
        raise UnknownElements
    if call.given.get("prepend") is None:
        later = element.replaced({index(dim): simplify(index(dim) + 1)})
        return combined(operator.sub, later, element, call.dtype, call.shape)
    prepended, before = call.own("prepend")
    if before.shape[dim] != 1 or not isinstance(prepended, Numbers):
        raise UnknownElements
    earlier = element.replaced({index(dim): simplify(index(dim) - 1)})
    inside = at_least_zero(simplify(index(dim) - 1), call.shape)
    return combined(operator.sub, element, chosen(inside, earlier, prepended, call.shape), call.dtype, call.shape)


def _arithmetic(function: Callable[[Leaf, Leaf], Leaf], names: tuple[str, str]) -> Callable[[ElementCall], Element]:
    def operation(call: ElementCall) -> Element:
        if call.dtype == torch.bool or call.given.get("alpha", 1) != 1:
            raise UnknownElements
        a, b = (call.numbers(name) for name in names)
        return combined(function, a, b, call.dtype, call.shape)

    return operation


def _negative(call: ElementCall) -> Element:
    return combined(operator.sub, constant(0), call.numbers("self"), call.dtype, call.shape)


def _compared(call: ElementCall, holds: Callable[[Leaf, Leaf], Predicate]) -> Predicate:
    """Compares both operands in the type in which torch does; a number takes that of the tensor."""
    kinds = {tensor_type(v).dtype for v in (call.given["self"], call.given["other"]) if _is_tensor(v)}
    floats = {kind for kind in kinds if kind.is_floating_point}
    if len(floats) > 1:
        raise UnknownElements
    dtype = floats.pop() if floats else torch.int64
    a, b = (exactly(as_numbers(call.element(name), call.shape), dtype, call.shape) for name in ("self", "other"))
    return where(lambda x: where(lambda y: holds(x, y), b, call.shape), a, call.shape)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and is_tensor(value)


def _comparison(of: str) -> Callable[[ElementCall], Element]:
    def operation(call: ElementCall) -> Element:
        shape = call.shape
        if of == "eq":
            return _compared(call, lambda a, b: is_equal(a, b, shape))
        if of == "ne":
            return negated(_compared(call, lambda a, b: is_equal(a, b, shape)), shape)
        return _compared(call, lambda a, b: is_at_most(*((a, b) if of == "le" else (b, a)), shape))

    return operation


def _strict(of: str) -> Callable[[ElementCall], Element]:
    """Takes `a < b` to hold where `a >= b` does not: of numbers that are not nan."""

    def operation(call: ElementCall) -> Element:
        for name in ("self", "other"):
            numbers = as_numbers(call.element(name), call.shape)
            if any(isinstance(x, float) and math.isnan(x) for _, x in numbers.cases):
                raise UnknownElements
        return negated(as_predicate(_comparison(of)(call), call.shape), call.shape)

    return operation


def _joined(
    join: Callable[[Predicate, Predicate, Sequence[Size]], Predicate], bits: bool
) -> Callable[[ElementCall], Element]:
    """Joins booleans by logic; bitwise operators are that for booleans alone."""

    def operation(call: ElementCall) -> Element:
        if bits and call.dtype != torch.bool:
            raise UnknownElements
        return join(call.predicate("self"), call.predicate("other"), call.shape)

    return operation


def _differs(a: Predicate, b: Predicate, shape: Sequence[Size]) -> Predicate:
    return either(both(a, negated(b, shape), shape), both(negated(a, shape), b, shape), shape)


def _opposite(call: ElementCall) -> Element:
    if call.dtype != torch.bool:
        raise UnknownElements
    return negated(call.predicate("self"), call.shape)


def _chosen(condition: str, yes: str, no: str) -> Callable[[ElementCall], Element]:
    def operation(call: ElementCall) -> Element:
        test = call.predicate(condition)
        if call.dtype != torch.bool:
            return chosen(test, call.numbers(yes), call.numbers(no), call.shape)
        first = both(test, call.predicate(yes), call.shape)
        return either(first, both(negated(test, call.shape), call.predicate(no), call.shape), call.shape)

    return operation


def _everywhere(call: ElementCall) -> Element:
    """Answers `all` and `any` of what is the same everywhere, and not empty."""
    element, kind = call.own()
    predicate = as_predicate(element, kind.shape)
    is_there = all(never_negative(simplify(size - 1), ()) for size in kind.shape)
    if predicate not in (TRUE, FALSE) or not is_there or call.dtype != torch.bool:
        raise UnknownElements
    return predicate


_BOTH, _EITHER = (_joined(both, True), _joined(both, False)), (_joined(either, True), _joined(either, False))
_OPERATIONS: Mapping[str, Callable[[ElementCall], Element]] = {
    **SHAPING,
    "cumsum": _cumulated,
    "diff": _difference,
    "add": _arithmetic(operator.add, ("self", "other")),
    "sub": _arithmetic(operator.sub, ("self", "other")),
    "rsub": _arithmetic(operator.sub, ("other", "self")),
    "mul": _arithmetic(operator.mul, ("self", "other")),
    "neg": _negative,
    "le": _comparison("le"),
    "ge": _comparison("ge"),
    "eq": _comparison("eq"),
    "ne": _comparison("ne"),
    "lt": _strict("ge"),
    "gt": _strict("le"),
    **{"bitwise_and": _BOTH[0], "__and__": _BOTH[0], "logical_and": _BOTH[1]},
    **{"bitwise_or": _EITHER[0], "__or__": _EITHER[0], "logical_or": _EITHER[1]},
    **{"bitwise_xor": _joined(_differs, True), "logical_xor": _joined(_differs, False)},
    **{"bitwise_not": _opposite, "logical_not": _opposite},
    "where": _chosen("condition", "self", "other"),
    "all": _everywhere,
    "any": _everywhere,
    "masked_fill": _chosen("mask", "value", "self"),
}
