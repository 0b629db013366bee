"""Experts of a limited capacity on one device: a loop over pairs of a token and an expert, which drops as ranks do.

Enters: a reference program, and the plan that it is the reference of. Leaves: the program, in which nobody gets the
pairs beyond an expert's capacity. It is written apart from `experts.compiler.expert_capacity`, so that a fault there
shows.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor, fx

from fxpar.experts.compiler.routed_rows import routed
from fxpar.ir.program import Program, note, operands, set_note
from fxpar.ir.step import batch_size
from fxpar.plan.plan import Plan

fxp = torch.ops.fxpar


def drop_beyond_capacity(program: Program, plan: Plan) -> None:
    """Has each sort of tokens by expert take the pairs that a run of all ranks keeps.

    Args:
        program: on one device; it is changed.
        plan: of all ranks, with a `capacity_factor`.
    """
    for region in routed(program):
        sort, (indices,), weights = region.sort, operands(region.sort), None
        if plan.experts.drop_policy == "probs":
            weights = next(operands(put)[1] for put in region.puts if put.target is fxp.moe_combine.default)
            _bring_before(weights, sort)
        tensor_ranks = plan.tp if plan.ep > 1 else 1
        with program.graph.inserting_before(sort):
            # Where no row is cut, what a data rank has is as one row.
            rows = _batch(program) if tensor_ranks > 1 else plan.data_ranks
            cuts = rows, plan.data_ranks, tensor_ranks
            args = (indices, weights, region.experts, *cuts, str(plan.experts.capacity_factor))
            limited = program.graph.call_function(kept_pairs, args)
        set_note(limited, note(indices))
        sort.replace_input_with(indices, limited)


def kept_pairs(
    indices: Tensor, weights: Tensor | None, experts: int, rows: int, data_ranks: int, tensor_ranks: int, factor: str
) -> Tensor:
    """Returns the experts of each token, int[T, K]; `experts` for the pairs that are dropped.

    Args:
        indices: int[T, K], of tokens by row of the batch.
        weights: [T, K]; an expert keeps those that weigh most, of equal ones the first. None: the first.
        rows: of the batch, or any number of equal parts of it where `tensor_ranks` is 1.
        data_ranks: that share out rows.
        tensor_ranks: that share out the sequence of each row, the last of them fewer where it does not divide.
        factor: multiple of the rows that each expert of a source would have if all had as many.
    """
    tokens, choices = indices.shape
    length, rows_of_rank = tokens // rows, rows // data_ranks
    part = math.ceil(length / tensor_ranks)
    capacity = math.ceil(Fraction(factor) * rows_of_rank * part * choices / experts)
    pairs: dict[tuple[int, int, int], list[tuple[float, int, int]]] = {}
    weight = [[0.0] * choices] * tokens if weights is None else weights.detach().tolist()
    for token, chosen in enumerate(indices.tolist()):
        row, position = divmod(token, length)
        for choice, expert in enumerate(chosen):
            source = row // rows_of_rank, position // part
            pairs.setdefault((*source, expert), []).append((-weight[token][choice], token, choice))
    limited = torch.full_like(indices, experts)
    for (*_, expert), candidates in pairs.items():
        for _, token, choice in sorted(candidates)[:capacity]:
            limited[token, choice] = expert
    return limited


def _bring_before(node: fx.Node, place: fx.Node) -> None:
    """Moves a node, and what it is made of, in front of a place that it does not depend on."""
    if place < node:
        for operand in node.all_input_nodes:
            _bring_before(operand, place)
        place.prepend(node)


def _batch(program: Program) -> fx.Node | int:
    """Returns how many rows the batch has, as a number, or as a node that reads it off an input."""
    size = batch_size(program)
    if isinstance(size, int):
        return size
    for entry in program.inputs:
        if size in entry.type.shape:
            sizes = program.node(entry.node), entry.type.shape.index(size)
            return program.graph.call_function(torch.ops.aten.sym_size.int, sizes)
    raise AssertionError(f"no input has {size} rows")
