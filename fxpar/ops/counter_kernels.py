"""The counter generator of `fxpar.ops.counter` in registers, for all kernels. Importing this module needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


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
