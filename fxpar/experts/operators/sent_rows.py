"""Rows of experts that travel alone: what sends as many as there are, to the ranks of their experts and back.

Enters: nothing. Leaves: the records of `fxpar.split_sizes`, `fxpar.send_rows` and `fxpar.return_rows`.

Terms: *holders* are the axes whose ranks hold different experts; a source has a leading dimension for each axis that
cuts tokens, and a holder the same ones: index i of a holder's dimension is what rank i received. How many rows that is
values decide, and it differs by rank: the extent is a counted symbol (`fxpar.ir.symbols`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from fxpar.ir.program import TensorType, tensor_type
from fxpar.layout.layout import Placement, shard
from fxpar.layout.symbolic_sizes import product
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import CollectiveSite, Gradients, LoweredCall, OnShapes, Operator, Reverse, Sent, torch_operator
from fxpar.signatures.engine import Refusal, Rule, Signature, seed_signature
from fxpar.signatures.matmul import formula
from fxpar.signatures.op_call import OpCall
from fxpar.torch_internals import is_fake

# Of an axis that the operator does not name: each index of the leading dimensions is apart.
_APART = Rule(formula("... _ h, ... _ -> ... _ h", "x", "sizes"), (("x",),))


def _crossed(call: OpCall) -> Placement | None:
    """The cut over sources and holders on the axis that is judged; None where the axes outside it leave none.

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
    """As many bytes as a holder's rows have, of all of them."""
    count = product(kind.shape) * kind.dtype.itemsize
    yield Sent("all_to_all", "forward", count)
    if crossing.reached[0]:
        yield Sent("all_to_all", "backward", count)


# ---------------------------------------------------------------------- lowering


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
    uncaptured="copies how many rows travel to the host; give experts.dispatch='static'",
)
def split_sizes(order: Any, counts: Any, received: Any) -> Any:
    """How many rows go where, on the host.

    The copy starts where the operator stands, and is awaited in front of the first reader.

    Args:
        order: i64[…, M]: the rows of a source.
        counts: i64[…, E]: of each expert.
        received: i64[…, n, E / n]: of each of n sources the rows for each expert of the holder.

    Returns:
        i64[…, 2n + 1].
    """


@partial(Operator, rule=_APART, shape=_shape, lower=_lower_there)
def _rows_apart(x: Any, sizes: Any) -> Any:
    """What sending is on an axis that it does not name."""


_record = partial(
    Operator,
    rule=_EXCHANGE,
    shape=_shape,
    like=_rows_apart,
    apart=True,
    uncaptured="sends as many rows as the routing decides; give experts.dispatch='static'",
)


@partial(_record, traffic=_there, lower=_lower_there, derivative=_of_sent)
def send_rows(x: Any, sizes: Any, *, axis: str) -> Any:
    """Rows to the ranks that hold their experts: […, M, h] → […, r, h], an all-to-all of uneven parts.

    Args:
        x: rows by rank, behind them those that go nowhere.
        sizes: of `split_sizes`.
    """


@partial(_record, traffic=_back, lower=_lower_back, derivative=lambda call: call.adjoint(send_rows))
def return_rows(x: Any, sizes: Any, *, axis: str) -> Any:
    """Rows back to where they came from: […, r, h] → […, M, h]; the adjoint of `send_rows`.

    Args:
        x: rows by the rank that they came from.
        sizes: as `send_rows` had them.
    """


_c10d = torch.ops._c10d_functional


def sizes_on_device(order: Tensor, counts: Tensor, received: Tensor) -> Tensor:
    """The split sizes, where the counts are.

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
    """The split sizes on their way to the host, and what tells that they are there: nothing waits yet."""
    sizes = sizes_on_device(order, counts, received)
    if sizes.device.type != "cuda" or is_fake(sizes):
        return sizes.to("cpu"), None
    # A copy into pageable memory waits for the device. One into pinned memory is queued, and an event tells its end.
    there = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True)
    there.copy_(sizes, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return there, event


def sizes_there(started: tuple[Tensor, Any]) -> Tensor:
    """The split sizes on the host: waits until they are there."""
    sizes, event = started
    if event is not None:
        event.synchronize()
    return sizes


def _numbers(sizes: Tensor, ranks: int, balanced: int) -> tuple[list[int], list[int], int]:
    """Rows that go to each rank and come of each, and those of a source.

    Args:
        balanced: those of a source where `sizes` has no values and all ranks are taken to get as many.
    """
    if is_fake(sizes):
        shares = [balanced // ranks + (rank < balanced % ranks) for rank in range(ranks)]
        return shares, shares, balanced
    numbers = sizes.flatten().tolist()
    return numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks]


def _packed_shape(x: Tensor, sizes: Tensor, ranks: int) -> Tensor:
    return x.new_empty((x.shape[-2], x.shape[-1]))


@torch_operator("packed_rows", torch.Tag.cudagraph_unsafe, fake=_packed_shape)
def packed_rows(x: Tensor, sizes: Tensor, ranks: int) -> Tensor:
    """[lead, rows, h] → [rows that go somewhere, h]."""
    sent, _, _ = _numbers(sizes, ranks, x.shape[-2])
    return x.reshape(-1, x.shape[-1])[: sum(sent)].clone(memory_format=torch.contiguous_format)


def _unpacked_shape(x: Tensor, sizes: Tensor, ranks: int, lead: int) -> Tensor:
    return x.new_empty((*[1] * lead, *x.shape))


@torch_operator("unpacked_rows", torch.Tag.cudagraph_unsafe, fake=_unpacked_shape)
def unpacked_rows(x: Tensor, sizes: Tensor, ranks: int, lead: int) -> Tensor:
    """[rows that went somewhere, h] → [lead, rows, h]: zeros for those that went nowhere."""
    _, _, rows = _numbers(sizes, ranks, x.shape[0])
    return functional.pad(x, (0, 0, 0, rows - x.shape[0])).view(*[1] * lead, rows, x.shape[-1])


def start_there(x: Tensor, sizes: Tensor, group: str, ranks: int) -> Tensor:
    """The rows on their way to their experts."""
    packed = packed_rows(x, sizes, ranks)
    sent, received, _ = _numbers(sizes, ranks, x.shape[-2])
    return _c10d.all_to_all_single(packed, received, sent, group)  # type: ignore[no-any-return]


def arrived_there(started: Tensor, lead: int) -> Tensor:
    """Of `start_there`: [lead, rows, h]."""
    rows = _c10d.wait_tensor(started)
    return rows.view(*[1] * lead, *rows.shape)  # type: ignore[no-any-return]


def start_back(x: Tensor, sizes: Tensor, group: str, ranks: int) -> Tensor:
    """The rows on their way back: all that a holder has."""
    rows = x.contiguous().view(-1, x.shape[-1])
    sent, received, _ = _numbers(sizes, ranks, x.shape[-2])
    return _c10d.all_to_all_single(rows, sent, received, group)  # type: ignore[no-any-return]


def arrived_back(started: Tensor, sizes: Tensor, ranks: int, lead: int) -> Tensor:
    """Of `start_back`: [lead, rows, h]."""
    rows: Tensor = unpacked_rows(_c10d.wait_tensor(started), sizes, ranks, lead)
    return rows
