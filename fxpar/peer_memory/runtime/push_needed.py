"""Tokens for those GPUs that need them, and sums of what these made of them, in one kernel each.

Enters: a rank's tensor, the experts that all tokens chose, memory of all ranks into which the others write, and flags
of all. Leaves: what `fxpar.peer_memory.compiler.symmetric_buffer` gives, to the bit. Needs Triton.

Programs of two kinds run alongside each other: the first write the rows that others need into their memory, and raise a
flag after each chunk of rows, whether anything of it was needed or not; the others wait for a chunk and read what is
needed of it. Which rows these are both find in the choice. So nothing waits for the host, no size depends on the
routing, and what stands in the memory from before is never read. The first kind waits for nobody and comes first to
the multiprocessors: the kernel ends however few of its programs run at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

from fxpar.peer_memory.compiler.row_programs import indented, parameters, wide_type
from fxpar.peer_memory.compiler.symmetric_buffer import slot_stride
from fxpar.peer_memory.runtime.push_kernels import FLAGS

# Elements that a program moves at once, and columns of these at most; tiles that have one flag; its warps.
_TILE, _COLUMNS, _TILES, _WARPS = 4096, 1024, 2, 8
# Programs that send, and that take.
_SENDING, _TAKING = 128, 128

_HEAD = """
import triton
import triton.language as tl
from fxpar.peer_memory.runtime.push_kernels import take_flag


@triton.jit
def push_needed_kernel(
    x_ptr, chosen_ptr, out_ptr, {areas} {flags} stop_ptr, far_ptr,
    rows, stride, chunks, chunk_rows, own,
    SENDING: tl.constexpr, TAKING: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    CHOICES: tl.constexpr, PLACES: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)[None, :]
    places = tl.arange(0, PLACES)[None, :]
    is_place = places < CHOICES
    tokens = tl.cast(rows, tl.int64) * WIDTH
    slot = tl.cast(stride, tl.int64)
"""

# The holders of a tile's tokens, [ROWS, PLACES], are `holder`; `row` and `is_row` its rows.
_ROWS = """
inside = tile * ROWS + tl.arange(0, ROWS)
row = tl.cast(chunk, tl.int64) * chunk_rows + inside
is_row = (inside < chunk_rows) & (row < rows)
"""
_HOLDERS = """
choice = chosen_ptr + ({owner} * tl.cast(rows, tl.int64) + row)[:, None] * CHOICES + places
expert = tl.load(choice, mask=is_row[:, None] & is_place, other=-1)
holder = tl.where(expert < 0, -1, expert // own)
"""

_EXPAND = """
    if program < SENDING:
        for chunk in range(program, chunks, SENDING):
            for tile in range(tl.cdiv(chunk_rows, ROWS)):
{rows}
{own_holders}
{needs}
                for begin in range(0, WIDTH, COLUMNS):
                    is_column = begin + columns < WIDTH
                    at = row[:, None] * WIDTH + begin + columns
                    value = tl.load(x_ptr + at, mask=any_needs[:, None] & is_column)
{stores}
            tl.debug_barrier()  # the stores of all threads, in front of the flags that one of them raises
{tell}
    else:
        for number in range(program - SENDING, chunks * {size}, TAKING):
            chunk = number // {size}
            sender = ({rank} + number) % {size}
            if sender != {rank}:
                flag = flags{rank}_ptr + chunk * {size} + sender
                take_flag(flag, stop_ptr, far_ptr)
            tl.debug_barrier()
            for tile in range(tl.cdiv(chunk_rows, ROWS)):
{rows}
{sent_holders}
                is_needed = tl.max((holder == {rank}).to(tl.int32), axis=1) > 0
                is_own = is_needed & (sender == {rank})
                is_sent = is_needed & (sender != {rank})
                for begin in range(0, WIDTH, COLUMNS):
                    is_column = begin + columns < WIDTH
                    at = row[:, None] * WIDTH + begin + columns
                    there = area{rank}_ptr + sender * slot + at
                    came = tl.load(there, mask=is_sent[:, None] & is_column, other=0.0, cache_modifier=".cg")
                    mine = tl.load(x_ptr + at, mask=is_own[:, None] & is_column, other=0.0)
                    value = tl.where(is_own[:, None], mine, came)
                    out = out_ptr + sender * tokens + at
                    tl.store(out, value, mask=is_row[:, None] & is_column)
"""

_SUM = """
    if program < SENDING:
        for number in range(program, chunks * {others}, SENDING):
            chunk = number // {others}
            owner = ({rank} + 1 + number % {others}) % {size}
            for tile in range(tl.cdiv(chunk_rows, ROWS)):
{rows}
{owner_holders}
                is_needed = tl.max((holder == {rank}).to(tl.int32), axis=1) > 0
                for begin in range(0, WIDTH, COLUMNS):
                    mask = is_needed[:, None] & (begin + columns < WIDTH)
                    at = row[:, None] * WIDTH + begin + columns
                    value = tl.load(x_ptr + owner * tokens + at, mask=mask)
{stores}
            tl.debug_barrier()  # the stores of all threads, in front of the flag that one of them raises
{tell}
    else:
        for chunk in range(program - SENDING, chunks, TAKING):
{wait}
            tl.debug_barrier()
            for tile in range(tl.cdiv(chunk_rows, ROWS)):
{rows}
{own_holders}
{needs}
                for begin in range(0, WIDTH, COLUMNS):
                    is_column = begin + columns < WIDTH
                    at = row[:, None] * WIDTH + begin + columns
{add}
                    tl.store(out_ptr + at, total, mask=is_row[:, None] & is_column)
"""


def push_needed(
    way: str,
    x: Tensor,
    chosen: Tensor,
    per_rank: int,
    rank: int,
    areas: Sequence[Tensor],
    flags: Sequence[Tensor],
    stop: Sequence[Tensor],
) -> Tensor:
    """Returns what a rank needs of the tokens of all, [n, t, f], or sums of what the ranks made of its own, [t, f].

    Args:
        way: `expand` or `sum`.
        x: contiguous: this rank's tokens, [t, f], or what it made of those of all, [n, t, f].
        chosen: i64[n, t, K], contiguous.
        per_rank: experts of a rank.
        rank: this one's number.
        areas: of all ranks, uint8[at least n * `slot_stride`].
        flags: of all ranks, int32[FLAGS], zero before and after.
        stop: as of `push_sum`.
    """
    size, choices, like = len(areas), chosen.shape[-1], x if way == "expand" else x[rank]
    rows, width = like.shape
    out = x.new_empty((size, rows, width) if way == "expand" else (rows, width))
    columns = min(triton.next_power_of_2(width), _COLUMNS)
    tile = _TILE // columns
    # Chunks have more rows where there would be more chunks than flags.
    chunk_rows = tile * max(_TILES, triton.cdiv(rows, FLAGS // size * tile))
    _kernel(way, size, rank, x.dtype)[(_SENDING + _TAKING,)](
        x,
        chosen,
        out,
        *(area.view(x.dtype) for area in areas),
        *flags,
        *stop,
        rows,
        slot_stride(like) // x.itemsize,
        max(1, triton.cdiv(rows, chunk_rows)),  # of no tokens too the ranks wait for each other
        chunk_rows,
        per_rank,
        SENDING=_SENDING,
        TAKING=_TAKING,
        ROWS=tile,
        WIDTH=width,
        COLUMNS=columns,
        CHOICES=choices,
        PLACES=triton.next_power_of_2(choices),
        num_warps=_WARPS,
    )
    return out


@cache
def _kernel(way: str, size: int, rank: int, dtype: torch.dtype) -> Any:
    return PyCodeCache.load(source(way, size, rank, dtype)).push_needed_kernel


def source(way: str, size: int, rank: int, dtype: torch.dtype) -> str:
    """Returns the kernel that expands, or that sums, on a rank of so many."""
    others = [(rank + step) % size for step in range(1, size)]  # at no time do two ranks begin with the same one
    areas = parameters([f"area{i}_ptr" for i in range(size)])
    head = _HEAD.format(areas=areas, flags=parameters([f"flags{i}_ptr" for i in range(size)]))
    body = _expanding(others, size, rank) if way == "expand" else _summing(others, size, rank, dtype)
    return head + body


def _expanding(others: Sequence[int], size: int, rank: int) -> str:
    stores = [f"tl.store(area{i}_ptr + {rank} * slot + at, value, mask=needs{i}[:, None] & is_column)" for i in others]
    needed = [*_needs(others), f"any_needs = {' | '.join(f'needs{i}' for i in others)}"]
    return _EXPAND.format(
        size=size,
        rank=rank,
        rows=_block(_ROWS),
        own_holders=_block(_HOLDERS, owner=rank),
        sent_holders=_block(_HOLDERS, owner="sender"),
        needs=indented(needed, 16),
        stores=indented(stores, 20),
        tell=indented([_raised(i, size, rank) for i in others], 12),
    )


def _summing(others: Sequence[int], size: int, rank: int, dtype: torch.dtype) -> str:
    stores, tell, wait = [], [], []
    for i in others:
        there = f"area{i}_ptr + {rank} * slot + at"
        stores += [f"if owner == {i}:", f"    tl.store({there}, value, mask=mask)"]
        tell += [f"if owner == {i}:", f"    {_raised(i, size, rank)}"]
        flag = f"flags{rank}_ptr + chunk * {size} + {i}"
        wait.append(f"take_flag({flag}, stop_ptr, far_ptr)")
    add = []
    for i in range(size):
        place = f"x_ptr + {rank} * tokens + at"
        if i != rank:
            place = f"area{rank}_ptr + {i} * slot + at"
        read = "" if i == rank else ', cache_modifier=".cg"'
        add.append(f"part{i} = tl.load({place}, mask=needs{i}[:, None] & is_column, other=0.0{read})")
    total = " + ".join(f"part{i}.to({wide_type(dtype)})" for i in range(size))  # in the order of the ranks
    return _SUM.format(
        size=size,
        rank=rank,
        others=size - 1,
        rows=_block(_ROWS),
        own_holders=_block(_HOLDERS, owner=rank),
        owner_holders=_block(_HOLDERS, owner="owner"),
        needs=indented(_needs(range(size)), 16),
        stores=indented(stores, 20),
        tell=indented(tell, 12),
        wait=indented(wait, 12),
        add=indented([*add, f"total = ({total}).to(x_ptr.dtype.element_ty)"], 20),
    )


def _needs(ranks: Sequence[int]) -> list[str]:
    """Returns whether each of the ranks needs a token."""
    return [f"needs{i} = tl.max((holder == {i}).to(tl.int32), axis=1) > 0" for i in ranks]


def _block(text: str, **names: object) -> str:
    return indented(text.format(**names).strip().splitlines(), 16)


def _raised(rank: int, size: int, sender: int) -> str:
    return f'tl.atomic_xchg(flags{rank}_ptr + chunk * {size} + {sender}, 1, sem="release", scope="sys")'
