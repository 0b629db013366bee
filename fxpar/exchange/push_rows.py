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
from fxpar.exchange.row_programs import RowProgram, read
from fxpar.exchange.row_source import REGISTERS, TILE, indented, parameters, results_of, row_source, warps_of

# Elements that a program sends at once. A flag is for two tiles.
_BLOCK, _TILES = 4096, 2
# Of all programs that send, and of all that add: half of a GPU each.
_ALL_WARPS = 2048

_KERNEL = """
import triton
import triton.language as tl
from fxpar.exchange.push_kernels import take_flag


@triton.jit
def push_rows_kernel(
    x_ptr, there_ptr, here_ptr, flags_there_ptr, flags_here_ptr, stop_ptr, far_ptr, {pointers}
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
                    take_flag(flags_here_ptr + chunk, stop_ptr, far_ptr)
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
    stop: Sequence[Tensor],
    operands: Sequence[Tensor],
) -> list[Tensor]:
    """What the program gives of the sum of this rank's tensor and the other's, the same bits on both.

    Args:
        text: of a `RowProgram`.
        x: [rows, width], contiguous.
        there, here: of its size and type: the other rank's memory, and this rank's into which the other writes.
        flags_there, flags_here: int32[FLAGS] of both, zero before and behind.
        stop: as of `push_sum`.
        operands: of the program, contiguous.
    """
    program = read(text)
    rows, width = x.shape
    types = tuple(operand.dtype for operand in operands)
    results = results_of(program, x, types)
    columns = triton.next_power_of_2(width)
    warps, tile = warps_of(columns), max(TILE // columns, 1)
    chunk_rows = tile * max(_TILES, triton.cdiv(rows, FLAGS * tile))
    _kernel(text, x.dtype, types)[(2 * _ALL_WARPS // warps,)](
        x,
        there,
        here,
        flags_there,
        flags_here,
        *stop,
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
        maxnreg=REGISTERS,
    )
    return results


@cache
def _kernel(text: str, total: torch.dtype, operands: tuple[torch.dtype, ...]) -> Any:
    return PyCodeCache.load(source(read(text), total, operands)).push_rows_kernel


def source(program: RowProgram, total: torch.dtype, operands: Sequence[torch.dtype]) -> str:
    """The kernel of a program, for these types of the sum and of the operands."""
    row_code = row_source(program, total, operands)
    pointers, loads, body = parameters(row_code.pointers), indented(row_code.loads, 16), indented(row_code.body, 16)
    return _KERNEL.format(pointers=pointers, loads=loads, body=body)
