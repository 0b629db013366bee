"""What the elements of a tensor of numbers are, case by case.

Enters: predicates, integers affine in the indices, floating constants. Leaves: `Numbers` and arithmetic on them, as
exact as the tensor's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations, product
from typing import TypeAlias

import sympy
import torch

from fxpar.layout.symbolic_sizes import Size, simplify

# Integers that are affine in an element's indices: what holds of them for every element and every size.

_MARK = "@"
# Below these nothing overflows 64 bits: sizes stay far under 2^31.
_LARGEST, _DEGREE = 2**31, 1


class UnknownElements(Exception):
    """The elements of a value are not known; never leaves this room."""


@cache
def index(dim: int) -> sympy.Symbol:
    """Returns an element's index in dimension `dim`."""
    return sympy.Symbol(f"{_MARK}{dim}", integer=True, nonnegative=True)


def indices(size: Size) -> set[sympy.Symbol]:
    """Returns the indices that occur."""
    return set() if isinstance(size, int) else {s for s in size.free_symbols if s.name.startswith(_MARK)}


def replaced(size: Size, values: Mapping[sympy.Symbol, Size]) -> Size:
    """Puts other expressions in the place of the expression's indices."""
    return size if isinstance(size, int) else simplify(size.subs(values, simultaneous=True))


def exact(size: Size) -> Size:
    """Returns the expression, if 64-bit arithmetic computes it without overflow and it is an integer.

    Raises:
        UnknownElements: neither is certain.
    """
    size = simplify(size)
    terms = [sympy.Integer(size)] if isinstance(size, int) else sympy.Add.make_args(size)
    for term in terms:
        number, rest = term.as_coeff_Mul()
        degree = sum(sympy.degree(rest, s) for s in rest.free_symbols) if rest.is_polynomial() else _DEGREE + 1
        if not number.is_Integer or abs(number) >= _LARGEST or degree > _DEGREE:
            raise UnknownElements
    return size


@lru_cache(maxsize=65536)
def never_negative(size: Size, shape: Sequence[Size]) -> bool:
    """Returns whether the expression is proved to be at least 0 for each element of this shape, for all sizes.

    Each index is set to the end of its range at which the expression is smallest; what remains is a polynomial in
    the sizes, and is no sum of negative terms when written in `size - 1`.
    """
    least = simplify(size)
    for dim, length in enumerate(shape):
        if isinstance(least, int):
            break
        slope = simplify(least.coeff(index(dim)))
        rest = simplify(least - slope * index(dim))
        if index(dim) in indices(rest):
            return False
        if _is_nonnegative(slope):
            least = rest
        elif _is_nonnegative(simplify(-slope)):
            least = simplify(rest + slope * (length - 1))
        else:
            return False
    return _is_nonnegative(least)


@lru_cache(maxsize=65536)
def _is_nonnegative(size: Size) -> bool:
    if isinstance(size, int):
        return size >= 0
    symbols = sorted(size.free_symbols, key=str)
    if indices(size) or not symbols or not size.is_polynomial(*symbols):
        return False
    shifted = sympy.Poly(size.subs({s: s + 1 for s in symbols}, simultaneous=True), *symbols)
    return all(c.is_number and c >= 0 for c in shifted.coeffs())


# Which elements of a boolean tensor are true, as a formula in their indices.

Clause: TypeAlias = frozenset[Size]
_MOST = 16


@dataclass(frozen=True)
class Predicate:
    """True where all expressions of some clause are at least 0; no clause is false, an empty one true."""

    clauses: frozenset[Clause]

    @property
    def indices(self) -> set[sympy.Symbol]:
        """Returns the indices it depends on."""
        return {i for clause in self.clauses for size in clause for i in indices(size)}

    def replaced(self, values: Mapping[sympy.Symbol, Size]) -> Predicate:
        """Puts other expressions in the place of its indices."""
        return Predicate(frozenset(frozenset(replaced(s, values) for s in clause) for clause in self.clauses))


TRUE, FALSE = Predicate(frozenset([frozenset()])), Predicate(frozenset())


def at_least_zero(size: Size, shape: Sequence[Size]) -> Predicate:
    """Holds where the expression is at least 0."""
    return normal_form([frozenset([simplify(size)])], shape)


def both(a: Predicate, b: Predicate, shape: Sequence[Size]) -> Predicate:
    """Returns the conjunction, over tensors of one shape."""
    return normal_form([x | y for x, y in product(a.clauses, b.clauses)], shape)


def either(a: Predicate, b: Predicate, shape: Sequence[Size]) -> Predicate:
    """Returns the disjunction, over tensors of one shape."""
    return normal_form([*a.clauses, *b.clauses], shape)


def negated(a: Predicate, shape: Sequence[Size]) -> Predicate:
    """Returns the negation: of integers, `e >= 0` fails where `-e - 1 >= 0`."""
    negation = TRUE
    for clause in a.clauses:
        negation = both(negation, normal_form([frozenset([simplify(-size - 1)]) for size in clause], shape), shape)
    return negation


def normal_form(clauses: Iterable[Clause], shape: Sequence[Size]) -> Predicate:
    """Names the same elements in fewer words: without what is always or never true, or follows from the rest.

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
    """Returns the clause without what follows from the rest of it; None where it is never true."""
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
    """Returns whether one of both is at least 0 everywhere: else both were at most -1, and their sum at most -2."""
    return never_negative(simplify(a + b + 1), shape)


# An integer affine in the indices, or a floating constant.
Leaf: TypeAlias = Size | float
_WHOLE = 2**53  # up to here float64 holds every integer


@dataclass(frozen=True)
class Numbers:
    """For each case, of which exactly one holds at an element, the element's value."""

    cases: tuple[tuple[Predicate, Leaf], ...]

    @property
    def indices(self) -> set[sympy.Symbol]:
        """Returns the indices it depends on."""
        leaf_indices = {i for _, leaf in self.cases if not isinstance(leaf, float) for i in indices(leaf)}
        return leaf_indices.union(*(condition.indices for condition, _ in self.cases))

    def replaced(self, values: Mapping[sympy.Symbol, Size]) -> Numbers:
        """Puts other expressions in the place of its indices."""
        return Numbers(
            tuple((c.replaced(values), x if isinstance(x, float) else replaced(x, values)) for c, x in self.cases)
        )


Element: TypeAlias = Predicate | Numbers


def constant(leaf: Leaf) -> Numbers:
    """Returns the same number everywhere."""
    return Numbers(((TRUE, leaf),))


def gathered(cases: Iterable[tuple[Predicate, Leaf]], shape: Sequence[Size]) -> Numbers:
    """Joins the cases of equal values, and leaves out the impossible ones."""
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
    """Applies a function to two numbers, element by element, and rounds to the type of the result."""
    pairs = [(both(p, q, shape), x, y) for p, x in a.cases for q, y in b.cases]
    return gathered([(c, rounded(function(x, y), dtype)) for c, x, y in pairs if c != FALSE], shape)


def rounded(leaf: Leaf, dtype: torch.dtype) -> Leaf:
    """Returns a value as an element of that type holds it.

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
    """Takes the first number where the condition holds, else the second."""
    other = negated(condition, shape)
    cases = [(both(condition, c, shape), x) for c, x in yes.cases]
    return gathered([*cases, *((both(other, c, shape), x) for c, x in no.cases)], shape)


def where(condition: Callable[[Leaf], Predicate], a: Numbers, shape: Sequence[Size]) -> Predicate:
    """Holds for the elements of whose value the condition is true."""
    predicate = FALSE
    for case, leaf in a.cases:
        predicate = either(predicate, both(case, condition(leaf), shape), shape)
    return predicate


def is_equal(a: Leaf, b: Leaf, shape: Sequence[Size]) -> Predicate:
    """Holds where two values are equal."""
    return both(is_at_most(a, b, shape), is_at_most(b, a, shape), shape)


def is_at_most(a: Leaf, b: Leaf, shape: Sequence[Size]) -> Predicate:
    """Holds where the first value is at most the second."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return TRUE if a <= b else FALSE
    if isinstance(a, float) or isinstance(b, float):
        raise UnknownElements
    return at_least_zero(simplify(b - a), shape)


def as_numbers(a: Element, shape: Sequence[Size]) -> Numbers:
    """Returns numbers as they are, of booleans 1 and 0."""
    return a if isinstance(a, Numbers) else gathered([(a, 1), (negated(a, shape), 0)], shape)


def as_predicate(a: Element, shape: Sequence[Size]) -> Predicate:
    """Returns booleans as they are, of numbers those that are not 0, nan too."""
    if isinstance(a, Predicate):
        return a
    return negated(where(lambda x: is_equal(x, 0, shape), a, shape), shape)
