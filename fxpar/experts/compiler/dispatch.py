"""Rows of one layer's experts, as sources and holders have them: in buffers of as many places as may be needed.

Enters: the rows of a sort by expert (`routed_rows`). Leaves: each operation on them where it runs. A helper of
`dispatch_experts`, which says what the terms mean.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.experts.compiler.emitter import Emitter
from fxpar.experts.compiler.expert_capacity import limit_of
from fxpar.experts.compiler.routed_rows import Routed
from fxpar.experts.compiler.token_cuts import TokenCut, token_cut
from fxpar.ir.program import Program, TensorType, describe, note, operands, output_types, tensor_type
from fxpar.layout.symbolic_sizes import Size, divide, simplify

aten, fxp = torch.ops.aten, torch.ops.fxpar
# What takes the place of an operand of a node.
_Operand = Callable[[fx.Node, fx.Node], fx.Node]


class StaticRows:
    """One layer's experts, being rewritten.

    Attributes:
        cut: how tokens are cut; its axes are the leading dimensions of what a source has.
        capacity: places of a block, as a node or number, and its size.
        excess: for how many rows a block has no place, where the plan's budget is less than tokens may need.
        held: of the leading dimensions those of holders.
        outer: those that stay in front of the holders' where rows are received: other data axes.
        merged: those that become rows there: of axes that split each expert, and of the sources among holders.
    """

    def __init__(self, program: Program, region: Routed, holders: Mapping[str, int]) -> None:
        self.region, self.holders = region, holders
        self.blocks = prod(holders.values())
        budget = program.plan.receive_budget
        # As it is written: of 1.1 no binary fraction is meant.
        self._budget = None if budget is None else Fraction(str(budget))
        self.excess: fx.Node | None = None
        self.own = _shared_out(region, self.blocks)
        self.emit = Emitter(program.graph, region.sort)
        self._limit = limit_of(program, region)
        indices = operands(region.sort)[0]
        tokens, where = tensor_type(indices).shape[0], describe(region.sort)
        self.cut: TokenCut = token_cut(program, self.emit, tokens, where, shared=self._is_shared(program))
        self.axes = list(self.cut.axes)
        self.lead = tuple(self.cut.axes.values())
        self.holder_dims = [i for i, axis in enumerate(self.axes) if axis in holders]
        others = [i for i in range(len(self.axes)) if i not in self.holder_dims]
        self.outer = [i for i in others if self.axes[i] in self.cut.batch]
        self.merged = [*(i for i in others if i not in self.outer), *self.holder_dims]
        self.sources = prod(self.lead[i] for i in self.merged)
        # Leading dimensions of what a holder has.
        self.here = (*(self.lead[i] for i in self.outer), *holders.values())
        # Rows by node: as a source has them, and as a holder does.
        self._source: dict[fx.Node, fx.Node] = {}
        self._holder: dict[fx.Node, fx.Node] = {}
        self._weights: dict[fx.Node, fx.Node] = {}
        self._plan(indices)

    def _is_shared(self, program: Program) -> bool:
        """Whether tensor parallel ranks have all tokens of a data rank, and do not share them out."""
        return not self.holders

    def _sorted(self, indices: fx.Node) -> tuple[fx.Node, fx.Node]:
        """A source's rows by expert, and how many each has."""
        emit, experts, lead = self.emit, self.region.experts, self.lead
        # Those that are kept are apart already, but where tensor ranks do not share tokens out.
        kept_pairs = None if self._limit is None else self._limit.indices
        is_apart = kept_pairs is not None and tensor_type(kept_pairs).shape[:-2] == lead
        chosen = kept_pairs if kept_pairs is not None and is_apart else self.cut.apart(indices, 1, fill=experts)
        self._tokens = tensor_type(chosen).shape[-2]
        self._token_node = emit.size(chosen, len(lead))
        rows, integer = simplify(self._tokens * self.region.k), torch.int64
        order, counts = emit.several(
            fxp.sort_by_expert.default,
            (chosen, experts),
            (TensorType(integer, (*lead, rows)), TensorType(integer, (*lead, experts))),
        )
        return order, counts

    def _exchanged(self, counts: fx.Node) -> fx.Node:
        """How many rows a holder gets of each source for each of its experts: [here, sources, own experts]."""
        sizes = (*self.lead, *self.holders.values(), self.own)
        received, shape = self._there(self.emit.view(counts, sizes, sizes)), (*self.here, self.sources, self.own)
        return self.emit.view(received, shape, shape)

    def _plan(self, indices: fx.Node) -> None:
        """Where each row goes."""
        emit, lead, integer = self.emit, self.lead, torch.int64
        order, counts = self._sorted(indices)
        if not self.holders:
            self._places = self._by_expert = self._own_rows(order, counts)
            self._counts = counts
            self._row_node = emit.size(self._places, len(lead))
            return
        node, size = self.capacity = self._places_of_a_block()
        if self.is_budgeted:
            kind = TensorType(integer, (*lead, 1))
            self.excess = emit.call(fxp.block_excess.default, (counts, self.blocks, node), kind)
        kind = TensorType(integer, (*lead, simplify(self.blocks * size)))
        self._places = emit.call(fxp.dispatch_indices.default, (order, counts, self.blocks, node), kind)
        self._by_expert, self._counts = emit.several(
            fxp.received_order.default,
            (self._exchanged(counts), node),
            (
                TensorType(integer, (*self.here, simplify(self.sources * size))),
                TensorType(integer, (*self.here, self.own)),
            ),
        )
        self._row_node = emit.size(self._by_expert, len(self.here))

    def _own_rows(self, order: fx.Node, counts: fx.Node) -> fx.Node:
        """The order of the rows of a source that holds all experts, without what is dropped anyway."""
        if self._limit is None or self._limit.part * self.own >= self.region.k:
            return order
        node, size = self._places_of_a_block()
        return self.emit.call(
            fxp.dispatch_indices.default, (order, counts, 1, node), TensorType(torch.int64, (*self.lead, size))
        )

    def _places_of_a_block(self) -> tuple[Any, Size]:
        """As many as tokens may need, or as the budget has, where that is less."""
        emit, most, budget = self.emit, Fraction(min(self.region.k, self.own)), self._budget
        limited = self._limit is not None and self._limit.part * self.own < most
        allowed = self._limit.part * self.own if self._limit is not None and limited else most
        self.is_budgeted = budget is not None and self.region.k * budget < allowed * self.blocks
        if budget is not None and self.is_budgeted:
            return emit.part(self._token_node, self._tokens, self.region.k * budget / self.blocks)
        if self._limit is None or not limited:
            return emit.part(self._token_node, self._tokens, most)
        node, size = self._limit.capacity
        return emit.number(operator.mul, node, self.own), simplify(self.own * size)

    @property
    def load(self) -> fx.Node:
        """How many rows each of a holder's experts received."""
        return self.counts_here

    def run(self) -> None:
        """Writes each node of the region over what a source has, or over what a holder has."""
        region = self.region
        for node in region.nodes:
            self.emit.like(node)
            if node in region.puts:
                node.replace_all_uses_with(self._put(node))
            else:
                self._rewrite(node)

    def _rewrite(self, node: fx.Node) -> None:
        if node in self.region.takes:
            self._source[node] = self._taken(node)
        elif node in self.region.on_holders:
            self._holder[node] = self._computed(node, self._holder_operand, self._rows_here, self._many_here)
        else:
            self._source[node] = self._computed(node, self._source_operand, tensor_type(self._places).shape, -1)

    @property
    def _rows_here(self) -> tuple[Size, ...]:
        """The shape of what a holder has, without a row's own."""
        return tensor_type(self._by_expert).shape

    @property
    def _many_here(self) -> Any:
        """How many those are, as a view takes it."""
        return -1

    @property
    def _row_node_here(self) -> fx.Node:
        """The same as a number."""
        row_node: fx.Node = self._row_node
        return row_node

    @property
    def counts_here(self) -> fx.Node:
        """How many rows a holder has for each of its experts."""
        return self._counts

    def _taken(self, node: fx.Node) -> fx.Node:
        value, _, k = node.args
        assert isinstance(value, fx.Node)
        tokens = self.cut.apart(value, self.region.k // int(k))  # type: ignore[arg-type]
        kind = TensorType(tensor_type(node).dtype, (*tensor_type(self._places).shape, *tensor_type(node).shape[1:]))
        return self.emit.call(fxp.moe_permute.default, (tokens, self._places, k), kind)

    def _put(self, node: fx.Node) -> fx.Node:
        value, weights_or_order, *rest = node.args
        assert isinstance(value, fx.Node)
        assert isinstance(weights_or_order, fx.Node)
        emit, dtype, width = self.emit, tensor_type(node).dtype, tensor_type(node).shape[-1]
        if node.target is fxp.moe_combine.default:
            args: tuple[Any, ...] = self._returned(value), self.cut.apart(weights_or_order, 1), self._places, rest[-1]
            return self.cut.together(emit.call(node.target, args, TensorType(dtype, (*self.lead, self._tokens, width))))
        # Of each pair alone where they are not added up: a token's stand together.
        times = self.region.k // int(rest[-1])  # type: ignore[arg-type]
        count = self._token_node if times == 1 else emit.number(operator.mul, self._token_node, times)
        shape = (*self.lead, simplify(self._tokens * times), width)
        args = self._returned(value), self._places, count, rest[-1]
        tokens = emit.call(node.target, args, TensorType(dtype, shape))
        if times == 1:
            return self.cut.together(tokens)
        wide = (*self.lead, self._tokens, width * times)
        tokens = self.cut.together(emit.view(tokens, (*self.lead, -1, width * times), wide))
        return emit.view(tokens, (-1, width), tensor_type(node).shape)

    def _computed(self, node: fx.Node, operand: _Operand, rows: tuple[Size, ...], many: Any) -> fx.Node:
        """An operation over rows of another shape.

        Args:
            many: how many rows there are, as a view takes it.
        """
        others = {arg: operand(node, arg) for arg in node.all_input_nodes}
        kinds = tuple(TensorType(kind.dtype, (*rows, *kind.shape[1:])) for kind in output_types(node))
        if node.target is aten.view.default:
            (kind,), lead = kinds, len(rows) - 1
            viewed = others[node.args[0]]  # type: ignore[index]
            return self.emit.view(viewed, (*kind.shape[:lead], many, *kind.shape[lead + 1 :]), kind.shape)
        is_one = isinstance(note(node).type, TensorType)
        return self.emit.shifted(node, others, kinds[0] if is_one else kinds, len(rows) - 1)

    def _holder_operand(self, node: fx.Node, arg: fx.Node) -> fx.Node:
        if arg in self.region.rows:
            return self._sent(arg)
        if arg is self.region.counts:
            return self.counts_here
        if not output_types(arg):  # the number of rows
            return self._row_node_here
        if node in self.region.grouped:
            return self._weight(arg)
        return arg

    def _source_operand(self, node: fx.Node, arg: fx.Node) -> fx.Node:
        return self._returned(arg) if arg in self.region.rows else arg

    def _sent(self, value: fx.Node) -> fx.Node:
        """Rows that a source has, as their holder does."""
        if not self.holders:
            return self._source[value] if value in self._source else self._holder[value]
        if value not in self._holder:
            source_rows, (node, size) = self._source[value], self.capacity
            width, sizes = tensor_type(source_rows).shape[-1], tuple(self.holders.values())
            parts = self.emit.view(source_rows, (*self.lead, *sizes, node, width), (*self.lead, *sizes, size, width))
            rows = tensor_type(self._by_expert).shape
            there = self.emit.view(self._there(parts), (*self.here, -1, width), (*rows, width))
            kind = TensorType(tensor_type(source_rows).dtype, (*rows, width))
            self._holder[value] = self.emit.call(fxp.moe_permute.default, (there, self._by_expert, 1), kind)
        return self._holder[value]

    def _returned(self, value: fx.Node) -> fx.Node:
        """Rows that a holder has, as their source does."""
        if not self.holders:
            return self._sent(value)
        if value not in self._source:
            rows = self._holder[value]
            placed = self.emit.call(
                fxp.moe_unpermute.default, (rows, self._by_expert, self._row_node, 1), tensor_type(rows)
            )
            self._source[value] = self._back(placed)
        return self._source[value]

    def _there(self, blocks: fx.Node) -> fx.Node:
        """[lead, holders, …] → [outer, holders, merged, …]: what each holder received."""
        count, rank = len(self.lead), len(tensor_type(blocks).shape)
        for place, index in enumerate(self.holder_dims):
            blocks = self.emit.over(blocks, count + place, self.axes[index])
        behind = count + len(self.holder_dims)
        return self.emit.permute(blocks, [*self.outer, *range(count, behind), *self.merged, *range(behind, rank)])

    def _back(self, rows: fx.Node) -> fx.Node:
        """[outer, holders, merged * capacity, f] → [lead, blocks * capacity, f]: what each source gets back."""
        emit, (node, size), width = self.emit, self.capacity, tensor_type(rows).shape[-1]
        merged = tuple(self.lead[i] for i in self.merged)
        parts = emit.view(rows, (*self.here, *merged, node, width), (*self.here, *merged, size, width))
        outer, front = len(self.outer), len(self.here)
        place = {dim: i for i, dim in enumerate(self.outer)} | {dim: front + i for i, dim in enumerate(self.merged)}
        rank = len(self.here) + len(merged)
        dims = [*(place[i] for i in range(len(self.lead))), *range(outer, front), rank, rank + 1]
        returned = emit.permute(parts, dims)
        for index, axis in enumerate(self.axes):
            if index in self.merged:
                returned = emit.over(returned, index, axis)
        return emit.view(returned, (*self.lead, -1, width), (*self.lead, simplify(self.blocks * size), width))

    def _weight(self, value: fx.Node) -> fx.Node:
        """[experts, …] → [holders, experts of each, …], cut over them."""
        if not self.holders:
            return value
        if value not in self._weights:
            shape = (*self.holders.values(), self.own, *tensor_type(value).shape[1:])
            weight = self.emit.view(value, shape, shape)
            for dim, axis in enumerate(self.holders):
                weight = self.emit.over(weight, dim, axis)
            self._weights[value] = weight
        return self._weights[value]


def _shared_out(region: Routed, ranks: int) -> int:
    local_experts = divide(region.experts, ranks)
    if local_experts is None:
        raise PlanError(
            f"{region.experts} experts are not shared out evenly by {ranks} ranks",
            where=describe(region.sort),
            remedy=f"choose an ep that divides {region.experts}",
        )
    return int(local_experts)
