"""A sum over more than two GPUs, and what is computed of each of its rows, in one kernel.

Enters: a rank's tensor, memory of all ranks into which the others write, flags of all, and a program of rows
(`row_programs`). Leaves: the program's results. Needs Triton.

Each rank owns a block of rows (`fxpar.exchange.sums`). Programs of three kinds run beside each other: the first send
rows to their owners, the next add what came of the rank's own and send the sum to all, the last compute what is wanted
of the sums that are there. Where copy engines have sent the rows before, the first kind has nothing to do.

A program waits for those of a kind before its own alone, on any rank, and these come first to the multiprocessors: the
kernel ends however few of its programs run at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

from fxpar.exchange.push_kernels import FLAGS
from fxpar.exchange.row_programs import RowProgram, read
from fxpar.exchange.row_source import REGISTERS, TILE, indented, parameters, results_of, row_source, warps_of, wide_type
from fxpar.exchange.sums import row_blocks

# Elements that a program sends at once; tiles that have one flag.
_BLOCK, _TILES = 4096, 2
# Warps of all programs that send, that add and that compute: as many as have room at once.
_SENDING, _ADDING, _COMPUTING = 768, 1024, 2304

_KERNEL = """
import triton
import triton.language as tl
from fxpar.exchange.push_kernels import take_flag


@triton.jit
def push_blocks_kernel(
    x_ptr, {areas} {flags} stop_ptr, far_ptr, {pointers}
    rows, block_rows, stride, chunks, chunk_rows,
    SENDING: tl.constexpr, ADDING: tl.constexpr, COMPUTING: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
{send}
    if (program >= SENDING) & (program < SENDING + ADDING):
        places = tl.arange(0, BLOCK)
        for chunk in range(program - SENDING, chunks, ADDING):
            begin = chunk.to(tl.int64) * chunk_rows
            own_rows = tl.minimum(tl.minimum(begin + chunk_rows, block_rows), rows - {rank} * block_rows)
{await_sent}
            for block in range(tl.cdiv(chunk_rows * WIDTH, BLOCK)):
                at = begin * WIDTH + block * BLOCK + places
                mask = at < own_rows * WIDTH
                own_at = ({rank} * block_rows + begin) * WIDTH + block * BLOCK + places
                own = tl.load(x_ptr + own_at, mask=mask)
{add}
                at = own_at{sums}
{share}
            tl.debug_barrier()  # the stores of all threads, in front of the flags that one of them raises
{tell_added}
    elif program >= SENDING + ADDING:
        column = tl.arange(0, COLUMNS)[None, :]
        is_column = column < WIDTH
        for number in range(program - SENDING - ADDING, chunks * {size}, COMPUTING):
            chunk = number // {size}
            owner = ({rank} + number) % {size}
            for tile in range(tl.cdiv(chunk_rows, ROWS)):
                inside = tile * ROWS + tl.arange(0, ROWS)[:, None]
                place = chunk.to(tl.int64) * chunk_rows + inside
                row = owner * block_rows + place
                is_row = (inside < chunk_rows) & (place < block_rows) & (row < rows)
                at = row * WIDTH + column
                mask = is_row & is_column
{loads}
                if tile == 0:  # what is here already is read while the rest is under way
                    flag = (chunks + chunk) * {size} + owner
                    take_flag(flags{rank}_ptr + flag, stop_ptr, far_ptr)
                    tl.debug_barrier()
                v0 = tl.load(area{rank}_ptr + at{sums}, mask=mask, other=0.0, cache_modifier=".cg")
{body}
"""

_SEND = """
    if program < SENDING:
        places = tl.arange(0, BLOCK)
        for chunk in range(program, chunks, SENDING):
            begin = chunk.to(tl.int64) * chunk_rows
            for block in range(tl.cdiv(chunk_rows * WIDTH, BLOCK)):
                at = begin * WIDTH + block * BLOCK + places
{stores}
            tl.debug_barrier()
{tell}
"""


@dataclass(frozen=True)
class _KernelKey:
    """For which ranks and types a kernel is made."""

    size: int
    rank: int
    total: torch.dtype
    operands: tuple[torch.dtype, ...]
    sends: bool


def push_blocks(
    text: str,
    x: Tensor,
    rank: int,
    areas: Sequence[Tensor],
    flags: Sequence[Tensor],
    stop: Sequence[Tensor],
    operands: Sequence[Tensor],
    is_sent: bool,
) -> list[Tensor]:
    """What the program gives of the sum of all ranks' tensors, the same bits on all.

    Args:
        text: of a `RowProgram`.
        x: [rows, width], contiguous.
        rank: this one's number.
        areas: of all ranks, uint8[at least `row_blocks(x, ranks).bytes`].
        flags: of all ranks, int32[FLAGS], zero before and behind.
        stop: as of `push_sum`.
        operands: of the program, contiguous.
        is_sent: whether the slots of this rank's area hold what the others sent.
    """
    program, size = read(text), len(areas)
    kind = _KernelKey(size, rank, x.dtype, tuple(operand.dtype for operand in operands), not is_sent)
    results, blocks = results_of(program, x, kind.operands), row_blocks(x, size)
    columns = triton.next_power_of_2(program.width)
    warps, tile = warps_of(columns), max(TILE // columns, 1)
    chunk_rows = tile * max(_TILES, triton.cdiv(blocks.block, FLAGS // (2 * size) * tile))
    sending, adding, computing = (count // warps for count in (_SENDING * kind.sends, _ADDING, _COMPUTING))
    _kernel(text, kind)[(sending + adding + computing,)](
        x,
        *(area.view(x.dtype) for area in areas),
        *flags,
        *stop,
        *operands,
        *results,
        blocks.rows,
        blocks.block,
        blocks.stride // x.itemsize,
        triton.cdiv(blocks.block, chunk_rows),
        chunk_rows,
        SENDING=sending,
        ADDING=adding,
        COMPUTING=computing,
        BLOCK=_BLOCK,
        ROWS=tile,
        WIDTH=program.width,
        COLUMNS=columns,
        num_warps=warps,
        maxnreg=REGISTERS,
    )
    return results


@cache
def _kernel(text: str, kind: _KernelKey) -> Any:
    return PyCodeCache.load(_source(read(text), kind)).push_blocks_kernel


def _source(program: RowProgram, kind: _KernelKey) -> str:
    size, rank, row_code = kind.size, kind.rank, row_source(program, kind.total, kind.operands)
    others = [(rank + step) % size for step in range(1, size)]  # at no time do two ranks begin with the same one
    wide = wide_type(kind.total)
    parts = [_part(i, rank) for i in range(size)]
    total = " + ".join(f"part{i}.to({wide})" for i in range(size))  # in the order of the ranks, as on a CPU
    share = [f"tl.store(area{i}_ptr + at, total, mask=mask)" for i in (*others, rank)]
    return _KERNEL.format(
        size=size,
        rank=rank,
        areas=parameters([f"area{i}_ptr" for i in range(size)]),
        flags=parameters([f"flags{i}_ptr" for i in range(size)]),
        pointers=parameters(row_code.pointers),
        send=_sent(kind, others) if kind.sends else "",
        await_sent=indented(_awaited(kind, others) if kind.sends else [], 12),
        add=indented([*parts, f"total = ({total}).to(x_ptr.dtype.element_ty)"], 16),
        sums=_slot(size),
        share=indented(share, 16),
        tell_added=indented([_raised(i, f"(chunks + chunk) * {size} + {rank}") for i in (*others, rank)], 12),
        loads=indented(row_code.loads, 16),
        body=indented(row_code.body, 16),
    )


def _sent(kind: _KernelKey, others: Sequence[int]) -> str:
    """The programs that send to owners."""
    stores = []
    for owner in others:
        first = f"({owner} * block_rows + begin)"
        stores += [
            f"rows_there = tl.minimum(tl.minimum(begin + chunk_rows, block_rows), rows - {owner} * block_rows)",
            "mask = at < rows_there * WIDTH",
            f"value = tl.load(x_ptr + {first} * WIDTH + block * BLOCK + places, mask=mask)",
            f"tl.store(area{owner}_ptr + at{_slot(kind.rank)}, value, mask=mask)",
        ]
    tell = [_raised(owner, f"chunk * {kind.size} + {kind.rank}") for owner in others]
    return _SEND.format(stores=indented(stores, 16), tell=indented(tell, 12))


def _awaited(kind: _KernelKey, others: Sequence[int]) -> list[str]:
    """Until a chunk is there from all."""
    lines = []
    for sender in others:
        flag = f"flags{kind.rank}_ptr + chunk * {kind.size} + {sender}"
        lines.append(f"take_flag({flag}, stop_ptr, far_ptr)")
    return [*lines, "tl.debug_barrier()"]


def _part(sender: int, rank: int) -> str:
    """What a rank has of a row that this one owns."""
    if sender == rank:
        return f"part{rank} = own"
    place = f"area{rank}_ptr + at{_slot(sender)}"
    return f'part{sender} = tl.load({place}, mask=mask, cache_modifier=".cg")'


def _slot(number: int) -> str:
    """From the begin of an area on: added one by one, since in all they may be more than 32 bits count."""
    return " + stride" * number


def _raised(rank: int, flag: str) -> str:
    return f'tl.atomic_xchg(flags{rank}_ptr + {flag}, 1, sem="release", scope="sys")'
