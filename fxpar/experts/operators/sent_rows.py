"""Rows on their way to the ranks of their experts and back: in which order they travel, and what sends them.

Enters: how many rows each source has for each expert. Leaves: operators of torch that give for each place of a buffer
the row that belongs there, -1 where none does; and the records of `fxpar.split_sizes`, `fxpar.send_rows` and
`fxpar.return_rows`, which send as many rows as there are.

Leading dimensions, one for each axis that cuts tokens, stand for ranks: each computes its own part.

Terms: *holders* are the axes whose ranks hold different experts; a source has a leading dimension for each axis that
cuts tokens, and a holder the same ones: index i of a holder's dimension is what rank i received. How many rows that is
values decide, and it differs by rank: the extent is a counted symbol (`fxpar.ir.symbols`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from fxpar.ir.program import TensorType, tensor_type
from fxpar.layout.layout import Placement, shard
from fxpar.layout.symbolic_sizes import product
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import (
    Autograd,
    CollectiveSite,
    Gradients,
    LoweredCall,
    OnShapes,
    Operator,
    Reverse,
    Sent,
    torch_operator,
)
from fxpar.signatures.engine import Refusal, Rule, Signature, seed_signature
from fxpar.signatures.matmul import formula
from fxpar.signatures.op_call import OpCall
from fxpar.torch_internals import is_fake

# Sizes of buffers are bounds, so that nothing waits for a number to reach the host: a source sends each rank `capacity`
# places, which hold whatever its tokens may choose there.


def _blocks_shape(order: Tensor, counts: Tensor, blocks: int, capacity: int) -> Tensor:
    return order.new_empty((*order.shape[:-1], blocks * capacity))


def _of_one_block(node: fx.Node) -> Iterable[object]:
    """Returns order and counts where all rows stand in front: only one block has no places between its rows."""
    return (node, node.args[1]) if node.args[2] == 1 else ()


def _results(node: fx.Node) -> Iterable[object]:
    return (part for part in node.users if part.target is operator.getitem)


@torch_operator(
    "dispatch_indices",
    fake=_blocks_shape,
    rule=Rule(formula("... _, ... _ -> ... _", "order", "counts")),
    buffer=_of_one_block,
)
def dispatch_indices(order: Tensor, counts: Tensor, blocks: int, capacity: int) -> Tensor:
    """Orders rows by the rank they go to: the experts of each in one block of places.

    Args:
        order: i64 [..., rows], the rows by expert, ascending.
        counts: i64 [..., experts], of each expert.
        blocks: ranks that hold different experts, as many each; they divide the experts.
        capacity: places of a block; rows for which there is none are left out.

    Returns:
        i64 [..., blocks * capacity]: entries of `order`, -1 in places after a block's rows.
    """
    sent = counts.unflatten(-1, (blocks, -1)).sum(-1)
    first = sent.cumsum(-1) - sent
    place = torch.arange(capacity, device=order.device)
    # gather takes no index beyond the end. Places without a row read any entry, and get -1 below.
    rows = (first.unsqueeze(-1) + place).clamp(max=max(order.shape[-1] - 1, 0)).flatten(-2)
    entries = order.gather(-1, rows) if order.shape[-1] else rows
    return torch.where((place < sent.unsqueeze(-1)).flatten(-2), entries, -1)


def _excess_shape(counts: Tensor, blocks: int, capacity: int) -> Tensor:
    return counts.new_empty((*counts.shape[:-1], 1))


@torch_operator("block_excess", fake=_excess_shape, rule=Rule(formula("... _ -> ... _", "counts")))
def block_excess(counts: Tensor, blocks: int, capacity: int) -> Tensor:
    """Returns for how many rows the fullest block has no place.

    Args:
        counts: i64 [..., experts], as `dispatch_indices` has them.
        blocks: likewise.
        capacity: likewise.

    Returns:
        i64 [..., 1].
    """
    sent = counts.unflatten(-1, (blocks, -1)).sum(-1)
    excess: Tensor = (sent.amax(-1, keepdim=True) - capacity).clamp_min(0)
    return excess


def _received_shapes(counts: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    *leading, sources, experts = counts.shape
    return counts.new_empty((*leading, sources * capacity)), counts.new_empty((*leading, experts))


_sorted_counts = Rule(formula("... _ _ -> ... _, ... _", "counts"))


@torch_operator("received_order", fake=_received_shapes, rule=_sorted_counts, buffer=_results)
def received_order(counts: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Orders rows that sources sent, by expert.

    Args:
        counts: i64 [..., sources, experts]: of each source the rows for each of this rank's experts.
        capacity: places of a source's block, in which its rows stand by expert; rows for which there was none are left
            out (`block_excess`).

    Returns:
        i64 [..., sources * capacity]: places of the buffer by expert, in an expert by source, -1 after all rows; and
        i64 [..., experts]: the rows of each expert.
    """
    # The sums are clamped, not the counts: a block that is full lost the rows that come last in it.
    end = counts.cumsum(-1).clamp_max(capacity)
    counts = end.diff(dim=-1, prepend=end.new_zeros(()).expand(*end.shape[:-1], 1))
    total = counts.sum(-2)
    place = torch.arange(capacity, device=counts.device)
    # Of each place its expert, or one more than there are.
    expert = (place.unsqueeze(-1) >= end.unsqueeze(-2)).sum(-1)
    before = counts.cumsum(-2) - counts + (total.cumsum(-1) - total).unsqueeze(-2)
    # Where an expert's rows of a source begin among all, less where they begin in the block.
    shift = torch.nn.functional.pad(before - (end - counts), (0, 1))
    is_row = expert < counts.shape[-1]
    size = counts.shape[-2] * capacity
    target = torch.where(is_row, place + shift.gather(-1, expert), size).flatten(-2)
    # Places without a row are written to one place more than there are, which is cut off.
    order = target.new_full((*target.shape[:-1], size + 1), -1)
    source = torch.arange(size, device=counts.device).expand(target.shape)
    return order.scatter(-1, target, source)[..., :-1].contiguous(), total


def _arrived_shapes(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    *leading, _, experts = counts.shape
    return counts.new_empty((*leading, rows)), counts.new_empty((*leading, experts))


@torch_operator("arrived_order", fake=_arrived_shapes, rule=_sorted_counts, buffer=_results)
def arrived_order(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Orders rows that sources sent, by expert, where nothing stands between them.

    Args:
        counts: i64 [..., sources, experts]: of each source the rows for each of this rank's experts.
        rows: no fewer than that is in all; they stand by source, those of a source by expert.

    Returns:
        i64 [..., rows]: the rows by expert, in an expert by source, -1 after all of them; and i64 [..., experts]: the
        rows of each expert.
    """
    total, end = counts.sum(-2), counts.flatten(-2).cumsum(-1)
    place = torch.arange(rows, device=counts.device).expand(*counts.shape[:-2], rows).contiguous()
    # Of each row its source and expert; that of the last ones is none.
    pair = torch.searchsorted(end.contiguous(), place, right=True)
    before = counts.cumsum(-2) - counts + (total.cumsum(-1) - total).unsqueeze(-2)
    shift = torch.nn.functional.pad(before.flatten(-2) - (end - counts.flatten(-2)), (0, 1))
    target = torch.where(pair < end.shape[-1], place + shift.gather(-1, pair), rows)
    order = target.new_full((*target.shape[:-1], rows + 1), -1)
    return order.scatter(-1, target, place)[..., :-1].contiguous(), total


def _resized_shape(x: Tensor, rows: int, fill: int) -> Tensor:
    return x.new_empty((*x.shape[:-2], rows, x.shape[-1]))


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rows = inputs[0].shape[-2]


def _resized_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return resize_rows(gradient, ctx.rows, 0), None, None


@torch_operator(
    "resize_rows",
    fake=_resized_shape,
    autograd=Autograd(_save_rows, _resized_back),
    rule=Rule(formula("... _ h -> ... _ h", "x"), (("x",),)),
)
def resize_rows(x: Tensor, rows: int, fill: int) -> Tensor:
    """Maps [..., any, h] → [..., rows, h]: the first rows, and after those that are there rows of `fill`."""
    present = x.shape[-2]
    if rows <= present:
        return x[..., :rows, :].clone(memory_format=torch.contiguous_format)
    return torch.nn.functional.pad(x, (0, 0, 0, rows - present), value=fill)


# ---------------------------------------------------------------------- rules of what sends

# Of an axis that the operator does not name: each index of the leading dimensions is apart.
_APART = Rule(formula("... _ h, ... _ -> ... _ h", "x", "sizes"), (("x",),))


def _crossed(call: OpCall) -> Placement | None:
    """Returns the cut over sources and holders on the axis that is judged; None where the axes outside it leave none.

    Axes nest as leading dimensions do: what the outer ones cut has one index left.
    """
    shape = call.operands[0].shape
    dim = next((dim for dim, size in enumerate(shape[:-2]) if size != 1), None)
    return None if dim is None else shard(dim, shape[dim])


def _check(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal | None:
    required = _crossed(call)
    if required is None:
        return None
    if any(placement != required for placement in placements):
        return Refusal(f"the ranks exchange rows: rows and split sizes have to be {required}")
    return (required,)


def _seed(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    required = _crossed(call)
    if required is None:
        return seed_signature(_APART, call, index, placement)
    outputs = _check(call, (placement,))
    return outputs if isinstance(outputs, Refusal) else Signature((required, required), (required,))


_EXCHANGE = Rule(_APART.labels, _APART.partial, seed=_seed, check=_check)

# ---------------------------------------------------------------------- shapes and traffic


def _shape(call: OnShapes) -> Tensor:
    x, sizes = call.args
    (out,) = call.outputs
    lead = tuple(x.shape[:-2])
    if tuple(sizes.shape[:-1]) != lead or sizes.is_floating_point():
        raise ValueError(f"split sizes {list(sizes.shape)} for rows {list(x.shape)}")
    if tuple(out.shape[:-2]) != lead or out.shape[-1] != x.shape[-1] or out.dtype != x.dtype:
        raise ValueError(f"rows {list(x.shape)} of {x.dtype} cannot be {list(out.shape)} of {out.dtype}")
    return out


def _sizes_shape(call: OnShapes) -> Tensor:
    order, counts, received = call.args
    *lead, ranks, local_experts = received.shape
    if list(order.shape[:-1]) != lead or list(counts.shape) != [*lead, ranks * local_experts]:
        raise ValueError(
            f"{list(order.shape)} rows and {list(counts.shape)} counts, of which {list(received.shape)} come"
        )
    sizes: Tensor = counts.new_empty((*lead, 2 * ranks + 1))
    return sizes


def _there(crossing: CollectiveSite) -> Iterator[Sent]:
    yield from _sent(crossing, crossing.call.outputs[0])


def _back(crossing: CollectiveSite) -> Iterator[Sent]:
    yield from _sent(crossing, crossing.call.operands[0])


def _sent(crossing: CollectiveSite, kind: TensorType) -> Iterator[Sent]:
    """Yields as many bytes as a holder's rows have, of all holders."""
    count = product(kind.shape) * kind.dtype.itemsize
    yield Sent("all_to_all", "forward", count)
    if crossing.reached[0]:
        yield Sent("all_to_all", "backward", count)


# ---------------------------------------------------------------------- lowering

_REMEDY = "give experts.dispatch='static'"


def _lower_sizes(node: fx.Node, rank: OnRank) -> LoweredCall:
    return LoweredCall(start_sizes, node.args, finish=sizes_there)


def _lower_there(node: fx.Node, rank: OnRank) -> LoweredCall:
    lead, ranks = len(tensor_type(node).shape) - 2, rank.ranks(node)
    return LoweredCall(start_there, (*node.args, ranks.group, ranks.size), finish=arrived_there, rest=(lead,))


def _lower_back(node: fx.Node, rank: OnRank) -> LoweredCall:
    lead, sizes, ranks = len(tensor_type(node).shape) - 2, node.args[1], rank.ranks(node)
    rest = (sizes, ranks.size, lead)
    return LoweredCall(start_back, (*node.args, ranks.group, ranks.size), finish=arrived_back, rest=rest)


def _of_sent(call: Reverse) -> Gradients:
    return call.adjoint(return_rows)


# ---------------------------------------------------------------------- records


@partial(
    Operator,
    rule=Rule(formula("... _, ... _, ... _ _ -> ... _", "order", "counts", "received")),
    shape=_sizes_shape,
    lower=_lower_sizes,
    stops_gradient=True,
    waits=f"waits until the host knows them; {_REMEDY}",
)
def split_sizes(order: Any, counts: Any, received: Any) -> Any:
    """Returns on the host how many rows go where.

    The copy starts where the operator stands, in a CUDA graph too. It is awaited in front of the first reader, and
    outside of graphs.

    Args:
        order: i64[…, M]: the rows of a source.
        counts: i64[…, E]: of each expert.
        received: i64[…, n, E / n]: of each of n sources the rows for each expert of the holder.

    Returns:
        i64[…, 2n + 1].
    """


@partial(Operator, rule=_APART, shape=_shape, lower=_lower_there)
def _rows_apart(x: Any, sizes: Any) -> Any:
    """Sends rows on an axis that the operator does not name."""


_record = partial(
    Operator,
    rule=_EXCHANGE,
    shape=_shape,
    like=_rows_apart,
    apart=True,
    uncaptured=f"sends as many rows as the routing decides; {_REMEDY}",
)


@partial(_record, traffic=_there, lower=_lower_there, derivative=_of_sent)
def send_rows(x: Any, sizes: Any, *, axis: str) -> Any:
    """Sends rows to the ranks that hold their experts: […, M, h] → […, r, h], an all-to-all of uneven parts.

    Args:
        x: rows by rank, after them those that go nowhere.
        sizes: of `split_sizes`.
    """


@partial(_record, traffic=_back, lower=_lower_back, derivative=lambda call: call.adjoint(send_rows))
def return_rows(x: Any, sizes: Any, *, axis: str) -> Any:
    """Sends rows back to where they came from: […, r, h] → […, M, h]; the adjoint of `send_rows`.

    Args:
        x: rows by the rank that they came from.
        sizes: as `send_rows` had them.
    """


_c10d = torch.ops._c10d_functional


def sizes_on_device(order: Tensor, counts: Tensor, received: Tensor) -> Tensor:
    """Returns the split sizes, on the device of the counts.

    Args:
        order: i64 [lead, rows], the source's rows.
        counts: i64 [lead, experts], of them.
        received: i64 [lead, ranks, own experts], of each source the rows for each of this rank's experts.
    """
    ranks = received.shape[-2]
    rows = counts.new_full((*counts.shape[:-1], 1), order.shape[-1])
    there = counts.unflatten(-1, (ranks, -1)).sum(-1)
    return torch.cat((there, received.sum(-1), rows), dim=-1)


def start_sizes(order: Tensor, counts: Tensor, received: Tensor) -> tuple[Tensor, Any]:
    """Starts to copy the split sizes to the host, and returns what tells that they are there: nothing waits yet."""
    sizes = sizes_on_device(order, counts, received)
    if sizes.device.type != "cuda" or is_fake(sizes):
        return sizes.to("cpu"), None
    # A copy into pageable memory waits for the device. One into pinned memory is queued, and an event tells its end.
    there = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True)
    there.copy_(sizes, non_blocking=True)
    # Recorded in a CUDA graph an external one tells each replay's end of the copy, while the rest of the graph runs.
    event = torch.cuda.Event(external=True)
    event.record()
    return there, event


def sizes_there(started: tuple[Tensor, Any]) -> Tensor:
    """Waits until the split sizes are on the host, and returns them."""
    sizes, event = started
    if event is not None:
        event.synchronize()
    return sizes


def _numbers(sizes: Tensor, ranks: int, balanced: int) -> tuple[list[int], list[int], int]:
    """Returns how many rows go to each rank and come from each, and those of a source.

    Args:
        balanced: those of a source where `sizes` has no values and all ranks are taken to get as many.
    """
    if is_fake(sizes):
        share = balanced // ranks  # of a symbol a comparison would be a guard
        shares = [balanced - share * (ranks - 1)] + [share] * (ranks - 1)
        return shares, shares, balanced
    numbers = sizes.flatten().tolist()
    return numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks]


def _unpacked_shape(x: Tensor, sizes: Tensor, ranks: int) -> Tensor:
    return x.new_empty(x.shape)


@torch_operator("unpacked_rows", torch.Tag.cudagraph_unsafe, fake=_unpacked_shape)
def unpacked_rows(x: Tensor, sizes: Tensor, ranks: int) -> Tensor:
    """Maps [rows that went somewhere, h] → [rows, h]: zeros for those that went nowhere."""
    _, _, rows = _numbers(sizes, ranks, x.shape[0])
    return functional.pad(x, (0, 0, 0, rows - x.shape[0]))


def start_there(x: Tensor, sizes: Tensor, group: str, ranks: int) -> Tensor:
    """Starts to send the rows to their experts."""
    sent, received, _ = _numbers(sizes, ranks, x.shape[-2])
    packed = x.contiguous().view(-1, x.shape[-1])[: sum(sent)]
    return _c10d.all_to_all_single(packed, received, sent, group)  # type: ignore[no-any-return]


def arrived_there(started: Tensor, lead: int) -> Tensor:
    """Waits for the rows of `start_there`: [lead, rows, h]."""
    rows = _c10d.wait_tensor(started)
    return rows.view(*[1] * lead, *rows.shape)  # type: ignore[no-any-return]


def start_back(x: Tensor, sizes: Tensor, group: str, ranks: int) -> Tensor:
    """Starts to send back all the rows that a holder has."""
    rows = x.contiguous().view(-1, x.shape[-1])
    sent, received, _ = _numbers(sizes, ranks, x.shape[-2])
    return _c10d.all_to_all_single(rows, sent, received, group)  # type: ignore[no-any-return]


def arrived_back(started: Tensor, sizes: Tensor, ranks: int, lead: int) -> Tensor:
    """Waits for the rows of `start_back`: [lead, rows, h], zeros for those that went nowhere."""
    rows: Tensor = _c10d.wait_tensor(started)
    missing = _numbers(sizes, ranks, rows.shape[0])[2] - rows.shape[0]
    # Where all rows went somewhere none are copied. Of simulated ranks each misses another number, which is no integer.
    if not isinstance(missing, int) or missing:
        rows = unpacked_rows(rows, sizes, ranks)
    return rows.view(*[1] * lead, *rows.shape)
