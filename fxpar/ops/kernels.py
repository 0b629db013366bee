"""Dropout in one kernel on NVIDIA GPUs: the bits of `fxpar.ops.counter`, drawn in registers.

Enters: a rank's tensor, the generator's input, and how the tensor is cut. Leaves: the tensor with its dropped elements.
No mask is kept: backward draws the same bits again. The plain form needs about five hundred 64-bit integer operations
an element, this one some twenty of 32 bits. Importing this module needs Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from fxpar.ops import counter
from fxpar.ops.counter import IndexCut

_BLOCK = 2048
# Numbers of 32 bits travel as signed ones: torch.compile (2.11) takes no larger ones for kernels.
_SIGN = 2**31


@triton.jit  # type: ignore[untyped-decorator]
def _dropout_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    rng_ptr,
    rank_ptr,
    offset_ptr,
    identity_ptr,
    count,
    run,
    ranks,
    origin,
    threshold,
    SCALE: tl.constexpr,
    IS_CUT: tl.constexpr,
    IS_MOVED: tl.constexpr,
    IS_OPERAND: tl.constexpr,
    IN_FOURS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program keeps or drops `BLOCK` consecutive elements of the rank's tensor.

    `run` elements that are neighbours here are neighbours in the whole tensor; the next run there is another rank's.
    Where this is a part of the first dimension's (`IS_MOVED`), that many elements stand before it.
    Where runs consist of whole counters (`IN_FOURS`), a lane draws the four words of one counter for four elements.
    `threshold` is that of 32-bit words, less 2^31.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    STRIDE: tl.constexpr = 4 if IN_FOURS else 1
    local = start + tl.arange(0, BLOCK // STRIDE).to(tl.int64) * STRIDE
    index = local
    if IS_CUT:
        index = (local // run * ranks + tl.load(rank_ptr)) * run + local % run
    if IS_MOVED:
        index += tl.load(offset_ptr)
    seed, step, microbatch = tl.load(rng_ptr), tl.load(rng_ptr + 1), tl.load(rng_ptr + 2)
    zero = tl.zeros_like(index)
    if IS_OPERAND:
        origin = tl.load(identity_ptr)
    c0 = (index >> 2).to(tl.uint32)
    c1 = (zero + origin).to(tl.uint32)
    c2 = (zero + step).to(tl.uint32)
    c3 = (microbatch + ((index >> 34) << 16)).to(tl.uint32)
    k0, k1 = (zero + seed).to(tl.uint32), (zero + (seed >> 32)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(c0, c1, c2, c3, k0, k1, 10)
    if IN_FOURS:
        word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    else:
        is_odd = (index & 1) == 1
        word = tl.where((index & 2) == 0, tl.where(is_odd, w1, w0), tl.where(is_odd, w3, w2))
    place = start + tl.arange(0, BLOCK).to(tl.int64)
    x = tl.load(x_ptr + place, mask=place < count, other=0.0)
    scaled = x.to(tl.float32) * SCALE
    y = tl.where(word.to(tl.int64) - 2147483648 >= threshold, scaled, 0.0)
    tl.store(y_ptr + place, y.to(x.dtype), mask=place < count)


@triton_op("fxpar::dropout", mutates_args={})
def _dropout(
    x: Tensor,
    rng: Tensor,
    rank: Tensor,
    offset: Tensor,
    identity: Tensor,
    p: float,
    origin: int,
    run: int,
    ranks: int,
    unit: int,
) -> Tensor:
    """Dropout of a contiguous tensor; `ranks` is 1 where no inner axis cuts it, `unit` is 0 where no outer one does.

    Args:
        rank: the rank's index among those that cut it, an i64 scalar.
        offset: elements before it, a multiple of `unit`, an i64 scalar.
        identity: of the draw, an i64 scalar, where `origin` is 0.
    """
    y = torch.empty_like(x)
    is_in_fours = (ranks == 1 or run % 4 == 0) and unit % 4 == 0
    grid = (triton.cdiv(x.numel(), _BLOCK),)
    wrap_triton(_dropout_kernel)[grid](
        x,
        y,
        rng,
        rank,
        offset,
        identity,
        x.numel(),
        run,
        ranks,
        (origin ^ _SIGN) - _SIGN,
        int(p * 2**32) - _SIGN,
        SCALE=1.0 / (1.0 - p),  # torch.compile would pass a variable as float64
        IS_CUT=ranks > 1,
        IS_MOVED=unit > 0,
        IS_OPERAND=origin == 0,
        IN_FOURS=is_in_fours,
        BLOCK=_BLOCK,
    )
    return y


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rng, rank, offset, identity, *ctx.options = inputs
    ctx.save_for_backward(rng, rank, offset, identity)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _dropout(grad.contiguous(), *ctx.saved_tensors, *ctx.options), *[None] * 9


_dropout.register_autograd(_backward, setup_context=_keep)


def dropout(x: Tensor, rng: Tensor, p: float, origin: int | Tensor, cuts: list[IndexCut]) -> Tensor:
    """`fxpar.ops.counter.dropout`, the same bits."""
    given = counter.cuts_of_kernel(x, p, cuts)
    if given is None:
        return counter.dropout(x, rng, p, origin, cuts)
    outer, inner = given
    run, ranks, rank, unit, offset = 1, 1, rng, 0, rng
    if inner:
        run, rank = x.shape[inner[0].dim :].numel() // inner[0].outer, inner[0].before
        ranks = int(inner[0].total)
    if outer:
        unit = x.numel() * ranks // outer[0].own
        offset = outer[0].before * unit
    identity, number = (origin, 0) if isinstance(origin, Tensor) else (rng, origin)
    found: Tensor = _dropout(x.contiguous(), rng, rank, offset, identity, p, number, run, ranks, unit)
    return found
