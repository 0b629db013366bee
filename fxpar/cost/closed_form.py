"""Bytes in closed form: the polynomial in the sizes that counts at a few sizes lie on.

Enters: a program, and what was counted at `points`. Leaves: polynomials with exact coefficients. Which powers can occur
is read from the shapes in the program, downward closed (with b*s**2 also b*s, s, …): for such a set of exponents the
lattice of the exponents themselves determines the polynomial (Chung and Yao, "On lattices admitting unique Lagrange
interpolations", SIAM J. Numer. Anal. 1977). Nothing is taken for granted: a point that had no part in it must agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod

import sympy
import torch

from fxpar.ir.program import Program, operands, output_types
from fxpar.ir.symbols import balanced
from fxpar.layout.symbolic_sizes import Size, names, product, simplify, symbol
from fxpar.ops.operator import alike

Exponents = tuple[int, ...]
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def exponents(program: Program) -> list[Exponents]:
    """Returns the powers of the program's symbols, in their order, that sizes of its values are made of, sorted."""
    order = [symbol(s.name) for s in program.symbols]
    shapes = {kind.shape for node in program.graph.nodes if node.op != "output" for kind in output_types(node)}
    for node in program.graph.nodes:
        if alike(node.target) is _ATTENTION:  # its scores are no value of the graph
            query, key = (output_types(operand)[0].shape for operand in operands(node)[:2])
            shapes.add((*query[:-1], key[-2]))
    monomials = {(0,) * len(order)}
    for size in {balanced(program.counted, product(shape)) for shape in shapes if names(shape)}:
        if sympy.sympify(size).is_polynomial(*order):
            for powers in sympy.Poly(size, *order).monoms():
                monomials.update(itertools.product(*[range(power + 1) for power in powers]))
    return sorted(monomials)


def points(powers: Sequence[Exponents], sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Returns where to count: one point for each power, the first at `sizes`, and behind them one to check.

    Towards smaller sizes where there is room, since models bound their sizes from above. Never below 2: what has one
    row alone is laid out otherwise.
    """
    base = {name: max(size, 2) for name, size in sizes.items()}
    steps = {}
    for index, (name, size) in enumerate(base.items()):
        most = max(power[index] for power in powers)
        steps[name] = -1 if size - most - 1 >= 2 else 1
    lattice = [_moved(base, steps, power) for power in powers]
    farther = [max(power[index] for power in powers) + 1 for index in range(len(base))]
    return [*lattice, _moved(base, steps, farther)]


def _moved(base: Mapping[str, int], steps: Mapping[str, int], by: Sequence[int]) -> dict[str, int]:
    return {name: size + steps[name] * times for (name, size), times in zip(base.items(), by, strict=True)}


def fit(
    powers: Sequence[Exponents], where: Sequence[Mapping[str, int]], counts: Sequence[Mapping[str, int]]
) -> dict[str, Size | None]:
    """Returns polynomials by name; None where the last point does not lie on the one through the others.

    Args:
        powers: of the symbols, as `exponents` gives them.
        where: as `points` gives them.
        counts: what was counted there, by name.
    """
    keys = list(dict.fromkeys(key for count in counts for key in count))
    rows = [
        [prod(size**e for size, e in zip(point.values(), power, strict=True)) for power in powers] for point in where
    ]
    values = [[count.get(key, 0) for key in keys] for count in counts]
    solved = sympy.Matrix(rows[:-1]).LUsolve(sympy.Matrix(values[:-1]))
    predicted = sympy.Matrix([rows[-1]]) * solved
    monomials = [
        prod((symbol(n) ** e for n, e in zip(where[0], power, strict=True)), start=sympy.Integer(1)) for power in powers
    ]
    polynomials: dict[str, Size | None] = {}
    for column, key in enumerate(keys):
        terms = [solved[row, column] * monomial for row, monomial in enumerate(monomials)]
        agrees = predicted[0, column] == values[-1][column]
        polynomials[key] = simplify(sympy.Add(*terms)) if agrees else None
    return polynomials
