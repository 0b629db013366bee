"""How long a step takes on a rank, as far as it depends on the order in which it computes and sends.

Enters: a step with the calls of its regions written out, behind the passes `overlap` and `exchange`. Leaves: seconds of
its products, of kernels around them, and those for which it waits for collectives.

What is computed element by element takes as long whole as in halves and is left out, but for what stands behind a sum:
a residual connection and a norm, say, which a sum in one shot computes while it waits for the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import fx

from fxpar.analysis.collectives import symbol_sizes
from fxpar.analysis.estimates import Estimates, Sending, estimates
from fxpar.analysis.exposed import travels_of
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbols import evaluate
from fxpar.program.program import Program, ScalarType, note, output_layouts, output_types
from fxpar.program.step import PARAMETER

aten = torch.ops.aten

# A product, and what is computed element by element in front of it or behind.
_KERNELS = 2
# An addition of two products reads both, and writes.
_ADDED = 3
_SUMS = ("all_reduce", "reduce_scatter")
_VIEWS = (aten.view.default, aten.t.default, aten.permute.default, aten.transpose.int, aten.reshape.default)


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step on a rank, by the plan's constants.

    Attributes:
        products: of matrix products and attention.
        kernels: gaps between kernels, what stands behind sums of activations, and additions of products: of the
            gradients of two halves above all.
        exposed: in which a rank waits for collectives.
    """

    products: float
    kernels: float
    exposed: float

    @property
    def total(self) -> float:
        """Of all parts."""
        return self.products + self.kernels + self.exposed

    def to_json(self) -> dict[str, float]:
        """A plain mapping."""
        return {"products": self.products, "kernels": self.kernels, "exposed": self.exposed, "total": self.total}


def predicted(program: Program, sizes: Mapping[str, int] | None = None) -> Predicted:
    """The seconds of a step.

    Args:
        program: a step, with property `local` and without calls of regions.
        sizes: of the inputs by symbol; the example's by default.
    """
    seconds = estimates(program, sizes)
    exposed = sum(each.exposed for each in travels_of(program, seconds))
    return Predicted(
        sum(seconds.products.values()), _Kernels(program, seconds, symbol_sizes(program, sizes)).seconds, exposed
    )


@dataclass
class _Kernels:
    """What a step computes around its products."""

    program: Program
    estimates: Estimates
    values: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """Of gaps, of what stands behind sums, and of additions of products."""
        cost, products = self.program.plan.cost, self.estimates.products
        sends = [each for sent in self.estimates.sends.values() for each in sent]
        gaps = (_KERNELS * len(products) + len(sends)) * cost.kernel_latency
        behind = sum(self._behind(node, sent) for node, sent in self._sums.items())
        added = sum(_ADDED * self._bytes(node) for node in self.program.graph.nodes if self._adds_products(node))
        return gaps + behind + added / cost.memory

    @cached_property
    def _sums(self) -> dict[fx.Node, Sending]:
        """Sums of activations, by node."""
        found = {}
        for node in self.program.graph.nodes:
            for sent in self.estimates.sends.get(node.name, ()):
                if sent.collective.op in _SUMS and sent.collective.phase != PARAMETER:
                    found[node] = sent
        return found

    @cached_property
    def _groups(self) -> dict[fx.Node, list[fx.Node]]:
        """Of each sum what follows from it in front of the next product or collective, as one kernel would hold it.

        What follows from several belongs to the last of them.
        """
        groups: dict[fx.Node, list[fx.Node]] = {node: [] for node in self._sums}
        of: dict[fx.Node, fx.Node] = {node: node for node in groups}
        order = {node: number for number, node in enumerate(groups)}
        for node in self.program.graph.nodes:
            breaks = node in self.estimates.products or node.name in self.estimates.sends
            known = [of[read] for read in node.all_input_nodes if read in of]
            if node.op == "call_function" and known and not breaks and not isinstance(note(node).type, ScalarType):
                of[node] = max(known, key=order.__getitem__)
                groups[of[node]].append(node)
        return groups

    def _behind(self, node: fx.Node, sent: Sending) -> float:
        """Seconds of the kernel behind a sum, besides those in which a sum in one shot waits anyway."""
        group = self._groups[node]
        inside = {node, *group}
        read = {each for member in group for each in member.all_input_nodes if each not in inside}
        written = [m for m in group if m.target not in _VIEWS and any(user not in inside for user in m.users)]
        parts = [node] * (2 if note(node).buffer else 1)  # of copies both parts are read in place of their sum
        moved = sum(map(self._bytes, (*parts, *read, *written)))
        seconds = moved / self.program.plan.cost.memory
        return max(0.0, seconds - sent.seconds) if note(node).one_shot else seconds

    def _adds_products(self, node: fx.Node) -> bool:
        if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2:
            return False
        return all(_viewed(read) in self.estimates.products for read in node.all_input_nodes)

    def _bytes(self, node: fx.Node) -> int:
        """Of what a rank holds of a value."""
        return sum(
            prod(evaluate(size, self.values) for size in local_shape(kind.shape, layout, self.program.axes))
            * kind.dtype.itemsize
            for kind, layout in zip(output_types(node), output_layouts(node), strict=True)
        )


def _viewed(node: fx.Node) -> fx.Node:
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node
