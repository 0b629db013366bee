"""What is computed of each row of a sum: additions, products and norms, as a text that a kernel is made of.

Enters: operations on rows. Leaves: a `RowProgram`, written as JSON and read again, and computed by torch's operators,
which is what a kernel of it must give; and the text of that kernel.

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
    """Returns whether rows can be a program's: by the sum alone, so that ranks never differ in it."""
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
        """Returns the program as JSON."""
        steps = [
            [s.name, [a if isinstance(a, int) else {"number": a} for a in s.operands], _word(s.dtype), s.extent]
            for s in self.steps
        ]
        return json.dumps([self.width, self.operands, steps, self.results], separators=(",", ":"))

    def extent(self, value: int) -> Extent:
        """Returns the extent of a value."""
        if value <= len(self.operands):
            return Extent.FULL if value == 0 else self.operands[value - 1]
        return self.steps[value - 1 - len(self.operands)].extent

    def dtype(self, value: int, total: torch.dtype, operands: Sequence[torch.dtype]) -> torch.dtype:
        """Returns the type of a value, where the sum and the operands are of these types."""
        if value <= len(self.operands):
            return (total, *operands)[value]
        return self.steps[value - 1 - len(self.operands)].dtype

    def run(self, total: Tensor, operands: Sequence[Tensor]) -> list[Tensor]:
        """Returns the results.

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
    """Returns the program of nothing but the sum."""
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
    """Returns the program that a text says."""
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


# Elements that a program holds of a value: of fewer too little is read at once.
TILE = 4096
# Registers of a thread: with more, not all programs would fit.
REGISTERS = 64
# Threads of a program: few, since those of one wait for each other after each sum of a row.
_WARPS, _WARPS_OF_WIDE = 8, 16

_HALF = (torch.float16, torch.bfloat16)
_TRITON = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32"}
_TRITON |= {torch.float64: "tl.float64"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def warps_of(columns: int) -> int:
    """Returns how many warps a program has whose rows have so many elements."""
    return _WARPS if columns <= TILE else _WARPS_OF_WIDE


def results_of(program: RowProgram, x: Tensor, operands: Sequence[torch.dtype]) -> list[Tensor]:
    """Returns memory for the results, [rows, width] or [rows, 1], where the sum is like x [rows, width]."""
    rows, width = x.shape
    return [
        x.new_empty((rows, width if program.extent(i) is Extent.FULL else 1), dtype=program.dtype(i, x.dtype, operands))
        for i in program.results
    ]


@dataclass(frozen=True)
class RowSource:
    """Parts of a kernel.

    Attributes:
        pointers: the parameters of operands and results, in order.
        loads: make the operands.
        body: makes and stores the results.
    """

    pointers: list[str]
    loads: list[str]
    body: list[str]


def row_source(program: RowProgram, total: torch.dtype, operands: Sequence[torch.dtype]) -> RowSource:
    """Returns the parts of a kernel of a program, for these types of the sum and of the operands.

    What is of half precision is computed in float32 and rounded after each step, as torch's operators do.
    """
    names = [f"in{i}_ptr" for i in range(len(operands))] + [f"out{i}_ptr" for i in range(len(program.results))]
    wide = [wide_type(program.dtype(i, total, operands)) for i in range(1 + len(operands) + len(program.steps))]
    loads = [f"in{i} = {_load(f'in{i}_ptr', extent)}" for i, extent in enumerate(program.operands)]
    lines = [f"v{i} = {'v0' if i == 0 else f'in{i - 1}'}.to({wide[i]})" for i in range(1 + len(operands))]
    summed: set[int | float] = set()
    for i, step in enumerate(program.steps, 1 + len(operands)):
        x = step.operands[0]
        if step.name in REDUCTIONS and x not in summed:
            summed.add(x)
            lines.append(f"sum{x} = {_over_columns(f'v{x}')}")
        # Squares about the mean: the row is in registers anyway, and a difference of two large sums would cancel.
        if step.name == "var":
            lines.append(f"apart{i} = v{x} - sum{x} / WIDTH")
        lines.append(f"v{i} = {_rounded(_step(i, step), step.dtype, wide[i])}")
    for i, value in enumerate(program.results):
        kind = _TRITON[program.dtype(value, total, operands)]
        place, mask = ("at", "mask") if program.extent(value) is Extent.FULL else ("row", "is_row")
        lines.append(f"tl.store(out{i}_ptr + {place}, v{value}.to({kind}), mask={mask})")
    return RowSource(names, loads, lines)


def indented(lines: Sequence[str], spaces: int) -> str:
    """Indents the lines of a block of a kernel."""
    return "\n".join(" " * spaces + line for line in lines)


def parameters(names: Sequence[str]) -> str:
    """Returns names as they stand in a kernel's head."""
    return "".join(f"{name}, " for name in names)


def wide_type(dtype: torch.dtype) -> str:
    """Returns Triton's type in which values of a type are computed."""
    return _TRITON[torch.float32 if dtype in _HALF else dtype]


def _load(pointer: str, extent: Extent) -> str:
    if extent is Extent.FULL:
        return f"tl.load({pointer} + at, mask=mask, other=0.0)"
    place, mask = ("row", "is_row") if extent is Extent.ROW else ("column", "is_column")
    return f"tl.load({pointer} + {place}, mask={mask}, other=0.0)"


def _rounded(text: str, dtype: torch.dtype, wide: str) -> str:
    if dtype in _HALF:
        return f"({text}).to({_TRITON[dtype]}).to({wide})"
    return f"({text}).to({wide})"


def _over_columns(x: str) -> str:
    # Columns past the width begin as zeros, and steps may have made other numbers of them.
    return f"tl.sum(tl.where(mask, {x}, 0.0), 1)[:, None]"


def _step(number: int, step: RowStep) -> str:
    operands = [f"v{a}" if isinstance(a, int) else repr(float(a)) for a in step.operands]
    x = operands[0]
    forms = {name: f" {sign} ".join(operands) for name, sign in _INFIX.items()}
    forms |= {"neg": f"-{x}", "rsqrt": f"tl.rsqrt({x})", "sqrt": f"tl.sqrt({x})", "reciprocal": f"1.0 / {x}"}
    forms |= {"square": f"{x} * {x}", "to": x}
    forms |= {"sum": f"sum{x[1:]}", "mean": f"sum{x[1:]} / WIDTH"}
    if step.name == "var":
        apart = f"apart{number}"
        return f"{_over_columns(f'{apart} * {apart}')} / (WIDTH - {operands[1]})"
    return forms[step.name]
