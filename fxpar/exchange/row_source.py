"""What a kernel computes of rows, as text: the loads, the steps and the stores of a program of rows.

Enters: a `RowProgram` and the types of its values. Leaves: lines of Triton's language, which the kernels of sums
(`push_rows`, `push_blocks`) have in their midst.

These lines know: `at`, `row` and `column`, the places of elements, rows and columns; `mask`, `is_row` and `is_column`,
whether they are; `WIDTH`. Between the loads and the steps the kernel makes `v0`, the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpar.exchange.row_programs import REDUCTIONS, Extent, RowProgram, RowStep

# Elements that a program holds of a value: of fewer too little is read at once.
TILE = 4096
# Registers of a thread: with more, not all programs would fit.
REGISTERS = 64
# Threads of a program: few, since those of one wait for each other behind each sum of a row.
_WARPS, _WARPS_OF_WIDE = 8, 16

_HALF = (torch.float16, torch.bfloat16)
_TRITON = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32"}
_TRITON |= {torch.float64: "tl.float64"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def warps_of(columns: int) -> int:
    """Warps of a program whose rows have so many elements."""
    return _WARPS if columns <= TILE else _WARPS_OF_WIDE


def results_of(program: RowProgram, x: Tensor, operands: Sequence[torch.dtype]) -> list[Tensor]:
    """Memory for the results, [rows, width] or [rows, 1], where the sum is like x [rows, width]."""
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
    """Those of a program, for these types of the sum and of the operands.

    What is of half precision is computed in float32 and rounded behind each step, as torch's operators do.
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
        if step.name == "var":
            lines.append(f"apart{i} = v{x} - sum{x} / WIDTH")
        lines.append(f"v{i} = {_rounded(_step(i, step), step.dtype, wide[i])}")
    for i, value in enumerate(program.results):
        kind = _TRITON[program.dtype(value, total, operands)]
        place, mask = ("at", "mask") if program.extent(value) is Extent.FULL else ("row", "is_row")
        lines.append(f"tl.store(out{i}_ptr + {place}, v{value}.to({kind}), mask={mask})")
    return RowSource(names, loads, lines)


def indented(lines: Sequence[str], spaces: int) -> str:
    """Lines of a block of a kernel."""
    return "\n".join(" " * spaces + line for line in lines)


def parameters(names: Sequence[str]) -> str:
    """In a kernel's head."""
    return "".join(f"{name}, " for name in names)


def wide_type(dtype: torch.dtype) -> str:
    """In which values of a type are computed."""
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
