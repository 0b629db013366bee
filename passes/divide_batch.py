"""divide_batch: the batch as a multiple of the ranks that share it out, and means over it as sums over counts."""

from __future__ import annotations

from dataclasses import replace

import torch

from fxpar.ir.program import Program, operands, tensor_type
from fxpar.ir.properties import Property
from fxpar.ir.step import batch_symbol
from fxpar.layout.symbolic_sizes import names
from fxpar.manager import register_pass
from fxpar.mesh.axes import Cuts, axis_that
from fxpar.ops.small_operators import size
from fxpar.passes.divide_sequence import divide as divide_sizes
from fxpar.rewrite.loss_reduction import add_count, check_added, leading_to
from fxpar.rewrite.means import MEANS, Counting, count_numbers, scalar
from fxpar.rewrite.rank_rows import divide_norms, keep_rows
from fxpar.rules import bind_arguments

aten = torch.ops.aten


@register_pass("divide_batch", requires={Property.CANONICAL}, invalidates={Property.LAYOUTS})
def divide_batch(program: Program) -> Program:
    """Writes the batch as n times a symbol for n data ranks, and means over it as sums over counts.

    Before (dp 2)::

        symbol b = input_ids.0 like 4
        %b = aten.sym_size.int(%input_ids, 0) : b
        %loss = aten.mean.default(%rows) : f32[]

    After::

        symbol b = input_ids.0 / 2 like 2
        %b = fxpar.size(%input_ids, 0) : 2*b
        %loss_sum = aten.sum.default(%rows) : f32[]
        %loss_ones = aten.ones_like.default(%rows) : f32[2*b]
        %loss_count = aten.sum.default(%loss_ones) : f32[]
        %loss = aten.div.Tensor(%loss_sum, %loss_count) : f32[]

    Terms: the *batch* is the symbolic size of the inputs' rows (`batch_symbol`). A mean over it divides by a number
    that no rank knows alone; as sum and count both are summed over the ranks, each of which counts what it has. The
    mean of a loss counts the targets that are not ignored, or their weights. So do numbers that depend on the batch and
    meet values: `x / b` becomes `x / count`. A norm by statistics of the batch sums its
    moments and counts. Values and gradients stay equal. Without data parallel ranks nothing changes.

    With `loss_reduction="local_mean"` a mean in the loss is that of each rank's rows, `[n, -1]`, and the mean of these;
    with `sum` it is the sum of these, and a term of the loss that depends on no row counts once for each rank; with
    `token` the count of the loss becomes an output, `fxpar.count`, by which a step weighs its microbatches.

    Refuses models whose batch is no symbolic size, and examples whose rows the ranks do not divide.
    """
    n, reduction = program.plan.data_ranks, program.plan.loss_reduction if program.loss else "mean"
    if n == 1 and reduction != "token":
        return program
    name = batch_symbol(program)
    if n > 1:
        remedy = f"pass rows that {n} ranks can share out"
        program = divide_sizes(program, n, {name}, where=axis_that(Cuts.BATCH), remedy=remedy)
        keep_rows(program, name)
        for node in program.graph.nodes:
            # A rank would read the size of its part here, and `size` gives that of the whole.
            if node.target is aten.sym_size.int and name in names((scalar(node),)):
                (source,), dim = operands(node), int(bind_arguments(node)["dim"])
                node.target, node.args, node.kwargs = size, (source, dim % len(tensor_type(source).shape)), {}
        divide_norms(program.graph, name)
        count_numbers(program.graph, name)
    leading = leading_to(program) if reduction in ("local_mean", "sum") and n > 1 else frozenset()
    means = []
    for node in [node for node in program.graph.nodes if node.target in MEANS]:
        counting = Counting(program.graph, node, name, n if node in leading else 1, reduction == "sum")
        MEANS[node.target](counting)
        means += [counting.mean] if counting.mean is not None and counting.ranks > 1 else []
    if leading:
        check_added(program, means, name)
    return add_count(program) if reduction == "token" else program


def of_all_ranks(program: Program) -> Program:
    """Returns the program for the batches of all data ranks together, where its example is one rank's."""
    n = program.plan.data_ranks
    if n == 1:
        return program
    name = batch_symbol(program)
    grown = (replace(s, example=s.example * n) if s.name == name else s for s in program.symbols)
    return program.with_(symbols=tuple(grown))
