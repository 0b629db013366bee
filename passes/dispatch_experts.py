"""dispatch_experts: rows go to the ranks that hold their experts, and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.experts.compiler.dispatch import StaticRows
from fxpar.experts.compiler.exact_rows import ExactRows
from fxpar.experts.compiler.expert_capacity import count_dropped, limit_rows
from fxpar.experts.compiler.gathered_rows import GatheredRows, can_gather, gathers
from fxpar.experts.compiler.padded_rows import PaddedRows
from fxpar.experts.compiler.routed_rows import Routed, routed
from fxpar.ir.program import Program, Property, describe, note, operands, output_node
from fxpar.ir.step import dropped_name, excess_name, load_name
from fxpar.ir.symbols import Counted
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

    After, in blocks of rows::

        %sent = fxpar.moe_permute.default(%x_own, %places, 2) : f32[2, 2*c, 64]
        %there = fxpar.shard_over[dp](%blocks, 1) : f32[2, 2, c, 64]
        %rows = fxpar.moe_permute.default(%received, %by_expert, 1) : f32[2, 2*c, 64]
        %y = fxpar.grouped_linear.default(%rows, %w_by_rank, %counts_here) : f32[2, 2*c, 128]

    Terms: the *holders* are the axes whose ranks hold different experts; each axis that cuts tokens is a leading
    dimension, [source, …]. A rank sorts its own tokens into one block for each holder, of as many places as its tokens
    may ever need there (tokens · min(K, experts of a holder)). The blocks change hands (an all-to-all, which
    `insert_collectives` puts where `shard_over` asks for it), are sorted by expert, computed, and go back the same
    way. Where no axis holds different experts each data rank computes its own rows. Tokens that tensor parallel ranks
    share are cut among them first and gathered behind, so that none travels twice. No size depends on the routing and
    nothing waits for the host. Values and gradients stay equal.

    Where less travels so (`gathered_rows.gathers`) each holder gets the tokens of all sources instead, picks the rows
    of its experts, and what it makes of a token, summed, goes back::

        %tokens = fxpar.expand_over[dp](%x_own, 0) : f32[2, 2*b*s, 64]
        %rows = fxpar.moe_permute.default(%tokens, %by_expert, 2) : f32[2, 2*2*b*s, 64]
        %y = fxpar.grouped_linear.default(%rows, %w_by_rank, %counts_here) : f32[2, 2*2*b*s, 128]

    `insert_collectives` puts an all-gather where `expand_over` asks for it, and behind `sum_over` a reduce-scatter. A
    token travels once to a rank, however many of its experts are there.

    Where ranks copy into each other's memory and enough tokens have no expert on a rank (`gathered_rows.picked_part`),
    those do not travel there::

        %tokens = fxpar.expand_needed[dp](%x_own, %indices_all, 4) : f32[2, 2*b*s, 64]
        %sums = fxpar.sum_needed[dp](%y_summed, %indices_all, 4) : f32[2*b*s, 64]

    With a `receive_budget` buffers have fewer places. Rows without one are left out, and an output says how many they
    are (`fxpar.excess.…`): what was computed is not to be used then.

    With a `capacity_factor` each source drops what goes beyond an expert's capacity, before the sort
    (`expert_capacity`): blocks are as large as the capacity of a holder's experts. Values are then those of a device
    that drops the same rows. With `pad_to_capacity` each expert computes as many rows as that, whatever it gets
    (`padded_rows`).

    How many rows each expert receives is an output more for each layer (`fxpar.load.…`), and how many are dropped
    (`fxpar.dropped.…`).

    With `Plan(dispatch="exact")` rows travel as they are sorted, as many as there are::

        %sizes = fxpar.split_sizes(%order, %counts, %counts_received) : i64[2, 5]
        %there = fxpar.send_rows[dp](%rows, %sizes) : f32[2, r, 64]
        %by_expert, %counts_here = fxpar.arrived_order.default(%counts_received, %r) : i64[2, r], i64[2, 2]

    Refuses experts that the holders do not divide, experts of a parameter each on tensor parallel ranks that are to
    hold different ones, and a plan whose ep nothing in the model consumes.
    """
    holders, plan = program.mesh.holders, program.plan
    is_limited = plan.capacity_factor is not None
    regions = routed(program) if holders or is_limited or plan.data_ranks > 1 else []
    known = {node for region in regions for node in region.grouped}
    others = [n for n in program.graph.nodes if n.target is torch.ops.fxpar.grouped_linear.default and n not in known]
    if others and (holders or is_limited):
        raise PlanError(
            "its rows are sorted in no way that is recognised as that of experts",
            where=describe(others[0]),
            remedy="call fxpar.ops.experts in the model, or set ep=1 and leave capacity_factor out",
        )
    if (holders or is_limited) and not regions:
        raise PlanError(
            "no operation of the model is recognised as that of experts",
            where=f"ep={plan.ep}" if holders else f"capacity_factor={plan.capacity_factor}",
            remedy=f"call fxpar.ops.experts in the model, or {'set ep=1' if holders else 'leave it out'}",
        )
    for region in regions:
        _check_held(program, region)
    counted: list[Counted] = []
    loads: dict[str, fx.Node] = {}
    for region in regions:
        rows: StaticRows
        limit_rows(program, region)
        dropped = count_dropped(program, region) if holders else None
        if holders and plan.dispatch == "exact":
            rows = ExactRows(program, region, holders, _new_name(program, counted))
            counted.append(rows.counted)
        else:
            rows = _static(program, region)(program, region, holders)
        rows.run()
        if holders:
            name = load_name(note(region.sort).fqn, tuple(loads))
            loads[name] = rows.load
            if rows.excess is not None:
                loads[excess_name(name)] = rows.excess
            if dropped is not None:
                loads[dropped_name(name)] = dropped
    end = output_node(program.graph)
    end.args = ((*end.args[0], *loads.values()),)  # type: ignore[misc]
    program.graph.eliminate_dead_code()
    return program.with_(counted=tuple(counted), outputs=(*program.outputs, *loads))


def _static(program: Program, region: Routed) -> type[StaticRows]:
    """How what has static sizes travels."""
    plan, holders = program.plan, program.mesh.holders
    if plan.pad_to_capacity:
        return PaddedRows
    if not holders or plan.dispatch == "alltoall":
        return StaticRows
    if plan.dispatch == "allgather":
        if not can_gather(program, holders):
            raise PlanError(
                "each token would be gathered by every tensor parallel rank that has it",
                where="dispatch='allgather'",
                remedy="give dispatch='static', or spread experts over ranks of dp or of tp alone",
            )
        return GatheredRows
    return GatheredRows if gathers(program, region, holders) else StaticRows


def _check_held(program: Program, region: Routed) -> None:
    """Refuses experts of a parameter each on tensor parallel ranks that are to hold different ones.

    What is stacked of them is whole on data ranks, which may be; tensor parallel ranks hold no matrix whole.
    """
    if not program.plan.axes_for(Cuts.FEATURES).keys() & set(program.mesh.holders):
        return
    for node in region.grouped:
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


def _new_name(program: Program, counted: Sequence[Counted]) -> str:
    """A symbol for the rows of one more layer."""
    taken = {symbol.name for symbol in program.symbols} | {symbol.name for symbol in counted}
    taken |= {node.name for node in program.graph.nodes}
    return next(name for i in itertools.count() if (name := f"r{i or ''}") not in taken)
