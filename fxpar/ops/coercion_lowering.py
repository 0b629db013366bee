"""What coercions do on ranks: shapes, what they communicate, and what a rank runs in their place.

Enters: nodes and crossings of coercions, with their placements. Leaves: for `fxpar.ops.coercions` the functions that
its records name. What a rank holds before and after is in the layouts of operand and node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.operators import shared_fraction
from fxpar.ir.program import TensorType, note, operands, output_types
from fxpar.layout.layout import Placement
from fxpar.layout.symbolic_sizes import Size, product, simplify
from fxpar.ops import factored, peer_memory, process_group
from fxpar.ops.collectives import Group, arrived, start_sum
from fxpar.ops.factored import SharedSegment, restored, summand
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import CollectiveSite, LoweredCall, OnShapes, Sent

# ---------------------------------------------------------------------- shapes and traffic


def shape(call: OnShapes) -> Tensor:
    """The layouts before and after decide what a rank holds of the value, which stays the same."""
    before, after = output_types(operands(call.node)[0])[0], output_types(call.node)[0]
    if before != after:
        raise ValueError(f"a coercion of {before} cannot give {after}")
    return call.outputs[0]


def traffic(crossing: CollectiveSite) -> Iterator[Sent]:
    """What the record sends. Each collective takes the whole value, with the padding of both cuts."""
    target, (before,), (after,) = crossing.call.target, crossing.before, crossing.after
    forward, backward = target.sends
    cuts = [p for p in (before, after) if p.is_padded]
    kind = crossing.call.outputs[0]
    if forward:
        yield Sent(forward, _phase(crossing, "forward"), _bytes(kind, after, cuts))
    if backward and crossing.reached[0]:
        backward_kind = crossing.stored[0] if crossing.of_parameters and target.sums_gradients else kind
        yield Sent(backward, _phase(crossing, "backward"), _bytes(backward_kind, after, cuts))


def exchange_traffic(crossing: CollectiveSite) -> Iterator[Sent]:
    """One dimension is cut anew by way of the whole, each way from the other cut."""
    (before,), (after,) = crossing.before, crossing.after
    if before.dim != after.dim:
        yield from traffic(crossing)
        return
    kind = crossing.call.outputs[0]
    for phase, cut in (("forward", before), ("backward", after)):
        if phase == "forward" or crossing.reached[0]:
            padded = [cut] if cut.is_padded else []
            yield Sent("all_gather", _phase(crossing, phase), _bytes(kind, after, padded))


def bucket_traffic(crossing: CollectiveSite) -> Iterator[Sent]:
    """All gradients at once; it leaves out what the loss does not reach."""
    kinds = crossing.stored if crossing.of_parameters else crossing.call.outputs
    entries = zip(kinds, crossing.after, crossing.reached, strict=True)
    if any(crossing.reached):
        size = simplify(sum(_bytes(kind, placement, []) for kind, placement, is_reached in entries if is_reached))
        yield Sent("all_reduce", _phase(crossing, "backward"), size)


def coalesced_traffic(crossing: CollectiveSite) -> Iterator[Sent]:
    """All gradients at once."""
    pairs = zip(crossing.call.outputs, crossing.after, strict=True)
    yield Sent("all_reduce", "forward", simplify(sum(_bytes(kind, placement, []) for kind, placement in pairs)))


def _phase(crossing: CollectiveSite, phase: str) -> str:
    return "parameter" if crossing.of_parameters else phase


def _bytes(kind: TensorType, placement: Placement, cuts: Sequence[Placement]) -> Size:
    """Of a whole value with the padding of its cuts; of one of which ranks share a part, of that."""
    shape = list(kind.shape)
    for cut in cuts:
        shape[cut.dim] = cut.pieces[0].padded
    size = simplify(product(shape) * kind.dtype.itemsize)
    if not placement.is_shared:
        return size
    part, total = shared_fraction(placement)
    return int(size) * part // total


# ---------------------------------------------------------------------- lowering


def as_it_is(node: fx.Node, rank: OnRank) -> LoweredCall:
    """The value itself."""
    return LoweredCall(process_group.same, (node.args[0],))


def first_only(node: fx.Node, rank: OnRank) -> LoweredCall:
    """The value on the first rank, zeros on the others."""
    return LoweredCall(process_group.first_only, (node.args[0], rank.ranks(node).index))


def lower_sum(node: fx.Node, rank: OnRank) -> LoweredCall:
    """An all-reduce."""
    ranks = rank.ranks(node)
    if ranks.copies is not None and note(node).one_shot:
        return LoweredCall(peer_memory.sum_in_one_shot, (node.args[0], *ranks.copies))
    if ranks.copies is not None:
        return LoweredCall(
            peer_memory.start_sum,
            (node.args[0], *ranks.copies),
            finish=peer_memory.summed,
            rest=ranks.copies,
        )
    return LoweredCall(
        process_group.start_sum,
        (node.args[0], ranks.group, ranks.size),
        finish=process_group.summed,
    )


def lower_gather(node: fx.Node, rank: OnRank) -> LoweredCall:
    """An all-gather of the blocks, put in their places."""
    ranks, (source, _) = rank.ranks(node), _sides(node, rank)
    if ranks.copies is not None:
        rest = (*rank.cut(source), *ranks.copies)
        return LoweredCall(
            peer_memory.start_gather,
            (node.args[0], *ranks.copies),
            finish=peer_memory.gathered,
            rest=rest,
        )
    start = (node.args[0], ranks.group, ranks.size)
    return LoweredCall(process_group.start_gather, start, finish=process_group.gathered, rest=rank.cut(source))


def lower_scatter(node: fx.Node, rank: OnRank) -> LoweredCall:
    """A reduce-scatter of the blocks."""
    ranks, (_, result) = rank.ranks(node), _sides(node, rank)
    if ranks.copies is not None:
        sends = (node.args[0], *rank.cut(result), ranks.size, *ranks.copies)
        return LoweredCall(peer_memory.start_scatter, sends, finish=peer_memory.scattered, rest=ranks.copies)
    start = (node.args[0], *rank.cut(result), ranks.group, ranks.size)
    return LoweredCall(process_group.start_scatter, start, finish=process_group.scattered)


def lower_r_to_s(node: fx.Node, rank: OnRank) -> LoweredCall:
    """The rank's block, or its part of a block that others share."""
    ranks, (_, result) = rank.ranks(node), _sides(node, rank)
    if result.is_shared:
        return lower_split_shared(node, rank)
    return LoweredCall(process_group.take, (node.args[0], *rank.cut(result), ranks.group, ranks.size, ranks.index))


def lower_s_to_p(node: fx.Node, rank: OnRank) -> LoweredCall:
    """The rank's block in its place among zeros."""
    ranks, (source, _) = rank.ranks(node), _sides(node, rank)
    return LoweredCall(process_group.pad, (node.args[0], *rank.cut(source), ranks.group, ranks.size, ranks.index))


def _sides(node: fx.Node, rank: OnRank) -> tuple[Placement, Placement]:
    return rank.placed(operands(node)[0], node), rank.placed(node, node)


def lower_split_shared(node: fx.Node, rank: OnRank) -> LoweredCall:
    """The rank's part of a block, or of the whole, that others share."""
    ranks, (source, result) = rank.ranks(node), _sides(node, rank)
    pieces = rank.shared(source, result, ranks.size)
    return LoweredCall(factored.split_shared, (node.args[0], result.dim, pieces, ranks.index))


def lower_all_to_all(node: fx.Node, rank: OnRank) -> LoweredCall:
    """An all-to-all; of one dimension that is cut anew, an all-gather."""
    ranks, (source, result) = rank.ranks(node), _sides(node, rank)
    before, after, where = rank.cut(source), rank.cut(result), (ranks.group, ranks.size)
    if source.dim == result.dim:
        rest = (before, after, *where, ranks.index)
        return LoweredCall(
            process_group.start_gather,
            (node.args[0], *where),
            finish=process_group.recut,
            rest=rest,
        )
    if ranks.copies is not None:
        start = (node.args[0], *after, ranks.size, *ranks.copies)
        return LoweredCall(
            peer_memory.start_exchange,
            start,
            finish=peer_memory.exchanged,
            rest=(*before, *ranks.copies),
        )
    return LoweredCall(
        process_group.start_exchange,
        (node.args[0], *after, *where),
        finish=process_group.exchanged,
        rest=before,
    )


def lower_sum_gradients(node: fx.Node, rank: OnRank) -> LoweredCall:
    """All values as they are."""
    return LoweredCall(sum_gradients, (list(node.args),))


def lower_pad_shared(node: fx.Node, rank: OnRank) -> LoweredCall:
    """The rank's part in its place in a block that others share."""
    ranks, (source, result) = rank.ranks(node), _sides(node, rank)
    pieces = rank.shared(result.plain, source.plain, ranks.size)
    return LoweredCall(factored.pad_shared, (node.args[0], source.dim, pieces, ranks.index))


def lower_reduce_from_shared(node: fx.Node, rank: OnRank) -> LoweredCall:
    """An all-reduce of what ranks share, each block in its place."""
    ranks, (source, _) = rank.ranks(node), _sides(node, rank)
    cut = source.dim, rank.shared(source.plain, source.plain, ranks.size)
    start, rest = (*cut, ranks.group, ranks.size, ranks.index), (*cut, ranks.size, ranks.index)
    x = node.args[0]
    return LoweredCall(
        factored.start_reduce_from_shared, (x, *start), finish=factored.reduce_from_shared, rest=(x, *rest)
    )


def lower_coalesced(node: fx.Node, rank: OnRank) -> LoweredCall:
    """One all-reduce of all values, shared blocks in their places."""
    ranks, cuts = rank.ranks(node), list[Held]()
    for source in operands(node):
        placement = rank.placed(source, node)
        pieces = rank.shared(placement.plain, placement.plain, ranks.size) if placement.is_shard else []
        cuts.append((placement.dim, pieces) if placement.is_shard else None)
    args = list(node.args), cuts
    rest = (*args, ranks.size, ranks.index)
    return LoweredCall(
        start_sums,
        (*args, ranks.group, ranks.size, ranks.index),
        finish=sums,
        rest=rest,
    )


# Dimension and pieces of a weight of which ranks share blocks, as tuples of `SharedSegment`'s fields; None of one that
# every rank holds whole.
Held = tuple[int, Sequence[Sequence[Any]]] | None


def sum_gradients(weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`fxpar.sum_gradients`: the values stay the same."""
    return tuple(weights)


def start_sums(gradients: Sequence[Tensor], cuts: Sequence[Held], group: str, size: int, index: Tensor) -> Tensor:
    """All sums in one flat tensor, on its way."""
    return start_sum(torch.cat([part.reshape(-1) for part in _parts(gradients, cuts, size, index)]), Group(group, size))


def sums(
    started: Tensor, gradients: Sequence[Tensor], cuts: Sequence[Held], size: int, index: Tensor
) -> tuple[Tensor, ...]:
    """Of `start_sums`."""
    parts = list(_parts(gradients, cuts, size, index))
    totals = arrived(started).split([part.numel() for part in parts])
    summed = []
    for gradient, item, part, flat in zip(gradients, cuts, parts, totals, strict=True):
        total = flat.view(part.shape)
        summed.append(total if item is None else restored(gradient, total, *_pieces(item), size, index))
    return tuple(summed)


def _parts(gradients: Sequence[Tensor], cuts: Sequence[Held], size: int, index: Tensor) -> Iterator[Tensor]:
    """What is summed of each."""
    for gradient, item in zip(gradients, cuts, strict=True):
        yield gradient if item is None else summand(gradient, *_pieces(item), size, index)


def _pieces(item: tuple[int, Sequence[Sequence[Any]]]) -> tuple[int, list[SharedSegment]]:
    return item[0], [SharedSegment(*piece) for piece in item[1]]
