"""Random bits without a state: a counter generator in plain tensor operations (SPEC section 2.4).

Enters: (seed, step, microbatch) as a tensor, a node's identity, and the global index of every element. Leaves: the same
bits under every plan, in recomputation and in replayed graphs.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox4x32-10.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
# How often words are mixed.
_ROUNDS = ContextVar("rounds", default=10)


@contextlib.contextmanager
def without_bits(*, counts_memory: bool) -> Iterator[None]:
    """Mixes words less often inside, for programs that run on fake tensors.

    Args:
        counts_memory: whether it matters what is alive while words are computed. They are mixed four times then: from
            the third round on all have the full shape, and every round takes the memory of the last one. Else words
            are not computed at all.
    """
    token = _ROUNDS.set(4 if counts_memory else 0)
    try:
        yield
    finally:
        _ROUNDS.reset(token)


class IndexCut(NamedTuple):
    """One axis over which a tensor is cut.

    Ranks hold units of each block: one each of a block in equal parts, or some rows each of a batch.

    Attributes:
        dim: the dimension.
        outer: how often the block is repeated in it.
        own: units that this rank holds.
        total: units that all ranks hold; a number, or an i64 scalar.
        before: units of the ranks before this one, an i64 scalar.
    """

    dim: int
    outer: int
    own: int
    total: int | Tensor
    before: Tensor


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Returns the high and low 32 bits of a product of 32-bit numbers held in int64.

    The constant is applied in two halves: a full product would exceed 63 bits.
    """
    low = a * (constant & 0xFFFF)
    high = a * (constant >> 16)
    middle = high + (low >> 16)
    return (middle >> 16) & _MASK, ((middle << 16) | (low & 0xFFFF)) & _MASK


def philox(counter: Sequence[Tensor], key: Sequence[Tensor], rounds: int = 10) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws four 32-bit words (in int64) by Philox4x32 from a 128-bit counter and a 64-bit key, broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        h0, l0 = _multiply(c0, _M0)
        h1, l1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def global_index(shape: Sequence[int], cuts: Sequence[IndexCut], device: torch.device) -> Tensor:
    """Returns the row-major index in the whole tensor of every element that a rank holds; `shape` is the rank's."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        position = torch.arange(size, device=device)
        whole: int | Tensor = size
        for cut in reversed(cuts):
            if cut.dim == dim:
                run = whole // cut.outer
                unit = run // cut.own
                position = position // run * (unit * cut.total) + cut.before * unit + position % run
                whole = unit * cut.total * cut.outer
        index = index * whole + position.view(-1, *[1] * (len(shape) - 1 - dim))
    return index.expand(tuple(shape))


def random_words(shape: Sequence[int], rng: Tensor, origin: int | Tensor, cuts: Sequence[IndexCut]) -> Tensor:
    """Draws one uniform 32-bit word (in int64) for each element a rank holds.

    Args:
        shape: the rank's shape.
        rng: i64[3]: seed, step, microbatch.
        origin: identity of the node, 32 bits: a number, or an i64 scalar.
        cuts: the axes over which the tensor is cut, the outermost first.
    """
    if not _ROUNDS.get():
        return torch.empty(tuple(shape), dtype=torch.int64, device=rng.device)
    index = global_index(shape, cuts, rng.device)
    # Four neighbours share a counter and take one word each.
    if _in_fours(shape, cuts):
        return torch.stack(_drawn(index[..., ::4], rng, origin), -1).flatten(-2)
    w0, w1, w2, w3 = _drawn(index, rng, origin)
    is_odd = (index & 1) == 1
    return torch.where((index & 2) == 0, torch.where(is_odd, w1, w0), torch.where(is_odd, w3, w2))


def _in_fours(shape: Sequence[int], cuts: Sequence[IndexCut]) -> bool:
    """Returns whether each four neighbours in the last dimension are of one counter: runs must hold whole counters.

    Of symbolic sizes it must hold for all: the bits are the same either way.
    """
    units = [math.prod(shape[cut.dim :]) // (cut.outer * cut.own) for cut in cuts]
    return len(shape) > 0 and all(statically_known_true(unit % 4 == 0) for unit in (shape[-1], *units))


def _drawn(index: Tensor, rng: Tensor, origin: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws the four words of the counters of elements.

    Elements past 2^34 share the word of the microbatch, whose number is far below 2^16.
    """
    seed, step, microbatch = rng[0], rng[1], rng[2]
    counter = (
        (index >> 2) & _MASK,
        torch.zeros_like(index) + origin,
        step & _MASK,
        (microbatch + ((index >> 34) << 16)) & _MASK,
    )
    return philox(counter, (seed & _MASK, (seed >> 32) & _MASK), _ROUNDS.get())


def dropout(x: Tensor, rng: Tensor, p: float, origin: int | Tensor, cuts: Sequence[IndexCut]) -> Tensor:
    """Zeroes each element with probability p and scales the others by 1/(1 - p)."""
    if p >= 1.0:
        return x * 0.0
    # Integers are compared, and no uniform numbers: kernels and the plain form agree to the bit.
    keep = random_words(x.shape, rng, origin, cuts) >= int(p * 2**32)
    return torch.where(keep, x * (1.0 / (1.0 - p)), x.new_zeros(()))


def cuts_of_kernel(
    x: Tensor, p: float, cuts: Sequence[IndexCut]
) -> tuple[Sequence[IndexCut], Sequence[IndexCut]] | None:
    """Returns the outer and the inner cut, one or none of each, of a dropout that is one kernel on GPUs.

    None where it has the plain form: float64, tensors of more than 2^31 elements and those that several axes cut.
    Two axes may cut it where the outer one cuts the first dimension, as data ranks do.
    """
    outer, inner = cuts[:1], cuts[1:]
    if not outer or outer[0].outer != 1 or x.shape[: outer[0].dim].numel() != 1:
        outer, inner = [], cuts
    is_plain = all(cut.own == 1 and isinstance(cut.total, int) for cut in inner)
    if p >= 1.0 or x.dtype == torch.float64 or len(inner) > 1 or not is_plain or not 0 < x.numel() < 2**31:
        return None
    return outer, inner


# Bits of a uniform number's significand, less the one that keeps it off 0 and 1.
_UNIFORM_BITS = {torch.float64: 32, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


def uniform_like(x: Tensor, rng: Tensor, dtype: torch.dtype, origin: int | Tensor, cuts: Sequence[IndexCut]) -> Tensor:
    """Draws uniform numbers in the open interval (0, 1) for the elements of a rank's `x`.

    They are odd multiples of 2^-(bits + 1), exact in their type: no logarithm or inverse of them is infinite.
    """
    bits = _UNIFORM_BITS[dtype]
    words = random_words(x.shape, rng, origin, cuts) >> (32 - bits)
    return (2 * words + 1).to(dtype) * 2.0 ** -(bits + 1)


def uniform(size: Sequence[int], rng: Tensor, dtype: torch.dtype, origin: int | Tensor) -> Tensor:
    """Draws as `uniform_like`, for a whole tensor of that shape."""
    return uniform_like(rng.new_empty(size), rng, dtype, origin, [])
