"""What a training step takes in and computes: samples, tokens and FLOPs.

Enters: the captured program, which is that of all data ranks. Leaves: formulas, of which a call gives the sizes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fxpar.cost.flops import matmul_flops
from fxpar.ir.grad_flow import carried
from fxpar.ir.program import Program, operands, tensor_type
from fxpar.ir.step import RNG_PATH, batch_dims
from fxpar.ir.symbols import Counted, with_counted
from fxpar.layout.symbolic_sizes import Size, evaluate, product


@dataclass(frozen=True)
class Volume:
    """Says how much a step takes in and computes, over all data ranks.

    Attributes:
        samples: rows of the batch.
        tokens: rows × length of the first integer input of at least two dimensions, padding included; else the rows.
        flops: of the matrix products in the author's forward and their backward, without recomputation.
    """

    samples: int = 0
    tokens: int = 0
    flops: float = 0.0

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.samples + other.samples, self.tokens + other.tokens, self.flops + other.flops)


@dataclass(frozen=True)
class Work:
    """Says the same of a program, by the values of its symbols; `products` counts the products of each size."""

    rows: Size
    tokens: Size
    products: Mapping[Size, int]
    counted: tuple[Counted, ...]

    def at(self, sizes: Mapping[str, int]) -> Volume:
        """Returns the volume of a batch with these sizes."""
        values = with_counted(self.counted, sizes)
        samples, tokens = int(evaluate(self.rows, values)), int(evaluate(self.tokens, values))
        flops = math.fsum(count * evaluate(size, values) for size, count in self.products.items())
        return Volume(samples, tokens, flops)


def work_of(program: Program) -> Work:
    """Returns what a step of a captured program computes."""
    dims = batch_dims(program)
    entries = [entry for entry in program.inputs if entry.path in dims and entry.path != RNG_PATH]
    rows: Size = entries[0].type.shape[dims[entries[0].path]] if entries else 1
    ids = (e.type.shape for e in entries if len(e.type.shape) > 1 and not e.type.dtype.is_floating_point)
    tokens = next((product(shape[:2]) for shape in ids), rows)
    products, flags = Counter[Size](), carried(program)
    for node, flops in matmul_flops(program):
        factors = (operand for operand in operands(node) if len(tensor_type(operand).shape) > 1)
        # A backward has two more products, for the input and the weight; of what is frozen, and of what no trained
        # parameter comes before, it has none.
        products[flops] += 1 + min(2, sum(any(flags[factor]) for factor in factors))
    return Work(rows, tokens, products, tuple(program.counted))
