"""Weights of experts in spare slots of other ranks, and the way of their gradients back.

Enters: which expert stands in each slot (`fxpar.plan_replicas`). Leaves: the records of `fxpar.replicate_experts` and
`fxpar.return_replicas`, each the other's adjoint.

Terms: n ranks have l experts each, and after these as many slots. Both forms have leading dimensions: first those of
axes whose ranks plan apart, of which `home` has as many, then one for each axis that the operator names, then the
experts of a rank. All sizes are fixed, and nothing is read on the host: a reduce-scatter carries one summand of each
slot from every rank, zeros but from the expert's home, and an all-gather brings every rank the gradients of all slots.
So n · slots matrices travel, where an all-gather of experts would carry n · l.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.operators import axes_of
from fxpar.ir.program import tensor_type
from fxpar.layout.layout import Placement, R, shard
from fxpar.layout.symbolic_sizes import Size, product
from fxpar.ops import process_group as c
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import (
    CollectiveSite,
    Gradients,
    LoweredCall,
    OnShapes,
    Operator,
    Reverse,
    Sent,
    torch_operator,
)
from fxpar.signatures.engine import Labelling, Labels, Refusal, Rule, Signature, seed_signature
from fxpar.signatures.op_call import OpCall


def _expert_dim(before: Sequence[Size], after: Sequence[Size]) -> int:
    """Returns the dimension of a rank's experts, the one that slots make longer.

    Raises:
        ValueError: the shapes do not differ in one dimension alone.
    """
    dims = [dim for dim, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    if len(before) != len(after) or len(dims) != 1:
        raise ValueError(f"{list(before)} and {list(after)} are no weights of experts with slots and without")
    return dims[0]


# ---------------------------------------------------------------------- rules


def _labels(call: OpCall) -> Labelling:
    """Labels an axis that the operator does not name: groups that plan apart, and what stands behind the experts."""
    (weights, home), (out,) = call.operands, call.outputs
    dim, lead = _expert_dim(weights.shape, out.shape), len(home.shape) - 1
    groups: Labels = tuple(f"d{i}" for i in range(lead))
    behind: Labels = tuple(f"w{i}" for i in range(len(out.shape) - dim - 1))
    of_weights: Labels = (*groups, *[None] * (dim + 1 - lead), *behind)
    return Labelling((of_weights, (*groups, None)), (of_weights,))


def _crossed(call: OpCall) -> Placement | None:
    """Returns the cut over the ranks on the axis that is judged; None where the axes outside it leave none.

    Axes nest as leading dimensions do: what the outer ones cut has one index left.
    """
    weights, home = call.operands
    dims = range(len(home.shape) - 1, _expert_dim(weights.shape, call.outputs[0].shape))
    dim = next((dim for dim in dims if weights.shape[dim] != 1), None)
    return None if dim is None else shard(dim, weights.shape[dim])


def _check(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal | None:
    cut = _crossed(call)
    if cut is None:
        return None
    if tuple(placements) != (cut, R):
        return Refusal(f"the ranks exchange experts: weights have to be {cut}, and homes the same on all ranks")
    return (cut,)


def _seed(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    cut = _crossed(call)
    if cut is None:
        return seed_signature(_APART, call, index, placement)
    outputs = _check(call, (placement, R)) if index == 0 else Refusal("homes have to be the same on all ranks")
    return outputs if isinstance(outputs, Refusal) else Signature((cut, R), (cut,))


_APART = Rule(_labels, (("self",),))

# ---------------------------------------------------------------------- shapes and traffic


def _replicated_shape(call: OnShapes) -> Tensor:
    return _checked(call, call.outputs[0], call.args[0])


def _returned_shape(call: OnShapes) -> Tensor:
    return _checked(call, call.args[0], call.outputs[0])


def _checked(call: OnShapes, longer: Tensor, shorter: Tensor) -> Tensor:
    """Returns the result of a call on weights with slots and without."""
    home, dim = call.args[1], _expert_dim(longer.shape, shorter.shape)
    slots, lead = longer.shape[dim] - shorter.shape[dim], home.dim() - 1
    if slots < 0 or longer.dtype != shorter.dtype:
        raise ValueError(f"weights {list(longer.shape)} of {longer.dtype} have no slots after {list(shorter.shape)}")
    # What plans for all ranks has no dimension for them.
    if home.is_floating_point() or home.shape[:-1] != longer.shape[:lead] or dim - lead != len(axes_of(call.node)):
        raise ValueError(f"slots {list(home.shape)} of {home.dtype} for weights {list(longer.shape)}")
    if home.shape[-1] % slots:
        raise ValueError(f"{home.shape[-1]} slots, {slots} on each rank")
    return call.outputs[0]


def _traffic(crossing: CollectiveSite) -> Iterator[Sent]:
    """Yields as many bytes as the slots of all ranks have."""
    weights, home = crossing.call.operands
    dim = _expert_dim(weights.shape, crossing.call.outputs[0].shape)
    size = home.shape[-1] * product(weights.shape[dim + 1 :]) * weights.dtype.itemsize
    forward, backward = crossing.call.target.sends
    yield Sent(forward, "forward", size)
    if crossing.reached[0]:
        yield Sent(backward, "backward", size)


# ---------------------------------------------------------------------- what a rank runs


def _places(home: Tensor, experts: int, index: Tensor) -> Tensor:
    """Returns which of a rank's experts stands in each slot of all ranks, i64 [n * slots]; `experts` for none."""
    place = home.flatten() - index * experts
    return torch.where((place >= 0) & (place < experts), place, experts)


def start_replicas(weights: Tensor, home: Tensor, dim: int, group: str, size: int, index: Tensor) -> Tensor:
    """Starts to send each expert to its slots: [1, slots, elements of an expert], on their way."""
    experts = weights.shape[dim]
    matrices, place = weights.reshape(experts, -1), _places(home, experts, index)
    rows = matrices.index_select(0, place.clamp_max(experts - 1))
    # A choice and no product: zero times infinity would be NaN.
    summands = torch.where((place < experts).unsqueeze(-1), rows, rows.new_zeros(()))
    return c.start_scatter(summands, 0, [(1, None)], group, size)


def replicas_arrived(started: Tensor, weights: Tensor, dim: int) -> Tensor:
    """Waits for the experts in this rank's slots, and puts them after its experts."""
    slots = c.scattered(started)
    return torch.cat((weights, slots.view(*weights.shape[:dim], -1, *weights.shape[dim + 1 :])), dim)


def start_returns(gradient: Tensor, dim: int, slots: int, group: str, size: int) -> Tensor:
    """Starts to gather the gradients of all slots: [n, slots, elements of an expert], on their way."""
    experts = gradient.shape[dim] - slots
    return c.start_gather(gradient.narrow(dim, experts, slots).reshape(slots, -1), group, size)


def replicas_returned(started: Tensor, gradient: Tensor, home: Tensor, dim: int, slots: int, index: Tensor) -> Tensor:
    """Waits for the gradients of all slots, and adds those of this rank's experts to their own."""
    experts = gradient.shape[dim] - slots
    local, places = gradient.narrow(dim, 0, experts), _places(home, experts, index).unflatten(0, (-1, slots))
    return add_replicas(local.reshape(experts, -1), c.arrived(started), places).view(local.shape)


def _added_shape(local: Tensor, of_slots: Tensor, places: Tensor) -> Tensor:
    return torch.empty_like(local, memory_format=torch.contiguous_format)


@torch_operator("add_replicas", fake=_added_shape)
def add_replicas(local: Tensor, of_slots: Tensor, places: Tensor) -> Tensor:
    """Adds to each of a rank's experts what its slots on other ranks have, rank by rank.

    A rank's slots have different experts: so the order of additions is fixed, and none waits for another.

    Args:
        local: [l, elements of an expert].
        of_slots: [n, slots, elements of an expert].
        places: i64[n, slots], the row of `local`, or l for none.
    """
    sums, experts = local.clone(memory_format=torch.contiguous_format), len(local)
    for place, rows in zip(places, of_slots, strict=True):
        # A choice and no product: zero times infinity would be NaN.
        summands = torch.where((place < experts).unsqueeze(-1), rows, rows.new_zeros(()))
        sums.index_add_(0, place.clamp_max(experts - 1), summands)
    return sums


def _lower_replicas(node: fx.Node, rank: OnRank) -> LoweredCall:
    (weights, home), ranks = node.args, rank.ranks(node)
    assert isinstance(weights, fx.Node)
    dim = _expert_dim(tensor_type(weights).shape, tensor_type(node).shape)
    start = (weights, home, dim, ranks.group, ranks.size, ranks.index)
    return LoweredCall(start_replicas, start, finish=replicas_arrived, rest=(weights, dim))


def _lower_returns(node: fx.Node, rank: OnRank) -> LoweredCall:
    (gradient, home), ranks = node.args, rank.ranks(node)
    assert isinstance(gradient, fx.Node)
    before, after = tensor_type(gradient).shape, tensor_type(node).shape
    dim = _expert_dim(before, after)
    slots = rank.size(before[dim] - after[dim])
    start, rest = (gradient, dim, slots, ranks.group, ranks.size), (gradient, home, dim, slots, ranks.index)
    return LoweredCall(start_returns, start, finish=replicas_returned, rest=rest)


def _of_replicas(call: Reverse) -> Gradients:
    return call.adjoint(return_replicas)


# ---------------------------------------------------------------------- records


@partial(Operator, rule=_APART, shape=_replicated_shape, lower=_lower_replicas)
def _replicate_elsewhere(self: Any, home: Any) -> Any:
    """Fills slots on an axis that the operator does not name."""


@partial(Operator, rule=_APART, shape=_returned_shape, lower=_lower_returns)
def _return_elsewhere(self: Any, home: Any) -> Any:
    """Adds slots' gradients on an axis that the operator does not name."""


_record = partial(Operator, rule=Rule(_labels, _APART.partial, seed=_seed, check=_check), apart=True, traffic=_traffic)


@partial(
    _record,
    like=_replicate_elsewhere,
    shape=_replicated_shape,
    lower=_lower_replicas,
    sends=("reduce_scatter", "all_gather"),
    resent=True,
    derivative=_of_replicas,
)
def replicate_experts(self: Any, home: Any, *, axis: str) -> Any:
    """Puts replicas of other ranks' experts after a rank's experts, S → S: [… n, l, …] → [… n, l + slots, …].

    Args:
        self: weights of experts, cut over the ranks.
        home: i64[…, n * slots]: the expert in each slot, -1 for none, whose weights are zeros. Slot s is on rank
            s // slots; the slots of a rank have different experts.
    """


@partial(
    _record,
    like=_return_elsewhere,
    shape=_returned_shape,
    lower=_lower_returns,
    sends=("all_gather", "reduce_scatter"),
    derivative=lambda call: call.adjoint(replicate_experts),
)
def return_replicas(self: Any, home: Any, *, axis: str) -> Any:
    """Adds slots' gradients to those of their home experts, S → S: [… n, l + slots, …] → [… n, l, …].

    Args:
        self: gradients of a rank's experts and of its slots after them.
        home: as of `replicate_experts`.
    """
