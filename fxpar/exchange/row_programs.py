"""What is computed of each row of a sum: additions, products and norms, as a text that a kernel is made of.

Enters: operations on rows. Leaves: a `RowProgram`, written as JSON and read again, and computed by torch's operators,
which is what a kernel of it must give.

Terms: a value is *full*, [rows, width], or has one number for each *row*, [rows, 1], or for each *column*, [width].
Value 0 is the sum, then come the operands and then what each step gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import torch
from torch import Tensor

# Types of sums, and the most bytes of a row, of which a kernel holds all that it computes at once.
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WIDEST = 16384


def fits(width: int, dtype: torch.dtype) -> bool:
    """Whether rows can be a program's: by the sum alone, so that ranks never differ in it."""
    return dtype in TYPES and 2 <= width <= _WIDEST // dtype.itemsize


class Extent(StrEnum):
    """How many numbers a value has."""

    FULL = "full"
    ROW = "row"
    COLUMN = "column"


@dataclass(frozen=True)
class RowStep:
    """One operation.

    Attributes:
        name: of it, a key of `POINTWISE` or `REDUCTIONS`.
        operands: numbers of values, and numbers as such (float).
        dtype: of what it gives, to which it is rounded.
        extent: of what it gives.
    """

    name: str
    operands: tuple[int | float, ...]
    dtype: torch.dtype
    extent: Extent


@dataclass(frozen=True)
class RowProgram:
    """Steps on rows.

    Attributes:
        width: elements of a row.
        operands: extents of what comes besides the sum.
        steps: in order.
        results: numbers of the values that are wanted, none of which is a column.
    """

    width: int
    operands: tuple[Extent, ...]
    steps: tuple[RowStep, ...]
    results: tuple[int, ...]

    @property
    def text(self) -> str:
        """As JSON."""
        steps = [
            [s.name, [a if isinstance(a, int) else {"number": a} for a in s.operands], _word(s.dtype), s.extent]
            for s in self.steps
        ]
        return json.dumps([self.width, self.operands, steps, self.results], separators=(",", ":"))

    def extent(self, value: int) -> Extent:
        """Of a value."""
        if value <= len(self.operands):
            return Extent.FULL if value == 0 else self.operands[value - 1]
        return self.steps[value - 1 - len(self.operands)].extent

    def dtype(self, value: int, total: torch.dtype, operands: Sequence[torch.dtype]) -> torch.dtype:
        """Of a value, where the sum and the operands are of these types."""
        if value <= len(self.operands):
            return (total, *operands)[value]
        return self.steps[value - 1 - len(self.operands)].dtype

    def run(self, total: Tensor, operands: Sequence[Tensor]) -> list[Tensor]:
        """The results.

        Args:
            total: [rows, width], the sum.
            operands: [rows, width], [rows, 1] or [width].
        """
        values = [total, *operands]
        for step in self.steps:
            args = [values[a] if isinstance(a, int) else a for a in step.operands]
            computed = (POINTWISE.get(step.name) or REDUCTIONS[step.name])(*args)
            values.append(computed.to(step.dtype))
        first = len(operands) + 1
        new = {i for i, step in enumerate(self.steps, first) if step.name != "to"}
        return [values[i] if i in new else values[i].clone() for i in self.results]  # memory of its own, as of a kernel


def sum_alone(width: int) -> RowProgram:
    """That of nothing but the sum."""
    return RowProgram(width, (), (), (0,))


# By name, in torch's operators.
POINTWISE: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "to": lambda x: x,
}
REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "var": lambda x, correction: x.var(-1, correction=correction, keepdim=True),
}


@cache
def read(text: str) -> RowProgram:
    """The program that a text says."""
    width, operands, steps, results = json.loads(text)
    return RowProgram(
        width,
        tuple(map(Extent, operands)),
        tuple(
            RowStep(
                name,
                tuple(a["number"] if isinstance(a, dict) else a for a in step_operands),
                getattr(torch, word),
                Extent(extent),
            )
            for name, step_operands, word, extent in steps
        ),
        tuple(results),
    )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
