"""The symbols of a program: sizes of its inputs, and numbers of rows that are counted while it runs.

Enters: nothing. Leaves: `Symbol`, `Counted`, and values of both.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fxpar.layout.symbols import Size, evaluate, names, simplify, symbol

# What computes the operations of `fxpar.layout.symbols.last_operation` in a graph.
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
        multiple: ranks that share out the dimension, whose size they must divide.
    """

    name: str
    path: str
    dim: int
    example: int
    multiple: int = 1

    @property
    def size(self) -> Size:
        """The dimension's size."""
        return simplify(self.multiple * symbol(self.name))


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
        """The symbol."""
        return symbol(self.name)


def with_counted(counted: Iterable[Counted], sizes: Mapping[str, int]) -> dict[str, int]:
    """Values of the symbols of inputs, and behind them of what is counted: that of a balanced load."""
    return {**sizes, **{each.name: max(evaluate(each.balanced, sizes), 1) for each in counted}}


def balanced(counted: Iterable[Counted], size: Size) -> Size:
    """A size in sizes of inputs alone, for a balanced load."""
    values = {each.size: sympy.sympify(each.balanced) for each in counted}
    if isinstance(size, int) or not values or names((size,)).isdisjoint(map(str, values)):
        return size
    return simplify(size.subs(values))
