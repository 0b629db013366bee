"""How long the parts of a step take, by the plan's constants.

Enters: a step with the calls of its regions written out. Leaves: seconds of each collective and of each matrix product;
anything else takes next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import fx

from fxpar.analysis.collectives import Collective, collectives, symbol_sizes
from fxpar.analysis.flops import matmul_flops
from fxpar.analysis.ring import collective_seconds
from fxpar.analysis.split import computed_part
from fxpar.layout.symbols import evaluate
from fxpar.program.program import Program


@dataclass(frozen=True)
class Sending:
    """A collective, and the seconds that it takes alone."""

    collective: Collective
    seconds: float


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
    for each in collectives(program, sizes):
        axes = each.axis.split("-")
        cost, ranks = program.plan.cost.on(axes), prod(program.axes[axis] for axis in axes)
        seconds = collective_seconds(each.op, ranks, each.bytes, cost, cost.latency)
        sends.setdefault(each.node, []).append(Sending(each, seconds))
    values = symbol_sizes(program, sizes)
    products = {
        node: evaluate(flops, values) * computed_part(node, program.axes) / program.plan.cost.flops
        for node, flops in matmul_flops(program)
    }
    return Estimates(sends, products)
