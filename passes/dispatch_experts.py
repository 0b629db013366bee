"""dispatch_experts: rows go to the ranks that hold their experts, and back."""

from __future__ import annotations

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.experts.compiler.dispatch import dispatch_of
from fxpar.experts.compiler.expert_capacity import limit_rows
from fxpar.experts.compiler.expert_replicas import add_spare_slots
from fxpar.experts.compiler.routed_rows import Routed, routed
from fxpar.experts.compiler.slot_prices import choose_slots
from fxpar.ir.program import Program, describe, note, operands, output_node
from fxpar.ir.properties import Property
from fxpar.ir.step import dropped_name, excess_name, load_name, routed_name
from fxpar.manager import register_pass
from fxpar.mesh.axes import Cuts


@register_pass(
    "dispatch_experts", requires={Property.CANONICAL}, provides={Property.EXPERTS}, invalidates={Property.LAYOUTS}
)
def dispatch_experts(program: Program) -> Program:
    """Sends each token, or its rows, to the ranks that hold its experts.

    Before (ep 2 on dp)::

        %order, %counts = fxpar.sort_by_expert.default(%indices, 8) : i64[b*s*2], i64[8]
        %rows = fxpar.moe_permute.default(%x, %order, 2) : f32[b*s*2, 64]
        %y = fxpar.grouped_linear.default(%rows, %w, %counts) : f32[b*s*2, 128]

    After (rows in blocks)::

        %sent = fxpar.moe_permute.default(%x_own, %places, 2) : f32[2, 2*c, 64]
        %there = fxpar.shard_over[dp](%blocks, 1) : f32[2, 2, c, 64]
        %rows = fxpar.moe_permute.default(%received, %by_expert, 1) : f32[2, 2*c, 64]
        %y = fxpar.grouped_linear.default(%rows, %w_by_rank, %counts_here) : f32[2, 2*c, 128]

    The ways, and what the terms mean, are in `fxpar.experts.compiler.dispatch`; `dispatch_of` chooses one for a layer.
    Where no axis holds different experts each data rank computes its own rows. Tokens that tensor parallel ranks share
    are cut among them first and gathered afterwards, so that none travels twice. But for `dispatch="dropless"` no size
    depends on the routing and nothing waits for the host. Values and gradients stay equal; with a `capacity_factor`
    they are those of a device that drops the same rows (`expert_capacity`).

    With `spare_experts` rows of hot experts go to replicas of these on ranks with few rows (`expert_replicas`); the
    plan of the result has a number where it was left to loads (`slot_prices`).

    Further outputs of each layer say how many rows each expert receives (`fxpar.load.…`), how many pairs are dropped
    (`fxpar.dropped.…`), and for how many rows a `recv_capacity_factor` has no place (`fxpar.excess.…`): what was
    computed is not to be used then. With spare slots, how many rows experts have together with
    their replicas (`fxpar.routed.…`).

    Refuses experts that the holders do not divide, experts of a parameter each on tensor parallel ranks that are to
    hold different ones, and a plan whose ep nothing in the model consumes.
    """
    program = choose_slots(program)
    holders, plan = program.mesh.holders, program.plan
    is_limited = plan.experts.capacity_factor is not None
    regions = routed(program) if holders or is_limited or plan.data_ranks > 1 else []
    known = {node for region in regions for node in region.grouped}
    others = [n for n in program.graph.nodes if n.target is torch.ops.fxpar.grouped_linear.default and n not in known]
    if others and (holders or is_limited):
        raise PlanError(
            "its rows are sorted in no way that is recognised as that of experts",
            where=describe(others[0]),
            remedy="call fxpar.ops.experts in the model, or set ep=1 and leave experts.capacity_factor out",
        )
    if (holders or is_limited) and not regions:
        raise PlanError(
            "no operation of the model is recognised as that of experts",
            where=f"ep={plan.ep}" if holders else f"experts.capacity_factor={plan.experts.capacity_factor}",
            remedy=f"call fxpar.ops.experts in the model, or {'set ep=1' if holders else 'leave it out'}",
        )
    for region in regions:
        _check_held(program, region)
    outputs: dict[str, fx.Node] = {}
    for region in regions:
        limit = limit_rows(program, region)
        region, replicas = add_spare_slots(program, region)
        layer = dispatch_of(program, region, limit)(program, region, limit, replicas)
        layer.run()
        program = program.with_(counted=(*program.counted, *layer.counted))
        if holders:
            name = load_name(note(region.sort).fqn, tuple(outputs))
            counts = {name: layer.load, excess_name(name): layer.excess, dropped_name(name): layer.dropped}
            counts |= {routed_name(name): None if replicas is None else replicas.routed}
            outputs |= {key: node for key, node in counts.items() if node is not None}
    end = output_node(program.graph)
    end.args = ((*end.args[0], *outputs.values()),)  # type: ignore[misc]
    program.graph.eliminate_dead_code()
    return program.with_(outputs=(*program.outputs, *outputs))


def _check_held(program: Program, region: Routed) -> None:
    """Refuses experts of a parameter each on tensor parallel ranks that are to hold different ones.

    What is stacked of them is whole on data ranks, which may be; tensor parallel ranks hold no matrix whole.
    """
    if not program.plan.axes_for(Cuts.FEATURES).keys() & set(program.mesh.holders):
        return
    for node in (node for node in region.nodes if node in region.grouped):  # a set has no order
        stacked = operands(node)[node.target is torch.ops.fxpar.grouped_linear.default]
        while stacked.target is not torch.ops.aten.stack.default and len(operands(stacked)) == 1:
            (stacked,) = operands(stacked)
        if stacked.target is torch.ops.aten.stack.default:
            plan = program.plan
            raise PlanError(
                f"experts' matrices are stacked from {len(operands(stacked))} parameters, of which ranks of tp hold "
                "parts: these cannot hold different experts",
                where=describe(node),
                remedy=f"give etp={plan.tp}, with ep within dp, or stack them in one parameter",
            )
