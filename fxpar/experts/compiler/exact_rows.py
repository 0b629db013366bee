"""Rows of one layer's experts that travel alone, as many as there are.

Enters: the rows of a sort by expert (`routed_rows`). Leaves: each operation on them where it runs, and the symbol of
how many rows a holder has. A helper of `dispatch_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxpar.errors import PassError
from fxpar.experts.compiler.dispatch import StaticRows
from fxpar.experts.compiler.routed_rows import Routed
from fxpar.ir.program import Program, TensorType, describe, tensor_type
from fxpar.ir.symbols import Counted, with_counted
from fxpar.layout.symbolic_sizes import Size, simplify
from fxpar.mesh.axes import Cuts
from fxpar.ops.sent_rows import return_rows, send_rows, split_sizes

aten, fxp = torch.ops.aten, torch.ops.fxpar


class ExactRows(StaticRows):
    """One layer's experts, being rewritten.

    A source's rows stand by expert, so that those of one holder stand together; what a holder receives stands by
    source. How many there are is copied to the host while rows are taken, and the order of what arrived is made while
    they travel.

    Attributes:
        counted: the symbol of how many rows a holder has.
    """

    def __init__(self, program: Program, region: Routed, holders: Mapping[str, int], name: str) -> None:
        """Sorts the rows of a source; `name` is the symbol of how many a holder has."""
        super().__init__(program, region, holders)
        rows = simplify(self._tokens * region.k)
        example = with_counted((Counted(name, rows, 1),), {s.name: s.example for s in program.symbols})[name]
        self.counted = Counted(name, rows, example)
        self._axis = "-".join(holders)

    def _is_shared(self, program: Program) -> bool:
        """Where tensor parallel ranks split each expert all of them need all rows of it."""
        return not any(axis in self.holders for axis in program.plan.axes_for(Cuts.FEATURES))

    def _plan(self, indices: fx.Node) -> None:
        self._places, counts = self._sorted(indices)
        self._received = self._exchanged(counts)
        kind = TensorType(torch.int64, (*self.lead, 2 * self.blocks + 1))
        self._sizes = self.emit.call(split_sizes, (self._places, counts, self._received), kind)
        self._arrived: tuple[fx.Node, fx.Node, fx.Node] | None = None

    @property
    def _rows_here(self) -> tuple[Size, ...]:
        return (*self.here, self.counted.size)

    @property
    def _many_here(self) -> Any:
        """A number: where no row came, torch could not tell what -1 is."""
        return self._row_node_here

    @property
    def _row_node_here(self) -> fx.Node:
        return self._order()[0]

    @property
    def counts_here(self) -> fx.Node:
        """How many rows a holder has for each of its experts."""
        return self._order()[2]

    def _order(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        """A holder's rows: how many, by expert, and how many each expert has."""
        if self._arrived is None:
            if not self._source:
                raise PassError(
                    "experts are computed before any row was taken for them",
                    where=describe(self.region.sort),
                    remedy="take the rows first, or give dispatch='static'",
                )
            self._sent(next(iter(self._source)))
        assert self._arrived is not None
        return self._arrived

    def _sent(self, value: fx.Node) -> fx.Node:
        if value in self._holder:
            return self._holder[value]
        local = self._source[value]
        width, rows = tensor_type(local).shape[-1], self._rows_here
        kind = TensorType(tensor_type(local).dtype, (*rows, width))
        there = self.emit.call(send_rows, (local, self._sizes), kind, axis=self._axis)
        if self._arrived is None:
            count = self.emit.size(there, len(self.here))
            kinds = TensorType(torch.int64, rows), TensorType(torch.int64, (*self.here, self.own))
            order, counts = self.emit.several(fxp.arrived_order.default, (self._received, count), kinds)
            self._arrived = count, order, counts
        self._holder[value] = self.emit.call(fxp.moe_permute.default, (there, self._order()[1], 1), kind)
        return self._holder[value]

    def _returned(self, value: fx.Node) -> fx.Node:
        if value in self._source:
            return self._source[value]
        local, (count, order, _) = self._holder[value], self._order()
        placed = self.emit.call(fxp.moe_unpermute.default, (local, order, count, 1), tensor_type(local))
        kind = TensorType(tensor_type(local).dtype, (*tensor_type(self._places).shape, tensor_type(local).shape[-1]))
        self._source[value] = self.emit.call(return_rows, (placed, self._sizes), kind, axis=self._axis)
        return self._source[value]
