"""What of a step's collectives is hidden behind matrix products, and what stays exposed.

Enters: a step with the calls of its regions written out. Leaves: for each collective its seconds, the products beside
which it travels, and the seconds for which a rank waits.

The order is that of a compiled step (`fxpar.runtime.overlap`), whose estimates it takes: in each unit, a part of one
phase between two boundaries of calls, products to which no collective listens follow a collective's start. Time passes
in matrix products and for collectives; those of an axis travel one after the other, and each is waited for in front of
its first reader, at the latest at the end of its unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from fxpar.analysis.collectives import Collective, collectives, symbol_sizes
from fxpar.analysis.flops import matmul_flops
from fxpar.analysis.ring import collective_seconds, sent
from fxpar.analysis.split import computed_part
from fxpar.layout.symbols import evaluate
from fxpar.plan.cost import Cost
from fxpar.program.coercions import axes_of
from fxpar.program.program import Program, ScalarType, note
from fxpar.program.step import is_forward

_aten = torch.ops.aten
# What the compiler writes as the products that are postponed.
_POSTPONED = frozenset(
    {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.linear.default, _aten.matmul.default}
)
# Seconds of postponed work that may wait for a collective.
_BACKLOG = 2e-3


@dataclass(frozen=True)
class Travel:
    """A collective on its way.

    Attributes:
        collective: what is sent.
        seconds: by the plan's constants.
        beside: names of the products between its start and its first reader, with the seconds of each.
        exposed: seconds for which a rank waits for it.
    """

    collective: Collective
    seconds: float
    beside: tuple[tuple[str, float], ...]
    exposed: float

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        beside = [{"node": name, "seconds": seconds} for name, seconds in self.beside]
        return {**self.collective.to_json(), "seconds": self.seconds, "beside": beside, "exposed": self.exposed}


def travels(program: Program, sizes: Mapping[str, int] | None = None) -> list[Travel]:
    """All collectives of a step in the order in which they start.

    Args:
        program: a step, with property `local` and without calls of regions.
        sizes: of the inputs by symbol; the example's by default.
    """
    sends: dict[str, list[Collective]] = {}
    for each in collectives(program, sizes):
        sends.setdefault(each.node, []).append(each)
    values = symbol_sizes(program, sizes)
    products = {
        node: evaluate(flops, values) * computed_part(node, program.axes) / program.plan.cost.flops
        for node, flops in matmul_flops(program)
    }
    found = []
    for unit in _units(program):
        clock = _Clock(program, sends, products)
        clock.run(_Order(program, sends, products).of(unit))
        found += clock.done
    return found


def _units(program: Program) -> Iterator[list[fx.Node]]:
    """What is compiled by itself, in order: forward and backward, each cut at the boundaries of calls."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function" and not isinstance(note(n).type, ScalarType)]
    for forward in (True, False):
        own = (node for node in nodes if is_forward(node) == forward)
        yield from (list(run) for _, run in itertools.groupby(own, key=lambda node: note(node).region))


@dataclass
class _Order:
    """The order of one unit; a node of several collectives stands in it once for each."""

    program: Program
    sends: Mapping[str, Sequence[Collective]]
    products: Mapping[fx.Node, float]
    _placed: dict[fx.Node, None] = field(default_factory=dict)
    _postponed: dict[fx.Node, float] = field(default_factory=dict)
    _found: list[fx.Node] = field(default_factory=list)

    def of(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        unit, listened = frozenset(nodes), self._listened(nodes)
        for node in nodes:
            if node in self._placed:
                continue
            is_product = node.target in _POSTPONED and node in self.products
            if node not in listened and (is_product or any(n in self._postponed for n in node.all_input_nodes)):
                self._postponed[node] = self.products[node] if is_product else 0.0
                self._run_postponed(unit, sum(self._postponed.values()) - _BACKLOG)
            else:
                self._place(unit, node)
        for node in (*self._postponed, *nodes):
            self._place(unit, node)
        return self._found

    def _listened(self, nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """Collectives and what they need."""
        found: set[fx.Node] = set()
        for node in reversed(nodes):
            if node.name in self.sends or any(user in found for user in node.users):
                found.add(node)
        return found

    def _place(self, unit: frozenset[fx.Node], node: fx.Node) -> None:
        stack = [node]
        while stack:
            last = stack[-1]
            missing = [n for n in last.all_input_nodes if n in unit and n not in self._placed]
            if missing:
                stack += missing
                continue
            stack.pop()
            if last not in self._placed:
                self._placed[last] = None
                self._start(unit, last)

    def _start(self, unit: frozenset[fx.Node], node: fx.Node) -> None:
        self._postponed.pop(node, None)
        if node.name not in self.sends:
            self._found.append(node)
        for each in self.sends.get(node.name, ()):
            self._found.append(node)
            self._run_postponed(unit, _taken_for(self.program, each))

    def _run_postponed(self, unit: frozenset[fx.Node], seconds: float) -> None:
        while self._postponed and seconds > 0:
            node = next(iter(self._postponed))
            seconds -= self._postponed.pop(node)
            self._place(unit, node)


def _taken_for(program: Program, each: Collective) -> float:
    """Seconds that the order takes for a collective's: it tells no axis from another, and takes the slowest."""
    axes, cost = program.plan.axes, program.plan.cost
    ranks, slowest = max(axes.values()), cost.on(axes)
    size = each.bytes * ranks / _ranks(program, each) if each.op == "all_gather" else each.bytes
    return slowest.latency + size * sent(each.op, ranks) / slowest.bandwidth


def _ranks(program: Program, each: Collective) -> int:
    return prod(program.axes[axis] for axis in each.axis.split("-"))


@dataclass
class _Clock:
    """The time of a rank and of what travels, while a unit runs in order."""

    program: Program
    sends: Mapping[str, Sequence[Collective]]
    products: Mapping[fx.Node, float]
    done: list[Travel] = field(default_factory=list)
    _now: float = 0.0
    _free: dict[str, float] = field(default_factory=dict)
    _under_way: dict[fx.Node, int] = field(default_factory=dict)
    _ends: list[float] = field(default_factory=list)
    _sent: dict[fx.Node, int] = field(default_factory=dict)

    def run(self, order: Sequence[fx.Node]) -> None:
        for node in order:
            for read in (*node.all_input_nodes, node):  # of several collectives of a node each needs the one before
                self._wait(read)
            if node.name in self.sends:
                self._start(node)
            elif node in self.products:
                self._compute(node, self.products[node])
        for node in list(self._under_way):
            self._wait(node)

    def _start(self, node: fx.Node) -> None:
        index = self._sent[node] = self._sent.get(node, -1) + 1
        each = self.sends[node.name][index]
        seconds = _seconds(self.program, node, each)
        end = max(self._now, self._free.get(each.axis, 0.0)) + seconds
        self._free[each.axis] = end
        self._under_way[node] = len(self.done)
        self.done.append(Travel(each, seconds, (), 0.0))
        self._ends.append(end)

    def _compute(self, node: fx.Node, seconds: float) -> None:
        self._now += seconds
        for index in self._under_way.values():
            one = self.done[index]
            self.done[index] = Travel(one.collective, one.seconds, (*one.beside, (node.name, seconds)), one.exposed)

    def _wait(self, node: fx.Node) -> None:
        index = self._under_way.pop(node, None)
        if index is None:
            return
        one, exposed = self.done[index], max(0.0, self._ends[index] - self._now)
        self._now += exposed
        self.done[index] = Travel(one.collective, one.seconds, one.beside, exposed)


def _seconds(program: Program, node: fx.Node, each: Collective) -> float:
    cost: Cost = program.plan.cost.on(axes_of(node))
    return collective_seconds(each.op, _ranks(program, each), each.bytes, cost, cost.latency)
