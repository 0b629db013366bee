"""How tokens reach the experts of a layer and come back: a class of six steps, and a subclass for each way.

Enters: the rows of a sort by expert (`routed_rows`), and their limit (`expert_capacity`). Leaves: each operation on
them where it runs.

Terms: a *source* is a rank that has tokens, a *holder* one of the ranks that hold different experts. What either has
stands over leading dimensions, as `token_cuts` says.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import fx

from fxpar.errors import PassError, PlanError
from fxpar.experts.compiler.emitter import Emitter
from fxpar.experts.compiler.expert_capacity import Limit, as_written
from fxpar.experts.compiler.expert_replicas import Replicas, early_weights
from fxpar.experts.compiler.routed_rows import Routed
from fxpar.experts.compiler.token_cuts import HolderDims, token_cut
from fxpar.experts.operators.selective_dispatch import expand_needed, needed_part, sum_needed
from fxpar.experts.operators.sent_rows import return_rows, send_rows, split_sizes
from fxpar.ir.program import Program, TensorType, describe, note, operands, output_types, tensor_type, update
from fxpar.ir.symbols import Counted, with_counted
from fxpar.layout.symbolic_sizes import Size, divide, product, simplify
from fxpar.mesh.axes import Cuts
from fxpar.ops.rank_dim import sum_over

aten, fxp = torch.ops.aten, torch.ops.fxpar
# Of the tokens of others which part a rank may need, so that it is worth a kernel to leave out the rest: copy engines,
# which carry all of them, leave the multiprocessors to whatever else is computed.
MOST_NEEDED = Fraction(9, 10)


class Dispatch:
    """The experts of one layer, being rewritten. Here every data rank has all experts, and nothing travels.

    The steps, of which a way has its own where it differs:

    1. `preprocess` sorts the chosen experts, and says where each row goes.
    2. `permute` makes rows of a source's tokens.
    3. `dispatch` sends a source's rows to the holders of their experts, which put them in the order of experts.
    4. `experts` computes a holder's rows.
    5. `combine` sends a holder's rows back to their sources.
    6. `unpermute` makes tokens of a source's rows.

    Attributes:
        load: how many rows each of a holder's experts received.
        excess: for how many rows there is no place, where the plan's budget is less than tokens may need.
        dropped: how many pairs each source drops by a capacity of experts.
        counted: symbols of sizes that the routing decides.
    """

    load: fx.Node
    counted: tuple[Counted, ...] = ()
    excess: fx.Node | None = None
    _expert_order: fx.Node  # of the rows that a holder received
    _viewed_rows: Any = -1  # how many rows a holder has, as a view takes it

    def __init__(self, program: Program, region: Routed, limit: Limit | None, replicas: Replicas | None) -> None:
        self.program, self.region, self.limit, self.replicas = program, region, limit, replicas
        self.emit, axes = Emitter(program.graph, region.sort), program.mesh.holders
        self.dropped = limit.dropped(self.emit) if limit is not None and axes else None
        self.local_experts, self.bound = region.experts_of_each(prod(axes.values())), _bound(program, region, limit)
        (indices,), where = operands(region.sort), describe(region.sort)
        self.cut = token_cut(program, self.emit, tensor_type(indices).shape[0], where, shared=self._has_all_tokens())
        self.holders = HolderDims(self.cut, axes)
        self.source_dims, self.holder_dims = self.holders.lead, self.holders.dims
        # Rows by node: as a source has them, and as a holder does.
        self._at_source: dict[fx.Node, fx.Node] = {}
        self._at_holder: dict[fx.Node, fx.Node] = {}
        self._weights: dict[fx.Node, fx.Node] = {}
        self.preprocess(indices)
        for node, weights in early_weights(region) if replicas else ():
            self._expert_operand(node, weights)

    def run(self) -> None:
        """Writes each node of the region over what a source has, or over what a holder has."""
        region = self.region
        for node in region.nodes:
            self.emit.like(node)
            if node in region.puts:
                node.replace_all_uses_with(self.unpermute(node))
            elif node in region.takes:
                self._at_source[node] = self.permute(node)
            elif node in region.on_holders:
                self._at_holder[node] = self.experts(node)
            else:
                others = {arg: self._rows_of_source(arg) if arg in region.rows else arg for arg in node.all_input_nodes}
                self._at_source[node] = self._computed(node, others, tensor_type(self._indices).shape, -1)

    def preprocess(self, indices: fx.Node) -> None:
        """Says where each row goes: which pair is at each place of a source, and how many rows holders have.

        Args:
            indices: the experts of all tokens, [tokens, K].
        """
        self._indices, self._counts = self._sort_source(indices)
        if self.bound[1] == "capacity":
            self._indices = self._places(self._indices, self._counts, 1, *self._size_of_a_block())
        self._row_count = self.emit.size(self._indices, len(self.source_dims))
        self._holder_rows = tensor_type(self._indices).shape

    def permute(self, node: fx.Node) -> fx.Node:
        """Returns the rows of a source's tokens."""
        value, k = operands(node)[0], node.args[-1]
        tokens = self._gather_tokens(self.cut.apart(value, self.region.k // int(k)))  # type: ignore[arg-type]
        kind = _like(node, *tensor_type(self._indices).shape, *tensor_type(node).shape[1:])
        return self.emit.call(fxp.moe_permute.default, (tokens, self._indices, k), kind)

    def dispatch(self, rows: fx.Node) -> fx.Node:
        """Returns rows that sources have, as their holders do: by expert."""
        return rows

    def experts(self, node: fx.Node) -> fx.Node:
        """Returns what a holder computes of its rows."""
        others = {arg: self._expert_operand(node, arg) for arg in node.all_input_nodes}
        return self._computed(node, others, self._holder_rows, self._viewed_rows)

    def combine(self, rows: fx.Node) -> fx.Node:
        """Returns rows that holders have, as their sources do."""
        return rows

    def unpermute(self, node: fx.Node) -> fx.Node:
        """Returns the tokens of a source's rows."""
        (value, weights_or_order, *_), last = operands(node), node.args[-1]
        emit, kind, dims = self.emit, tensor_type(node), tensor_type(self._indices).shape[:-1]
        (token_count, tokens), width = self._tokens, kind.shape[-1]
        if node.target is fxp.moe_combine.default:
            args: tuple[Any, ...] = (
                self._rows_of_source(value),
                self._gather(self.cut.apart(weights_or_order, 1)),
                self._indices,
            )
            summed = emit.call(node.target, (*args, last), _like(node, *dims, tokens, width))
            return self.cut.together(self._reduce(summed))
        # Of each pair alone where they are not added up: a token's stand together.
        times = self.region.k // int(last)  # type: ignore[arg-type]
        count = token_count if times == 1 else emit.number(operator.mul, token_count, times)
        args, wide = (self._rows_of_source(value), self._indices, count, last), width * times
        summed = emit.call(node.target, args, _like(node, *dims, simplify(tokens * times), width))
        if times == 1:
            return self.cut.together(self._reduce(summed))
        summed = emit.view(summed, (*dims, -1, wide), (*dims, tokens, wide))
        return emit.view(self.cut.together(self._reduce(summed)), (-1, width), kind.shape)

    def _has_all_tokens(self) -> bool:
        """Returns whether tensor parallel ranks have all tokens of a data rank, and do not share them out."""
        return not self.program.mesh.holders

    def _sort_source(self, indices: fx.Node) -> list[fx.Node]:
        """Sorts [tokens, K] by expert → of each source the order of its pairs, [lead, rows], and how many each has."""
        # Those that are limited are apart already, but for replicas, and where tensor ranks do not share tokens out.
        limited = None if self.limit is None or self.replicas else self.limit.indices
        is_apart = limited is not None and tensor_type(limited).shape[:-2] == self.source_dims
        chosen = limited if limited is not None and is_apart else self._apart(indices)
        self._count_tokens(chosen)
        return self._sort_by_expert(chosen, self.region.experts)

    def _apart(self, indices: fx.Node) -> fx.Node:
        """Maps [tokens, K] → [lead, tokens, K]; in padding no expert's number."""
        return self.cut.apart(indices, 1, fill=self.region.experts)

    def _count_tokens(self, chosen: fx.Node) -> None:
        """Notes of […, tokens, K] how many tokens there are, as a number or node, and in symbols."""
        *dims, tokens, _ = tensor_type(chosen).shape
        self._tokens: tuple[Any, Size] = self.emit.size(chosen, len(dims)), tokens

    def _sort_by_expert(self, chosen: fx.Node, experts: int) -> list[fx.Node]:
        """Maps […, tokens, K] → the order of its pairs by expert, […, rows], and how many each has, […, experts]."""
        *dims, tokens, k = tensor_type(chosen).shape
        kinds = _integers(*dims, simplify(tokens * k)), _integers(*dims, experts)
        return self.emit.several(fxp.sort_by_expert.default, (chosen, experts), kinds)

    def _places(self, order: fx.Node, counts: fx.Node, blocks: int, node: Any, size: Size) -> fx.Node:
        """Returns the row of each place of so many blocks of a size, [lead, places]."""
        kind = _integers(*tensor_type(counts).shape[:-1], simplify(blocks * size))
        return self.emit.call(fxp.dispatch_indices.default, (order, counts, blocks, node), kind)

    def _received_order(self, counts: fx.Node, node: Any, size: Size) -> list[fx.Node]:
        """Maps […, sources, experts] → the order by expert of blocks of a size, and how many rows of each fit."""
        *dims, sources, experts = tensor_type(counts).shape
        kinds = _integers(*dims, simplify(sources * size)), _integers(*dims, experts)
        return self.emit.several(fxp.received_order.default, (counts, node), kinds)

    def _size_of_a_block(self, sources: int = 1) -> tuple[Any, Size]:
        """Returns how many places a holder has for tokens, of so many sources, as a number or node and in symbols."""
        most, bound = self.bound
        if self.limit is None or bound != "capacity":
            return self.emit.part(*self._tokens, most)
        (node, size), times = self.limit.capacity, sources * self.local_experts
        return self.emit.number(operator.mul, node, times), simplify(size * times)

    def _note_excess(self, counts: fx.Node, blocks: int, node: Any) -> None:
        """Counts the rows without a place in blocks of a size."""
        kind = _integers(*tensor_type(counts).shape[:-1], 1)
        self.excess = self.emit.call(fxp.block_excess.default, (counts, blocks, node), kind)

    def _gather_tokens(self, tokens: fx.Node) -> fx.Node:
        """Returns the tokens that rows are made of: a source's own."""
        return tokens

    def _gather(self, value: fx.Node) -> fx.Node:
        """Returns what stands by the tokens that rows are made of, as their weights do."""
        return value

    def _reduce(self, tokens: fx.Node) -> fx.Node:
        """Returns the tokens of a source, of those that are made of rows."""
        return tokens

    def _rows_of_source(self, value: fx.Node) -> fx.Node:
        """Returns rows as their source has them."""
        if value not in self._at_source:
            rows = self._at_holder[value]
            self._at_source[value] = self.combine(rows) if self.holders.axes else rows
        return self._at_source[value]

    def _rows_of_holder(self, value: fx.Node) -> fx.Node:
        """Returns rows as their holder has them."""
        if value not in self._at_holder:
            rows = self._at_source[value]
            self._at_holder[value] = self.dispatch(rows) if self.holders.axes else rows
        return self._at_holder[value]

    def _computed(self, node: fx.Node, others: Mapping[fx.Node, fx.Node], rows: tuple[Size, ...], many: Any) -> fx.Node:
        """Returns an operation over rows of another shape.

        Args:
            others: what takes the place of its operands.
            many: how many rows there are, as a view takes it.
        """
        kinds = tuple(TensorType(kind.dtype, (*rows, *kind.shape[1:])) for kind in output_types(node))
        lead = len(rows) - 1
        if node.target is aten.view.default:
            (kind,), viewed = kinds, others[node.args[0]]  # type: ignore[index]
            return self.emit.view(viewed, (*kind.shape[:lead], many, *kind.shape[lead + 1 :]), kind.shape)
        is_one = isinstance(note(node).type, TensorType)
        return self.emit.shifted(node, others, kinds[0] if is_one else kinds, lead)

    def _expert_operand(self, node: fx.Node, arg: fx.Node) -> fx.Node:
        """Returns what takes the place of an operand where experts are."""
        if arg in self.region.rows:
            return self._rows_of_holder(arg)
        if node not in self.region.grouped:
            return arg
        if arg is self.region.counts:
            return self._counts
        if not output_types(arg):  # the number of rows
            return self._row_count  # type: ignore[no-any-return]
        if arg not in self._weights:
            weights = self.holders.share_out(arg)
            self._weights[arg] = self.replicas.replicate(self.emit, self.holders, weights) if self.replicas else weights
        return self._weights[arg]

    def _exchange_counts(self, counts: fx.Node) -> fx.Node:
        """Returns how many rows a holder gets of each source for each of its experts: [holders, sources, experts]."""
        local_counts = self.holders.to_holders(counts, (self.local_experts,), (self.local_experts,))
        shape = (*self.holder_dims, self.holders.sources, self.local_experts)
        return self.emit.view(local_counts, shape, shape)

    def _sorted_by_expert(self, received: fx.Node) -> fx.Node:
        """Returns a holder's rows by expert, of those in the order in which they came."""
        return self.emit.call(fxp.moe_permute.default, (received, self._expert_order, 1), tensor_type(received))

    def _sorted_by_source(self, rows: fx.Node) -> fx.Node:
        """Returns a holder's rows in the order in which they came."""
        args = rows, self._expert_order, self._row_count, 1
        return self.emit.call(fxp.moe_unpermute.default, args, tensor_type(rows))


class AllToAllDispatch(Dispatch):
    """Rows travel in blocks, one for each holder, of as many places as a source's tokens may ever need there.

    That is tokens · min(K, experts of a holder)::

        %sent = fxpar.moe_permute.default(%x_own, %places, 2) : f32[2, 2*c, 64]
        %there = fxpar.shard_over[dp](%blocks, 1) : f32[2, 2, c, 64]
        %rows = fxpar.moe_permute.default(%received, %by_expert, 1) : f32[2, 2*c, 64]
        %y = fxpar.grouped_linear.default(%rows, %w_by_rank, %counts_here) : f32[2, 2*c, 128]

    Blocks change hands by an all-to-all, which `insert_collectives` puts where `shard_over` asks for it. With a
    `recv_capacity_factor` they have fewer places; rows without one are left out and counted.
    """

    def preprocess(self, indices: fx.Node) -> None:
        """Says where each row goes."""
        order, counts = self._sort_source(indices)
        self._block = self._size_of_a_block()
        if self.bound[1] == "budget":
            self._note_excess(counts, self.holders.ranks, self._block[0])
        self._indices = self._places(order, counts, self.holders.ranks, *self._block)
        self._expert_order, self._counts = self._received_order(self._exchange_counts(counts), *self._block)
        self._row_count = self.emit.size(self._expert_order, len(self.holder_dims))
        self._holder_rows, self.load = tensor_type(self._expert_order).shape, self._counts

    def dispatch(self, rows: fx.Node) -> fx.Node:
        """Returns rows that sources have, as their holders do."""
        blocks, width = self._to_holders(rows), tensor_type(rows).shape[-1]
        received = self.emit.view(blocks, (*self.holder_dims, -1, width), (*self._holder_rows, width))
        return self._sorted_by_expert(received)

    def combine(self, rows: fx.Node) -> fx.Node:
        """Returns rows that holders have, as their sources do."""
        return self._to_sources(self._sorted_by_source(rows))

    def _to_holders(self, rows: fx.Node) -> fx.Node:
        """Maps [lead, holders * places, f] → [outer, holders, merged, places, f]: what each holder receives."""
        (node, size), width = self._block, tensor_type(rows).shape[-1]
        return self.holders.to_holders(rows, (node, width), (size, width))

    def _to_sources(self, rows: fx.Node) -> fx.Node:
        """Maps [outer, holders, merged * places, f] → [lead, holders * places, f]: what each source gets back."""
        returned, width = self.holders.to_sources(rows, *self._block), tensor_type(rows).shape[-1]
        shape = (*self.source_dims, simplify(self.holders.ranks * self._block[1]), width)
        return self.emit.view(returned, (*self.source_dims, -1, width), shape)


class PaddedDispatch(AllToAllDispatch):
    """Rows travel in blocks, in which each expert has as many places of every source as its capacity.

    Zeros stand after its rows. Where those of a source stand by expert, those that a holder received do so by one
    change of the order of dimensions. Neither the products' sizes nor that order depend on how many rows there are.
    """

    def preprocess(self, indices: fx.Node) -> None:
        """Says where each row goes."""
        assert self.limit is not None
        emit, (node, size) = self.emit, self.limit.capacity
        order, counts = self._sort_source(indices)
        self._indices, self.load = self._places(order, counts, self.region.experts, node, size), counts
        if self.holders.axes:
            self._block = emit.number(operator.mul, node, self.local_experts), simplify(self.local_experts * size)
            args, kind = (
                (self._exchange_counts(counts), [len(self.holder_dims)]),
                _integers(*self.holder_dims, self.local_experts),
            )
            self.load = emit.call(aten.sum.dim_IntList, args, kind)
        times = self.holders.sources, self.holders.sources * self.local_experts
        per_expert, self._row_count = (emit.number(operator.mul, node, n) for n in times)
        self._counts = emit.call(aten.full_like.default, (self.load, per_expert), tensor_type(self.load))
        self._holder_rows = (*self.holder_dims, simplify(times[1] * size))

    def dispatch(self, rows: fx.Node) -> fx.Node:
        """Returns rows that sources have, as their holders do."""
        return self._turned(self._to_holders(rows), self.holders.sources, self.local_experts)

    def combine(self, rows: fx.Node) -> fx.Node:
        """Returns rows that holders have, as their sources do."""
        return self._to_sources(self._turned(rows, self.local_experts, self.holders.sources))

    def _turned(self, rows: fx.Node, *blocks: int) -> fx.Node:
        """Maps [holders, first * second * places, f] → [holders, second * first * places, f]."""
        assert self.limit is not None
        (node, size), width, front = self.limit.capacity, tensor_type(rows).shape[-1], len(self.holder_dims)
        dims = (*self.holder_dims, *blocks)
        parts = self.emit.view(rows, (*dims, node, width), (*dims, size, width))
        turned = self.emit.permute(parts, [*range(front), front + 1, front, front + 2, front + 3])
        return self.emit.view(turned, (*self.holder_dims, -1, width), (*self._holder_rows, width))


class AllGatherDispatch(Dispatch):
    """Each holder gets the tokens of all sources and picks the rows of its experts; what it makes of a token goes back.

    A token that chooses K of E experts has as a rule several on each of a few ranks. In blocks of rows it would travel
    once for each of them. Here it travels once, and so does the sum over its experts::

        %tokens = fxpar.expand_over[dp](%x_own, 0) : f32[2, 2*b*s, 64]
        %rows = fxpar.moe_permute.default(%tokens, %by_expert, 2) : f32[2, 2*2*b*s, 64]
        %y = fxpar.grouped_linear.default(%rows, %w_by_rank, %counts_here) : f32[2, 2*2*b*s, 128]

    `insert_collectives` puts an all-gather where `expand_over` asks for it, and after `sum_over` a reduce-scatter.
    These stand first in `permute` and last in `unpermute`; between them rows stay with their holders. Where ranks copy
    into each other's memory and many tokens have no expert on a rank, those do not travel there::

        %tokens = fxpar.expand_needed[dp](%x_own, %indices_all, 4) : f32[2, 2*b*s, 64]
        %sums = fxpar.sum_needed[dp](%y_summed, %indices_all, 4) : f32[2*b*s, 64]
    """

    def _has_all_tokens(self) -> bool:
        """Returns True: tensor parallel ranks have all tokens, and each picks the rows of its experts."""
        return True

    def preprocess(self, indices: fx.Node) -> None:
        """Says which rows a holder picks."""
        emit, part = self.emit, expected_part(self.program, self.region)
        self._is_needed, self._origin = part is not None and part < MOST_NEEDED, "" if part is None else _why(part)
        self._at_holder = self._at_source  # a source computes no rows
        chosen = self._apart(indices)
        self._source_tokens, self._chosen = tensor_type(chosen).shape[-2], self.holders.joined(chosen)
        chosen = self.holders.for_each(self._chosen)
        self._count_tokens(chosen)
        # Numbers outside this holder's experts go to nobody; the number of none is beyond those of the last holder.
        numbers = emit.call(aten.sub.Tensor, (chosen, self._first_experts()), tensor_type(chosen))
        order, self._counts = self._sort_by_expert(numbers, self.local_experts)
        self.load, limited = self._counts, () if self.limit is None else tensor_type(self.limit.indices).shape[:-2]
        block = self._size_of_a_block(int(product(limited)) // prod(self.holders.outer))
        self._indices = self._places(order, self._counts, 1, *block)
        if self.bound[1] == "budget":
            self._note_excess(self._counts, 1, block[0])
            shape = (*self.holder_dims, 1, self.local_experts)
            self._counts = self._received_order(emit.view(self._counts, shape, shape), *block)[1]
        self._row_count = emit.size(self._indices, len(self.holder_dims))
        self._holder_rows = tensor_type(self._indices).shape

    def _first_experts(self) -> fx.Node:
        """Returns the number of the first expert of each holder, [holders, 1, 1]."""
        emit, shape = self.emit, (*self.holders.axes.values(), 1, 1)
        firsts = emit.call(
            aten.arange.start_step, (0, self.region.experts, self.local_experts), _integers(self.holders.ranks)
        )
        return self.holders.over(emit.view(firsts, shape, shape))

    def _gather_tokens(self, tokens: fx.Node) -> fx.Node:
        """Maps [lead, n, f] → [holders, sources * n, f]: those that a holder needs, or all."""
        if not self._is_needed:
            return self._explained(self._gather(tokens))
        emit, (*_, rows, width) = self.emit, tensor_type(tokens).shape
        times = divide(rows, self._source_tokens)
        assert times is not None
        wide = simplify(times * width)
        tokens = emit.view(tokens, (*self.source_dims, -1, wide), (*self.source_dims, self._source_tokens, wide))
        tokens = self.holders.joined(tokens)
        ((place, axis),) = enumerate(self.holders.axes, len(self.holders.outer))
        args, kind = (tokens, self._chosen, self.local_experts), self.holders.expanded(tokens, place, axis)
        received = self._explained(emit.call(expand_needed, args, kind, axis=axis))
        shape = (*self.holder_dims, simplify(rows * self.holders.sources), width)
        return emit.view(received, (*self.holder_dims, -1, width), shape)

    def _gather(self, value: fx.Node) -> fx.Node:
        """Maps [lead, n, f] → [holders, sources * n, f]: what each source has, for each holder."""
        return self.holders.for_each(self.holders.joined(value))

    def _reduce(self, tokens: fx.Node) -> fx.Node:
        """Maps [holders, sources * n, f] → [lead, n, f]: the sums over the holders, of each source where it is."""
        emit = self.emit
        for place, axis in reversed(list(enumerate(self.holders.axes, len(self.holders.outer)))):
            shape = tensor_type(tokens).shape
            kind = _like(tokens, *shape[:place], *shape[place + 1 :])
            if self._is_needed:
                tokens = emit.call(sum_needed, (tokens, self._chosen, self.local_experts), kind, axis=axis)
            else:
                tokens = emit.call(sum_over, (tokens, place), kind, axis=axis)
            self._explained(tokens)
        return self.holders.to_sources(tokens, -1, self._source_tokens)

    def _explained(self, node: fx.Node) -> fx.Node:
        """Returns the node, with the reason why its tokens travel as they do where there are two ways."""
        return update(node, origin=self._origin) if self._origin else node


class DroplessDispatch(Dispatch):
    """Rows travel as they are sorted, as many as there are; a holder receives them by source.

    How many there are is copied to the host while rows are taken. The order of what will arrive is made meanwhile, for
    as many rows as might: so it is of a fixed size, and a graph can hold it::

        %sizes = fxpar.split_sizes(%order, %counts, %counts_received) : i64[2, 5]
        %most, %counts_here = fxpar.arrived_order.default(%counts_received, %bound) : i64[2, 4*n], i64[2, 2]
        %there = fxpar.send_rows[dp](%rows, %sizes) : f32[2, r, 64]
        %by_expert = fxpar.resize_rows.default(%most_view, %r, -1) : i64[2, r, 1]
    """

    def _has_all_tokens(self) -> bool:
        """Returns whether ranks need all rows of an expert: tensor parallel ones do that split each expert."""
        return not self.program.plan.axes_for(Cuts.FEATURES).keys() & self.program.mesh.holders.keys()

    def preprocess(self, indices: fx.Node) -> None:
        """Says how many rows go where, and names how many a holder gets."""
        self._indices, counts = self._sort_source(indices)
        self._received = self._exchange_counts(counts)
        args, kind = (self._indices, counts, self._received), _integers(*self.source_dims, 2 * self.holders.ranks + 1)
        self._sizes, self._axis = self.emit.call(split_sizes, args, kind), "-".join(self.holders.axes)
        dims, sources, lead = self.holder_dims, self.holders.sources, len(self.source_dims)
        most_rows = simplify(sources * tensor_type(self._indices).shape[lead])
        kinds = _integers(*dims, most_rows), _integers(*dims, self.local_experts)
        most = self.emit.number(operator.mul, self.emit.size(self._indices, lead), sources)
        order, self._counts = self.emit.several(fxp.arrived_order.default, (self._received, most), kinds)
        self._most_order = self.emit.view(order, (*dims, -1, 1), (*tensor_type(order).shape, 1))
        self.load = self._counts
        symbols, rows = self.program.symbols, simplify(self._tokens[1] * self.region.k)
        taken = {node.name for node in self.program.graph.nodes}
        taken |= {*(s.name for s in symbols), *(s.name for s in self.program.counted)}
        name = next(name for i in itertools.count() if (name := f"r{i or ''}") not in taken)
        example = with_counted((Counted(name, rows, 1),), {s.name: s.example for s in symbols})[name]
        self.counted = (Counted(name, rows, example),)
        self._holder_rows, self._has_arrived = (*self.holder_dims, self.counted[0].size), False

    def run(self) -> None:
        """Writes each node, and sends the rows if no expert computes them."""
        super().run()
        self._arrive()

    def experts(self, node: fx.Node) -> fx.Node:
        """Returns what a holder computes of its rows."""
        self._arrive()
        return super().experts(node)

    def _arrive(self) -> None:
        if self._has_arrived:
            return
        if not self._at_source:
            raise PassError(
                "experts are computed before any row was taken for them",
                where=describe(self.region.sort),
                remedy="take the rows first, or give experts.dispatch='static'",
            )
        self._rows_of_holder(next(iter(self._at_source)))

    def dispatch(self, rows: fx.Node) -> fx.Node:
        """Returns rows that sources have, as their holders do."""
        kind = _like(rows, *self._holder_rows, tensor_type(rows).shape[-1])
        received = self.emit.call(send_rows, (rows, self._sizes), kind, axis=self._axis)
        if not self._has_arrived:
            # A view takes the number of rows: where none came, torch could not tell what -1 is.
            dims, shape = self.holder_dims, self._holder_rows
            self._row_count = self._viewed_rows = self.emit.size(received, len(dims))
            order = self.emit.call(
                fxp.resize_rows.default, (self._most_order, self._row_count, -1), _integers(*shape, 1)
            )
            self._expert_order, self._has_arrived = self.emit.view(order, (*dims, self._row_count), shape), True
        return self._sorted_by_expert(received)

    def combine(self, rows: fx.Node) -> fx.Node:
        """Returns rows that holders have, as their sources do."""
        kind = _like(rows, *tensor_type(self._indices).shape, tensor_type(rows).shape[-1])
        return self.emit.call(return_rows, (self._sorted_by_source(rows), self._sizes), kind, axis=self._axis)


def dispatch_of(program: Program, region: Routed, limit: Limit | None) -> type[Dispatch]:
    """Returns the way that rows of a layer travel.

    Raises:
        PlanError: the plan asks for tokens to be gathered, and each would travel several times.
    """
    plan, holders = program.plan, program.mesh.holders
    if holders and plan.experts.dispatch == "dropless":
        return DroplessDispatch
    if plan.experts.pad_to_capacity:
        return PaddedDispatch
    if not holders:
        return Dispatch
    # Of tokens that tensor parallel ranks share and data ranks send each would travel for every one of the former.
    can_gather = not (plan.axes_for(Cuts.FEATURES) and plan.axes_for(Cuts.BATCH).keys() & holders.keys())
    if plan.experts.dispatch == "allgather" and not can_gather:
        raise PlanError(
            "each token would be gathered by every tensor parallel rank that has it",
            where="experts.dispatch='allgather'",
            remedy="give experts.dispatch='static', or spread experts over ranks of dp or of tp alone",
        )
    # Gathered, no more travels than in blocks that have a place or more for each token of a source.
    is_less = plan.experts.dispatch == "static" and can_gather and _bound(program, region, limit)[0] >= 1
    return AllGatherDispatch if is_less or plan.experts.dispatch == "allgather" else AllToAllDispatch


def expected_part(program: Program, region: Routed) -> Fraction | None:
    """Returns which part of others' tokens a rank is expected to need, where copies can pick them; None elsewhere.

    Between more than two ranks the plan has to ask for copies, since NCCL is faster otherwise
    (`fxpar.peer_memory.runtime.copy_transport`), and its collectives know no rows.
    """
    holders, transport = program.mesh.holders, program.plan.communication.collective_transport
    ranks = prod(holders.values())
    copies = transport == "copy" or (transport == "auto" and ranks == 2)
    if not copies or len(holders) != 1 or not holders.keys() <= program.plan.axes_for(Cuts.BATCH).keys():
        return None
    return needed_part(region.experts, region.experts // ranks, region.k)


def _why(part: Fraction) -> str:
    few, most = part < MOST_NEEDED, f"{float(MOST_NEEDED):.0%}"
    needs = f"a rank needs {float(part):.1%} of the tokens"
    return f"{needs}, less than {most}: it gets these alone" if few else f"{needs}, not less than {most}: it gets all"


def _bound(program: Program, region: Routed, limit: Limit | None) -> tuple[Fraction, str]:
    """Returns how many rows of a token a holder has places for at most, and which bound says so."""
    budget, ranks = program.plan.experts.recv_capacity_factor, prod(program.mesh.holders.values())
    local_experts = Fraction(region.experts, ranks)
    bounds = {"tokens": min(Fraction(region.k), local_experts)}
    if limit is not None:
        bounds["capacity"] = limit.part * local_experts
    if budget is not None:
        bounds["budget"] = region.k * as_written(budget) / ranks
    reason = min(bounds, key=bounds.__getitem__)  # of equal ones the first, which is exact
    return bounds[reason], reason


def _like(value: fx.Node, *shape: Size) -> TensorType:
    return TensorType(tensor_type(value).dtype, shape)


def _integers(*shape: Size) -> TensorType:
    return TensorType(torch.int64, shape)
