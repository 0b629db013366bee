"""How much of a GPU a matrix product fills.

Enters: the rows and columns of a result. Leaves: the part of the multiprocessors' time in which they compute.

A product is cut into tiles, of which each multiprocessor computes one at a time: as many as there are multiprocessors
are a *wave*, and the last wave takes as long as a full one. So half the rows may take more than half the time. cuBLAS
chooses the tiles; of those that it has for Hopper these are the usual ones. A smaller tile reads more for each product
of two elements, and runs at a lower rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import ceil

# Rows and columns of a tile, and its rate over that of the largest.
TILES: Mapping[tuple[int, int], float] = {
    (128, 256): 1.0,
    (256, 128): 1.0,
    (192, 192): 1.0,
    (128, 192): 0.97,
    (192, 128): 0.97,
    (128, 128): 0.9,
    (64, 256): 0.85,
    (256, 64): 0.85,
    (64, 128): 0.75,
    (128, 64): 0.75,
    (64, 64): 0.65,
}


@lru_cache(maxsize=4096)
def filled(matrices: int, rows: int, columns: int, multiprocessors: int) -> float:
    """The part of its time in which a product computes, by the tiles with which that is most; at most 1.

    Args:
        matrices: results of a batched product, each of `rows` by `columns` elements.
        multiprocessors: of the GPU; 1 where there are no waves.
    """
    elements = matrices * rows * columns
    if multiprocessors == 1 or not elements:
        return 1.0
    return max(
        rate * elements / (_rounds(matrices * ceil(rows / high) * ceil(columns / wide), multiprocessors) * high * wide)
        for (high, wide), rate in TILES.items()
    )


def _rounds(tiles: int, multiprocessors: int) -> int:
    """Tiles for which there is time in as many waves as these need."""
    return ceil(tiles / multiprocessors) * multiprocessors
