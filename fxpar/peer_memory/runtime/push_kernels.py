"""A sum over GPUs in one kernel, with what is computed of its rows: ranks write into each other's memory, and add.

Enters: a rank's tensor, memory of both ranks into which the other one writes, and flags of both. Leaves: the sum. Needs
Triton.

Copy engines are better where something is computed alongside them. Where nothing is, a copy is followed by the way of a
flag through two streams and by a kernel that reads all of it again; here what came first is added while the rest is
under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

from fxpar.peer_memory.compiler.row_programs import (
    REGISTERS,
    TILE,
    RowProgram,
    indented,
    parameters,
    read,
    results_of,
    row_source,
    warps_of,
    wide_type,
)
from fxpar.peer_memory.compiler.symmetric_buffer import row_blocks

# Programs that send, and those that add. The first come first and wait for nobody: whatever else runs on the
# multiprocessors, they end.
SENDING, ADDING = 128, 128
# Chunks, each of which has a flag: few, since a program waits until all of its chunk is there before it raises it.
CHUNKS = 768
# Words for flags of a buffer; more than this module needs (`push_rows`).
FLAGS = 4096
BLOCK, WARPS = 8192, 16


@triton.jit
def take_flag(flag_ptr, stop_ptr, far_ptr):  # type: ignore[no-untyped-def]
    """Waits until a flag is up, and takes it down; waits no longer where the host has set its word.

    That word is far away: hundreds of programs that read it all the time hold up what else crosses the bus, for tens of
    milliseconds. Each reads it a few times a second, and tells the others of its device by a word that is near.
    """
    taken = tl.atomic_cas(flag_ptr, 1, 0, sem="acquire", scope="sys")
    looks = 0
    while taken != 1:
        taken = tl.atomic_cas(flag_ptr, 1, 0, sem="acquire", scope="sys")
        looks += 1
        if looks % 1024 == 0:
            if looks % 262144 == 0:
                tl.atomic_max(stop_ptr, tl.load(far_ptr, volatile=True), sem="relaxed")
            taken = tl.maximum(taken, tl.load(stop_ptr, volatile=True))


# Else it would be compiled anew for some places, while a graph is captured.
@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def _take_flags_kernel(flags_ptr, first, stop_ptr, far_ptr, RANK: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            take_flag(flags_ptr + first + rank, stop_ptr, far_ptr)


def take_flags(flags: Tensor, first: int, rank: int, size: int, stop: Sequence[Tensor]) -> None:
    """Waits until the flags of all other ranks are up, and takes them down.

    Args:
        flags: int32[…].
        first: the place of rank 0's.
        rank: this one's number.
        size: how many ranks there are.
        stop: as of `push_sum`.
    """
    # One warp: whatever else runs on the GPU has room beside it.
    _take_flags_kernel[(1,)](flags, first, *stop, RANK=rank, SIZE=size, num_warps=1)


# Elements of a program of `add_slots`.
_ADDED = tl.constexpr(2048)


@triton.jit  # type: ignore[untyped-decorator]
def _add_slots_kernel(  # type: ignore[no-untyped-def]
    area_ptr, step, local_ptr, pitch, width, out_ptr, RANK: tl.constexpr, SIZE: tl.constexpr
):
    across = tl.cdiv(width, _ADDED)
    row = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across).to(tl.int64) * _ADDED + tl.arange(0, _ADDED)
    total = tl.zeros((_ADDED,), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            part = tl.load(local_ptr + row * pitch + column, mask=column < width)
        else:
            at = tl.cast(step, tl.int64) * rank + row * width + column
            part = tl.load(area_ptr + at, mask=column < width, cache_modifier=".cg")
        total += part.to(tl.float32)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=column < width)


def add_slots(area: Tensor, step: int, local: Tensor, rank: int, size: int) -> Tensor:
    """Returns the sum of this rank's part and of those in the slots of the others, added in float32 in their order.

    Args:
        area: this rank's, [at least size * step].
        step: elements from slot to slot.
        local: [rows, width] of contiguous rows, of its type.
        rank: this one's number.
        size: how many ranks there are.

    Returns:
        [rows, width], contiguous.
    """
    out = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    rows, width = (1, local.numel()) if local.is_contiguous() else local.shape
    if out.numel():
        grid = (triton.cdiv(width, _ADDED.value) * rows,)
        _add_slots_kernel[grid](area, step, local, local.stride(0), width, out, RANK=rank, SIZE=size)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _push_sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr, memory, flags, stop, out_ptr, counts, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Chunks of so many blocks, to each program every so many-th.

    Args:
        memory: the other rank's and this one's, and so `flags`.
        stop: words of this device and of the host.
        counts: elements, chunks, and blocks of a chunk.
        PROGRAMS: that send, and that add.
    """
    there_ptr, here_ptr = memory
    flags_there_ptr, flags_here_ptr = flags
    stop_ptr, far_ptr = stop
    size, chunks, blocks = counts
    SENDING: tl.constexpr = PROGRAMS[0]
    ADDING: tl.constexpr = PROGRAMS[1]
    program = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    if program < SENDING:
        for chunk in range(program, chunks, SENDING):
            for block in range(blocks):
                at = (chunk * blocks + block).to(tl.int64) * BLOCK + places
                tl.store(there_ptr + at, tl.load(x_ptr + at, mask=at < size), mask=at < size)
            tl.debug_barrier()  # the stores of all threads, in front of the flag that one of them raises
            # Release, of the whole system: the other GPU sees these stores before it sees the flag.
            tl.atomic_xchg(flags_there_ptr + chunk, 1, sem="release", scope="sys")
    else:
        for chunk in range(program - SENDING, chunks, ADDING):
            take_flag(flags_here_ptr + chunk, stop_ptr, far_ptr)
            tl.debug_barrier()
            for block in range(blocks):
                at = (chunk * blocks + block).to(tl.int64) * BLOCK + places
                # The first cache knows nothing of what another GPU writes: .cg reads past it.
                came = tl.load(here_ptr + at, mask=at < size, cache_modifier=".cg")
                tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < size) + came, mask=at < size)


def push_sum(
    x: Tensor, there: Tensor, here: Tensor, flags_there: Tensor, flags_here: Tensor, stop: Sequence[Tensor]
) -> Tensor:
    """Returns the sum of this rank's tensor and the other's, the same bits on both.

    Args:
        x: [n], contiguous.
        there, here: [n] of its type: the other rank's memory, and this rank's into which the other writes.
        flags_there, flags_here: int32[FLAGS] of both, zero before and after.
        stop: int32[1] of this device, and in pinned memory of the host, which sets it where nothing comes any more.
    """
    out = torch.empty_like(x)
    blocks = triton.cdiv(x.numel(), CHUNKS * BLOCK)
    chunks = triton.cdiv(x.numel(), blocks * BLOCK)
    _push_sum_kernel[(SENDING + ADDING,)](
        x,
        (there, here),
        (flags_there, flags_here),
        tuple(stop),
        out,
        (x.numel(), chunks, blocks),
        PROGRAMS=(SENDING, ADDING),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out


# Elements that a program sends at once. A flag is for two tiles.
_BLOCK, _TILES = 4096, 2
# Of all programs that send, and of all that add: half of a GPU each.
_ALL_WARPS = 2048

_KERNEL = """
import triton
import triton.language as tl
from fxpar.peer_memory.runtime.push_kernels import take_flag


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
    """Returns what the program gives of the sum of this rank's tensor and the other's, the same bits on both.

    Args:
        text: of a `RowProgram`.
        x: [rows, width], contiguous.
        there, here: of its size and type: the other rank's memory, and this rank's into which the other writes.
        flags_there, flags_here: int32[FLAGS] of both, zero before and after.
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
    """Returns the kernel of a program, for these types of the sum and of the operands."""
    row_code = row_source(program, total, operands)
    pointers, loads, body = parameters(row_code.pointers), indented(row_code.loads, 16), indented(row_code.body, 16)
    return _KERNEL.format(pointers=pointers, loads=loads, body=body)


# Elements that a program sends at once; tiles that have one flag.
# Warps of all programs that send, that add and that compute: as many as have room at once.
_SENDING, _ADDING, _COMPUTING = 768, 1024, 2304

_BLOCKS_KERNEL = """
import triton
import triton.language as tl
from fxpar.peer_memory.runtime.push_kernels import take_flag


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
    """Returns what the program gives of the sum of all ranks' tensors, the same bits on all.

    Args:
        text: of a `RowProgram`.
        x: [rows, width], contiguous.
        rank: this one's number.
        areas: of all ranks, uint8[at least `row_blocks(x, ranks).bytes`].
        flags: of all ranks, int32[FLAGS], zero before and after.
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
    _blocks_kernel(text, kind)[(sending + adding + computing,)](
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
def _blocks_kernel(text: str, kind: _KernelKey) -> Any:
    return PyCodeCache.load(_source(read(text), kind)).push_blocks_kernel


def _source(program: RowProgram, kind: _KernelKey) -> str:
    size, rank, row_code = kind.size, kind.rank, row_source(program, kind.total, kind.operands)
    others = [(rank + step) % size for step in range(1, size)]  # at no time do two ranks begin with the same one
    wide = wide_type(kind.total)
    parts = [_part(i, rank) for i in range(size)]
    total = " + ".join(f"part{i}.to({wide})" for i in range(size))  # in the order of the ranks, as on a CPU
    share = [f"tl.store(area{i}_ptr + at, total, mask=mask)" for i in (*others, rank)]
    return _BLOCKS_KERNEL.format(
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
    """Returns the programs that send to owners."""
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
    """Waits until a chunk is there from all."""
    lines = []
    for sender in others:
        flag = f"flags{kind.rank}_ptr + chunk * {kind.size} + {sender}"
        lines.append(f"take_flag({flag}, stop_ptr, far_ptr)")
    return [*lines, "tl.debug_barrier()"]


def _part(sender: int, rank: int) -> str:
    """Returns what a rank has of a row that this one owns."""
    if sender == rank:
        return f"part{rank} = own"
    place = f"area{rank}_ptr + at{_slot(sender)}"
    return f'part{sender} = tl.load({place}, mask=mask, cache_modifier=".cg")'


def _slot(number: int) -> str:
    """Returns the offset of a slot: added one by one, since in all they may be more than 32 bits count."""
    return " + stride" * number


def _raised(rank: int, flag: str) -> str:
    return f'tl.atomic_xchg(flags{rank}_ptr + {flag}, 1, sem="release", scope="sys")'
