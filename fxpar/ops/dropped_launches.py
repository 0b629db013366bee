"""Attention with dropout in one pass over keys on NVIDIA GPUs: no probability is in memory, and no mask is kept.

Enters: a rank's heads of query, key and value, and where they stand among those of all ranks. Leaves: what the plain
form of `fxpar.ops.attend` computes, with the bits of `fxpar.ops.counter`, which are drawn in registers and in the
backward drawn again. Sums over keys and queries have one order, so that results do not change from run to run.
Importing this module needs Triton.

Source: Dao, "FlashAttention-2" (arXiv 2307.08691), algorithms 1 and 2; the dropout of the plain form in their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpar.ops import dropped_kernels as kernels

_LOG2E = 1.4426950408889634
_SIGN = 2**31


class Bits(NamedTuple):
    """Of which elements of the whole tensor of probabilities a rank draws the bits.

    Attributes:
        rng: i64[3]: seed, step, microbatch.
        identity: of the draw, 32 bits: a number, or an i64 scalar.
        p: probability of a zero, less than 1.
        heads: of all ranks.
        rows_before: rows of the batch on the ranks before this one, an i64 scalar; None for none.
        heads_before: heads on them.
    """

    rng: Tensor
    identity: int | Tensor
    p: float
    heads: int
    rows_before: Tensor | None
    heads_before: Tensor | None


def _ceil(length: int, part: int) -> int:
    """How many parts there are."""
    return -(-length // part)


def _padded(size: int) -> int:
    """Columns of a tile: products have at least 16, and a power of two."""
    return max(16, 1 << (size - 1).bit_length())


def _rows(x: Tensor) -> Tensor:
    """A tensor whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _at(x: Tensor) -> tuple[int, ...]:
    """Distances of rows of the batch, of heads and of rows of a head."""
    return x.stride()[:3]


@dataclass(frozen=True)
class _Common:
    """What all kernels of a call take: `mask`, its strides, sizes, the generator's tensors, and named options.

    `columns` are those of the widest tile.
    """

    mask: Tensor
    mask_at: tuple[int, ...]
    sizes: tuple[int, ...]
    bits: tuple[Tensor, ...]
    columns: int
    options: dict[str, Any]

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bits: Bits, is_causal: bool) -> _Common:
        (_, heads, height, d), width = query.shape, key.shape[-2]
        identity = bits.identity
        given = (bits.rng, identity, bits.rows_before, bits.heads_before)
        options = {
            "origin": 0 if isinstance(identity, Tensor) else (identity ^ _SIGN) - _SIGN,
            "threshold": int(bits.p * 2**32) - _SIGN,
            "keep": 1.0 / (1.0 - bits.p),
            "CAUSAL": is_causal,
            "MASKED": mask is not None,
            "MOVED": (bits.rows_before is not None, bits.heads_before is not None),
            "IS_OPERAND": isinstance(identity, Tensor),
            "IN_FOURS": width % 4 == 0,
            "D": _padded(d),
            "DV": _padded(value.shape[-1]),
        }
        return _Common(
            bits.rng if mask is None else mask,
            (0, 0, 0, 0) if mask is None else mask.expand(*query.shape[:-1], width).stride(),
            (heads, bits.heads, height, width, d, value.shape[-1]),
            tuple(each if isinstance(each, Tensor) else bits.rng for each in given),
            max(_padded(d), _padded(value.shape[-1])),
            options,
        )


class Tiles(NamedTuple):
    """How a kernel cuts its work.

    Attributes:
        queries: of a tile, and so `keys`.
        warps: that compute one program.
        stages: loads that are under way at a time.
    """

    queries: int
    keys: int
    warps: int
    stages: int


def _tiles(kind: str, columns: int, device: torch.device) -> Tiles:
    """Those of a kernel for heads of so many columns, with as many stages as the device has shared memory for."""
    found = _TILES[kind][columns <= 64, columns <= 128]
    properties: Any = torch.cuda.get_device_properties(device)
    room = properties.shared_memory_per_block_optin - _SCRATCH
    passed, held = (found.queries, found.keys) if kind == "keys" else (found.keys, found.queries)
    stages = (room - held * columns * 4) // (passed * columns * 4)
    return found._replace(stages=max(1, min(found.stages, stages)))


# By kernel, and whether heads have at most 64 and 128 columns: the fastest of those tried on an H100.
_TILES: dict[str, dict[tuple[bool, bool], Tiles]] = {
    "forward": {
        (True, True): Tiles(128, 128, 8, 2),
        (False, True): Tiles(128, 64, 8, 3),
        (False, False): Tiles(64, 32, 8, 3),
    },
    "keys": {
        (True, True): Tiles(64, 64, 8, 2),
        (False, True): Tiles(64, 64, 4, 1),
        (False, False): Tiles(32, 64, 8, 1),
    },
    "queries": {
        (True, True): Tiles(64, 64, 4, 2),
        (False, True): Tiles(128, 64, 8, 2),
        (False, False): Tiles(32, 32, 4, 2),
    },
}
_SCRATCH = 2**14  # bytes of shared memory for what changes between the layouts of products


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bits: Bits, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The result [b, h, s, v], in memory [b, s, h, v], and the logarithms of the sums of exponentials [b, h, s].

    Args:
        query: [b, h, s, d], and so `key` [b, h, t, d] and `value` [b, h, t, v].
        mask: what is added to the scores, broadcast to [b, h, s, t].
    """
    query, key, value = (_rows(x) for x in (query, key, value))
    batch, heads, height, _ = query.shape
    out = query.new_empty(batch, height, heads, value.shape[-1]).transpose(1, 2)
    log_sum = query.new_empty(batch, heads, height, dtype=torch.float32)
    common = _Common.of(query, key, value, mask, bits, is_causal)
    tiles = _tiles("forward", common.columns, query.device)
    kernels.forward_kernel[batch * heads, _ceil(height, tiles.queries)](
        query,
        key,
        value,
        common.mask,
        out,
        log_sum,
        *(_at(x) for x in (query, key, value)),
        common.mask_at,
        _at(out),
        common.sizes,
        common.bits,
        scale=scale * _LOG2E,
        M=tiles.queries,
        N=tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **common.options,
    )
    return out, log_sum


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    out: Tensor,
    log_sum: Tensor,
    mask: Tensor | None,
    bits: Bits,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in memory [b, s, h, d]; arguments as of `forward`, and what that gave."""
    query, key, value, gradient = (_rows(x) for x in (query, key, value, gradient))
    total = (gradient.float() * out.float()).sum(-1)
    of_query, of_key, of_value = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (query, key, value))
    found = (of_query, of_key, of_value)
    common = _Common.of(query, key, value, mask, bits, is_causal)
    for kind in ("keys", "queries"):
        tiles = _tiles(kind, common.columns, query.device)
        of_keys = kind == "keys"
        programs = _ceil(key.shape[-2], tiles.keys) if of_keys else _ceil(query.shape[-2], tiles.queries)
        kernels.backward_kernel[query.shape[0] * query.shape[1], programs](
            query,
            key,
            value,
            common.mask,
            gradient,
            log_sum.contiguous(),
            total.contiguous(),
            *found,
            *(_at(x) for x in (query, key, value)),
            common.mask_at,
            *(_at(x) for x in (gradient, *found)),
            common.sizes,
            common.bits,
            scale=scale,
            OF_KEYS=of_keys,
            M=tiles.queries,
            N=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **common.options,
        )
    return found
