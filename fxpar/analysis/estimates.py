"""How long the parts of a step take, by the plan's constants.

Enters: a step with the calls of its regions written out. Leaves: seconds of each collective, and how many of them
products may hide, and of each matrix product, in waves of multiprocessors; anything else takes next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from torch import fx

from fxpar.analysis.communication import Collective, collectives, symbol_sizes
from fxpar.analysis.flops import matmul_flops
from fxpar.analysis.parallel_fraction import computed_part
from fxpar.analysis.ring import collective_seconds
from fxpar.ir.program import Note, Program, note, output_layouts, tensor_type
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import evaluate

# Products whose results are cut into tiles, and those of them whose leading dimension is a number of matrices.
_BATCHED = ("aten.bmm.default", "aten.baddbmm.default")
_OF_TILES = ("aten.mm.default", "aten.addmm.default", "aten.linear.default", *_BATCHED)


@dataclass(frozen=True)
class Sending:
    """A collective, and the seconds that it takes alone.

    Attributes:
        hideable: of its seconds those in which products can run beside it: all of what copy engines carry, which of
            sums over more than two ranks is the first half of the way, none of what is sent in one shot, and of what
            the process group sends the part `Cost.hidden`.
    """

    collective: Collective
    seconds: float
    hideable: float


@dataclass(frozen=True)
class Estimates:
    """Seconds on a rank.

    Attributes:
        sends: of the nodes that communicate, by name; most have one collective.
        products: of matrix products and attention.
    """

    sends: Mapping[str, Sequence[Sending]]
    products: Mapping[fx.Node, float]


def estimates(program: Program, sizes: Mapping[str, int] | None = None) -> Estimates:
    """What the nodes of a step take.

    Args:
        program: with property `local` and without calls of regions.
        sizes: of the inputs by symbol; the example's by default.
    """
    sends: dict[str, list[Sending]] = {}
    notes = {node.name: note(node) for node in program.graph.nodes if node.op == "call_function"}
    for collective in collectives(program, sizes):
        sends.setdefault(collective.node, []).append(_sending(program, collective, notes[collective.node]))
    values = symbol_sizes(program, sizes)
    rate = program.plan.cost.flops
    products = {
        node: evaluate(flops, values) * computed_part(node, program.axes) / (rate * _filled(program, node, values))
        for node, flops in matmul_flops(program)
    }
    return Estimates(sends, products)


def _sending(program: Program, sent: Collective, how: Note) -> Sending:
    """Through the process group, or where a buffer is noted by copies or in one shot, between ranks of one machine."""
    axes = sent.axis.split("-")
    cost, ranks = program.plan.cost.on(axes), prod(program.axes[axis] for axis in axes)
    if not how.buffer:
        seconds = collective_seconds(sent.op, ranks, sent.bytes, cost, cost.latency)
        return Sending(sent, seconds, cost.hidden * seconds)
    alone = collective_seconds(sent.op, ranks, sent.bytes * sent.part, cost, 0.0)
    if how.one_shot:
        return Sending(sent, alone + cost.latency, 0.0)
    carried = alone / 2 if ranks > 2 and sent.op == "all_reduce" else alone
    return Sending(sent, alone + cost.copy_latency, carried + cost.copy_latency)


def _filled(program: Program, node: fx.Node, values: Mapping[str, int]) -> float:
    """The part of its time in which a product computes; 1 where it is none of two matrices."""
    if str(node.target) not in _OF_TILES:
        return 1.0
    shape = local_shape(tensor_type(node).shape, output_layouts(node)[0], program.axes)
    *leading, rows, columns = (1, *(evaluate(size, values) for size in shape))
    if str(node.target) not in _BATCHED:
        leading, rows = [], rows * prod(leading)
    return filled(prod(leading), rows, columns, program.plan.cost.multiprocessors)


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
