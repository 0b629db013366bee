"""Rows of one layer's experts where each holder gets all tokens of the others, and picks those of its experts.

Enters: the rows of a sort by expert (`routed_rows`). Leaves: each operation on them where the experts are. A helper of
`dispatch_experts`, which says what the terms mean.

A token that chooses K of E experts has as a rule several on each of a few ranks: in blocks of rows it would travel once
for each of them. Here it travels once, and so does what a holder makes of it: the sum over its experts. Where many
tokens have none on a rank, and ranks copy into each other's memory, those do not travel there (`picked_part`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import fx

from fxpar.experts.compiler.dispatch import StaticRows
from fxpar.experts.compiler.expert_capacity import share
from fxpar.experts.compiler.routed_rows import Routed
from fxpar.ir.program import Program, TensorType, tensor_type, update
from fxpar.layout.symbolic_sizes import Size, divide, product, simplify
from fxpar.mesh.axes import Cuts
from fxpar.ops.rank_dim import expand_over, sum_over
from fxpar.ops.selective_dispatch import expand_needed, needed_part, sum_needed

aten, fxp = torch.ops.aten, torch.ops.fxpar
# Of the tokens of others which part a rank may need, so that it is worth a kernel to leave out the rest: copy engines,
# which carry all of them, leave the multiprocessors to whatever else is computed.
MOST_NEEDED = Fraction(9, 10)


def can_gather(program: Program, holders: Mapping[str, int]) -> bool:
    """Not tokens that tensor parallel ranks share and data ranks send: each would travel for every one of them."""
    plan = program.plan
    return not (plan.axes_for(Cuts.FEATURES) and plan.axes_for(Cuts.BATCH).keys() & holders.keys())


def gathers(program: Program, region: Routed, holders: Mapping[str, int]) -> bool:
    """Whether no more travels where tokens are gathered than in blocks of rows.

    A block has as many places for each token of a source as it may need there, or as a budget or a capacity leaves it:
    it is no smaller than the tokens themselves where those are one or more.
    """
    plan = program.plan
    if not can_gather(program, holders):
        return False
    local_experts = Fraction(region.experts, prod(holders.values()))
    places, part, budget = min(Fraction(region.k), local_experts), share(program, region), plan.receive_budget
    if part is not None:
        places = min(places, part * local_experts)
    if budget is not None:
        places = min(places, Fraction(region.k) * Fraction(str(budget)) / prod(holders.values()))
    return places >= 1


def picked_part(program: Program, region: Routed, holders: Mapping[str, int]) -> Fraction | None:
    """Of the tokens of others which part a rank is expected to need, where copies can pick them; None elsewhere.

    Between more than two ranks the plan has to ask for copies, since NCCL is faster otherwise
    (`fxpar.runtime.mailboxes`), and its collectives know no rows.
    """
    plan, ranks = program.plan, prod(holders.values())
    copies = plan.exchange == "copy" or (plan.exchange == "auto" and ranks == 2)
    if not copies or len(holders) != 1 or not holders.keys() <= plan.axes_for(Cuts.BATCH).keys():
        return None
    return needed_part(region.experts, region.experts // ranks, region.k)


def _why(part: Fraction) -> str:
    few, most = part < MOST_NEEDED, f"{float(MOST_NEEDED):.0%}"
    needs = f"a rank needs {float(part):.1%} of the tokens"
    return f"{needs}, less than {most}: it gets these alone" if few else f"{needs}, not less than {most}: it gets all"


class GatheredRows(StaticRows):
    """One layer's experts, being rewritten.

    All that is computed of rows is computed by their holders, of the tokens of all sources; what they make of them is
    summed over the holders.
    """

    def __init__(self, program: Program, region: Routed, holders: Mapping[str, int]) -> None:
        part = picked_part(program, region, holders)
        self._is_needed = part is not None and part < MOST_NEEDED
        self._origin = "" if part is None else _why(part)
        super().__init__(program, region, holders)

    def _is_shared(self, program: Program) -> bool:
        """Tensor parallel ranks have all tokens of a data rank: each picks the rows of its experts."""
        return True

    def _plan(self, indices: fx.Node) -> None:
        """Which rows a holder picks."""
        emit, experts, integer = self.emit, self.region.experts, torch.int64
        self._own_tokens = self.cut.apart(indices, 1, fill=experts)
        self._chosen = self._joined(self._own_tokens)
        chosen = self._for_each(self._chosen)
        kind = tensor_type(chosen)
        self._tokens, self._token_node = kind.shape[-2], emit.size(chosen, len(self.here))
        # What is no number of an expert here goes to nobody; the number of none is beyond those of the last holder.
        numbers = emit.call(aten.sub.Tensor, (chosen, self._first()), TensorType(integer, kind.shape))
        rows = simplify(self._tokens * self.region.k)
        order, counts = emit.several(
            fxp.sort_by_expert.default,
            (numbers, self.own),
            (TensorType(integer, (*self.here, rows)), TensorType(integer, (*self.here, self.own))),
        )
        node, size = self._places_of_a_holder()
        kind = TensorType(integer, (*self.here, size))
        self._places = self._by_expert = emit.call(fxp.dispatch_indices.default, (order, counts, 1, node), kind)
        self._load = self._counts = counts
        if self.is_budgeted:
            kind = TensorType(integer, (*self.here, 1))
            self.excess = emit.call(fxp.block_excess.default, (counts, 1, node), kind)
            self._counts = self._with_places(counts, node, size)
        self._row_node = emit.size(self._by_expert, len(self.here))

    def _first(self) -> fx.Node:
        """The number of the first expert of each holder, [holders, 1, 1]."""
        emit, sizes = self.emit, tuple(self.holders.values())
        kind = TensorType(torch.int64, (self.blocks,))
        firsts = emit.call(aten.arange.start_step, (0, self.region.experts, self.own), kind)
        firsts = emit.view(firsts, (*sizes, 1, 1), (*sizes, 1, 1))
        for dim, axis in enumerate(self.holders):
            firsts = emit.over(firsts, dim, axis)
        return firsts

    def _places_of_a_holder(self) -> tuple[Any, Size]:
        """As many as the tokens of all sources may need, or as the budget or the capacity has, where that is less."""
        emit, k, limit = self.emit, self.region.k, self._limit
        most, budget = Fraction(min(k, self.own)), self._budget
        allowed = most if limit is None else min(most, limit.part * self.own)
        self.is_budgeted = budget is not None and k * budget < allowed * self.blocks
        if budget is not None and self.is_budgeted:
            return emit.part(self._token_node, self._tokens, k * budget / self.blocks)
        if limit is None or allowed == most:
            return emit.part(self._token_node, self._tokens, most)
        node, size = limit.capacity
        lead = tensor_type(limit.indices).shape[:-2]
        times = int(product(lead)) // prod(self.lead[i] for i in self.outer) * self.own
        return emit.number(operator.mul, node, times), simplify(size * times)

    def _with_places(self, counts: fx.Node, node: Any, size: Size) -> fx.Node:
        """Of the rows of each expert how many have a place."""
        shape = (*self.here, 1, self.own)
        one = self.emit.view(counts, shape, shape)
        kinds = TensorType(torch.int64, (*self.here, size)), TensorType(torch.int64, (*self.here, self.own))
        return self.emit.several(fxp.received_order.default, (one, node), kinds)[1]

    @property
    def load(self) -> fx.Node:
        """How many rows each of a holder's experts received."""
        return self._load

    def _rewrite(self, node: fx.Node) -> None:
        """Over what a holder has."""
        if node in self.region.takes:
            self._holder[node] = self._taken(node)
        else:
            self._holder[node] = self._computed(node, self._holder_operand, self._rows_here, self._many_here)

    def _sent(self, value: fx.Node) -> fx.Node:
        return self._holder[value]

    def _taken(self, node: fx.Node) -> fx.Node:
        value, _, k = node.args
        assert isinstance(value, fx.Node)
        all_tokens = self._tokens_of_all(self.cut.apart(value, self.region.k // int(k)))  # type: ignore[arg-type]
        kind = TensorType(tensor_type(node).dtype, (*self._rows_here, *tensor_type(node).shape[1:]))
        return self.emit.call(fxp.moe_permute.default, (all_tokens, self._places, k), kind)

    def _put(self, node: fx.Node) -> fx.Node:
        value, weights_or_order, *rest = node.args
        assert isinstance(value, fx.Node)
        assert isinstance(weights_or_order, fx.Node)
        emit, dtype, width = self.emit, tensor_type(node).dtype, tensor_type(node).shape[-1]
        if node.target is fxp.moe_combine.default:
            weights = self._of_all(self.cut.apart(weights_or_order, 1))
            args: tuple[Any, ...] = self._holder[value], weights, self._places, rest[-1]
            tokens = emit.call(node.target, args, TensorType(dtype, (*self.here, self._tokens, width)))
            return self.cut.together(self._summed(tokens))
        # Of each pair alone where they are not added up: a token's stand together.
        times = self.region.k // int(rest[-1])  # type: ignore[arg-type]
        count = self._token_node if times == 1 else emit.number(operator.mul, self._token_node, times)
        kind = TensorType(dtype, (*self.here, simplify(self._tokens * times), width))
        tokens = emit.call(node.target, (self._holder[value], self._places, count, rest[-1]), kind)
        if times == 1:
            return self.cut.together(self._summed(tokens))
        wide = width * times
        tokens = emit.view(tokens, (*self.here, -1, wide), (*self.here, self._tokens, wide))
        return emit.view(self.cut.together(self._summed(tokens)), (-1, width), tensor_type(node).shape)

    def _tokens_of_all(self, value: fx.Node) -> fx.Node:
        """[lead, n, f] → [here, sources * n, f]: those that a holder needs, or all. Of several rows a token has all."""
        if not self._is_needed:
            return self._told(self._of_all(value))
        emit, (*_, rows, width) = self.emit, tensor_type(value).shape
        token_count = tensor_type(self._own_tokens).shape[-2]
        times = divide(rows, token_count)
        assert times is not None
        wide = simplify(times * width)
        one = self._joined(emit.view(value, (*self.lead, -1, wide), (*self.lead, token_count, wide)))
        ((place, (axis, ranks)),) = enumerate(self.holders.items(), len(self.outer))
        shape = tensor_type(one).shape
        kind = TensorType(tensor_type(one).dtype, (*shape[:place], ranks, *shape[place:]))
        received = self._told(emit.call(expand_needed, (one, self._chosen, self.own), kind, axis=axis))
        return emit.view(received, (*self.here, -1, width), (*self.here, simplify(rows * self.sources), width))

    def _told(self, node: fx.Node) -> fx.Node:
        """The node, with the reason why its tokens travel as they do where there are two ways."""
        return update(node, origin=self._origin) if self._origin else node

    def _of_all(self, value: fx.Node) -> fx.Node:
        """[lead, n, f] → [here, sources * n, f]: what each source has, for each holder."""
        return self._for_each(self._joined(value))

    def _joined(self, value: fx.Node) -> fx.Node:
        """[lead, n, f] → [outer, sources * n, f]."""
        emit, count = self.emit, len(self.lead)
        permuted = emit.permute(value, [*self.outer, *self.merged, count, count + 1])
        *_, rows, width = tensor_type(permuted).shape
        outer = tuple(self.lead[i] for i in self.outer)
        return emit.view(permuted, (*outer, -1, width), (*outer, simplify(rows * self.sources), width))

    def _for_each(self, tokens: fx.Node) -> fx.Node:
        """[outer, n, f] → [here, n, f]: the same for each holder."""
        for place, (axis, ranks) in enumerate(self.holders.items(), len(self.outer)):
            shape = tensor_type(tokens).shape
            kind = TensorType(tensor_type(tokens).dtype, (*shape[:place], ranks, *shape[place:]))
            tokens = self.emit.call(expand_over, (tokens, place), kind, axis=axis)
        return tokens

    def _summed(self, value: fx.Node) -> fx.Node:
        """[here, sources * n, f] → [lead, n, f]: the sums over the holders, of each source where it is."""
        emit, outer, dtype = self.emit, tuple(self.lead[i] for i in self.outer), tensor_type(value).dtype
        for place, axis in reversed(list(enumerate(self.holders, len(outer)))):
            shape = tensor_type(value).shape
            kind = TensorType(dtype, (*shape[:place], *shape[place + 1 :]))
            if self._is_needed:
                value = emit.call(sum_needed, (value, self._chosen, self.own), kind, axis=axis)
            else:
                value = emit.call(sum_over, (value, place), kind, axis=axis)
            self._told(value)
        width = tensor_type(value).shape[-1]
        merged = tuple(self.lead[i] for i in self.merged)
        token_count = tensor_type(self._own_tokens).shape[-2]
        sums = emit.view(value, (*outer, *merged, -1, width), (*outer, *merged, token_count, width))
        place_of = {dim: i for i, dim in enumerate((*self.outer, *self.merged))}
        count = len(self.lead)
        sums = emit.permute(sums, [*(place_of[i] for i in range(count)), count, count + 1])
        for index in self.merged:
            sums = emit.over(sums, index, self.axes[index])
        return sums
