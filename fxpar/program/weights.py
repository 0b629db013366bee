"""Which values of a graph are made from parameters alone.

Enters: a graph and its parameters. Leaves: the values, which depend on no input.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fxpar.program.program import operands


def weights_of(graph: fx.Graph, owned: Iterable[fx.Node]) -> set[fx.Node]:
    """The placeholders `owned` and all values that are made from them alone."""
    found = set(owned)
    for node in graph.nodes:
        if node.op == "call_function" and operands(node) and all(other in found for other in operands(node)):
            found.add(node)
    return found
