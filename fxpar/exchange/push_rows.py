"""A sum over two GPUs, and what is computed of each of its rows, in one kernel.

Enters: what `push_kernels` takes, and a program of rows (`row_programs`). Leaves: the program's results. Needs Triton.

While a sum is under way most of what a GPU's memory could do is left: a residual connection and a norm behind it are
computed of the rows that are there, and neither the sum nor the residual is read again. The kernel is made for the
program, as source that Triton compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

from fxpar.exchange.push_kernels import FLAGS
from fxpar.exchange.row_programs import REDUCTIONS, Extent, RowProgram, RowStep, read

# Elements that a program sends at once, and that it holds of a value: of fewer too little is read at once. A flag is
# for two such tiles.
_BLOCK, _TILE, _TILES = 4096, 4096, 2
# Threads of a program: few, since those of one wait for each other behind each sum of a row.
_WARPS, _WARPS_OF_WIDE = 8, 16
# Of all programs that send, and of all that add: half of a GPU each. With more registers they would not fit.
_ALL_WARPS, _REGISTERS = 2048, 64

_HALF = (torch.float16, torch.bfloat16)
_TRITON = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32"}
_TRITON |= {torch.float64: "tl.float64"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}

_KERNEL = """
import triton
import triton.language as tl


@triton.jit
def kernel(
    x_ptr, there_ptr, here_ptr, flags_there_ptr, flags_here_ptr, {pointers}
    rows, chunks, chunk_rows,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < PROGRAMS:
        places = tl.arange(0, BLOCK)
        for chunk in range(program, chunks, PROGRAMS):
            begin = chunk.to(tl.int64) * chunk_rows * WIDTH
            end = tl.minimum((chunk + 1).to(tl.int64) * chunk_rows, rows) * WIDTH
            for block in range(tl.cdiv(chunk_rows * WIDTH, BLOCK)):
                at = begin + block * BLOCK + places
                tl.store(there_ptr + at, tl.load(x_ptr + at, mask=at < end), mask=at < end)
            tl.debug_barrier()
            tl.atomic_xchg(flags_there_ptr + chunk, 1, sem="release", scope="sys")
    else:
        column = tl.arange(0, COLUMNS)[None, :]
        is_column = column < WIDTH
        for chunk in range(program - PROGRAMS, chunks, PROGRAMS):
            for tile in range(tl.cdiv(chunk_rows, ROWS)):
                inside = tile * ROWS + tl.arange(0, ROWS)[:, None]
                row = chunk.to(tl.int64) * chunk_rows + inside
                is_row = (inside < chunk_rows) & (row < rows)
                at = row * WIDTH + column
                mask = is_row & is_column
                own = tl.load(x_ptr + at, mask=mask, other=0.0)
{loads}
                if tile == 0:  # what is here already is read while the rest is under way
                    while tl.atomic_cas(flags_here_ptr + chunk, 1, 0, sem="acquire", scope="sys") != 1:
                        pass
                    tl.debug_barrier()
                v0 = own + tl.load(here_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
{body}
"""


def push_rows(
    text: str,
    x: Tensor,
    there: Tensor,
    here: Tensor,
    flags_there: Tensor,
    flags_here: Tensor,
    operands: Sequence[Tensor],
) -> list[Tensor]:
    """What the program gives of the sum of this rank's tensor and the other's, the same bits on both.

    Args:
        text: of a `RowProgram`.
        x: [rows, width], contiguous.
        there, here: of its size and type: the other rank's memory, and this rank's into which the other writes.
        flags_there, flags_here: int32[FLAGS] of both, zero before and behind.
        operands: of the program, contiguous.
    """
    program = read(text)
    rows, width = x.shape
    types = tuple(each.dtype for each in operands)
    results = [
        x.new_empty((rows, width if program.extent(i) is Extent.FULL else 1), dtype=program.dtype(i, x.dtype, types))
        for i in program.results
    ]
    columns = triton.next_power_of_2(width)
    warps = _WARPS if columns <= _TILE else _WARPS_OF_WIDE
    tile = max(_TILE // columns, 1)
    chunk_rows = tile * max(_TILES, triton.cdiv(rows, FLAGS * tile))
    _kernel(text, x.dtype, types)[(2 * _ALL_WARPS // warps,)](
        x,
        there,
        here,
        flags_there,
        flags_here,
        *operands,
        *results,
        rows,
        triton.cdiv(rows, chunk_rows),
        chunk_rows,
        PROGRAMS=_ALL_WARPS // warps,
        BLOCK=_BLOCK,
        ROWS=tile,
        WIDTH=width,
        COLUMNS=columns,
        num_warps=warps,
        maxnreg=_REGISTERS,
    )
    return results


@cache
def _kernel(text: str, total: torch.dtype, operands: tuple[torch.dtype, ...]) -> Any:
    return PyCodeCache.load(source(read(text), total, operands)).kernel


def source(program: RowProgram, total: torch.dtype, operands: Sequence[torch.dtype]) -> str:
    """The kernel of a program, for these types of the sum and of the operands.

    What is of half precision is computed in float32 and rounded behind each step, as torch's operators do.
    """
    names = [f"in{i}_ptr" for i in range(len(operands))] + [f"out{i}_ptr" for i in range(len(program.results))]
    wide = [_wide(program.dtype(i, total, operands)) for i in range(1 + len(operands) + len(program.steps))]
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
    return _KERNEL.format(pointers="".join(f"{name}, " for name in names), loads=_block(loads), body=_block(lines))


def _block(lines: Sequence[str]) -> str:
    return "\n".join(" " * 16 + line for line in lines)


def _wide(dtype: torch.dtype) -> str:
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
    given = [f"v{a}" if isinstance(a, int) else repr(float(a)) for a in step.operands]
    x = given[0]
    forms = {name: f" {sign} ".join(given) for name, sign in _INFIX.items()}
    forms |= {"neg": f"-{x}", "rsqrt": f"tl.rsqrt({x})", "sqrt": f"tl.sqrt({x})", "reciprocal": f"1.0 / {x}"}
    forms |= {"square": f"{x} * {x}", "to": x}
    forms |= {"sum": f"sum{x[1:]}", "mean": f"sum{x[1:]} / WIDTH"}
    if step.name == "var":
        apart = f"apart{number}"
        return f"{_over_columns(f'{apart} * {apart}')} / (WIDTH - {given[1]})"
    return forms[step.name]
