"""The symbols of a program: sizes of its inputs, and numbers of rows that are counted while it runs.

Enters: nothing. Leaves: `Symbol`, `Counted`, and values of both; `Condition`, what sizes must satisfy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fxpar.layout.symbolic_sizes import Size, evaluate, names, parse_size, simplify, symbol

_RELATIONS: Mapping[str, type[sympy.core.relational.Relational]] = {
    "==": sympy.Eq,
    "!=": sympy.Ne,
    ">=": sympy.Ge,
    "<=": sympy.Le,
    ">": sympy.Gt,
    "<": sympy.Lt,
}
RELATIONS = tuple(_RELATIONS)

# What computes the operations of `fxpar.layout.symbolic_sizes.last_operation` in a graph.
SIZE_FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "mod": operator.mod,
    "floordiv": operator.floordiv,
    "max": torch.sym_max,
    "min": torch.sym_min,
}


@dataclass(frozen=True)
class Symbol:
    """A symbolic size: dimension `dim` of input `path` is `multiple` times the symbol.

    Attributes:
        example: the symbol's value in the example.
        multiple: what divides the dimension's size: the ranks that share it out, times `group`.
        group: how many of its rows belong together, which one rank has.
    """

    name: str
    path: str
    dim: int
    example: int
    multiple: int = 1
    group: int = 1

    @property
    def ranks(self) -> int:
        """Returns ranks that share out the dimension."""
        return self.multiple // self.group

    @property
    def size(self) -> Size:
        """Returns the dimension's size."""
        return simplify(self.multiple * symbol(self.name))


def in_groups_of(known: Symbol) -> str:
    """Returns what a message about ranks that cannot share a size out says of its groups."""
    return f" in whole groups of {known.group}" if known.group > 1 else ""


@dataclass(frozen=True)
class Counted:
    """A number of rows that values decide, and that each rank has one of its own of (`fxpar.send_rows`).

    A text with such an extent is that of one device where each rank's rows are filled up to the most that one has:
    what is done to rows is done to each by itself.

    Attributes:
        balanced: what it is where all ranks receive as many, in sizes of inputs; reports and costs take it for that.
        example: the same for the example, and at least 1.
    """

    name: str
    balanced: Size
    example: int

    @property
    def size(self) -> Size:
        """Returns the symbol."""
        return symbol(self.name)


def with_counted(counted: Iterable[Counted], sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns values of the symbols of inputs, and after them of what is counted: that of a balanced load."""
    return {**sizes, **{entry.name: max(evaluate(entry.balanced, sizes), 1) for entry in counted}}


def balanced(counted: Iterable[Counted], size: Size) -> Size:
    """Returns a size in sizes of inputs alone, for a balanced load."""
    values = {entry.size: sympy.sympify(entry.balanced) for entry in counted}
    if isinstance(size, int) or not values or names((size,)).isdisjoint(map(str, values)):
        return size
    return simplify(size.subs(values))


@dataclass(frozen=True)
class Condition:
    """A relation that the sizes of a call must satisfy for the program to be the model: `s >= 5`.

    Attributes:
        relation: one of `RELATIONS`.
    """

    left: Size
    relation: str
    right: Size

    def __str__(self) -> str:
        return f"{self.left} {self.relation} {self.right}"

    @property
    def expression(self) -> sympy.Basic:
        """Returns the relation as sympy has it; true or false where no symbol is left."""
        return _RELATIONS[self.relation](sympy.sympify(self.left), sympy.sympify(self.right))

    @property
    def names(self) -> set[str]:
        """Returns names of its symbols."""
        return names((self.left, self.right))

    def holds(self, sizes: Mapping[str, Size]) -> bool:
        """Returns whether it is satisfied.

        Args:
            sizes: values of the symbols.
        """
        return bool(self.expression.subs({symbol(name): size for name, size in sizes.items()}) == sympy.true)

    def with_sizes(self, sizes: Mapping[sympy.Symbol, Size]) -> Condition:
        """Returns the same in other symbols."""
        left, right = (
            side if isinstance(side, int) else simplify(side.subs(sizes, simultaneous=True))
            for side in (self.left, self.right)
        )
        return Condition(left, self.relation, right)


def condition_of(relation: sympy.core.relational.Relational) -> Condition:
    """Returns the condition that a relation of sizes is.

    Raises:
        TextError: a side has no text form.
    """
    name = next(name for name, kind in _RELATIONS.items() if isinstance(relation, kind))
    left, right = (parse_size(str(simplify(side))) for side in relation.args)
    return Condition(left, name, right)
