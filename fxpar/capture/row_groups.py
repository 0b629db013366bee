"""Rows that a model takes in groups: `rewards.view(-1, 4)` is right for multiples of four rows alone.

Enters: what a trace assumed of its sizes. Leaves: by symbol of the trace the number that divides it. In a program the
number of groups is the symbol, and the rows are a multiple of it, so that every rank, and every microbatch, has whole
groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch

_REMAINDERS = ("Mod", "PythonMod")


def divisors(environment: Any) -> dict[str, int]:
    """Returns for each symbol that a trace assumed to be a multiple of a number that number.

    Args:
        environment: the sizes of the trace; None where none is symbolic.
    """
    divisors: dict[str, int] = {}
    for guard in environment.guards if environment is not None else ():
        for size, by in _divided(guard.expr):
            size = environment.replacements.get(size, size)
            if size.is_Symbol and by.is_Integer and by > 1:
                divisors[str(size)] = math.lcm(divisors.get(str(size), 1), int(by))
    return divisors


def _divided(relation: Any) -> Iterator[tuple[Any, Any]]:
    """A size and what divides it: `b % 4 == 0`, `b == 4 * (b // 4)`."""
    if not isinstance(relation, sympy.Eq):
        return
    for one, other in (relation.args, relation.args[::-1]):
        if other == 0 and type(one).__name__ in _REMAINDERS:
            yield one.args
        by, rest = other.as_coeff_Mul()
        if type(rest).__name__ == "FloorDiv" and rest.args == (one, by):
            yield one, by


def of_rows(shapes: Iterable[Any], values: Iterable[Any]) -> dict[str, int]:
    """Returns for each symbol that counts rows, the first dimension of inputs, how many rows are a group.

    A number that the author's code asks about and that no size is divided by is a branch, and no group.

    Args:
        shapes: of the inputs. Those that have as many rows in the example have one number of rows.
        values: of all nodes of the trace.
    """
    rows = [shape[0] for shape in shapes if len(shape) and isinstance(shape[0], torch.SymInt)]
    known = divisors(rows[0].node.shape_env) if rows else {}
    if known:
        divided = set(_divided_in(values))
        known = {name: by for name, by in known.items() if name in divided}
    groups: dict[int, int] = {}
    for size in rows:
        hint = int(size.node.hint)
        groups[hint] = math.lcm(groups.get(hint, 1), known.get(str(size.node.expr), 1))
    by_symbol = {str(size.node.expr): groups[int(size.node.hint)] for size in rows if size.node.expr.is_Symbol}
    return {name: group for name, group in by_symbol.items() if group > 1}


def _divided_in(values: Iterable[Any]) -> Iterator[str]:
    """Symbols that sizes of values are divided parts of."""
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and not size.node.expr.is_Symbol:
                parts = (part for part in sympy.preorder_traversal(size.node.expr) if type(part).__name__ == "FloorDiv")
                yield from (str(part.args[0]) for part in parts)


def in_groups(expression: Any, groups: Mapping[str, int]) -> Any:
    """Returns a size with each symbol of `groups` as that multiple of one of its name."""
    return expression.xreplace({s: groups[str(s)] * s for s in expression.free_symbols if str(s) in groups})
