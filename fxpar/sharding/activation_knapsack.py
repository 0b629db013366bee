"""Which values of the forward a rank keeps for the backward, and which the backward computes again.

Enters: a step and the storages of its forward. Leaves: the nodes to compute again, of least bytes kept or of least
seconds within a budget of bytes: an exact choice, as a mixed integer program.

A value that the backward reads is kept or computed again; what is computed again has operands of which the same is
true; a value is kept where its storages are. Bytes are counted once a storage, and seconds are those of
`fxpar.cost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix
from torch import fx

from fxpar.cost.measure import Storages
from fxpar.ir.program import is_tensor

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
