"""A value once for each rank of an axis, and the sum of what the ranks made of it.

Enters: nothing. Leaves: the records of `fxpar.expand_over` and `fxpar.sum_over`, each the other's adjoint, and of
`fxpar.shard_over` and `fxpar.replicate_over`, by which a program says itself which dimension an axis cuts, or that it
cuts none. They move nothing: a rank has one index of the dimension, and what is summed is partial. What all ranks have
of one value,
and each computes with operands of its own, it computes so as one of a leading dimension
(`fxpar/experts/compiler/dispatch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.program import TensorType
from fxpar.layout.layout import P, Placement, R, shard
from fxpar.ops import process_group
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import Demand, Gradients, LoweredCall, OnShapes, Operator, Reverse
from fxpar.signatures.engine import Labelling, Refusal, Rule, Signature
from fxpar.signatures.op_call import OpCall


def expand_dim(x: Tensor, dim: int) -> Tensor:
    """Maps […] → [… 1 …]: what a rank has of `expand_over`."""
    return x.unsqueeze(dim)


def sum_dim(x: Tensor, dim: int) -> Tensor:
    """Maps [… 1 …] → […]: what a rank has of `sum_over`."""
    return x.squeeze(dim)


# ---------------------------------------------------------------------- rules


def _cut(call: OpCall, longer: TensorType) -> Placement | Refusal:
    dim = int(call.get("dim"))
    if longer.shape[dim] != call.n:
        return Refusal(f"dimension {dim} of {longer} has no index for each of {call.n} ranks", structural=True)
    return shard(dim, longer.shape[dim])


def _expanded(call: OpCall) -> Signature | Refusal:
    cut = _cut(call, call.outputs[0])
    return cut if isinstance(cut, Refusal) else Signature((R,), (cut,))


def _summed(call: OpCall) -> Signature | Refusal:
    cut = _cut(call, call.operands[0])
    return cut if isinstance(cut, Refusal) else Signature((cut,), (P,))


def _sharded(call: OpCall) -> Signature | Refusal:
    dim = int(call.get("dim"))
    cut = shard(dim, call.operands[0].shape[dim])
    return Signature((cut,), (cut,))


def _replicated(call: OpCall) -> Signature:
    return Signature((R,), (R,))


def demanding(demand: Demand, **fields: Any) -> Callable[..., Operator]:
    """Returns the record of an operator whose values have one signature on the axis that it names.

    Args:
        demand: the signature of a call, or why it has none.
        fields: of the record.
    """

    def check(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal:
        signature = demand(call)
        if isinstance(signature, Refusal):
            return signature
        return signature.outputs if tuple(placements) == signature.operands else _refused(signature)

    def seed(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
        signature = demand(call)
        if isinstance(signature, Refusal) or placement == signature.operands[index]:
            return signature
        return _refused(signature)

    return partial(Operator, demand=demand, rule=Rule(seed=seed, check=check), **fields)


def _refused(signature: Signature) -> Refusal:
    return Refusal(f"its operands have to be {', '.join(map(str, signature.operands))}")


def _longer(call: OpCall) -> Labelling:
    labels = tuple(f"d{i}" for i in range(len(call.operands[0].shape)))
    dim = int(call.get("dim"))
    return Labelling((labels,), ((*labels[:dim], None, *labels[dim:]),))


def _shorter(call: OpCall) -> Labelling:
    labels = tuple(f"d{i}" for i in range(len(call.outputs[0].shape)))
    dim = int(call.get("dim"))
    return Labelling(((*labels[:dim], None, *labels[dim:]),), (labels,))


# ---------------------------------------------------------------------- shapes, lowering and derivatives


def _expanded_shape(call: OnShapes) -> Tensor:
    (x, dim), (out,) = call.args, call.outputs
    shape, target = list(x.shape), list(out.shape)
    if not 0 <= dim < len(target) or shape != [*target[:dim], *target[dim + 1 :]] or x.dtype != out.dtype:
        raise ValueError(f"{shape} of {x.dtype} with a dimension before {dim} more cannot be {target} of {out.dtype}")
    return out


def _summed_shape(call: OnShapes) -> Tensor:
    x, dim = call.args
    if not 0 <= dim < x.dim():
        raise ValueError(f"{list(x.shape)} has no dimension {dim}")
    summed: Tensor = x.new_empty((*x.shape[:dim], *x.shape[dim + 1 :]))
    return summed


def _lower_expand(node: fx.Node, rank: OnRank) -> LoweredCall:
    return LoweredCall(expand_dim, node.args)


def _lower_sum(node: fx.Node, rank: OnRank) -> LoweredCall:
    return LoweredCall(sum_dim, node.args)


def _of_ranks(call: Reverse) -> Gradients:
    return call.adjoint(sum_over)


# ---------------------------------------------------------------------- records


@partial(Operator, rule=Rule(_longer, (("self",),)), shape=_expanded_shape, lower=_lower_expand)
def _expand_elsewhere(self: Any, dim: int) -> Any:
    """Expands on an axis that the operator does not name."""


@partial(Operator, rule=Rule(_shorter, (("self",),)), shape=_summed_shape, lower=_lower_sum)
def _sum_elsewhere(self: Any, dim: int) -> Any:
    """Sums on an axis that the operator does not name."""


@demanding(_expanded, like=_expand_elsewhere, shape=_expanded_shape, lower=_lower_expand, derivative=_of_ranks)
def expand_over(self: Any, dim: int, *, axis: str) -> Any:
    """Expands a value once for each rank of the axis, R → S(dim): […] → [… n …], with n ranks.

    Args:
        self: what all ranks have.
        dim: of the result, the new one.
    """


@demanding(
    _summed,
    like=_sum_elsewhere,
    shape=_summed_shape,
    lower=_lower_sum,
    derivative=lambda call: call.adjoint(expand_over),
)
def sum_over(self: Any, dim: int, *, axis: str) -> Any:
    """Sums what the ranks of the axis have, S(dim) → P: [… n …] → […]. Nothing is added until P is reduced.

    Args:
        self: of n ranks, each of which has one index of `dim`.
        dim: a dimension of it.
    """


def _lower(node: fx.Node, rank: OnRank) -> LoweredCall:
    return LoweredCall(process_group.same, node.args[:1])


@demanding(
    _sharded,
    like=torch.ops.aten.alias.default,
    shape=lambda call: call.args[0],
    lower=_lower,
    derivative=lambda call: call.tangents,
)
def shard_over(self: Any, dim: int, *, axis: str) -> Any:
    """Cuts the value on the axis in a dimension.

    Args:
        self: any shape.
        dim: the dimension, of whose size the axis has a divisor of ranks.
    """


@demanding(
    _replicated,
    like=torch.ops.aten.alias.default,
    shape=lambda call: call.args[0],
    lower=_lower,
    stops_gradient=True,
)
def replicate_over(self: Any, *, axis: str) -> Any:
    """Has each rank of the axis have the whole value, R → R: what decides something for all ranks.

    Args:
        self: any shape, without a gradient.
    """
