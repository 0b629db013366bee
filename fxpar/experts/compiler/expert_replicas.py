"""Hot experts stand in spare slots of ranks with few rows, so that no rank has more than an even load.

Enters: the rows of a sort by expert. Leaves: where a plan has `spare_experts`, a sort in which each rank has numbers
for its experts and, after them, for its slots. Dispatch takes slots for experts; their weights come from other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx

from fxpar.cost.communication import symbol_sizes
from fxpar.cost.seconds import product_seconds
from fxpar.errors import PlanError
from fxpar.experts.compiler.emitter import Emitter
from fxpar.experts.compiler.routed_rows import Routed
from fxpar.experts.compiler.token_cuts import HolderDims, token_cut
from fxpar.experts.operators.replicated_weights import replicate_experts
from fxpar.ir.program import Program, TensorType, describe, operands, output_types, tensor_type
from fxpar.layout.symbolic_sizes import Size, evaluate
from fxpar.mesh.axes import Cuts
from fxpar.ops.rank_dim import replicate_over

fxp = torch.ops.fxpar
# Weights of a replica travel in the forward and again in the backward, and its gradients come home.
_TIMES_SENT = 3
# Rows of a pair and results travel in the forward, and their gradients in the backward.
_ROWS_SENT = 4


@dataclass(frozen=True)
class Replicas:
    """The spare slots of one layer's experts.

    Attributes:
        home: the expert in each slot, i64 [outer, holders * slots]: data ranks that hold the same experts plan apart.
        slots: of a rank.
        routed: pairs for each expert of all sources that plan together, i64 [outer, E].
    """

    home: fx.Node
    slots: int
    routed: fx.Node

    def replicate(self, emit: Emitter, holders: HolderDims, weights: fx.Node) -> fx.Node:
        """Maps [holders, experts of each, …] → [outer, holders, experts and slots of each, …]."""
        weights = holders.for_outer(weights)
        kind, dim = tensor_type(weights), len(holders.dims)
        shape = (*kind.shape[:dim], kind.shape[dim] + self.slots, *kind.shape[dim + 1 :])
        return emit.call(
            replicate_experts, (weights, self.home), TensorType(kind.dtype, shape), axis="-".join(holders.axes)
        )


def add_spare_slots(program: Program, region: Routed) -> tuple[Routed, Replicas | None]:
    """Sends rows of hot experts to their replicas; None where the plan has no spare slots.

    Before (ep 2 on dp, 4 experts)::

        %order, %counts = fxpar.sort_by_expert.default(%indices, 4) : i64[b*s*2], i64[4]

    After (a slot on each rank, so that 6 places have rows)::

        %home, %moved = fxpar.plan_replicas.default(%counts_by_source, 1, 0.03) : i64[2], i64[2, 2]
        %rerouted = fxpar.reroute.default(%own, %home_by_source, %moved, 4, 1) : i64[2, b*s, 2]
        %indices_rerouted = aten.view.default(%rerouted, [-1, 2]) : i64[b*s*2, 2]
        %order, %counts = fxpar.sort_by_expert.default(%indices_rerouted, 6) : i64[b*s*2], i64[6]

    What reads the router's indices otherwise, as losses that balance the load do, reads them as they are.

    Returns:
        The region, with slots among its experts, and what is in the slots.

    Raises:
        PlanError: ranks have fewer experts than slots, or do not divide the experts.
    """
    slots, axes = program.plan.experts.slots, program.mesh.holders
    if not slots:
        return region, None
    ranks, where, experts = prod(axes.values()), describe(region.sort), region.experts
    per_rank = region.experts_of_each(ranks)
    if slots > per_rank:
        raise PlanError(
            f"spare_experts={slots} is more than the {per_rank} experts of a rank",
            where=where,
            remedy=f"give spare_experts of at most {per_rank}",
        )
    emit, (indices,) = Emitter(program.graph, region.sort), operands(region.sort)
    # Each rank that holds other experts is a source: tensor parallel ones where they do.
    shared = not program.plan.axes_for(Cuts.FEATURES).keys() & axes.keys()
    cut = token_cut(program, emit, tensor_type(indices).shape[0], where, shared=shared)
    holders, chosen = HolderDims(cut, axes), cut.apart(indices, 1, fill=experts)
    kind = tensor_type(chosen)
    pairs = TensorType(kind.dtype, (*holders.lead, kind.shape[-2] * kind.shape[-1]))
    _, counts = emit.several(
        fxp.sort_by_expert.default, (chosen, experts), (pairs, TensorType(torch.int64, (*holders.lead, experts)))
    )
    for axis in axes:
        counts = emit.call(replicate_over, (counts,), tensor_type(counts), axis=axis)
    by_source, places = (*holders.outer, ranks, experts), (*holders.outer, ranks * slots)
    kinds = tuple(TensorType(torch.int64, shape) for shape in (places, (*by_source[:-1], ranks * slots)))
    min_gain = program.plan.experts.min_gain
    gain = least_gain(program, region, pairs.shape[-1]) if min_gain is None else float(min_gain)
    counts = emit.view(counts, by_source, by_source)
    kind_of_loads = TensorType(torch.int64, (*holders.outer, experts))
    loads = emit.call(torch.ops.aten.sum.dim_IntList, (counts, [-2]), kind_of_loads)
    plan = (counts, slots, gain)
    home, moved = emit.several(fxp.plan_replicas.default, plan, kinds)
    shape = (*holders.lead, ranks * slots)
    args = (chosen, holders.for_each(home), emit.view(moved, shape, shape), experts, slots)
    region.sort.replace_input_with(indices, cut.together(emit.call(fxp.reroute.default, args, kind)))
    return replace(region, experts=experts + ranks * slots), Replicas(home, slots, loads)


def early_weights(region: Routed) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields the weights that are there before rows are sorted, and what reads them: they can travel while rows do."""
    for node in (node for node in region.nodes if node in region.grouped):  # a set has no order
        yield from ((node, arg) for arg in node.all_input_nodes if output_types(arg) and arg < region.sort)


def expert_weights(region: Routed) -> list[TensorType]:
    """Returns the types of all weights of a layer's experts, [E, …]."""
    read = {arg for node in region.grouped for arg in operands(node)} - region.rows - {region.counts}
    return [kind for arg in read for kind in output_types(arg)]


def pair_seconds(program: Program, region: Routed) -> float:
    """Returns the seconds in which a pair is computed, forward and backward, and in which it travels if that depends.

    Where sizes do not depend on the routing, rows that go elsewhere save no traffic.
    """
    cost, elements = program.plan.cost.on(program.mesh.holders), [prod(k.shape[1:]) for k in expert_weights(region)]
    seconds = product_seconds(2 * sum(elements), 1, cost)
    if program.plan.experts.dispatch == "dropless":
        widths = [(kind := tensor_type(take)).shape[-1] * kind.dtype.itemsize for take in region.takes]
        seconds += _ROWS_SENT * sum(widths) / cost.bandwidth
    return seconds


def least_gain(program: Program, region: Routed, pairs: Size) -> float:
    """Returns the share of an even load that takes as long as the weights of one expert on their way.

    Args:
        pairs: of each source, an even load.
    """
    weights, ranks = expert_weights(region), prod(program.mesh.holders.values())
    if not weights:
        return 0.0
    sent = _TIMES_SENT * sum(prod(kind.shape[1:]) * kind.dtype.itemsize for kind in weights)
    seconds = sent / program.plan.cost.on(program.mesh.holders).bandwidth
    even = evaluate(pairs, symbol_sizes(program, None))
    return round(min(seconds / pair_seconds(program, region) / even, float(ranks)), 6)
