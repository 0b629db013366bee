"""How much of a program's arithmetic its ranks divide among them.

Enters: a program with layouts. Leaves: the share of matrix FLOPs that is divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch import fx

from fxpar.analysis.communication import symbol_sizes
from fxpar.analysis.flops import matmul_flops
from fxpar.ir.operators import computed_fraction
from fxpar.ir.program import Program, operands, output_layouts
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.mesh.axes import Cuts


def split_flops(program: Program, sizes: Mapping[str, int] | None = None) -> float:
    """Share of the matrix FLOPs that the ranks which split each layer divide among them; 1 where there are none.

    Of a product that c of n ranks compute alike, that is (1 - c/n) / (1 - 1/n). It is a share of what can be counted:
    `fxpar.analysis.flops.uncounted` lists the rest.
    """
    axes = program.plan.axes_for(Cuts.FEATURES)
    n = prod(axes.values())
    if n == 1:
        return 1.0
    values = symbol_sizes(program, sizes)
    total, split = 0, 0.0
    for node, flops in matmul_flops(program):
        amount = evaluate(flops, values)
        total += amount
        split += amount * (1 - computed_part(node, axes)) / (1 - 1 / n)
    return split / total if total else 0.0


def computed_part(node: fx.Node, axes: Mapping[str, int]) -> float:
    """What part of a product a rank computes.

    Args:
        axes: those that count, with their sizes.
    """
    layouts = [layout for o in operands(node) for layout in output_layouts(o)]
    return prod(computed_fraction([layout.on(axis) for layout in layouts], n) for axis, n in axes.items())
