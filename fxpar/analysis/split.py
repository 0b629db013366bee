"""How much of a program's arithmetic its ranks divide among them.

Enters: a program with layouts. Leaves: the share of matrix FLOPs that an axis divides.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxpar.analysis.collectives import symbol_sizes
from fxpar.analysis.flops import matmul_flops
from fxpar.layout.symbols import evaluate
from fxpar.program.coercions import computed_fraction
from fxpar.program.program import Program, operands, output_layouts


def split_flops(program: Program, axis: str = "tp", sizes: Mapping[str, int] | None = None) -> float:
    """Share of the matrix FLOPs that the ranks of an axis divide among them; 1 for an axis of one rank.

    Of a product that c of n ranks compute alike, that is (1 - c/n) / (1 - 1/n). It is a share of what can be counted:
    `fxpar.analysis.flops.uncounted` lists the rest.
    """
    if axis not in program.axes:
        return 1.0
    values = symbol_sizes(program, sizes)
    n, total, split = program.axes[axis], 0, 0.0
    for node, flops in matmul_flops(program):
        amount = evaluate(flops, values)
        total += amount
        placements = [layout.on(axis) for o in operands(node) for layout in output_layouts(o)]
        split += amount * (1 - computed_fraction(placements, n)) / (1 - 1 / n)
    return split / total if total else 0.0
