"""Experts of a limited capacity: what goes beyond it goes to nobody.

Enters: the rows of a sort by expert. Leaves: where a plan has a `capacity_factor`, a sort of those pairs alone that an
expert takes. Each source fills places of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.experts.compiler.emitter import Emitter
from fxpar.experts.compiler.routed_rows import Routed
from fxpar.experts.compiler.token_cuts import token_cut
from fxpar.ir.program import Program, TensorType, describe, operands, tensor_type
from fxpar.layout.symbolic_sizes import Size

aten, fxp = torch.ops.aten, torch.ops.fxpar


@dataclass(frozen=True)
class Limit:
    """The capacity of one layer's experts.

    Attributes:
        indices: the experts of each source's tokens, [lead, tokens, K]; E for the pairs that are dropped.
        part: of a source's tokens, that an expert takes at most.
        capacity: places of an expert for the rows of a source, as a node or number, and its size.
    """

    indices: fx.Node
    part: Fraction
    capacity: tuple[Any, Size]

    def dropped(self, emit: Emitter) -> fx.Node:
        """Counts the pairs that each source drops, i64 [lead]."""
        kind, unlimited = tensor_type(self.indices), self.indices.args[0]
        is_other = emit.call(aten.ne.Tensor, (self.indices, unlimited), TensorType(torch.bool, kind.shape))
        return emit.call(aten.sum.dim_IntList, (is_other, [-2, -1]), TensorType(torch.int64, kind.shape[:-2]))


def as_written(number: float) -> Fraction:
    """Returns the decimal number that a plan has: of 1.1 no binary fraction is meant."""
    return Fraction(str(number))


def share(program: Program, region: Routed) -> Fraction | None:
    """Returns which part of a source's tokens an expert takes at most, rounded up to rows; None where all."""
    factor = program.plan.experts.capacity_factor
    return None if factor is None else min(Fraction(1), as_written(factor) * region.k / region.experts)


def limit_rows(program: Program, region: Routed) -> Limit | None:
    """Drops what goes beyond the capacity of a layer's experts; None where they have no capacity.

    Before (ep 2 on dp)::

        %order, %counts = fxpar.sort_by_expert.default(%indices, 8) : i64[2*b*s*2], i64[8]

    After::

        %own = aten.view.default(%indices, [2, -1, 2]) : i64[2, b*s, 2]
        %kept = fxpar.drop_by_probability.default(%own, %own_weights, 8, %capacity) : i64[2, b*s, 2]
        %indices_kept = aten.view.default(%kept, [-1, 2]) : i64[2*b*s, 2]
        %order, %counts = fxpar.sort_by_expert.default(%indices_kept, 8) : i64[2*b*s*2], i64[8]

    What reads the router's indices otherwise, as losses that balance the load do, reads all of them.

    Raises:
        PlanError: of rows that are weighed in several ways or in none, those of the largest weights are to be taken.
    """
    part = share(program, region)
    if part is None:
        return None
    emit, (indices,) = Emitter(program.graph, region.sort), operands(region.sort)
    tokens, where = tensor_type(indices).shape[0], describe(region.sort)
    cut = token_cut(program, emit, tokens, where, shared=not program.mesh.holders)
    chosen = cut.apart(indices, 1, fill=region.experts)
    kind = tensor_type(chosen)
    capacity = emit.part(emit.size(chosen, len(cut.axes)), kind.shape[-2], part)
    if program.plan.experts.drop_policy == "position":
        limited = emit.call(fxp.drop_by_position.default, (chosen, region.experts, capacity[0]), kind)
    else:
        weights = cut.apart(_weights(region), 1)
        limited = emit.call(fxp.drop_by_probability.default, (chosen, weights, region.experts, capacity[0]), kind)
    region.sort.replace_input_with(indices, cut.together(limited))
    return Limit(limited, part, capacity)


def _weights(region: Routed) -> fx.Node:
    """Returns the weights of all pairs, [tokens, K], in front of the sort."""
    distinct = {operands(put)[1] for put in region.puts if put.target is fxp.moe_combine.default}
    if len(distinct) != 1:
        reason = f"its rows are added up with {len(distinct)} weights of their pairs, and drop_policy='probs' needs one"
        raise PlanError(
            reason, where=describe(region.sort), remedy="call fxpar.ops.experts, or give experts.drop_policy='position'"
        )
    (weights,) = distinct
    _hoist(weights, region.sort)
    return weights


def _hoist(value: fx.Node, place: fx.Node) -> None:
    """Moves what a value is made of before a node, on which nothing of it depends: rows leave by `puts` alone."""
    nodes = list(place.graph.nodes)
    nodes = nodes[nodes.index(place) :]
    needed = {value}
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    assert place not in needed
    for node in nodes:
        if node in needed:
            place.prepend(node)
