"""Experts of a limited capacity: what goes beyond it goes to nobody.

Enters: a program whose plan has a `capacity_factor`. Leaves: the same, in which each sort of tokens by expert takes
the pairs that are kept. A helper of `dispatch_experts`, and of the reference that such a program is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.experts.compiler.emitter import Emitter, part_of
from fxpar.experts.compiler.routed_rows import Routed
from fxpar.experts.compiler.token_cuts import token_cut
from fxpar.ir.program import Program, TensorType, describe, operands, tensor_type
from fxpar.layout.symbolic_sizes import Size

aten, fxp = torch.ops.aten, torch.ops.fxpar
_KEEPS = (fxp.drop_by_position.default, fxp.drop_by_probability.default)
# What brings tokens that are apart together.
_TOGETHER = (aten.view.default, aten.permute.default, fxp.resize_rows.default)


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


def share(program: Program, region: Routed) -> Fraction | None:
    """Of a source's tokens, which part an expert takes at most, rounded up to rows; None where that is no limit."""
    factor = program.plan.capacity_factor
    # As it is written: of 1.1 no binary fraction is meant.
    return None if factor is None else min(Fraction(1), Fraction(str(factor)) * region.k / region.experts)


def limit_rows(program: Program, region: Routed) -> None:
    """Drops what goes beyond the capacity of a layer's experts.

    Before (ep 2 on dp)::

        %order, %counts = fxpar.sort_by_expert.default(%indices, 8) : i64[2*b*s*2], i64[8]

    After::

        %own = aten.view.default(%indices, [2, -1, 2]) : i64[2, b*s, 2]
        %kept = fxpar.drop_by_probability.default(%own, %own_weights, 8, %capacity) : i64[2, b*s, 2]
        %indices_kept = aten.view.default(%kept, [-1, 2]) : i64[2*b*s, 2]
        %order, %counts = fxpar.sort_by_expert.default(%indices_kept, 8) : i64[2*b*s*2], i64[8]

    Every source fills places of its own. What reads the router's indices otherwise, as losses that balance the load do,
    reads all of them.
    """
    part = share(program, region)
    if part is None:
        return
    emit, (indices,) = Emitter(program.graph, region.sort), operands(region.sort)
    tokens, where = tensor_type(indices).shape[0], describe(region.sort)
    cut = token_cut(program, emit, tokens, where, shared=not program.mesh.holders)
    chosen = cut.apart(indices, 1, fill=region.experts)
    kind = tensor_type(chosen)
    capacity, _ = emit.part(emit.size(chosen, len(cut.axes)), kind.shape[-2], part)
    by_position = program.plan.drop_policy == "position"
    scores = [] if by_position else [cut.apart(_weights(region), 1)]
    kept_pairs = emit.call(_KEEPS[not by_position], (chosen, *scores, region.experts, capacity), kind)
    region.sort.replace_input_with(indices, cut.together(kept_pairs))


def count_dropped(program: Program, region: Routed) -> fx.Node | None:
    """How many pairs of each source are dropped, i64 [lead]; None where none can be."""
    limit = limit_of(program, region)
    if limit is None:
        return None
    emit, kept_pairs = Emitter(program.graph, region.sort), limit.indices
    kind = tensor_type(kept_pairs)
    is_other = emit.call(aten.ne.Tensor, (kept_pairs, kept_pairs.args[0]), TensorType(torch.bool, kind.shape))
    return emit.call(aten.sum.dim_IntList, (is_other, [-2, -1]), TensorType(torch.int64, kind.shape[:-2]))


def limit_of(program: Program, region: Routed) -> Limit | None:
    """The capacity of a layer's experts in a program whose rows are limited."""
    part = share(program, region)
    if part is None:
        return None
    (kept_pairs,) = operands(region.sort)
    while kept_pairs.target in _TOGETHER:
        kept_pairs = operands(kept_pairs)[0]
    assert kept_pairs.target in _KEEPS
    return Limit(kept_pairs, part, (kept_pairs.args[-1], part_of(tensor_type(kept_pairs).shape[-2], part)))


def _weights(region: Routed) -> fx.Node:
    """The weights of all pairs, [tokens, K].

    Raises:
        PlanError: rows are weighed in no way that tells them.
    """
    distinct = {operands(put)[1] for put in region.puts if put.target is fxp.moe_combine.default}
    if len(distinct) != 1:
        reason = f"its rows are added up with {len(distinct)} weights of their pairs, and drop_policy='probs' needs one"
        raise PlanError(
            reason, where=describe(region.sort), remedy="call fxpar.ops.experts, or give drop_policy='position'"
        )
    (weights,) = distinct
    _hoist(weights, region.sort)
    return weights


def _hoist(value: fx.Node, place: fx.Node) -> None:
    """Puts what a value is made of in front of a node, on which nothing of it depends: rows leave by `puts` alone."""
    behind = list(place.graph.nodes)
    behind = behind[behind.index(place) :]
    needed = {value}
    for node in reversed(behind):
        if node in needed:
            needed.update(node.all_input_nodes)
    assert place not in needed
    for node in behind:
        if node in needed:
            place.prepend(node)
