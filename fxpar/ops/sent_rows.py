"""Rows of experts that travel alone: what sends as many as there are, to the ranks of their experts and back.

Enters: nothing. Leaves: the records of `fxpar.split_sizes`, `fxpar.send_rows` and `fxpar.return_rows`. What a rank runs
is in `fxpar.ops.alltoallv`.

Terms: *holders* are the axes whose ranks hold different experts; a source has a leading dimension for each axis that
cuts tokens, and a holder the same ones: index i of a holder's dimension is what rank i received. How many rows that is
values decide, and it differs by rank: the extent is a counted symbol (`fxpar.ir.symbols`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx

from fxpar.ir.program import TensorType, output_types, tensor_type
from fxpar.layout.layout import Placement, shard
from fxpar.layout.symbolic_sizes import product
from fxpar.ops import alltoallv
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import CollectiveSite, Gradients, LoweredCall, OnShapes, Operator, Reverse, Sent
from fxpar.signatures.engine import seed_signature
from fxpar.signatures.matmul import formula
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.rule import Refusal, Rule, Signature

# ---------------------------------------------------------------------- rules

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


# ---------------------------------------------------------------------- lowering and derivatives


def _lower_sizes(node: fx.Node, rank: OnRank) -> LoweredCall:
    return LoweredCall(alltoallv.start_sizes, node.args, finish=alltoallv.sizes_there)


def _lower_there(node: fx.Node, rank: OnRank) -> LoweredCall:
    lead, ranks = len(tensor_type(node).shape) - 2, rank.ranks(node)
    return LoweredCall(
        alltoallv.start_there, (*node.args, ranks.group, ranks.size), finish=alltoallv.arrived_there, rest=(lead,)
    )


def _lower_back(node: fx.Node, rank: OnRank) -> LoweredCall:
    lead, sizes, ranks = len(tensor_type(node).shape) - 2, node.args[1], rank.ranks(node)
    rest = (sizes, ranks.size, lead)
    return LoweredCall(
        alltoallv.start_back, (*node.args, ranks.group, ranks.size), finish=alltoallv.arrived_back, rest=rest
    )


def _reversed(call: Reverse, target: Operator) -> Gradients:
    x, sizes = call.node.args
    assert isinstance(x, fx.Node)
    (kind,), (gradient,) = output_types(x), call.tangents
    assert gradient is not None
    return call.call(target, gradient, sizes, kind=TensorType(output_types(gradient)[0].dtype, kind.shape)), None


def _there_derivative(call: Reverse) -> Gradients:
    return _reversed(call, return_rows)


def _back_derivative(call: Reverse) -> Gradients:
    return _reversed(call, send_rows)


# ---------------------------------------------------------------------- records


@partial(
    Operator,
    rule=Rule(formula("... _, ... _, ... _ _ -> ... _", "order", "counts", "received")),
    shape=_sizes_shape,
    lower=_lower_sizes,
    stops_gradient=True,
    uncaptured="copies how many rows travel to the host; give dispatch='static'",
)
def split_sizes(order: Any, counts: Any, received: Any) -> Any:
    """How many rows go where, on the host (`fxpar.ops.alltoallv`).

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
    uncaptured="sends as many rows as the routing decides; give dispatch='static'",
)


@partial(_record, traffic=_there, lower=_lower_there, derivative=_there_derivative)
def send_rows(x: Any, sizes: Any, *, axis: str) -> Any:
    """Rows to the ranks that hold their experts: […, M, h] → […, r, h], an all-to-all of uneven parts.

    Args:
        x: rows by rank, behind them those that go nowhere.
        sizes: of `split_sizes`.
    """


@partial(_record, traffic=_back, lower=_lower_back, derivative=_back_derivative)
def return_rows(x: Any, sizes: Any, *, axis: str) -> Any:
    """Rows back to where they came from: […, r, h] → […, M, h]; the adjoint of `send_rows`.

    Args:
        x: rows by the rank that they came from.
        sizes: as `send_rows` had them.
    """
