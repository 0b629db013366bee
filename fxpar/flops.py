"""The arithmetic of matrix products.

Enters: a program. Leaves: floating point operations of every matrix product and attention, in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fxpar import operators
from fxpar.program import Program, operands, output_types
from fxpar.symbols import Size, product, simplify

aten = torch.ops.aten


def matmul_flops(program: Program) -> Iterator[tuple[fx.Node, Size]]:
    """Forward FLOPs (2 a multiply-add) of every matrix product and attention, over global shapes."""
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        kinds = [output_types(o)[0] for o in operands(node)]
        target = node.target
        if target in (aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default):
            yield node, simplify(2 * product(output_types(node)[0].shape) * kinds[0].shape[-1])
        elif target in (aten.addmm.default, aten.baddbmm.default):
            yield node, simplify(2 * product(output_types(node)[0].shape) * kinds[1].shape[-1])
        elif target in (aten.scaled_dot_product_attention.default, operators.attention):
            rows, columns = product(kinds[0].shape[:-1]), kinds[1].shape[-2]
            yield node, simplify(2 * rows * columns * (kinds[0].shape[-1] + kinds[2].shape[-1]))
        elif target in (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default):
            yield node, simplify(2 * product(output_types(node)[0].shape) * product(kinds[1].shape[1:]))
