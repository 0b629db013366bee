"""Integers that are affine in an element's indices: what holds of them for every element and every size.

Enters: expressions in indices and symbolic sizes. Leaves: proofs that they are never negative. An index of dimension
`dim` lies in `0 … size - 1`; symbolic sizes are at least 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

import sympy

from fxpar.layout.symbolic_sizes import Size, simplify

_MARK = "@"
# Below these nothing overflows 64 bits: sizes stay far under 2^31.
_LARGEST, _DEGREE = 2**31, 1


class UnknownElements(Exception):
    """The elements of a value are not known; never leaves this room."""


@cache
def index(dim: int) -> sympy.Symbol:
    """An element's index in dimension `dim`."""
    return sympy.Symbol(f"{_MARK}{dim}", integer=True, nonnegative=True)


def indices(size: Size) -> set[sympy.Symbol]:
    """The indices that occur."""
    return set() if isinstance(size, int) else {s for s in size.free_symbols if s.name.startswith(_MARK)}


def replaced(size: Size, values: Mapping[sympy.Symbol, Size]) -> Size:
    """The expression with other expressions for its indices."""
    return size if isinstance(size, int) else simplify(size.subs(values, simultaneous=True))


def exact(size: Size) -> Size:
    """The expression, if 64-bit arithmetic computes it without overflow and it is an integer.

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
    """Whether the expression is proved to be at least 0 for each element of a tensor of this shape, for all sizes.

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
