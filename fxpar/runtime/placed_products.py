"""Weights' gradients of a compiled backward are computed where they are to stay (`fxpar.ops.products`).

Enters: the graph of a backward, as Inductor gets it. Leaves: it; products that are nothing but results are
`fxpar.placed_product`.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpar.ops import products  # noqa: F401 - defines the operator
from fxpar.program.program import output_node

_MM = torch.ops.aten.mm.default
_PLACED = torch.ops.fxpar.placed_product.default


def place_products(graph: fx.Graph) -> int:
    """Lets products be written where a call's results are to stay; gives how many."""
    end = output_node(graph)
    placed = 0
    for index, value in enumerate(end.args[0]):  # type: ignore[arg-type]
        if not isinstance(value, fx.Node) or value.target is not _MM or list(value.users) != [end]:
            continue
        if list(end.args[0]).count(value) == 1:  # type: ignore[arg-type]
            value.target, value.args = _PLACED, (*value.args, index)
            placed += 1
    return placed
