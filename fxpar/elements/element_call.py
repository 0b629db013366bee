"""One call of an operator, seen by its elements.

Enters: a node and what is known of those before it. Leaves: `ElementCall`, its operands broadcast and in the result's
type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.elements.affine import UnknownElements, index
from fxpar.elements.numbers import Element, Numbers, as_numbers, as_predicate, constant, gathered, rounded
from fxpar.elements.predicate import FALSE, TRUE, Predicate, normal_form
from fxpar.layout.symbolic_sizes import Size, simplify
from fxpar.program.program import ScalarType, TensorType, note, tensor_type

_SHORT = (torch.float16, torch.bfloat16)


def spread(element: Element, shape: Sequence[Size], onto: Sequence[Size]) -> Element:
    """The elements of a tensor of one shape, broadcast to another.

    Raises:
        UnknownElements: the shapes do not broadcast for every size.
    """
    offset = len(onto) - len(shape)
    if offset < 0 or any(a != 1 and simplify(a) != simplify(b) for a, b in zip(shape, onto[offset:], strict=True)):
        raise UnknownElements
    moved = element.replaced({index(dim): index(dim + offset) for dim in range(len(shape))})
    return normal(moved, onto)


def normal(element: Element, shape: Sequence[Size]) -> Element:
    """With 0 for the index of each dimension of size 1."""
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
        """The result's."""
        return self.kind.shape

    @property
    def dtype(self) -> torch.dtype:
        """The result's."""
        return self.kind.dtype

    def own(self, name: str = "self") -> tuple[Element, TensorType]:
        """A tensor operand in its own indices, with its type."""
        value = self.given.get(name)
        if not isinstance(value, fx.Node) or value not in self.found:
            raise UnknownElements
        return self.found[value], tensor_type(value)

    def element(self, name: str) -> Element:
        """A tensor operand broadcast to the result, or a number."""
        value = self.given.get(name)
        if isinstance(value, (bool, int, float)):
            return (TRUE if value else FALSE) if isinstance(value, bool) else constant(value)
        if isinstance(value, fx.Node) and isinstance(note(value).type, ScalarType):
            return constant(self.size(name))
        element, kind = self.own(name)
        return spread(element, kind.shape, self.shape)

    def numbers(self, name: str) -> Numbers:
        """As `element`, in the type in which the result is computed: 16 bits are computed in 32."""
        numbers = as_numbers(self.element(name), self.shape)
        if isinstance(self.given[name], fx.Node):
            return exactly(numbers, self.dtype, self.shape)
        return converted(numbers, torch.float32 if self.dtype in _SHORT else self.dtype, self.shape)

    def predicate(self, name: str) -> Predicate:
        """As `element`, where it is true."""
        return as_predicate(self.element(name), self.shape)

    def size(self, name: str, default: Size | None = None) -> Size:
        """An argument that is a size or a position."""
        value = self.given.get(name)
        value = default if value is None else value
        kind = note(value).type if isinstance(value, fx.Node) else None
        if isinstance(kind, ScalarType):
            return simplify(kind.value)
        if type(value) is not int:
            raise UnknownElements
        return value

    def dim(self, name: str, rank: int) -> int:
        """An argument that names a dimension, from the start."""
        value = self.given.get(name)
        if type(value) is not int or not -rank <= value < max(rank, 1):
            raise UnknownElements
        return value % rank if rank else 0


def converted(numbers: Numbers, dtype: torch.dtype, shape: Sequence[Size]) -> Numbers:
    """The numbers as elements of another type."""
    return gathered([(condition, rounded(leaf, dtype)) for condition, leaf in numbers.cases], shape)


def exactly(numbers: Numbers, dtype: torch.dtype, shape: Sequence[Size]) -> Numbers:
    """The numbers in a type that changes none of them.

    Raises:
        UnknownElements: it changes one. In which order torch rounds and computes is left open.
    """
    result = converted(numbers, dtype, shape)
    if [x for _, x in result.cases] != [x for _, x in numbers.cases]:
        raise UnknownElements
    return result


def filled(value: Any, dtype: torch.dtype) -> Element:
    """The same literal everywhere, in a tensor of that type."""
    if not isinstance(value, (bool, int, float)):
        raise UnknownElements
    if dtype == torch.bool:
        return TRUE if value else FALSE
    return constant(rounded(float(value) if isinstance(value, float) else int(value), dtype))
