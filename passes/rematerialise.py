"""rematerialise: of what the backward reads, what is worth it is computed again."""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from fxpar.cost.communication import Collective, collectives, symbol_sizes
from fxpar.cost.flops import matmul_flops, unknown_product
from fxpar.cost.layers import layers
from fxpar.cost.measure import Storages, storages
from fxpar.cost.seconds import again_seconds, collective_seconds
from fxpar.errors import PlanError
from fxpar.ir.grad_flow import weights_of
from fxpar.ir.operators import computed_fraction
from fxpar.ir.program import Program, note, operands, output_layouts
from fxpar.ir.properties import Property
from fxpar.ir.step import BACKWARD, PARAMETER, is_forward
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.manager import register_pass
from fxpar.ops.collectives import all_gather
from fxpar.ops.operator import Operator
from fxpar.passes.differentiate import forward_of
from fxpar.rewrite.emit import compute_again, is_repeatable
from fxpar.rules import bind_arguments
from fxpar.sharding.activation_knapsack import Keeping


@register_pass("rematerialise", requires={Property.STEP}, preserves="dataflow")
def rematerialise(program: Program) -> Program:
    """With `Recompute("selective")`, keeps fewer bytes and computes what the backward reads again from them.

    Before::

        %h = aten.mm.default(%x, %w) : f32[n, 8] tp:I
        %y = aten.exp.default(%h) : f32[n, 8] tp:I
        %z = aten.mul.Tensor(%y, %h) : f32[n, 8] tp:I
        %y_gradient = aten.mul.Tensor(%z_gradient, %h) : f32[n, 8] tp:R {phase=backward}
        %h_gradient = aten.mul.Tensor(%y_gradient, %y) : f32[n, 8] tp:R {phase=backward}

    After::

        %y_gradient = aten.mul.Tensor(%z_gradient, %h) : f32[n, 8] tp:R {phase=backward}
        %y_again = aten.exp.default(%h) : f32[n, 8] tp:R {origin="recompute", phase=backward}
        %h_gradient = aten.mul.Tensor(%y_gradient, %y_again) : f32[n, 8] tp:R {phase=backward}

    Without a budget fewest bytes are kept that suffice without matrix products and collectives in the backward, and of
    the choices that keep no more that of least seconds. With one it is the choice of least seconds within it, first
    among those without matrix products, where sequence-parallel gathers may be sent again; and among all if none of
    these keeps the budget. No other collective is sent again. What one layer leaves to others is not computed again: it
    would be from the first layer on, all at once. Draws draw the same bits again. Values stay equal.

    Bytes are those of a rank, for inputs of the example's sizes. What the author's regions keep is chosen from as well.

    Refuses a budget that no choice keeps.
    """
    if program.plan.recompute.mode != "selective":
        return program
    backward = [node for node in program.graph.nodes if node.op == "call_function" and note(node).phase == BACKWARD]
    chosen = _chosen(program)
    compute_again(program, chosen, backward)
    return program


def _chosen(program: Program) -> set[fx.Node]:
    forward = forward_of(program)
    stored = storages(forward, _random_states(forward))
    sent = {entry.node: entry for entry in collectives(program)}
    cheap, gathers, products = _kinds(program, stored, set(sent))
    seconds = _seconds(program, stored, sent, {*cheap, *gathers, *products})
    readers = {node: [user for user in node.users if not is_forward(user)] for node in program.graph.nodes}
    reads = [node for node, users in readers.items() if is_forward(node) and users and node.op != "output"]
    # The parameter phase runs once after all microbatches, when their forwards are gone.
    fixed = {node for node in reads if any(note(user).phase == PARAMETER for user in readers[node])}
    fixed |= {node for node in program.output_nodes().values() if is_forward(node)}
    keeping = Keeping(reads, fixed, seconds, stored)
    requested = program.plan.recompute.activation_memory_budget
    if requested is None:
        return keeping.again(cheap, keeping.least(cheap))
    # Up to 1 a budget is a share of what is kept without recomputation, above that bytes.
    budget = int(requested * keeping.all_bytes if requested <= 1 else requested)
    for allowed in (cheap | gathers, cheap | gathers | products):
        quickest = keeping.quickest(allowed, budget)
        if quickest is not None:
            return keeping.again(allowed, quickest)
    least = stored.total(keeping.least(cheap | gathers | products))
    raise PlanError(
        f"a rank cannot keep as little as {budget} bytes for the backward of the example's batch",
        where=f"recompute.activation_memory_budget={requested}",
        remedy=f"give at least {least} bytes, of {keeping.all_bytes} without recomputation, or use Recompute('full')",
    )


def _random_states(forward: Program) -> frozenset[str]:
    """Returns placeholders of the generator's state, which a step makes and keeps for itself."""
    draws = [n for n in forward.graph.nodes if isinstance(n.target, Operator) and n.target.draws]
    states = [bind_arguments(node)["rng"] for node in draws]
    return frozenset(state.name for state in states if isinstance(state, fx.Node))


def _kinds(program: Program, stored: Storages, sent: set[str]) -> tuple[set[fx.Node], set[fx.Node], set[fx.Node]]:
    """Returns what may be computed again: what is cheap, what gathers a sequence, and what may hold matrix products."""
    weights = weights_of(program.graph, [program.node(p.node) for p in program.parameters])
    dear = {node for node, _ in matmul_flops(program)}
    crossing = _crossing(program, stored)
    kinds: tuple[set[fx.Node], set[fx.Node], set[fx.Node]] = set(), set(), set()
    for node in program.graph.nodes:
        if not is_forward(node) or not is_repeatable(node) or node in weights or node in crossing:
            continue
        if node.name in sent:
            kinds[1].update([node] if node.target is all_gather else [])
        else:
            kinds[2 if node in dear or _is_foreign(node) or unknown_product(node) else 0].add(node)
    return kinds


def _is_foreign(node: fx.Node) -> bool:
    """Returns whether nobody knows what an operator costs: it is neither torch's nor fxpar's."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace not in ("aten", "prims", "fxpar")
    return "path" in node.kwargs


def _crossing(program: Program, stored: Storages) -> set[fx.Node]:
    """Returns values that are read after the layer, or the run between layers, that makes them."""
    starts = {node for part in layers(program, stored) for node in (part[0], part[-1].next)}
    place, current = dict[fx.Node, int](), 0
    for node in program.graph.nodes:
        current += node in starts
        place[node] = current
    return {n for n in place if any(is_forward(u) and u.op != "output" and place[u] > place[n] for u in n.users)}


def _seconds(
    program: Program, stored: Storages, sent: dict[str, Collective], nodes: set[fx.Node]
) -> dict[fx.Node, float]:
    """Estimates the seconds in which a rank computes each node once more."""
    sizes, flops = symbol_sizes(program, None), dict(matmul_flops(program))
    return {
        node: _sending(program, sent[node.name])
        if node.name in sent
        else again_seconds(
            evaluate(flops.get(node, 0), sizes) * _part(program, node), _moved(node, stored), program.plan.cost
        )
        for node in nodes
    }


def _sending(program: Program, entry: Collective) -> float:
    axes = entry.axis.split("-")
    cost = program.plan.cost.on(axes)
    return collective_seconds(entry.op, prod(program.axes[axis] for axis in axes), entry.bytes, cost, cost.latency)


def _part(program: Program, node: fx.Node) -> float:
    """Returns what part of a product a rank computes."""
    layouts = [layout for operand in operands(node) for layout in output_layouts(operand)]
    return prod(computed_fraction([layout.on(axis) for layout in layouts], n) for axis, n in program.axes.items())


def _moved(node: fx.Node, stored: Storages) -> int:
    """Returns bytes that a rank reads and writes; none where the result is a view."""
    sources = set[int]().union(*(stored.of.get(read.name, frozenset()) for read in operands(node)))
    written = stored.of.get(node.name, frozenset())
    # A view has the memory of its operand: no kernel runs.
    if written <= sources:
        return 0
    return sum(stored.sizes.get(tensor.name, 0) for tensor in (node, *dict.fromkeys(operands(node))))
