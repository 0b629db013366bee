"""recognize_experts: layers of experts, however a model writes them, are rows sorted by expert."""

from __future__ import annotations

import torch

from fxpar.experts.compiler.choices import PICKS, picked_rows_error
from fxpar.experts.compiler.graph_forms import write_loops, write_pairs, write_sorted
from fxpar.experts.compiler.routing_facts import routing_facts
from fxpar.ir.program import Program, name_sizes, note, output_types, remove_dead
from fxpar.ir.properties import Property
from fxpar.layout.symbolic_sizes import names
from fxpar.manager import register_pass


@register_pass("recognize_experts", requires={Property.CANONICAL}, invalidates={Property.LAYOUTS})
def recognize_experts(program: Program) -> Program:
    """Writes layers of experts with the operators on rows of `fxpar.experts.operators.permute`.

    Before, of a matrix for each pair of token and expert::

        %w_pair = aten.index.Tensor(%w, [%chosen]) : f32[b*s, 2, 128, 64]
        %y = aten.einsum.default("tkoi,ti->tko", [%w_pair, %x]) : f32[b*s, 2, 128]
        %weighed = aten.mul.Tensor(%y, %weights) : f32[b*s, 2, 128]
        %sum = aten.sum.dim_IntList(%weighed, [1]) : f32[b*s, 128]

    Before, of a loop, for each expert e::

        %mask = aten.eq.Scalar(%chosen, e) : bool[b*s, 2]
        %weighed = aten.mul.Tensor(%weights, %mask) : f32[b*s, 2]
        %column = aten.sum.dim_IntList(%weighed, [-1], True) : f32[b*s, 1]
        %w_e = aten.select.int(%w, 0, e) : f32[128, 64]
        %y_e = aten.linear.default(%x, %w_e) : f32[b*s, 128]
        %term = aten.mul.Tensor(%y_e, %column) : f32[b*s, 128]
        %sum_e = aten.add.Tensor(%sum, %term) : f32[b*s, 128]

    After::

        %order, %counts = fxpar.sort_by_expert.default(%chosen, 8) : i64[2*b*s], i64[8]
        %rows = fxpar.moe_permute.default(%x, %order, 2) : f32[2*b*s, 64]
        %y = fxpar.grouped_linear.default(%rows, %w, %counts, False) : f32[2*b*s, 128]
        %sum = fxpar.moe_combine.default(%y, %weights, %order, float32) : f32[b*s, 128]

    Rows that a model sorts itself become the same (`fxpar.experts.compiler.graph_forms`).

    `routing_facts` says what each value is of the choice of a top-k. A choice is recognised where it is of as many
    experts as there are matrices, which are all others for a token: so many places of buffers go by that. What is not
    recognised stays as it is. Values and gradients stay equal, and the order of random nodes. Refuses loops over
    experts that pick rows and are not recognised: no program can hold as many rows as the routing sends.
    """
    if program.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default):
        for write in (write_sorted, write_pairs, write_loops):
            # Facts are found anew for each form, as the form before has replaced nodes that they speak of.
            write(program.graph, routing_facts(program.graph))
    name_sizes(program)
    remove_dead(list(program.graph.nodes))
    used: set[str] = set()
    for node in program.graph.nodes:
        if node.target is PICKS:
            raise picked_rows_error(note(node).source or f"%{node.name}", note(node).fqn)
        if node.op != "output":
            used |= names(size for kind in output_types(node) for size in kind.shape)
    return program.with_(counted=tuple(symbol for symbol in program.counted if symbol.name in used))
