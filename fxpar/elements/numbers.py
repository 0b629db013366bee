"""What the elements of a tensor of numbers are, case by case.

Enters: predicates, integers affine in the indices, floating constants. Leaves: `Numbers` and arithmetic on them, as
exact as the tensor's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch

from fxpar.elements.affine import UnknownElements, exact, indices, replaced
from fxpar.elements.predicate import FALSE, TRUE, Predicate, at_least_zero, both, either, negated
from fxpar.layout.symbolic_sizes import Size, simplify

# An integer affine in the indices, or a floating constant.
Leaf: TypeAlias = Size | float
_WHOLE = 2**53  # up to here float64 holds every integer


@dataclass(frozen=True)
class Numbers:
    """For each case, of which exactly one holds at an element, the element's value."""

    cases: tuple[tuple[Predicate, Leaf], ...]

    @property
    def indices(self) -> set[sympy.Symbol]:
        """The indices it depends on."""
        leaf_indices = {i for _, leaf in self.cases if not isinstance(leaf, float) for i in indices(leaf)}
        return leaf_indices.union(*(condition.indices for condition, _ in self.cases))

    def replaced(self, values: Mapping[sympy.Symbol, Size]) -> Numbers:
        """With other expressions for its indices."""
        return Numbers(
            tuple((c.replaced(values), x if isinstance(x, float) else replaced(x, values)) for c, x in self.cases)
        )


Element: TypeAlias = Predicate | Numbers


def constant(leaf: Leaf) -> Numbers:
    """The same number everywhere."""
    return Numbers(((TRUE, leaf),))


def gathered(cases: Iterable[tuple[Predicate, Leaf]], shape: Sequence[Size]) -> Numbers:
    """The cases, those of equal values joined and the impossible left out."""
    joined: dict[tuple[bool, str], tuple[Predicate, Leaf]] = {}
    for condition, leaf in cases:
        if condition == FALSE:
            continue
        key = (isinstance(leaf, float), str(leaf))
        known = joined.get(key)
        joined[key] = (condition if known is None else either(known[0], condition, shape), leaf)
    return Numbers(tuple(joined.values()))


def combined(
    function: Callable[[Leaf, Leaf], Leaf], a: Numbers, b: Numbers, dtype: torch.dtype, shape: Sequence[Size]
) -> Numbers:
    """A function of two numbers, element by element, rounded to the type of the result."""
    pairs = [(both(p, q, shape), x, y) for p, x in a.cases for q, y in b.cases]
    return gathered([(c, rounded(function(x, y), dtype)) for c, x, y in pairs if c != FALSE], shape)


def rounded(leaf: Leaf, dtype: torch.dtype) -> Leaf:
    """A value as an element of that type holds it.

    Raises:
        UnknownElements: it is not certain that the type holds it exactly: indices as floating numbers, small integers.
    """
    if dtype.is_floating_point:
        if isinstance(leaf, float) or (isinstance(leaf, int) and abs(leaf) <= _WHOLE):
            return float(torch.tensor(leaf, dtype=torch.float64).to(dtype))
    elif dtype == torch.int64 and not isinstance(leaf, float):
        return exact(leaf)
    raise UnknownElements


def chosen(condition: Predicate, yes: Numbers, no: Numbers, shape: Sequence[Size]) -> Numbers:
    """The first number where the condition holds, else the second."""
    other = negated(condition, shape)
    cases = [(both(condition, c, shape), x) for c, x in yes.cases]
    return gathered([*cases, *((both(other, c, shape), x) for c, x in no.cases)], shape)


def where(condition: Callable[[Leaf], Predicate], a: Numbers, shape: Sequence[Size]) -> Predicate:
    """The elements of whose value the condition is true."""
    predicate = FALSE
    for case, leaf in a.cases:
        predicate = either(predicate, both(case, condition(leaf), shape), shape)
    return predicate


def is_equal(a: Leaf, b: Leaf, shape: Sequence[Size]) -> Predicate:
    """Where two values are equal."""
    return both(is_at_most(a, b, shape), is_at_most(b, a, shape), shape)


def is_at_most(a: Leaf, b: Leaf, shape: Sequence[Size]) -> Predicate:
    """Where the first value is at most the second."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return TRUE if a <= b else FALSE
    if isinstance(a, float) or isinstance(b, float):
        raise UnknownElements
    return at_least_zero(simplify(b - a), shape)


def as_numbers(a: Element, shape: Sequence[Size]) -> Numbers:
    """Numbers as they are, of booleans 1 and 0."""
    return a if isinstance(a, Numbers) else gathered([(a, 1), (negated(a, shape), 0)], shape)


def as_predicate(a: Element, shape: Sequence[Size]) -> Predicate:
    """Booleans as they are, of numbers those that are not 0, nan too."""
    if isinstance(a, Predicate):
        return a
    return negated(where(lambda x: is_equal(x, 0, shape), a, shape), shape)
