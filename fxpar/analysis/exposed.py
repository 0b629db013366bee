"""What of a step's collectives is hidden behind matrix products, and what stays exposed.

Enters: a step with the calls of its regions written out. Leaves: for each collective its seconds, the products beside
which it travels, and the seconds for which a rank waits.

Time passes in matrix products and for collectives; those of an axis travel one after the other, and each is waited for
in front of its first reader, at the latest at the end of its run (`fxpar.passes.overlap`). What of a collective cannot
be hidden, since its kernel takes the products' multiprocessors, passes where it starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxpar.analysis.communication import Collective
from fxpar.analysis.estimates import Estimates, estimates
from fxpar.ir.program import Program, ScalarType, note


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
    return travels_of(program, estimates(program, sizes))


def travels_of(program: Program, seconds: Estimates) -> list[Travel]:
    """As `travels`, by estimates that are known."""
    travels = []
    for run in _runs(program):
        clock = _Clock(seconds)
        clock.run(run)
        travels += clock.done
    return travels


def _runs(program: Program) -> Iterator[list[fx.Node]]:
    """What is computed at a stretch, in order: each phase, cut at the boundaries of calls."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function" and not isinstance(note(n).type, ScalarType)]
    for _, run in itertools.groupby(nodes, key=lambda node: (note(node).phase, note(node).region)):
        yield list(run)


@dataclass
class _Clock:
    """The time of a rank and of what travels, while a run is computed in order."""

    seconds: Estimates
    done: list[Travel] = field(default_factory=list)
    _now: float = 0.0
    _free: dict[str, float] = field(default_factory=dict)
    _under_way: dict[fx.Node, int] = field(default_factory=dict)
    _ends: list[float] = field(default_factory=list)

    def run(self, order: Sequence[fx.Node]) -> None:
        for node in order:
            for read in node.all_input_nodes:
                self._wait(read)
            self._start(node)
            if node in self.seconds.products:
                self._compute(node, self.seconds.products[node])
        for node in list(self._under_way):
            self._wait(node)

    def _start(self, node: fx.Node) -> None:
        for sending in self.seconds.sends.get(node.name, ()):
            self._wait(node)  # of several collectives of a node each needs the one before
            one = sending.collective
            end = max(self._now, self._free.get(one.axis, 0.0)) + sending.seconds
            self._free[one.axis] = end
            self._under_way[node] = len(self.done)
            stalled = sending.seconds - sending.hideable
            self._now += stalled
            self.done.append(Travel(one, sending.seconds, (), stalled))
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
        one, waited = self.done[index], max(0.0, self._ends[index] - self._now)
        self._now += waited
        self.done[index] = Travel(one.collective, one.seconds, one.beside, one.exposed + waited)
