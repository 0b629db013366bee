"""What operators that make, move or take apart tensors do to elements: factories, views, indexing, triangles.

Enters: calls. Leaves: elements, in the indices of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxpar.elements.affine import UnknownElements, index, never_negative
from fxpar.elements.element_call import ElementCall, converted, filled, spread
from fxpar.elements.numbers import Element, Numbers, as_numbers, as_predicate, chosen, constant, rounded
from fxpar.elements.predicate import Predicate, at_least_zero, both
from fxpar.layout.symbolic_sizes import Size, simplify
from fxpar.program.program import tensor_type


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
    """Views that only add or drop dimensions of size 1; any view of what is the same everywhere."""
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
    """A position that may count from the end, from the start."""
    if never_negative(position, ()):
        return position
    if never_negative(simplify(-position - 1), ()) and never_negative(simplify(position + length), ()):
        return simplify(position + length)
    raise UnknownElements


def _sliced(call: ElementCall) -> Element:
    """A start behind the end leaves no element; one before the first would be moved, and is not accepted."""
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
    """Integer tensors for all leading dimensions, each proved to lie inside its dimension."""
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
    """tril (sign 1) keeps `col - row <= diagonal`, triu (sign -1) `col - row >= diagonal`."""

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
