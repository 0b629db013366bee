"""The exact minimum over all choices.

Enters: options and prices. Leaves: one option for each node, of least total cost; or None where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fxpar.choice.collapse import cheapest
from fxpar.choice.options import Option, Options, Value
from fxpar.choice.prices import Prices
from fxpar.choice.problem import cost_of, problem_of
from fxpar.layout.layout import Placement


@dataclass(frozen=True)
class Solution:
    """The choice and its cost in seconds, ties included."""

    chosen: Mapping[fx.Node, Option]
    cost: float


def solve(
    graph: fx.Graph, options: Options, prices: Prices, ends: Mapping[Value, tuple[Placement, ...]]
) -> Solution | None:
    """Chooses an option for every node. Layers that pose the same problem are solved once.

    Args:
        ends: what values that leave the program may be.
    """
    nodes, problem = problem_of(graph, options, prices, ends)
    picks = cheapest(problem)
    if picks is None:
        return None
    chosen = {node: options.of[node][pick] for node, pick in zip(nodes, picks, strict=True)}
    return Solution({node: chosen[node] for node in options.of}, cost_of(problem, picks))
