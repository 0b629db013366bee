"""The symbols of a program: sizes of its inputs, and numbers of rows that are counted while it runs.

Enters: nothing. Leaves: `Symbol`, `Counted`, and values of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy

from fxpar.layout.symbols import Size, evaluate, names, simplify, symbol


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
        """Ranks that share out the dimension."""
        return self.multiple // self.group

    @property
    def size(self) -> Size:
        """The dimension's size."""
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
