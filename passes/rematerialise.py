"""rematerialise: of what the backward reads, what is worth it is computed again.

The choice is exact: a mixed integer program, of least bytes kept or of least seconds within a budget of bytes. A value
that the backward reads is kept or computed again; what is computed again has operands of which the same is true; a
value is kept where its storages are. Bytes are counted once a storage, and seconds are those of `fxpar.cost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix
from torch import fx

from fxpar.cost.communication import Collective, collectives, symbol_sizes
from fxpar.cost.flops import matmul_flops, unknown_product
from fxpar.cost.layers import layers
from fxpar.cost.measure import Storages, storages
from fxpar.cost.seconds import again_seconds, collective_seconds
from fxpar.errors import PlanError
from fxpar.ir.grad_flow import weights_of
from fxpar.ir.operators import computed_fraction
from fxpar.ir.program import Program, is_tensor, note, operands, output_layouts
from fxpar.ir.properties import Property
from fxpar.ir.step import BACKWARD, PARAMETER, is_forward
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.manager import register_pass
from fxpar.ops.collectives import all_gather
from fxpar.ops.operator import Operator
from fxpar.passes.differentiate import forward_of
from fxpar.passes.recompute import is_resent
from fxpar.rewrite.emit import compute_again, is_repeatable
from fxpar.rules import bind_arguments


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

    With `Plan(shard="parameters")` what gathers a parameter is repeated in any mode, in front of the first node of the
    backward that reads it: no rank keeps the whole model.

    Refuses a budget that no choice keeps.
    """
    if program.plan.recompute.mode == "selective":
        compute_again(program, _chosen(program), _backward(program))
    if program.plan.shard == "parameters":
        # Behind the others, since what computes a layer again reads its parameters too.
        gathers = {node for node in program.graph.nodes if node.op == "call_function" and note(node).shard}
        compute_again(program, {node for node in gathers if is_forward(node)}, _backward(program))
    return program


def _backward(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function" and note(node).phase == BACKWARD]


def _chosen(program: Program) -> set[fx.Node]:
    forward = forward_of(program)
    stored = storages(forward, _random_states(forward))
    sent = {entry.node: entry for entry in collectives(program)}
    cheap, gathers, products = _kinds(program, stored, set(sent))
    seconds = _seconds(program, stored, sent, {*cheap, *gathers, *products})
    readers = {node: [user for user in node.users if not is_forward(user)] for node in program.graph.nodes}
    reads = [node for node, users in readers.items() if is_forward(node) and users and node.op != "output"]
    # Parameters are no activations: how long they are whole the plan says.
    reads = [node for node in reads if node.op == "placeholder" or not note(node).shard]
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
            kinds[1].update([node] if node.target is all_gather or is_resent(node) else [])
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


# How far from the least seconds a choice may be: equal layers that keep other values are as good as each other, and a
# proof that no other choice among them is a little better would take longer than any step saves.
_GAP = 1e-3


@dataclass(frozen=True)
class Keeping:
    """What is to be chosen.

    Attributes:
        reads: nodes of the forward that the backward reads.
        fixed: those of them that are kept.
        seconds: in which each node that may be computed again is.
        storages: of the forward.
    """

    reads: Sequence[fx.Node]
    fixed: Set[fx.Node]
    seconds: Mapping[fx.Node, float]
    storages: Storages

    @property
    def all_bytes(self) -> int:
        """Returns bytes that are kept where nothing is computed again."""
        return self._bytes(self.reads)

    def least(self, allowed: Set[fx.Node]) -> frozenset[int]:
        """Returns the storages of fewest bytes that suffice; of such choices one of least seconds.

        Args:
            allowed: nodes that may be computed again.
        """
        if not self.all_bytes:
            return self._of(self.reads)
        saved = self._solved(allowed, None)
        assert saved is not None  # all may be kept
        return self._within(allowed, self.storages.total(saved)) or saved

    def quickest(self, allowed: Set[fx.Node], budget: int) -> frozenset[int] | None:
        """Finds storages within a budget of bytes, to compute the others again from in least seconds; None for none.

        Args:
            allowed: nodes that may be computed again.
        """
        if self.all_bytes <= budget:
            return self._of(self.reads)
        least = self._solved(allowed, None)
        if least is None or self.storages.total(least) > budget:
            return None
        return self._within(allowed, budget) or least

    def _within(self, allowed: Set[fx.Node], budget: int) -> frozenset[int] | None:
        """Returns what the solver finds, whose arithmetic has tolerances; None where that is more than the budget."""
        saved = self._solved(allowed, budget)
        return saved if saved is not None and self.storages.total(saved) <= budget else None

    def again(self, allowed: Set[fx.Node], saved: Set[int]) -> set[fx.Node]:
        """Returns what is computed again where some storages are kept."""
        return self._saved_and_recomputed(allowed, saved)[1]

    def _saved_and_recomputed(self, allowed: Set[fx.Node], saved: Set[int]) -> tuple[set[fx.Node], set[fx.Node]]:
        """Returns the values that are kept, and those that are computed again."""
        parts: tuple[set[fx.Node], set[fx.Node]] = set(), set()
        pending = list(self.reads)
        for node in pending:
            is_there = node not in allowed or (self._held(node) <= saved and not self._is_view(node))
            is_there |= node in self.fixed
            if self._held(node) and node not in parts[0] | parts[1]:
                parts[not is_there].add(node)
                pending += () if is_there else node.all_input_nodes
        return parts

    def _is_view(self, node: fx.Node) -> bool:
        """Returns whether a value is another one seen otherwise: that one is kept, a repeated one is written out."""
        return any(self._held(node) == self._held(read) and is_tensor(read) for read in node.all_input_nodes)

    def _held(self, node: fx.Node) -> frozenset[int]:
        return self.storages.of.get(node.name, frozenset())

    def _of(self, nodes: Sequence[fx.Node] | Set[fx.Node]) -> frozenset[int]:
        return frozenset[int]().union(*map(self._held, nodes))

    def _bytes(self, nodes: Sequence[fx.Node]) -> int:
        return self.storages.total(self._of(nodes))

    def _solved(self, allowed: Set[fx.Node], budget: int | None) -> frozenset[int] | None:
        """Returns the storages of least bytes, or of least seconds within a budget."""
        allowed = allowed - self.fixed
        model = _BinaryProgram()
        pending = list(dict.fromkeys(self.reads))
        known = set(pending)
        for node in pending:
            if not self._held(node):
                continue
            keep = model.variable("keep", node)
            for storage in self._held(node):
                model.at_least({model.variable("storage", storage): 1, keep: -1}, 0)
            if node not in allowed:
                continue
            for read in node.all_input_nodes:
                if self._held(read):
                    others = (model.variable("keep", read), model.variable("again", read))
                    model.at_least({model.variable("again", node): -1, **dict.fromkeys(others, 1)}, 0)
                    pending += [read] if read not in known else []
                    known.add(read)
        for node in self.reads:
            if self._held(node):
                model.at_least({model.variable("keep", node): 1, model.variable("again", node): 1}, 1)
        again, storages = model.of("again"), model.of("storage")
        # The variables stay in the model with an upper bound of 0, so that a constraint may name them.
        never = {i for node, i in again.items() if node not in allowed}
        cost: dict[int, float] = {i: self.storages.bytes[storage] for storage, i in storages.items()}
        if budget is not None:
            model.at_least({i: -size for i, size in cost.items()}, -budget)
            cost = {i: self.seconds[node] for node, i in again.items() if node in allowed}
        solution = model.solved(cost, never, 0.0 if budget is None else _GAP)
        if solution is None:
            return None
        return self._of(
            self._saved_and_recomputed(allowed, {storage for storage, i in storages.items() if solution[i]})[0]
        )


class _BinaryProgram:
    """A mixed integer program over variables that are 0 or 1."""

    def __init__(self) -> None:
        self.variables: dict[tuple[str, Any], int] = {}
        self._rows: list[dict[int, float]] = []
        self._bounds: list[float] = []

    def variable(self, kind: str, subject: Any) -> int:
        """Returns the number of a variable, which is made where there is none."""
        return self.variables.setdefault((kind, subject), len(self.variables))

    def of(self, kind: str) -> dict[Any, int]:
        """Returns the variables of a kind."""
        return {subject: i for (known, subject), i in self.variables.items() if known == kind}

    def at_least(self, row: Mapping[int, float], bound: float) -> None:
        """Adds a linear constraint, of coefficients not larger than 1."""
        # Bytes stand next to ones in a constraint, and solvers take coefficients so far apart for rounding.
        scale = max(abs(value) for value in row.values())
        self._rows.append({i: value / scale for i, value in row.items()})
        self._bounds.append(bound / scale)

    def solved(self, cost: Mapping[int, float], never: Set[int], gap: float) -> list[bool] | None:
        """Returns values of least cost; None where there are none."""
        count = len(self.variables)
        weights = numpy.zeros(count)
        weights[list(cost)] = list(cost.values())
        weights /= weights.max(initial=0.0) or 1.0
        highest = numpy.ones(count)
        highest[list(never)] = 0
        entries = [(r, i, value) for r, row in enumerate(self._rows) for i, value in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        matrix = csr_matrix((values, (rows, columns)), shape=(len(self._rows), count))
        solution = milp(
            weights,
            integrality=numpy.ones(count),
            bounds=Bounds(0, highest),
            constraints=LinearConstraint(matrix, self._bounds, numpy.inf),
            options={"mip_rel_gap": gap},
        )
        return None if solution.x is None else [value > 0.5 for value in solution.x]
