"""Which elements of a boolean tensor are true, as a formula in their indices.

Enters: affine expressions. Leaves: `Predicate`, a disjunction of conjunctions of "this expression is at least 0", kept
short by what holds for every element of a shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TypeAlias

import sympy

from fxpar.elements.affine import UnknownElements, indices, never_negative, replaced
from fxpar.layout.symbolic_sizes import Size, simplify

Clause: TypeAlias = frozenset[Size]
_MOST = 16


@dataclass(frozen=True)
class Predicate:
    """True where all expressions of some clause are at least 0; no clause is false, an empty one true."""

    clauses: frozenset[Clause]

    @property
    def indices(self) -> set[sympy.Symbol]:
        """The indices it depends on."""
        return {i for clause in self.clauses for size in clause for i in indices(size)}

    def replaced(self, values: Mapping[sympy.Symbol, Size]) -> Predicate:
        """With other expressions for its indices."""
        return Predicate(frozenset(frozenset(replaced(s, values) for s in clause) for clause in self.clauses))


TRUE, FALSE = Predicate(frozenset([frozenset()])), Predicate(frozenset())


def at_least_zero(size: Size, shape: Sequence[Size]) -> Predicate:
    """True where the expression is at least 0."""
    return normal_form([frozenset([simplify(size)])], shape)


def both(a: Predicate, b: Predicate, shape: Sequence[Size]) -> Predicate:
    """The conjunction, over tensors of one shape."""
    return normal_form([x | y for x, y in product(a.clauses, b.clauses)], shape)


def either(a: Predicate, b: Predicate, shape: Sequence[Size]) -> Predicate:
    """The disjunction, over tensors of one shape."""
    return normal_form([*a.clauses, *b.clauses], shape)


def negated(a: Predicate, shape: Sequence[Size]) -> Predicate:
    """The negation: of integers, `e >= 0` fails where `-e - 1 >= 0`."""
    negation = TRUE
    for clause in a.clauses:
        negation = both(negation, normal_form([frozenset([simplify(-size - 1)]) for size in clause], shape), shape)
    return negation


def normal_form(clauses: Iterable[Clause], shape: Sequence[Size]) -> Predicate:
    """The same elements in fewer words: without what is always or never true, or follows from the rest.

    Raises:
        UnknownElements: the formula is too long.
    """
    shape = tuple(shape)
    short = {c for c in (_shortened(clause, shape) for clause in clauses) if c is not None}
    if len(short) > _MOST:
        raise UnknownElements
    alone = [size for clause in short if len(clause) == 1 for size in clause]
    # Where `a` holds nothing more is asked; where it does not, what covers the rest of `a` holds.
    open_ = {frozenset(x for x in c if c == {x} or not any(_cover(a, x, shape) for a in alone)) for c in short}
    if any(_cover(a, b, shape) for a, b in combinations(alone, 2)):
        return TRUE
    remaining = sorted(open_, key=lambda clause: sorted(map(str, clause)))
    for clause in list(remaining):
        if any(other != clause and _implies(clause, other, shape) for other in remaining):
            remaining.remove(clause)
    return Predicate(frozenset(remaining))


def _shortened(clause: Clause, shape: tuple[Size, ...]) -> Clause | None:
    """The clause without what follows from the rest of it; None where it is never true."""
    open_ = [size for size in sorted(clause, key=str) if not never_negative(size, shape)]
    pairs = combinations(open_, 2)
    if any(never_negative(simplify(-a - 1), shape) for a in open_):
        return None
    if any(never_negative(simplify(-a - b - 1), shape) for a, b in pairs):
        return None
    remaining = list(open_)
    for size in open_:
        if any(other is not size and never_negative(simplify(size - other), shape) for other in remaining):
            remaining.remove(size)
    return frozenset(remaining)


def _implies(a: Clause, b: Clause, shape: tuple[Size, ...]) -> bool:
    return all(any(never_negative(simplify(y - x), shape) for x in a) for y in b)


def _cover(a: Size, b: Size, shape: tuple[Size, ...]) -> bool:
    """Whether one of both is at least 0 everywhere: else both were at most -1, and their sum at most -2."""
    return never_negative(simplify(a + b + 1), shape)
