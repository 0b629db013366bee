"""The coercions: every conversion between two placements on one axis (SPEC section 2.1).

Enters: nothing. Leaves: a record for each row of the table with the collective it costs forward and backward, for the
rows of a factored axis, whose ranks share blocks (f and the slice on its inner factor), and for the bucket of many f.
The placement a coercion converts *to* is the one in the node's note; `coercion` says which row converts one placement
to another.

Where the ranks of an axis share blocks (`kv / c`, `!kv`) the axis is factored: n/c blocks over the outer factor, and
on the inner one the blocks are invariant (settled) or replicated. Its coercions are those of the inner factor:

================  ========================  ==========================================  ===========
from → to         forward                   backward                                    name
================  ========================  ==========================================  ===========
S / c; I → S / c  identity                  all-reduce of the shared blocks' gradients  `share`
S / c → S / d     each rank keeps its part  zero-pad (partial)                          `take_part`
================  ========================  ==========================================  ===========
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx

from fxpar.layout.layout import Layout, Placement
from fxpar.layout.symbols import Size, product, simplify
from fxpar.ops import bound, coalesced, factored
from fxpar.ops.onrank import OnRank
from fxpar.ops.operator import Crossing, Gradients, OnShapes, Operator, Reverse, Run, Sent
from fxpar.program.coercions import dual, is_finer, shared_fraction, unsettled
from fxpar.program.program import TensorType, note, operands, output_layouts, output_types
from fxpar.program.properties import Property
from fxpar.program.step import BACKWARD, PARAMETER
from fxpar.program.weights import owner_of

# ---------------------------------------------------------------------- shapes and traffic


def _shape(call: OnShapes) -> Tensor:
    """The layouts before and after decide what a rank holds of the value, which stays the same."""
    before, after = output_types(operands(call.node)[0])[0], output_types(call.node)[0]
    if before != after:
        raise ValueError(f"a coercion of {before} cannot give {after}")
    return call.outputs[0]


def _traffic(crossing: Crossing) -> Iterator[Sent]:
    """That of the table's row. Each collective takes the whole value, with the padding of both cuts."""
    row, (before,), (after,) = COERCION_OF[crossing.call.target], crossing.before, crossing.after
    cuts = [p for p in (before, after) if p.is_padded]
    kind = crossing.call.outputs[0]
    if row.forward:
        yield Sent(row.forward, _phase(crossing, "forward"), _bytes(kind, after, cuts))
    if row.backward and crossing.reached[0]:
        held = crossing.held[0] if crossing.of_parameters and row.operator.sums_gradients else kind
        yield Sent(row.backward, _phase(crossing, "backward"), _bytes(held, after, cuts))


def _exchange_traffic(crossing: Crossing) -> Iterator[Sent]:
    """One dimension is cut anew by way of the whole, each way from the other cut."""
    (before,), (after,) = crossing.before, crossing.after
    if before.dim != after.dim:
        yield from _traffic(crossing)
        return
    kind = crossing.call.outputs[0]
    for phase, cut in (("forward", before), ("backward", after)):
        if phase == "forward" or crossing.reached[0]:
            padded = [cut] if cut.is_padded else []
            yield Sent("all_gather", _phase(crossing, phase), _bytes(kind, after, padded))


def _bucket_traffic(crossing: Crossing) -> Iterator[Sent]:
    """All gradients at once; it leaves out what the loss does not reach."""
    kinds = crossing.held if crossing.of_parameters else crossing.call.outputs
    entries = zip(kinds, crossing.after, crossing.reached, strict=True)
    if any(crossing.reached):
        size = simplify(sum(_bytes(kind, placement, []) for kind, placement, is_reached in entries if is_reached))
        yield Sent("all_reduce", _phase(crossing, "backward"), size)


def _coalesced_traffic(crossing: Crossing) -> Iterator[Sent]:
    """All gradients at once."""
    pairs = zip(crossing.call.outputs, crossing.after, strict=True)
    yield Sent("all_reduce", "forward", simplify(sum(_bytes(kind, placement, []) for kind, placement in pairs)))


def _phase(crossing: Crossing, phase: str) -> str:
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


def _as_it_is(node: fx.Node, rank: OnRank) -> Run:
    return Run(bound.same, (node.args[0],))


def _first_only(node: fx.Node, rank: OnRank) -> Run:
    return Run(bound.first_only, (node.args[0], rank.ranks(node).index))


def _lower_sum(node: fx.Node, rank: OnRank) -> Run:
    ranks = rank.ranks(node)
    return Run(bound.start_sum, (node.args[0], ranks.group, ranks.size), finish=bound.summed)


def _lower_gather(node: fx.Node, rank: OnRank) -> Run:
    ranks, (source, _) = rank.ranks(node), _sides(node, rank)
    start = (node.args[0], ranks.group, ranks.size)
    return Run(bound.start_gather, start, finish=bound.gathered, rest=rank.cut(source))


def _lower_scatter(node: fx.Node, rank: OnRank) -> Run:
    ranks, (_, result) = rank.ranks(node), _sides(node, rank)
    start = (node.args[0], *rank.cut(result), ranks.group, ranks.size)
    return Run(bound.start_scatter, start, finish=bound.scattered)


def _lower_take(node: fx.Node, rank: OnRank) -> Run:
    ranks, (_, result) = rank.ranks(node), _sides(node, rank)
    if result.is_shared:
        return _lower_take_part(node, rank)
    return Run(bound.take, (node.args[0], *rank.cut(result), ranks.group, ranks.size, ranks.index))


def _lower_pad(node: fx.Node, rank: OnRank) -> Run:
    ranks, (source, _) = rank.ranks(node), _sides(node, rank)
    return Run(bound.pad, (node.args[0], *rank.cut(source), ranks.group, ranks.size, ranks.index))


def _sides(node: fx.Node, rank: OnRank) -> tuple[Placement, Placement]:
    return rank.placed(operands(node)[0], node), rank.placed(node, node)


def _lower_take_part(node: fx.Node, rank: OnRank) -> Run:
    ranks, (source, result) = rank.ranks(node), _sides(node, rank)
    pieces = rank.shared(source, result, ranks.size)
    return Run(factored.take_part, (node.args[0], result.dim, pieces, ranks.index))


def _lower_all_to_all(node: fx.Node, rank: OnRank) -> Run:
    ranks, (source, result) = rank.ranks(node), _sides(node, rank)
    before, after, where = rank.cut(source), rank.cut(result), (ranks.group, ranks.size)
    if source.dim == result.dim:
        rest = (before, after, *where, ranks.index)
        return Run(bound.start_gather, (node.args[0], *where), finish=bound.recut, rest=rest)
    return Run(bound.start_exchange, (node.args[0], *after, *where), finish=bound.exchanged, rest=before)


def _lower_sum_gradients(node: fx.Node, rank: OnRank) -> Run:
    return Run(coalesced.sum_gradients, (list(node.args),))


def _lower_pad_part(node: fx.Node, rank: OnRank) -> Run:
    ranks, (source, result) = rank.ranks(node), _sides(node, rank)
    pieces = rank.shared(result.plain, source.plain, ranks.size)
    return Run(factored.pad_part, (node.args[0], source.dim, pieces, ranks.index))


def _lower_sum_shared(node: fx.Node, rank: OnRank) -> Run:
    ranks, (source, _) = rank.ranks(node), _sides(node, rank)
    held = source.dim, rank.shared(source.plain, source.plain, ranks.size)
    start, rest = (*held, ranks.group, ranks.size, ranks.index), (*held, ranks.size, ranks.index)
    x = node.args[0]
    return Run(factored.start_sum_shared, (x, *start), finish=factored.sum_shared, rest=(x, *rest))


def _lower_coalesced(node: fx.Node, rank: OnRank) -> Run:
    ranks, held = rank.ranks(node), list[coalesced.Held]()
    for source in operands(node):
        placement = rank.placed(source, node)
        pieces = rank.shared(placement.plain, placement.plain, ranks.size) if placement.is_shard else []
        held.append((placement.dim, pieces) if placement.is_shard else None)
    given = list(node.args), held
    rest = (*given, ranks.size, ranks.index)
    return Run(
        coalesced.start_sums,
        (*given, ranks.group, ranks.size, ranks.index),
        finish=coalesced.sums,
        rest=rest,
    )


# ---------------------------------------------------------------------- derivatives


def _conjugated(reverse: Reverse) -> Gradients:
    """The coercion of the gradient (SPEC section 2.1): from the dual of the result to the dual of the operand."""
    node, (gradient,) = reverse.node, reverse.tangents
    assert gradient is not None
    target = CONJUGATE[node.target]
    if target is None:
        return (gradient,)
    (source,) = operands(node)
    (kind,), layout = output_types(source), dual_layout(output_layouts(source)[0])
    phase = PARAMETER if target in (all_reduce, sum_shared) and of_parameter(node) else BACKWARD
    args, kwargs, name = (gradient,), {"axis": node.kwargs["axis"]}, f"{gradient.name}_{target.__name__}"
    return (reverse.emit.call(target, args, kwargs, kind, note(node), layouts=[layout], phase=phase, name=name),)


def of_parameter(node: fx.Node) -> bool:
    """Whether a node sums gradients of a parameter itself: once a step, and not in each microbatch."""
    is_sum = isinstance(node.target, Operator) and node.target.sums_gradients
    return is_sum and all(owner_of(source).op == "placeholder" for source in operands(node))


def dual_layout(layout: Layout) -> Layout:
    """How the gradient of a value of that layout is held."""
    return Layout(tuple((axis, dual(placement)) for axis, placement in layout))


def _together(reverse: Reverse) -> Gradients:
    """One reduction of the gradients that there are."""
    node, sources = reverse.node, operands(reverse.node)
    given = [(i, gradient) for i, gradient in enumerate(reverse.tangents) if gradient is not None]
    kinds = tuple(output_types(gradient)[0] for _, gradient in given)
    layouts = [dual_layout(output_layouts(sources[i])[0]) for i, _ in given]
    gradients, kwargs, place = [gradient for _, gradient in given], {"axis": node.kwargs["axis"]}, note(node)
    phase, axis = PARAMETER if of_parameter(node) else BACKWARD, node.kwargs["axis"]
    name = f"{axis}_sums".replace("-", "_")
    sums = reverse.emit.call(
        all_reduce_coalesced, gradients, kwargs, kinds, place, layouts=layouts, phase=phase, name=name
    )
    found: list[fx.Node | None] = [None] * len(sources)
    for position, (i, _) in enumerate(given):
        args, layout = (sums, position), [layouts[position]]
        found[i] = reverse.emit.call(operator.getitem, args, {}, kinds[position], place, layouts=layout, phase=phase)
    return found


# ---------------------------------------------------------------------- records

_record = partial(Operator, shape=_shape, traffic=_traffic, stage=Property.COLLECTIVES, derivative=_conjugated)


@partial(
    _record,
    kinds=("I", "R"),
    sends=("", "all_reduce"),
    lower=_as_it_is,
    sums_gradients=True,
)
def copy_to(x: Any, *, axis: str) -> Any:
    """I → R (Megatron's f): identity; all-reduce of the gradient."""


@partial(_record, kinds=("P", "I"), sends=("all_reduce", ""), lower=_lower_sum)
def reduce_from(x: Any, *, axis: str) -> Any:
    """P → I (Megatron's g): all-reduce; identity on the gradient."""


@partial(
    _record,
    kinds=("S", "R"),
    sends=("all_gather", "reduce_scatter"),
    lower=_lower_gather,
)
def all_gather(x: Any, *, axis: str) -> Any:
    """S → R (sequence-parallel gather): all-gather; reduce-scatter of the gradient."""


@partial(
    _record,
    kinds=("P", "S"),
    sends=("reduce_scatter", "all_gather"),
    lower=_lower_scatter,
)
def reduce_scatter(x: Any, *, axis: str) -> Any:
    """P → S (sequence-parallel scatter-reduce): reduce-scatter; all-gather of the gradient."""


@partial(
    _record,
    kinds=("I", "S"),
    sends=("", "all_gather"),
    lower=_lower_take,
)
def split(x: Any, *, axis: str) -> Any:
    """I → S: each rank keeps its block; all-gather of the gradient."""


@partial(
    _record,
    kinds=("S", "I"),
    sends=("all_gather", ""),
    lower=_lower_gather,
)
def gather(x: Any, *, axis: str) -> Any:
    """S → I: all-gather; each rank keeps its block of the gradient."""


@partial(_record, kinds=("R", "S"), lower=_lower_take)
def take(x: Any, *, axis: str) -> Any:
    """R → S: each rank keeps its block; the gradient is padded with zeros, a summand."""


@partial(
    _record,
    kinds=("P", "R"),
    sends=("all_reduce", "all_reduce"),
    lower=_lower_sum,
)
def all_reduce(x: Any, *, axis: str) -> Any:
    """P → R: all-reduce, forward and backward."""


@partial(_record, kinds=("R", "I"), lower=_as_it_is)
def settle(x: Any, *, axis: str) -> Any:
    """R → I: identity; the gradient is kept on rank 0 and zero elsewhere."""


@partial(_record, kinds=("I", "P"), lower=_first_only)
def keep_first(x: Any, *, axis: str) -> Any:
    """I → P: kept on rank 0, zero elsewhere; identity on the gradient."""


@partial(_record, kinds=("R", "P"), lower=_first_only)
def mask_first(x: Any, *, axis: str) -> Any:
    """R → P: kept on rank 0, zero elsewhere, forward and backward."""


@partial(
    _record,
    kinds=("S", "S"),
    sends=("all_to_all", "all_to_all"),
    traffic=_exchange_traffic,
    lower=_lower_all_to_all,
)
def all_to_all(x: Any, *, axis: str) -> Any:
    """S(i) → S(j): all-to-all, forward and backward."""


@partial(
    _record,
    kinds=("S", "S"),
    sends=("", "all_reduce"),
    lower=_as_it_is,
    sums_gradients=True,
)
def share(x: Any, *, axis: str) -> Any:
    """S; I → S (f among the ranks that share a block): identity; all-reduce of the gradients of what is shared."""


@partial(_record, kinds=("S", "S"), lower=_lower_take_part)
def take_part(x: Any, *, axis: str) -> Any:
    """S / c → S: each of the ranks that share a block keeps a part of it; the gradient is padded with zeros."""


# Of gradients alone: the conjugates of coercions that have no conjugate among those above.


@partial(_record, kinds=("S", "P"), lower=_lower_pad)
def pad(x: Any, *, axis: str) -> Any:
    """S → P: each rank's block in its place, zeros elsewhere; the conjugate of `take`."""


@partial(_record, kinds=("S", "S"), lower=_lower_pad_part)
def pad_part(x: Any, *, axis: str) -> Any:
    """S → S / c; P: each rank's part in its place in a shared block, zeros elsewhere; the conjugate of `take_part`."""


@partial(_record, kinds=("S", "S"), sends=("all_reduce", ""), lower=_lower_sum_shared)
def sum_shared(x: Any, *, axis: str) -> Any:
    """S / c; P → S / c: all-reduce among the ranks that share a block; the conjugate of `share`."""


@partial(_record, shape=lambda call: list(call.args), traffic=_coalesced_traffic, lower=_lower_coalesced)
def all_reduce_coalesced(*gradients: Any, axis: str) -> Any:
    """Several gradients, each summed as `all_reduce` or `sum_shared` would: one all-reduce of all."""


@partial(
    _record,
    shape=lambda call: list(call.args),
    traffic=_bucket_traffic,
    lower=_lower_sum_gradients,
    sums_gradients=True,
    derivative=_together,
)
def sum_gradients(*weights: Any, axis: str) -> Any:
    """Several parameters, each coerced as `copy_to` or `share` would: identity; one all-reduce of all gradients.

    A weight may also be what another such sum, over other axes, gives of a parameter.
    """


# ---------------------------------------------------------------------- the table


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


_PLAIN = (copy_to, reduce_from, all_gather, reduce_scatter, split, gather, take, all_reduce, settle, keep_first)
COERCIONS: Mapping[tuple[str, str], Coercion] = {
    (row.source, row.target): row for row in map(_row, (*_PLAIN, mask_first, all_to_all))
}
# Of shards whose blocks several ranks hold (SPEC section 2.2): I → R and R → S on the inner factor of the axis.
_SHARE, _TAKE_PART = _row(share), _row(take_part)

# Conversions of gradients alone.
_PAD, _PAD_PART, _SUM_SHARED = _row(pad), _row(pad_part), _row(sum_shared)
_OF_GRADIENTS = (_PAD, _PAD_PART, _SUM_SHARED)

COERCION_OF: Mapping[Any, Coercion] = {
    row.operator: row for row in (*COERCIONS.values(), _SHARE, _TAKE_PART, *_OF_GRADIENTS)
}
# What a coercion is in the backward, where I and R are one; None of those that leave the value as it is.
IN_BACKWARD: Mapping[Any, Operator | None] = {
    **dict.fromkeys((copy_to, settle, share)),
    reduce_from: all_reduce,
    gather: all_gather,
    split: take,
    keep_first: mask_first,
}
# What a gradient goes through where the value goes through a coercion; None where it stays as it is.
CONJUGATE: Mapping[Any, Operator | None] = {
    copy_to: all_reduce,
    reduce_from: None,
    all_gather: reduce_scatter,
    reduce_scatter: all_gather,
    split: all_gather,
    gather: take,
    take: pad,
    all_reduce: all_reduce,
    settle: mask_first,
    keep_first: None,
    mask_first: mask_first,
    all_to_all: all_to_all,
    share: sum_shared,
    take_part: pad_part,
}


def coercion(source: Placement, target: Placement) -> Coercion | None:
    """The row that converts `source` to `target`; None where nothing does, or where they are the same.

    What is lowered takes blocks in the order of the ranks: nothing converts others.
    """
    if source == target or not (source.in_rank_order and target.in_rank_order):
        return None
    if source.plain != source or target.plain != target:
        return None
    if source.settled or target.settled:
        return _SHARE if source.settled and unsettled(source) == target else None
    if not source.is_shared and not target.is_shared:
        return COERCIONS.get((source.kind, target.kind))
    return _TAKE_PART if is_finer(source, target) else None


def gradient_coercion(source: Placement, target: Placement) -> Coercion | None:
    """As `coercion`, of gradients: I and R are one there, shared blocks may be summands, and padding zero.

    Of what all ranks hold each takes its block, of shared ones too: the backward is not differentiated.
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
