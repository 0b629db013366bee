"""Dropout in one kernel on NVIDIA GPUs, and its bits alone: those of `fxpar.ops.counter`, drawn in registers.

Enters: a rank's tensor, the generator's input, and how the tensor is cut. Leaves: the tensor with its dropped elements,
or words of 32 bits, one for each element, that say which stay. The plain form needs about five hundred 64-bit integer
operations an element, these some fifteen of 32 bits. Importing this module needs Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_WORDS = 128
# Numbers of 32 bits travel as signed ones: kernels take these alone.
_SIGN = 2**31


class DropoutShard(NamedTuple):
    """What a rank holds of a contiguous tensor, and the draw.

    Attributes:
        rng: i64[3]: seed, step, microbatch.
        rank: its index among those that cut it, an i64 scalar.
        offset: elements before it, a multiple of `unit`, an i64 scalar.
        identity: of the draw, an i64 scalar, where `origin` is 0.
        p: probability of a zero.
        origin: the identity, a number.
        run: so many neighbours here are neighbours in the whole tensor; the next run there is another rank's.
        ranks: that share runs out; 1 where no inner axis cuts it.
        unit: elements of a row of the first dimension; 0 where no outer axis cuts that.
    """

    rng: Tensor
    rank: Tensor
    offset: Tensor
    identity: Tensor
    p: float
    origin: int
    run: int
    ranks: int
    unit: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Returns what kernels read."""
        return self.rng, self.rank, self.offset, self.identity

    @property
    def numbers(self) -> tuple[int, ...]:
        """Returns the numbers that kernels take."""
        return self.run, self.ranks, (self.origin ^ _SIGN) - _SIGN, int(self.p * 2**32) - _SIGN

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Returns what kernels are compiled for: runs are shared out, rows are before, the identity is in memory."""
        return self.ranks > 1, self.unit > 0, self.origin == 0

    def runs_are(self, units: int) -> bool:
        """Returns whether runs consist of so many elements each."""
        return self.ranks == 1 or self.run % units == 0


@triton.jit  # type: ignore[untyped-decorator]
def _index(local, tensors, numbers, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers in the whole tensor of elements of the rank's, of which there are less than 2^31."""
    IS_CUT: tl.constexpr = KIND[0]
    IS_MOVED: tl.constexpr = KIND[1]
    _, rank_ptr, offset_ptr, _ = tensors
    run, ranks, _, _ = numbers
    index = local.to(tl.int64)
    if IS_CUT:
        index = ((local // run).to(tl.int64) * ranks + tl.load(rank_ptr)) * run + local % run
    if IS_MOVED:
        index += tl.load(offset_ptr)
    return index


@triton.jit  # type: ignore[untyped-decorator]
def _identity(tensors, numbers, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The identity of the draw."""
    IS_OPERAND: tl.constexpr = KIND[2]
    _, _, _, identity_ptr = tensors
    _, _, origin, _ = numbers
    if IS_OPERAND:
        origin = tl.load(identity_ptr)
    return origin


@triton.jit  # type: ignore[untyped-decorator]
def _dropout_kernel(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, tensors, numbers, count, scale, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """A program keeps or drops `BLOCK` consecutive elements of the rank's tensor.

    Args:
        tensors: of a `DropoutShard`, and so `numbers`.
        KIND: its kinds, and whether runs consist of whole counters: a lane then draws the four words of one counter for
            four elements.
    """
    IN_FOURS: tl.constexpr = KIND[3]
    start = tl.program_id(0) * BLOCK
    rng_ptr, threshold, origin = tensors[0], numbers[3], _identity(tensors, numbers, KIND)
    if IN_FOURS:
        local = start + tl.arange(0, BLOCK // 4) * 4
        w0, w1, w2, w3 = drawn(_index(local, tensors, numbers, KIND) >> 2, rng_ptr, origin)
        # Interleaving alternates two vectors. In this order the four words of a lane are neighbours, w0 w1 w2 w3.
        word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    else:
        local = start + tl.arange(0, BLOCK)
        word = one_word(_index(local, tensors, numbers, KIND), rng_ptr, origin)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < count, other=0.0)
    y = tl.where(stays(word, threshold), x.to(tl.float32) * scale, 0.0)
    tl.store(y_ptr + place, y.to(x.dtype), mask=place < count)


@triton.jit  # type: ignore[untyped-decorator]
def _draw_kernel(  # type: ignore[no-untyped-def]
    words_ptr, tensors, numbers, count, KIND: tl.constexpr, IN_WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """A program draws `BLOCK` words; where runs do not consist of whole words, each bit by itself."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    local = (place * 32).to(tl.int32)
    IN_FOURS: tl.constexpr = KIND[3]
    rng_ptr, threshold, origin = tensors[0], numbers[3], _identity(tensors, numbers, KIND)
    if IN_WORDS:
        words = packed(_index(local, tensors, numbers, KIND), rng_ptr, origin, threshold, IN_FOURS)
    else:
        words = tl.zeros_like(local)
        for i in range(32):
            word = one_word(_index(local + i, tensors, numbers, KIND), rng_ptr, origin)
            words |= stays(word, threshold).to(tl.int32) << i
    tl.store(words_ptr + place, words, mask=place * 32 < count)


def dropout(x: Tensor, cut: DropoutShard) -> Tensor:
    """Drops elements of a contiguous tensor."""
    y = torch.empty_like(x)
    _dropout_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
        x,
        y,
        cut.tensors,
        cut.numbers,
        x.numel(),
        1.0 / (1.0 - cut.p),
        KIND=(*cut.kinds, cut.runs_are(4) and cut.unit % 4 == 0),
        BLOCK=_BLOCK,
    )
    return y


def draw(cut: DropoutShard, count: int) -> Tensor:
    """Draws which of so many elements stay: i32[ceil(count / 32)], a word's lowest bit that of its first element."""
    words = torch.empty(triton.cdiv(count, 32), dtype=torch.int32, device=cut.rng.device)
    _draw_kernel[(triton.cdiv(words.numel(), _WORDS),)](
        words,
        cut.tensors,
        cut.numbers,
        count,
        KIND=(*cut.kinds, cut.unit % 4 == 0),
        IN_WORDS=cut.runs_are(32),
        BLOCK=_WORDS,
    )
    return words


@triton.jit  # type: ignore[untyped-decorator]
def _multiplied(a, CONSTANT: tl.constexpr):  # type: ignore[no-untyped-def]
    """High and low 32 bits of a product, which is one instruction."""
    product = a.to(tl.uint64) * CONSTANT
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def drawn(counter, rng_ptr, identity):  # type: ignore[no-untyped-def]
    """The four words of counters: Philox4x32-10.

    Args:
        counter: numbers, i64; an element's is a quarter of its own.
        rng_ptr: of i64[3]: seed, step, microbatch.
        identity: of the draw, an integer of which 32 bits count.
    """
    seed, step, microbatch = tl.load(rng_ptr), tl.load(rng_ptr + 1), tl.load(rng_ptr + 2)
    # What is one number for all stays a scalar: the first rounds multiply it once.
    c0 = counter.to(tl.uint32)
    c1 = (tl.zeros_like(step) + identity).to(tl.uint32)
    c2 = step.to(tl.uint32)
    c3 = (microbatch + ((counter >> 32) << 16)).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        h0, l0 = _multiplied(c0, 0xD2511F53)
        h1, l1 = _multiplied(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        # Philox's key wraps round at 32 bits, which a debug build of Triton would report as an overflow.
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def stays(word, threshold):  # type: ignore[no-untyped-def]
    """Whether elements are kept; `threshold` is that of 32-bit words, less 2^31: kernels take signed numbers."""
    return (word ^ 0x80000000).to(tl.int32, bitcast=True) >= threshold


@triton.jit
def one_word(index, rng_ptr, identity):  # type: ignore[no-untyped-def]
    """The word of each element by itself, where neighbours need not be those of one counter."""
    w0, w1, w2, w3 = drawn(index >> 2, rng_ptr, identity)
    is_odd = (index & 1) == 1
    return tl.where((index & 2) == 0, tl.where(is_odd, w1, w0), tl.where(is_odd, w3, w2))


@triton.jit  # type: ignore[untyped-decorator]
def packed(first, rng_ptr, identity, threshold, IN_FOURS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of 32 neighbours from each of `first` on stay: bits of an i32, the first the lowest.

    A lane draws all counters of its word, nine where elements do not begin with a counter (`IN_FOURS`).
    """
    counter = first >> 2
    bits = tl.zeros_like(counter)
    COUNTERS: tl.constexpr = 8 if IN_FOURS else 9
    for i in tl.static_range(COUNTERS):
        w0, w1, w2, w3 = drawn(counter + i, rng_ptr, identity)
        low = stays(w0, threshold).to(tl.int32) | (stays(w1, threshold).to(tl.int32) << 1)
        high = stays(w2, threshold).to(tl.int32) | (stays(w3, threshold).to(tl.int32) << 1)
        bits |= (low | (high << 2)).to(tl.int64) << (4 * i)
    if not IN_FOURS:
        bits = bits >> (first & 3)
    return bits.to(tl.int32)
