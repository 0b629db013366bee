"""Attention with dropout as one operator, where the device has a kernel that draws the counter generator's bits.

Enters: a rank's heads of query, key and value, and how probabilities are dropped (`fxpar.ops.sdpa.Drops`). Leaves:
whether there is a kernel, and the operators that call it; on the meta device they are shapes alone, and stand
for those of a GPU that this machine has not.

In one pass over keys, a probability has one bit in memory. A kernel of its own draws these bits of `fxpar.ops.counter`,
for a draw is most of what attention would compute: forward and backward read them. Sums over keys and queries have one
order, so that results do not change from run to run. The kernels (`fxpar.ops.dropped_kernels`) need Triton.

Source: Dao, "FlashAttention-2" (arXiv 2307.08691), algorithms 1 and 2; the dropout of the plain form in their place.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpar.errors import InputError
from fxpar.ops.counter import IndexCut
from fxpar.ops.operator import torch_operator

_TYPES = (torch.float16, torch.bfloat16)

_COLUMNS = 256  # of a head, the most of which tiles fit

_OTHERS = ("cuda", "meta")


@dataclass(frozen=True)
class Places:
    """Which heads a rank holds of all that there are.

    Attributes:
        heads: of all ranks.
        rows_before: rows of the batch on the ranks before this one, an i64 scalar; None for none.
        heads_before: heads on them.
    """

    heads: int
    rows_before: Tensor | None
    heads_before: Tensor | None


def places(query: Tensor, key: Tensor, value: Tensor, p: float, cuts: Sequence[IndexCut]) -> Places | None:
    """Returns where a rank's heads stand, for a call that has a kernel; None where the plain form is to be computed.

    There is one for half precision, four dimensions, heads of up to 256, and cuts of the batch and of whole heads.

    Args:
        query: [b, h, s, d], and so `key` and `value`, with as many heads.
        p: probability of a zero.
        cuts: of the probabilities.

    Raises:
        InputError: there is one, and Triton is not installed.
    """
    if query.device.type not in _OTHERS or query.dtype not in _TYPES or p >= 1.0:
        return None
    if any(x.dim() != 4 or x.shape[:2] != query.shape[:2] or x.shape[-1] > _COLUMNS for x in (query, key, value)):
        return None
    rows_before = heads_before = None
    heads = query.shape[1]
    for cut in cuts:
        if cut.outer != 1 or cut.dim not in (0, 1) or (cut.dim == 0 and rows_before is not None):
            return None
        if cut.dim == 0:
            rows_before = cut.before * (query.shape[0] // cut.own)
        elif heads_before is not None or cut.own != 1 or not isinstance(cut.total, int):
            return None
        else:
            heads, heads_before = cut.total * heads, cut.before * heads
    if query.device.type == "cuda":
        require_triton("attention")
    return Places(heads, rows_before, heads_before)


def require_triton(where: str) -> None:
    """Refuses to drop on a GPU without Triton.

    Raises:
        InputError: it is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise InputError(
            "dropout on a GPU is a Triton kernel, and Triton is not installed",
            where=where,
            remedy="pip install triton, or run on the CPU",
        )


def _words_shape(
    rng: Tensor, identity: Any, rows_before: Any, heads_before: Any, sizes: Sequence[int], *_: Any
) -> Tensor:
    batch, heads, height, width = sizes[:4]
    return rng.new_empty(batch, heads, -(-width // 32), height, dtype=torch.int32)


@torch_operator("drawn_probabilities", fake=_words_shape, direct=True)
def drawn_probabilities(
    rng: Tensor,
    identity: Tensor | None,
    rows_before: Tensor | None,
    heads_before: Tensor | None,
    sizes: Sequence[int],
    origin: int,
    p: float,
    is_causal: bool,
) -> Tensor:
    """Draws which probabilities stay, a bit each: i32[b, h, ceil(t / 32), s].

    Forward and backward call it alike. Compiled together they have it once, and the words are kept.

    Args:
        rng: i64[3], (seed, step, microbatch).
        identity: of the draw, an i64 scalar, or None for `origin`.
        rows_before: as of `Places`, and so `heads_before`.
        sizes: b, h, s and t of this rank, and h of all ranks.
        p: probability of a zero.
        is_causal: whether a query sees keys up to its own position. Words of keys that no query near theirs sees are
            not written.
    """
    from fxpar.ops import dropped_kernels as kernels

    batch, local_heads, height, width, heads = sizes
    count = _ceil(width, 32)
    words = torch.empty(batch, local_heads, count, height, dtype=torch.int32, device=rng.device)
    rows, per_program, warps = _DRAWN
    kernels.draw_kernel[batch * local_heads, _ceil(height, rows), _ceil(count, per_program)](
        words,
        (local_heads, heads, height, width),
        # A kernel takes a pointer in any case. Without its flag it does not read there.
        tuple(rng if operand is None else operand for operand in (rng, identity, rows_before, heads_before)),
        # The same 32 bits as a signed number.
        ((origin ^ _SIGN) - _SIGN if identity is None else 0, int(p * 2**32) - _SIGN),
        CAUSAL=is_causal,
        KIND=(rows_before is not None, heads_before is not None, identity is not None, width % 4 == 0),
        ROWS=rows,
        WORDS=per_program,
        num_warps=warps,
    )
    return words


def _shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _d = query.shape
    out = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(batch, heads, rows, dtype=torch.float32)


@torch_operator("dropped_attention", fake=_shape, direct=True)
def dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    words: Tensor,
    p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Computes the result [b, h, s, v], in memory [b, s, h, v], and logarithms of sums of exponentials [b, h, s].

    Args:
        query: [b, h, s, d], and so `key` [b, h, t, d] and `value` [b, h, t, v].
        mask: what is added to the scores, broadcast to [b, h, s, t].
        words: of `drawn_probabilities`.
        p: probability of a zero.
        is_causal: whether a query sees keys up to its own position.
        scale: of the scores.
    """

    from fxpar.ops import dropped_kernels as kernels

    query, key, value = (_rows(x) for x in (query, key, value))
    batch, heads, height, _ = query.shape
    out = query.new_empty(batch, height, heads, value.shape[-1]).transpose(1, 2)
    log_sum = query.new_empty(batch, heads, height, dtype=torch.float32)
    common = _Common.of(query, key, value, mask, p, is_causal)
    tiles = _tiles("forward", common.columns, query.device)
    kernels.forward_kernel[batch * heads, _ceil(height, tiles.queries)](
        (query, key, value, common.mask, words, out, log_sum),
        (*(_at(x) for x in (query, key, value)), common.mask_at, _at(out)),
        common.sizes,
        # The kernel computes exp2, which a GPU has as an instruction, in place of exp.
        (scale * _LOG2E, common.keep),
        **tiles.options(),
        **common.options,
    )
    return out, log_sum


def _gradient_shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    gradients = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (query, key, value))
    of_query, of_key, of_value = gradients
    return of_query, of_key, of_value


@torch_operator("dropped_attention_gradient", fake=_gradient_shape, direct=True)
def dropped_attention_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    out: Tensor,
    log_sum: Tensor,
    mask: Tensor | None,
    words: Tensor,
    p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of query, key and value, each in memory [b, s, h, d], from that of the result.

    Args:
        query: as of `dropped_attention`, and so all others but these.
        gradient: of the result.
        out: the result.
        log_sum: the second result.
    """

    from fxpar.ops import dropped_kernels as kernels

    query, key, value, gradient, out = (_rows(x) for x in (query, key, value, gradient, out))
    log_sum, total = log_sum.contiguous(), torch.empty_like(log_sum, memory_format=torch.contiguous_format)
    of_query, of_key, of_value = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (query, key, value))
    common = _Common.of(query, key, value, mask, p, is_causal)
    read = (query, key, value, common.mask, words, gradient)
    read_at = (*(_at(x) for x in (query, key, value)), common.mask_at, _at(gradient))
    programs = query.shape[0] * query.shape[1]
    tiles = _tiles("queries", common.columns, query.device)
    kernels.queries_kernel[programs, _ceil(query.shape[-2], tiles.queries)](
        (*read, out, log_sum, total, of_query),
        (*read_at, _at(out), _at(of_query)),
        common.sizes,
        (scale, common.keep),
        **tiles.options(),
        **common.options,
    )
    tiles = _tiles("keys", common.columns, query.device)
    kernels.keys_kernel[programs, _ceil(key.shape[-2], tiles.keys)](
        (*read, log_sum, total, of_key, of_value),
        (*read_at, _at(of_key), _at(of_value)),
        common.sizes,
        (scale, common.keep),
        **tiles.options(),
        **common.options,
    )
    return of_query, of_key, of_value


_LOG2E = 1.4426950408889634

_SIGN = 2**31


def _ceil(length: int, part: int) -> int:
    """Returns how many parts there are."""
    return -(-length // part)


def _padded(size: int) -> int:
    """Returns the columns of a part of a tile: products have at least 16, and a power of two."""
    return max(16, 1 << (size - 1).bit_length())


def _parts(size: int) -> tuple[int, int]:
    """Returns the columns of the parts of a tile: one, or two where these have less padding."""
    whole = _padded(size)
    first = whole // 2
    second = _padded(size - first) if first >= 16 else whole
    return (first, second) if first + second < whole else (whole, 0)


def _rows(x: Tensor) -> Tensor:
    """Returns a tensor whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _at(x: Tensor) -> tuple[int, ...]:
    """Returns the distances of rows of the batch, of heads and of rows of a head."""
    return x.stride()[:3]


@dataclass(frozen=True)
class _Common:
    """What all kernels that compute attention take: `mask`, its strides, sizes, a factor, and named options.

    `columns` are those of the widest tile; `keep` is what probabilities that stay are multiplied by.
    """

    mask: Tensor
    mask_at: tuple[int, ...]
    sizes: tuple[int, ...]
    columns: int
    keep: float
    options: dict[str, Any]

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, is_causal: bool) -> _Common:
        (_, heads, height, d), (width, of_value) = query.shape, value.shape[-2:]
        options = {"KIND": (is_causal, mask is not None), "D": _parts(d), "DV": _parts(of_value)}
        return _Common(
            # A kernel takes a pointer in any case. Without MASKED it does not read there.
            query if mask is None else mask,
            (0, 0, 0, 0) if mask is None else mask.expand(*query.shape[:-1], width).stride(),
            (heads, heads, height, width, d, of_value),
            max(_padded(d), _padded(of_value)),
            1.0 / (1.0 - p),
            options,
        )


class Tiles(NamedTuple):
    """How a kernel cuts its work.

    Attributes:
        queries: of a tile, and so `keys`, which are a multiple of 32.
        warps: that compute one program.
        stages: loads that are under way at a time.
    """

    queries: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, Any]:
        """Returns what a kernel takes of it."""
        return {"TILE": (self.queries, self.keys), "num_warps": self.warps, "num_stages": self.stages}


def _tiles(kind: str, columns: int, device: torch.device) -> Tiles:
    """Returns a kernel's tiles for heads of so many columns, and as many stages as the device has shared memory for."""
    tiles = _TILES[kind][columns <= 64, columns <= 128]
    properties: Any = torch.cuda.get_device_properties(device)
    room = properties.shared_memory_per_block_optin - _SCRATCH
    passed, resident = (tiles.queries, tiles.keys) if kind == "keys" else (tiles.keys, tiles.queries)
    stages = (room - resident * columns * 4) // (passed * columns * 4)
    return tiles._replace(stages=max(1, min(tiles.stages, stages)))


# By kernel, and whether heads have at most 64 and 128 columns: on an H100 for 65 to 128 the fastest of eight that were
# tried, for others what spills no registers.
_TILES: dict[str, dict[tuple[bool, bool], Tiles]] = {
    "forward": {
        (True, True): Tiles(128, 128, 8, 2),
        (False, True): Tiles(64, 64, 4, 3),
        (False, False): Tiles(64, 32, 8, 3),
    },
    "keys": {
        (True, True): Tiles(64, 64, 8, 2),
        (False, True): Tiles(64, 64, 4, 2),
        (False, False): Tiles(32, 32, 8, 1),
    },
    "queries": {
        (True, True): Tiles(64, 64, 4, 2),
        (False, True): Tiles(64, 32, 4, 3),
        (False, False): Tiles(32, 32, 4, 2),
    },
}

_DRAWN = (128, 4, 4)  # queries and words of a program that draws, and its warps

_SCRATCH = 2**14  # bytes of shared memory for what changes between the layouts of products
