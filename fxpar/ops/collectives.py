"""The coercions: every conversion between two placements on one axis (SPEC section 2.1).

Enters: nothing. Leaves: a record for each row of the table with the collective it costs forward and backward, for the
rows of a factored axis, whose ranks share blocks (f and the slice on its inner factor), and for the bucket of many f;
what each is in the backward; and which row converts one placement to another. The placement a coercion converts *to* is
the one in the node's note.

Where the ranks of an axis share blocks (`kv / c`, `!kv`) the axis is factored: n/c blocks over the outer factor, and
on the inner one the blocks are invariant (reduced) or replicated. Its coercions are those of the inner factor:

================  ========================  ==========================================  ===========
from → to         forward                   backward                                    name
================  ========================  ==========================================  ===========
S / c; I → S / c  identity                  all-reduce of the shared blocks' gradients  `copy_to_shared`
S / c → S / d     each rank keeps its part  zero-pad (partial)                          `split_shared`
================  ========================  ==========================================  ===========
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.grad_flow import owner_of
from fxpar.ir.operators import dual, is_finer, pending, shared_fraction
from fxpar.ir.program import TensorType, changed, note, operands, output_layouts, output_types
from fxpar.ir.properties import Property
from fxpar.ir.stages import is_received
from fxpar.ir.step import ONCE, PARAMETER
from fxpar.layout.layout import Layout, Placement
from fxpar.layout.symbolic_sizes import Size, product, simplify
from fxpar.ops import peer_copies, process_group
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import CollectiveSite, Gradients, LoweredCall, OnShapes, Operator, Reverse, Sent
from fxpar.ops.process_group import SharedSegment, arrived, restored, start_sum, summand

# ---------------------------------------------------------------------- derivatives


def _conjugated(reverse: Reverse) -> Gradients:
    """Coerces the gradient from the dual of the result to the dual of the operand (SPEC section 2.1)."""
    node, (gradient,) = reverse.node, reverse.tangents
    assert gradient is not None
    target = CONJUGATE[node.target]
    if target is None:
        return (gradient,)
    (source,) = operands(node)
    (kind,), layout = output_types(source), dual_layout(output_layouts(source)[0])
    kind = TensorType(output_types(gradient)[0].dtype, kind.shape)  # sums of half-precision gradients are wider
    # Data ranks that share out an optimizer's state alone add up whole gradients until the step's last backward.
    waits = target in (all_reduce, reduce_from_shared) and of_parameter(node)
    waits |= note(node).shard == "optimizer"
    place = changed(note(node), phase=PARAMETER) if waits else note(node)
    args, kwargs, name = (gradient,), {"axis": node.kwargs["axis"]}, f"{gradient.name}_{target.__name__}"
    converted = reverse.emit.call(target, args, kwargs, kind, place, layouts=[layout], name=name)
    if note(node).shard == "gradients":
        gradient.append(converted)  # and not behind all others, which would keep all whole gradients until then
    return (converted,)


def of_parameter(node: fx.Node) -> bool:
    """Returns whether a node sums gradients of a parameter itself, in the main type, and of its whole not in each
    microbatch."""
    if note(node).shard:
        return operands(node)[0].op == "placeholder"
    is_sum = isinstance(node.target, Operator) and node.target.sums_gradients
    owners = [owner_of(source) for source in operands(node)] if is_sum else []
    return is_sum and all(owner.op == "placeholder" and not is_received(owner) for owner in owners)


def dual_layout(layout: Layout) -> Layout:
    """Returns how the gradient of a value of that layout is held."""
    return Layout(tuple((axis, dual(placement)) for axis, placement in layout))


def _together(reverse: Reverse) -> Gradients:
    """Reduces the gradients that there are, all at once."""
    node, sources = reverse.node, operands(reverse.node)
    present = [(i, gradient) for i, gradient in enumerate(reverse.tangents) if gradient is not None]
    kinds = tuple(output_types(gradient)[0] for _, gradient in present)
    layouts = [dual_layout(output_layouts(sources[i])[0]) for i, _ in present]
    gradients, axis = [gradient for _, gradient in present], node.kwargs["axis"]
    place = changed(note(node), phase=PARAMETER) if of_parameter(node) else note(node)
    name = f"{axis}_sums".replace("-", "_")
    sums = reverse.emit.call(all_reduce_coalesced, gradients, {"axis": axis}, kinds, place, layouts=layouts, name=name)
    summed: list[fx.Node | None] = [None] * len(sources)
    for position, (i, _) in enumerate(present):
        args, layout = (sums, position), [layouts[position]]
        summed[i] = reverse.emit.call(operator.getitem, args, {}, kinds[position], place, layouts=layout)
    return summed


# ---------------------------------------------------------------------- shapes and traffic


def shape(call: OnShapes) -> Tensor:
    """Returns what a rank holds of the value, as the layouts before and after decide; the value stays the same."""
    before, after = output_types(operands(call.node)[0])[0], output_types(call.node)[0]
    if before != after:
        raise ValueError(f"a coercion of {before} cannot give {after}")
    return call.outputs[0]


def traffic(crossing: CollectiveSite) -> Iterator[Sent]:
    """Yields what the record sends. Each collective takes the whole value, with the padding of both cuts."""
    target, (before,), (after,) = crossing.call.target, crossing.before, crossing.after
    forward, backward = target.sends
    cuts = [p for p in (before, after) if p.is_padded]
    kind = crossing.call.outputs[0]
    if forward:
        yield Sent(forward, _phase(crossing, "forward"), _bytes(kind, after, cuts))
    if backward and crossing.reached[0]:
        is_main = crossing.of_parameters and (target.sums_gradients or crossing.shard)
        backward_kind = crossing.stored[0] if is_main else kind
        yield Sent(backward, _phase(crossing, "backward"), _bytes(backward_kind, after, cuts))


def exchange_traffic(crossing: CollectiveSite) -> Iterator[Sent]:
    """Yields what an exchange sends; one dimension is cut anew by way of the whole, each way from the other cut."""
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
    """Yields one all-reduce of all gradients; it leaves out what the loss does not reach."""
    kinds = crossing.stored if crossing.of_parameters else crossing.call.outputs
    entries = zip(kinds, crossing.after, crossing.reached, strict=True)
    if any(crossing.reached):
        size = simplify(sum(_bytes(kind, placement, []) for kind, placement, is_reached in entries if is_reached))
        yield Sent("all_reduce", _phase(crossing, "backward"), size)


def coalesced_traffic(crossing: CollectiveSite) -> Iterator[Sent]:
    """Yields one all-reduce of all gradients."""
    pairs = zip(crossing.call.outputs, crossing.after, strict=True)
    yield Sent("all_reduce", "forward", simplify(sum(_bytes(kind, placement, []) for kind, placement in pairs)))


def _phase(crossing: CollectiveSite, phase: str) -> str:
    if crossing.shard in ("optimizer", "gradients") and phase == "forward":
        return ONCE
    is_late = crossing.call.target.sums_gradients or crossing.shard == "optimizer"
    return PARAMETER if crossing.of_parameters and is_late else phase


def _bytes(kind: TensorType, placement: Placement, cuts: Sequence[Placement]) -> Size:
    """Returns the bytes of a whole value with the padding of its cuts; where ranks share a part of it, of that part."""
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
    """Lowers a coercion to the value itself."""
    return LoweredCall(process_group.same, (node.args[0],))


def first_only(node: fx.Node, rank: OnRank) -> LoweredCall:
    """Lowers a coercion that keeps the value on the first rank and puts zeros on the others."""
    return LoweredCall(process_group.first_only, (node.args[0], rank.ranks(node).index))


def lower_sum(node: fx.Node, rank: OnRank) -> LoweredCall:
    """Lowers a sum to an all-reduce."""
    ranks = rank.ranks(node)
    if ranks.copies is not None and note(node).one_shot:
        return LoweredCall(peer_copies.sum_in_one_shot, (node.args[0], *ranks.copies))
    if ranks.copies is not None:
        return LoweredCall(
            peer_copies.start_sum, (node.args[0], *ranks.copies), finish=peer_copies.summed, rest=ranks.copies
        )
    return LoweredCall(process_group.start_sum, (node.args[0], ranks.group), finish=process_group.arrived)


def lower_gather(node: fx.Node, rank: OnRank) -> LoweredCall:
    """Lowers a gather to an all-gather, whose blocks are then put in their places."""
    ranks, (source, _) = rank.ranks(node), _sides(node, rank)
    if ranks.copies is not None:
        rest = (*rank.cut(source), *ranks.copies)
        return LoweredCall(
            peer_copies.start_gather, (node.args[0], *ranks.copies), finish=peer_copies.gathered, rest=rest
        )
    start = (node.args[0], ranks.group, ranks.size)
    return LoweredCall(process_group.start_gather, start, finish=process_group.put_in_places, rest=rank.cut(source))


def lower_scatter(node: fx.Node, rank: OnRank) -> LoweredCall:
    """Lowers a scatter to a reduce-scatter of the blocks."""
    ranks, (_, result) = rank.ranks(node), _sides(node, rank)
    if ranks.copies is not None:
        cut = rank.cut(result)
        sends, rest = (node.args[0], *cut, ranks.size, *ranks.copies), (*cut, *ranks.copies)
        return LoweredCall(peer_copies.start_scatter, sends, finish=peer_copies.scattered, rest=rest)
    start = (node.args[0], *rank.cut(result), ranks.group, ranks.size)
    return LoweredCall(process_group.start_scatter, start, finish=process_group.scattered)


def lower_r_to_s(node: fx.Node, rank: OnRank) -> LoweredCall:
    """Lowers a cut: takes the rank's block, or its part of a block that others share."""
    ranks, (_, result) = rank.ranks(node), _sides(node, rank)
    if result.is_shared:
        return lower_split_shared(node, rank)
    return LoweredCall(process_group.take, (node.args[0], *rank.cut(result), ranks.size, ranks.index))


def lower_s_to_p(node: fx.Node, rank: OnRank) -> LoweredCall:
    """Lowers padding: puts the rank's block in its place among zeros."""
    ranks, (source, _) = rank.ranks(node), _sides(node, rank)
    return LoweredCall(process_group.pad, (node.args[0], *rank.cut(source), ranks.size, ranks.index))


def _sides(node: fx.Node, rank: OnRank) -> tuple[Placement, Placement]:
    return rank.placed(operands(node)[0], node), rank.placed(node, node)


def lower_split_shared(node: fx.Node, rank: OnRank) -> LoweredCall:
    """Lowers a split: takes the rank's part of a block, or of the whole, that others share."""
    ranks, (source, result) = rank.ranks(node), _sides(node, rank)
    pieces = rank.shared(source, result, ranks.size)
    return LoweredCall(process_group.split_shared, (node.args[0], result.dim, pieces, ranks.index))


def lower_all_to_all(node: fx.Node, rank: OnRank) -> LoweredCall:
    """Lowers an all-to-all; where one dimension is cut anew, to an all-gather."""
    ranks, (source, result) = rank.ranks(node), _sides(node, rank)
    before, after, where = rank.cut(source), rank.cut(result), (ranks.group, ranks.size)
    if source.dim == result.dim:
        rest = (before, after, ranks.size, ranks.index)
        return LoweredCall(process_group.start_gather, (node.args[0], *where), finish=process_group.recut, rest=rest)
    if ranks.copies is not None:
        start = (node.args[0], *after, ranks.size, *ranks.copies)
        return LoweredCall(
            peer_copies.start_exchange, start, finish=peer_copies.exchanged, rest=(*before, *ranks.copies)
        )
    return LoweredCall(
        process_group.start_exchange, (node.args[0], *after, *where), finish=process_group.put_in_places, rest=before
    )


def lower_sum_gradients(node: fx.Node, rank: OnRank) -> LoweredCall:
    """Lowers a sum of gradients: passes all values on as they are."""
    return LoweredCall(unchanged_weights, (list(node.args),))


def lower_pad_shared(node: fx.Node, rank: OnRank) -> LoweredCall:
    """Lowers padding: puts the rank's part in its place in a block that others share."""
    ranks, (source, result) = rank.ranks(node), _sides(node, rank)
    pieces = rank.shared(result.plain, source.plain, ranks.size)
    return LoweredCall(process_group.pad_shared, (node.args[0], source.dim, pieces, ranks.index))


def lower_reduce_from_shared(node: fx.Node, rank: OnRank) -> LoweredCall:
    """Lowers a sum to an all-reduce of what ranks share, each block in its place."""
    ranks, (source, _) = rank.ranks(node), _sides(node, rank)
    cut = source.dim, rank.shared(source.plain, source.plain, ranks.size)
    start, rest = (*cut, ranks.group, ranks.size, ranks.index), (*cut, ranks.size, ranks.index)
    x = node.args[0]
    return LoweredCall(
        process_group.start_reduce_from_shared, (x, *start), finish=process_group.reduce_from_shared, rest=(x, *rest)
    )


def lower_coalesced(node: fx.Node, rank: OnRank) -> LoweredCall:
    """Lowers several sums to one all-reduce of all values, shared blocks in their places."""
    ranks, cuts = rank.ranks(node), list[Held]()
    for source in operands(node):
        placement = rank.placed(source, node)
        pieces = rank.shared(placement.plain, placement.plain, ranks.size) if placement.is_shard else []
        cuts.append((placement.dim, pieces) if placement.is_shard else None)
    args = list(node.args), cuts
    rest = (*args, ranks.size, ranks.index)
    return LoweredCall(start_sums, (*args, ranks.group, ranks.size, ranks.index), finish=sums, rest=rest)


# Dimension and pieces of a weight of which ranks share blocks, as tuples of `SharedSegment`'s fields; None of one that
# every rank holds whole.
Held = tuple[int, Sequence[Sequence[Any]]] | None


def unchanged_weights(weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Computes `fxpar.sum_gradients`: the values stay the same."""
    return tuple(weights)


def start_sums(gradients: Sequence[Tensor], cuts: Sequence[Held], group: str, size: int, index: Tensor) -> Tensor:
    """Starts all sums as one flat tensor, which it returns on its way."""
    return start_sum(torch.cat([part.reshape(-1) for part in _parts(gradients, cuts, size, index)]), group)


def sums(
    started: Tensor, gradients: Sequence[Tensor], cuts: Sequence[Held], size: int, index: Tensor
) -> tuple[Tensor, ...]:
    """Returns what `start_sums` started, when it is there, with each sum in its gradient's place."""
    parts = list(_parts(gradients, cuts, size, index))
    totals = arrived(started).split([part.numel() for part in parts])
    summed = []
    for gradient, item, part, flat in zip(gradients, cuts, parts, totals, strict=True):
        total = flat.view(part.shape)
        summed.append(total if item is None else restored(gradient, total, *_pieces(item), size, index))
    return tuple(summed)


def _parts(gradients: Sequence[Tensor], cuts: Sequence[Held], size: int, index: Tensor) -> Iterator[Tensor]:
    """Yields what is summed of each gradient."""
    for gradient, item in zip(gradients, cuts, strict=True):
        yield gradient if item is None else summand(gradient, *_pieces(item), size, index)


def _pieces(item: tuple[int, Sequence[Sequence[Any]]]) -> tuple[int, list[SharedSegment]]:
    return item[0], [SharedSegment(*piece) for piece in item[1]]


# ---------------------------------------------------------------------- records

_record = partial(Operator, shape=shape, traffic=traffic, stage=Property.COLLECTIVES, derivative=_conjugated)


@partial(_record, kinds=("I", "R"), sends=("", "all_reduce"), lower=as_it_is, sums_gradients=True)
def copy_to(x: Any, *, axis: str) -> Any:
    """Coerces I → R (Megatron's f): identity; all-reduce of the gradient."""


@partial(_record, kinds=("P", "I"), sends=("all_reduce", ""), lower=lower_sum, copies=True)
def reduce_from(x: Any, *, axis: str) -> Any:
    """Coerces P → I (Megatron's g): all-reduce; identity on the gradient."""


@partial(_record, kinds=("S", "R"), sends=("all_gather", "reduce_scatter"), lower=lower_gather, copies=True)
def all_gather(x: Any, *, axis: str) -> Any:
    """Coerces S → R (sequence-parallel gather): all-gather; reduce-scatter of the gradient."""


@partial(_record, kinds=("P", "S"), sends=("reduce_scatter", "all_gather"), lower=lower_scatter, copies=True)
def reduce_scatter(x: Any, *, axis: str) -> Any:
    """Coerces P → S (sequence-parallel scatter-reduce): reduce-scatter; all-gather of the gradient."""


@partial(_record, kinds=("I", "S"), sends=("", "all_gather"), lower=lower_r_to_s)
def i_to_s(x: Any, *, axis: str) -> Any:
    """Coerces I → S: each rank keeps its block; all-gather of the gradient."""


@partial(_record, kinds=("S", "I"), sends=("all_gather", ""), lower=lower_gather, copies=True)
def s_to_i(x: Any, *, axis: str) -> Any:
    """Coerces S → I: all-gather; each rank keeps its block of the gradient."""


@partial(_record, kinds=("R", "S"), lower=lower_r_to_s)
def r_to_s(x: Any, *, axis: str) -> Any:
    """Coerces R → S: each rank keeps its block; the gradient is padded with zeros, a summand."""


@partial(_record, kinds=("P", "R"), sends=("all_reduce", "all_reduce"), lower=lower_sum, copies=True)
def all_reduce(x: Any, *, axis: str) -> Any:
    """Coerces P → R: all-reduce, forward and backward."""


@partial(_record, kinds=("R", "I"), lower=as_it_is)
def r_to_i(x: Any, *, axis: str) -> Any:
    """Coerces R → I: identity; the gradient is kept on rank 0 and zero elsewhere."""


@partial(_record, kinds=("I", "P"), lower=first_only)
def i_to_p(x: Any, *, axis: str) -> Any:
    """Coerces I → P: the value is kept on rank 0 and zero elsewhere; identity on the gradient."""


@partial(_record, kinds=("R", "P"), lower=first_only)
def r_to_p(x: Any, *, axis: str) -> Any:
    """Coerces R → P: the value is kept on rank 0 and zero elsewhere, forward and backward."""


@partial(
    _record,
    kinds=("S", "S"),
    sends=("all_to_all", "all_to_all"),
    traffic=exchange_traffic,
    lower=lower_all_to_all,
    copies=True,
)
def all_to_all(x: Any, *, axis: str) -> Any:
    """Coerces S(i) → S(j): all-to-all, forward and backward."""


@partial(_record, kinds=("S", "S"), sends=("", "all_reduce"), lower=as_it_is, sums_gradients=True)
def copy_to_shared(x: Any, *, axis: str) -> Any:
    """Coerces S; I → S (f among ranks that share a block): identity; all-reduce of the gradients of what is shared."""


@partial(_record, kinds=("S", "S"), lower=lower_split_shared)
def split_shared(x: Any, *, axis: str) -> Any:
    """Coerces S / c → S: each of the ranks that share a block keeps a part; the gradient is padded with zeros."""


# Of gradients alone: the conjugates of coercions that have no conjugate among those above.


@partial(_record, kinds=("S", "P"), lower=lower_s_to_p)
def s_to_p(x: Any, *, axis: str) -> Any:
    """Coerces S → P: each rank's block in its place, zeros elsewhere; the conjugate of `r_to_s`."""


@partial(_record, kinds=("S", "S"), lower=lower_pad_shared)
def pad_shared(x: Any, *, axis: str) -> Any:
    """Coerces S → S / c; P: a rank's part in its place in a shared block, else zeros; conjugate of `split_shared`."""


@partial(_record, kinds=("S", "S"), sends=("all_reduce", ""), lower=lower_reduce_from_shared)
def reduce_from_shared(x: Any, *, axis: str) -> Any:
    """Coerces S / c; P → S / c: all-reduce among ranks that share a block; the conjugate of `copy_to_shared`."""


@partial(_record, shape=lambda call: list(call.args), traffic=coalesced_traffic, lower=lower_coalesced)
def all_reduce_coalesced(*gradients: Any, axis: str) -> Any:
    """Sums several gradients, each as `all_reduce` or `reduce_from_shared` would, in one all-reduce of all."""


@partial(
    _record,
    shape=lambda call: list(call.args),
    traffic=bucket_traffic,
    lower=lower_sum_gradients,
    sums_gradients=True,
    derivative=_together,
)
def sum_gradients(*weights: Any, axis: str) -> Any:
    """Coerces several parameters as `copy_to` or `copy_to_shared` does each: identity; one all-reduce of all gradients.

    A weight may also be what another such sum, over other axes, gives of a parameter.
    """


# What a coercion is in the backward, where I and R are one; None of those that leave the value as it is.
IN_BACKWARD: Mapping[Any, Operator | None] = {
    **dict.fromkeys((copy_to, r_to_i, copy_to_shared)),
    reduce_from: all_reduce,
    s_to_i: all_gather,
    i_to_s: r_to_s,
    i_to_p: r_to_p,
}
# What a gradient goes through where the value goes through a coercion; None where it stays as it is.
CONJUGATE: Mapping[Any, Operator | None] = {
    copy_to: all_reduce,
    reduce_from: None,
    all_gather: reduce_scatter,
    reduce_scatter: all_gather,
    i_to_s: all_gather,
    s_to_i: r_to_s,
    r_to_s: s_to_p,
    all_reduce: all_reduce,
    r_to_i: r_to_p,
    i_to_p: None,
    r_to_p: r_to_p,
    all_to_all: all_to_all,
    copy_to_shared: reduce_from_shared,
    split_shared: pad_shared,
}


@dataclass(frozen=True)
class Coercion:
    """One row of the table: from and to (kinds), and the collective of each direction ("" where it is local)."""

    source: str
    target: str
    operator: Operator
    forward: str
    backward: str


def _row(operator: Operator) -> Coercion:
    assert operator.kinds is not None
    return Coercion(*operator.kinds, operator, *operator.sends)


_PLAIN = (copy_to, reduce_from, all_gather, reduce_scatter, i_to_s, s_to_i, r_to_s, all_reduce, r_to_i, i_to_p)
COERCIONS: Mapping[tuple[str, str], Coercion] = {
    (row.source, row.target): row for row in map(_row, (*_PLAIN, r_to_p, all_to_all))
}
# Of shards whose blocks several ranks hold (SPEC section 2.2): I → R and R → S on the inner factor of the axis.
_SHARE, _TAKE_PART = _row(copy_to_shared), _row(split_shared)

# Conversions of gradients alone.
_PAD, _PAD_PART, _SUM_SHARED = _row(s_to_p), _row(pad_shared), _row(reduce_from_shared)
_OF_GRADIENTS = (_PAD, _PAD_PART, _SUM_SHARED)

COERCION_OF: Mapping[Any, Coercion] = {
    row.operator: row for row in (*COERCIONS.values(), _SHARE, _TAKE_PART, *_OF_GRADIENTS)
}


def coercion(source: Placement, target: Placement) -> Coercion | None:
    """Returns the row that converts `source` to `target`; None where no row does, or where they are the same.

    Lowered code takes blocks in the order of the ranks: no row converts others.
    """
    if source == target or not (source.in_rank_order and target.in_rank_order):
        return None
    if source.plain != source or target.plain != target:
        return None
    if source.reduced or target.reduced:
        return _SHARE if source.reduced and pending(source) == target else None
    if not source.is_shared and not target.is_shared:
        return COERCIONS.get((source.kind, target.kind))
    return _TAKE_PART if is_finer(source, target) else None


def gradient_coercion(source: Placement, target: Placement) -> Coercion | None:
    """Returns the row for gradients, as `coercion`: I and R are one, shared blocks may be summands, padding is zero.

    Where all ranks hold a value, each takes its block, also a shared one: the backward is not differentiated.
    """
    if source.partial and source.plain == target:
        return _SUM_SHARED
    if target.partial:
        return _PAD_PART if source.is_shard and is_finer(target.plain, source.plain) else None
    if source.is_shard and target.kind == "P":
        return None if source.is_shared else _PAD
    if source.kind in "IR" and target.is_shared and target.plain == target and target.in_rank_order:
        return COERCIONS[("R", "S")]
    return None if source.partial else coercion(source.plain, target.plain)
