"""Rows of one layer's experts, as many for each as its capacity.

Enters: the rows of a sort by expert that are limited (`expert_capacity`). Leaves: each operation on them where it runs.
A helper of `dispatch_experts`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxpar.experts.compiler.dispatch import StaticRows
from fxpar.ir.program import TensorType, tensor_type
from fxpar.layout.symbolic_sizes import Size, simplify

aten, fxp = torch.ops.aten, torch.ops.fxpar


class PaddedRows(StaticRows):
    """One layer's experts, being rewritten.

    Each expert has a block of places of every source, in which zeros stand behind its rows. Where those of a source
    stand by expert, those that a holder received do so by one change of the order of dimensions: neither the products'
    sizes nor that order depend on how many rows there are.
    """

    def _plan(self, indices: fx.Node) -> None:
        """Where each row goes."""
        emit, limit, integer = self.emit, self._limit, torch.int64
        assert limit is not None
        node, size = limit.capacity
        order, counts = self._sorted(indices)
        experts, local_experts = self.region.experts, self.own
        kind = TensorType(integer, (*self.lead, simplify(experts * size)))
        self._places = emit.call(fxp.dispatch_indices.default, (order, counts, experts, node), kind)
        self._places_of_an_expert = node, size
        self._load = counts
        if self.holders:
            self.capacity = emit.number(operator.mul, node, local_experts), simplify(local_experts * size)
            shape = (*self.here, local_experts)
            self._load = emit.call(
                aten.sum.dim_IntList, (self._exchanged(counts), [len(self.here)]), TensorType(integer, shape)
            )
        sources = self.sources if self.holders else 1
        per_expert, self._row_node = (emit.number(operator.mul, node, n) for n in (sources, sources * local_experts))
        self._counts = emit.call(aten.full_like.default, (self._load, per_expert), tensor_type(self._load))

    @property
    def _rows_here(self) -> tuple[Size, ...]:
        if not self.holders:
            return tensor_type(self._places).shape
        return (*self.here, simplify(self.sources * self.own * self._places_of_an_expert[1]))

    @property
    def load(self) -> fx.Node:
        """How many of them are no padding."""
        return self._load

    def _sent(self, value: fx.Node) -> fx.Node:
        if not self.holders:
            return super()._sent(value)
        if value not in self._holder:
            source_rows, (node, size) = self._source[value], self.capacity
            width, sizes = tensor_type(source_rows).shape[-1], tuple(self.holders.values())
            parts = self.emit.view(source_rows, (*self.lead, *sizes, node, width), (*self.lead, *sizes, size, width))
            self._holder[value] = self._turned(self._there(parts), (self.sources, self.own))
        return self._holder[value]

    def _returned(self, value: fx.Node) -> fx.Node:
        if not self.holders:
            return self._sent(value)
        if value not in self._source:
            self._source[value] = self._back(self._turned(self._holder[value], (self.own, self.sources)))
        return self._source[value]

    def _turned(self, rows: fx.Node, blocks: tuple[int, int]) -> fx.Node:
        """[here, first * second * places, f] → [here, second * first * places, f]."""
        width, (node, size) = tensor_type(rows).shape[-1], self._places_of_an_expert
        front, sizes = len(self.here), (*self.here, *blocks)
        parts = self.emit.view(rows, (*sizes, node, width), (*sizes, size, width))
        turned = self.emit.permute(parts, [*range(front), front + 1, front, front + 2, front + 3])
        return self.emit.view(turned, (*self.here, -1, width), (*self._rows_here, width))

    @property
    def _row_node_here(self) -> Any:
        return self._row_node
