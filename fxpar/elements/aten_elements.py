"""The elements that aten operators compute.

Enters: nodes in graph order. Leaves: the `Element` of each node whose elements follow from sizes alone. Only what
stands in `_OPERATIONS` is understood, and of that only calls whose result is certain.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.elements.affine import UnknownElements, index, never_negative
from fxpar.elements.element_call import ElementCall, exactly, filled, normal, spread
from fxpar.elements.numbers import (
    Element,
    Leaf,
    Numbers,
    as_numbers,
    as_predicate,
    chosen,
    combined,
    constant,
    is_at_most,
    is_equal,
    where,
)
from fxpar.elements.predicate import FALSE, TRUE, Predicate, at_least_zero, both, either, negated
from fxpar.elements.shaping import SHAPING
from fxpar.layout.symbolic_sizes import Size, simplify
from fxpar.program.program import Program, is_tensor, tensor_type
from fxpar.rules import bind_arguments


def elements(program: Program | None, nodes: Iterable[fx.Node]) -> dict[fx.Node, Element]:
    """What is known of the nodes' elements, by node; `nodes` are in graph order and complete with their operands.

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
    """The elements of a tensor of one shape, broadcast to another; None if it is not certain that they can be."""
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
    """Of the same integer in the whole dimension: its multiples."""
    element, kind = call.own()
    dim = call.dim("dim", len(kind.shape))
    if index(dim) in element.indices or call.dtype.is_floating_point or not kind.shape:
        raise UnknownElements
    count = constant(simplify(index(dim) + 1))
    return combined(operator.mul, as_numbers(element, call.shape), count, call.dtype, call.shape)


def _difference(call: ElementCall) -> Element:
    """`x[i] - x[i - 1]`, before the first element `x[0] - prepended`."""
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
    """Both operands in the type in which torch compares them; a number takes that of the tensor."""
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
    """`a < b` where not `a >= b`: of numbers that are not nan."""

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
    """Logic of booleans; bitwise operators are that for booleans alone."""

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
    """`all` and `any` of what is the same everywhere, and not empty."""
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
