"""A sum over two GPUs in one kernel: each writes into the other's memory, and adds what comes.

Enters: a rank's tensor, memory of both ranks into which the other one writes, and flags of both. Leaves: the sum. Needs
Triton.

Copy engines are better where something is computed beside them. Where nothing is, a copy is followed by the way of a
flag through two streams and by a kernel that reads all of it again; here what came first is added while the rest is
under way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

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


@triton.jit  # type: ignore[untyped-decorator]
def _push_sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    there_ptr,
    here_ptr,
    flags_there_ptr,
    flags_here_ptr,
    stop_ptr,
    far_ptr,
    out_ptr,
    size,
    chunks,
    blocks,
    SENDING: tl.constexpr,
    ADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Chunks of `blocks` blocks, to each program every so many-th."""
    program = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    if program < SENDING:
        for chunk in range(program, chunks, SENDING):
            for block in range(blocks):
                at = (chunk * blocks + block).to(tl.int64) * BLOCK + places
                tl.store(there_ptr + at, tl.load(x_ptr + at, mask=at < size), mask=at < size)
            tl.debug_barrier()  # the stores of all threads, in front of the flag that one of them raises
            tl.atomic_xchg(flags_there_ptr + chunk, 1, sem="release", scope="sys")
    else:
        for chunk in range(program - SENDING, chunks, ADDING):
            take_flag(flags_here_ptr + chunk, stop_ptr, far_ptr)
            tl.debug_barrier()
            for block in range(blocks):
                at = (chunk * blocks + block).to(tl.int64) * BLOCK + places
                came = tl.load(here_ptr + at, mask=at < size, cache_modifier=".cg")
                tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < size) + came, mask=at < size)


def push_sum(
    x: Tensor, there: Tensor, here: Tensor, flags_there: Tensor, flags_here: Tensor, stop: Sequence[Tensor]
) -> Tensor:
    """The sum of this rank's tensor and the other's, the same bits on both.

    Args:
        x: [n], contiguous.
        there, here: [n] of its type: the other rank's memory, and this rank's into which the other writes.
        flags_there, flags_here: int32[FLAGS] of both, zero before and behind.
        stop: int32[1] of this device, and in pinned memory of the host, which sets it where nothing comes any more.
    """
    out = torch.empty_like(x)
    blocks = triton.cdiv(x.numel(), CHUNKS * BLOCK)
    chunks = triton.cdiv(x.numel(), blocks * BLOCK)
    _push_sum_kernel[(SENDING + ADDING,)](
        x,
        there,
        here,
        flags_there,
        flags_here,
        *stop,
        out,
        x.numel(),
        chunks,
        blocks,
        SENDING=SENDING,
        ADDING=ADDING,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out
