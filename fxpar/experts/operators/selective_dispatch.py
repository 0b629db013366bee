"""Tokens for those ranks alone that hold experts that they chose, and the sums of what these make of them.

Enters: nothing. Leaves: the records of `fxpar.expand_needed` and `fxpar.sum_needed`, each the other's adjoint. They are
what an all-gather with `expand_over`, and `sum_over` with a reduce-scatter, would be if a rank got zeros in the place
of tokens that chose none of its experts, and what it makes of those were left out of the sum. Where ranks copy into
each other's memory nothing else travels; their process group carries all tokens, and what is not needed is masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from math import comb, prod
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.operators import axes_of
from fxpar.ir.program import TensorType
from fxpar.layout.layout import Placement, R, shard
from fxpar.layout.symbolic_sizes import divide, product
from fxpar.ops import peer_copies as copies
from fxpar.ops import process_group as c
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import CollectiveSite, Gradients, LoweredCall, OnShapes, Operator, Reverse, Sent
from fxpar.ops.rank_dim import demanding
from fxpar.peer_memory.compiler.symmetric_buffer import needs
from fxpar.signatures.engine import Refusal, Rule, Signature
from fxpar.signatures.matmul import formula
from fxpar.signatures.op_call import OpCall


def needed_part(experts: int, per_rank: int, k: int) -> Fraction:
    """Returns what part of tokens chose one of a rank's `per_rank` experts, if any choice of k of `experts` is alike.

    The others chose k of those that the rank has not.
    """
    return Fraction(1) if k > experts - per_rank else 1 - Fraction(comb(experts - per_rank, k), comb(experts, k))


# ---------------------------------------------------------------------- rules


def _of_tokens(call: OpCall, lead: int) -> Placement | Refusal:
    """Returns how tokens are cut that stand after so many leading dimensions: each rank has as many."""
    tokens = call.operands[1].shape[-2]
    if divide(tokens, call.n) is None:
        return Refusal(f"{tokens} tokens are not those of {call.n} ranks", structural=True)
    return shard(lead, tokens)


def _of_ranks(call: OpCall, kind: TensorType) -> Placement | Refusal:
    """Returns how the ranks' parts of all tokens are cut: each rank has one index."""
    dim = len(kind.shape) - 3
    if dim < 0 or kind.shape[dim] != call.n:
        return Refusal(f"dimension {dim} of {kind} has no index for each of {call.n} ranks", structural=True)
    return shard(dim, kind.shape[dim])


def _expanded(call: OpCall) -> Signature | Refusal:
    before, after = _of_tokens(call, len(call.operands[0].shape) - 2), _of_ranks(call, call.outputs[0])
    if isinstance(before, Refusal):
        return before
    return after if isinstance(after, Refusal) else Signature((before, R), (after,))


def _summed(call: OpCall) -> Signature | Refusal:
    before, after = _of_ranks(call, call.operands[0]), _of_tokens(call, len(call.outputs[0].shape) - 2)
    if isinstance(before, Refusal):
        return before
    return after if isinstance(after, Refusal) else Signature((before, R), (after,))


def _apart(x: str, out: str) -> Rule:
    """Returns the rule of an axis that the operator does not name: leading dimensions and columns are apart."""
    return Rule(formula(f"{x}, ... _ _ -> {out}", "self", "chosen"), (("self",),))


# ---------------------------------------------------------------------- shapes and traffic


def _ranks_of(call: OnShapes) -> int:
    """Returns how many ranks have a part of what the shapes are of; 1 where they are the whole's."""
    return prod(call.axes.get(axis, 1) for axis in axes_of(call.node))


def _check_chosen(call: OnShapes, lead: tuple[int, ...], tokens: int) -> None:
    _, chosen, per_rank = call.args
    if tuple(chosen.shape[:-2]) != lead or chosen.shape[-2] != tokens or chosen.is_floating_point():
        raise ValueError(f"{list(chosen.shape)} of {chosen.dtype} are not the experts of {[*lead, tokens]} tokens")
    if not isinstance(per_rank, int) or per_rank < 1:
        raise ValueError(f"a rank has {per_rank} experts")


def _expanded_shape(call: OnShapes) -> Tensor:
    (x, _, _), (out,) = call.args, call.outputs
    *lead, own_tokens, width = x.shape
    tokens = own_tokens * _ranks_of(call)
    _check_chosen(call, tuple(lead), tokens)
    if [*out.shape[:-3], *out.shape[-2:]] != [*lead, tokens, width] or out.dtype != x.dtype:
        raise ValueError(f"tokens {list(x.shape)} of {x.dtype} cannot be {list(out.shape)} of {out.dtype}")
    return out


def _summed_shape(call: OnShapes) -> Tensor:
    x = call.args[0]
    *lead, _, tokens, width = x.shape
    _check_chosen(call, tuple(lead), tokens)
    summed: Tensor = x.new_empty((*lead, tokens // _ranks_of(call), width))
    return summed


def _traffic(crossing: CollectiveSite) -> Iterator[Sent]:
    """Yields the traffic: all tokens, of which a part is expected to travel where the ranks copy."""
    call = crossing.call
    tokens = min((*call.operands[:1], *call.outputs), key=lambda kind: len(kind.shape))
    per_rank, size = int(call.get("own")), product(tokens.shape) * tokens.dtype.itemsize
    part = needed_part(call.n * per_rank, per_rank, int(call.operands[1].shape[-1]))
    forward, backward = call.target.sends
    yield Sent(forward, "forward", size, part)
    if crossing.reached[0]:
        yield Sent(backward, "backward", size, part)


# ---------------------------------------------------------------------- what a rank runs


def start_tokens(x: Tensor, group: str, size: int) -> Tensor:
    """Starts to gather the tokens of all ranks: [n, …, t, f], on their way."""
    return c.start_gather(x, group, size)


def needed_tokens(started: Tensor, chosen: Tensor, per_rank: int, index: Tensor) -> Tensor:
    """Takes from `start_tokens` those that this rank needs, [… 1, n * t, f]."""
    tokens = c.arrived(started).movedim(0, -3).flatten(-3, -2)
    return _masked(tokens, chosen, per_rank, index).unsqueeze(-3)


def start_sums(x: Tensor, chosen: Tensor, per_rank: int, group: str, size: int, index: Tensor) -> Tensor:
    """Starts to sum what the ranks made of this one's tokens: [1, …, t, f], on their way."""
    masked = _masked(x.squeeze(-3), chosen, per_rank, index)
    return c.start_scatter(masked, masked.dim() - 2, [(1, None)], group, size)


def needed_sums(started: Tensor) -> Tensor:
    """Waits for the sums of `start_sums`, and returns them."""
    return c.arrived(started).squeeze(0)


def _masked(x: Tensor, chosen: Tensor, per_rank: int, index: Tensor) -> Tensor:
    return torch.where(needs(chosen, per_rank, index).unsqueeze(-1), x, x.new_zeros(()))


def _lower_expand(node: fx.Node, rank: OnRank) -> LoweredCall:
    (x, *choice), ranks = node.args, rank.ranks(node)
    if ranks.copies is not None:
        return LoweredCall(copies.expand_copied, (x, *choice, ranks.size, *ranks.copies))
    start = (x, ranks.group, ranks.size)
    return LoweredCall(start_tokens, start, finish=needed_tokens, rest=(*choice, ranks.index))


def _lower_sum(node: fx.Node, rank: OnRank) -> LoweredCall:
    ranks = rank.ranks(node)
    if ranks.copies is not None:
        return LoweredCall(copies.sum_copied, (*node.args, ranks.size, *ranks.copies))
    return LoweredCall(start_sums, (*node.args, ranks.group, ranks.size, ranks.index), finish=needed_sums)


def _of_needed(call: Reverse) -> Gradients:
    return call.adjoint(sum_needed)


# ---------------------------------------------------------------------- records


@partial(Operator, rule=_apart("... _ f", "... _ _ f"), shape=_expanded_shape, lower=_lower_expand)
def _expand_elsewhere(self: Any, chosen: Any, own: int) -> Any:
    """Expands on an axis that the operator does not name."""


@partial(Operator, rule=_apart("... _ _ f", "... _ f"), shape=_summed_shape, lower=_lower_sum)
def _sum_elsewhere(self: Any, chosen: Any, own: int) -> Any:
    """Sums on an axis that the operator does not name."""


_record = partial(demanding, traffic=_traffic, copies=True, one_shot=True)


@_record(
    _expanded,
    like=_expand_elsewhere,
    shape=_expanded_shape,
    lower=_lower_expand,
    sends=("all_gather", "reduce_scatter"),
    derivative=_of_needed,
)
def expand_needed(self: Any, chosen: Any, own: int, *, axis: str) -> Any:
    """Expands tokens for each rank of the axis that needs them, S → S: [… n*t, f] → [… n, n*t, f], with n ranks.

    Index r of the new dimension has the tokens that chose an expert of rank r, and zeros in the place of others.

    Args:
        self: t tokens of each rank, cut in that dimension.
        chosen: i64[… n*t, K], of all tokens on all ranks: the experts of each. Those of rank r begin at r * own; what
            is beyond the last rank's is nobody's.
        own: experts of a rank.
    """


@_record(
    _summed,
    like=_sum_elsewhere,
    shape=_summed_shape,
    lower=_lower_sum,
    sends=("reduce_scatter", "all_gather"),
    derivative=lambda call: call.adjoint(expand_needed),
)
def sum_needed(self: Any, chosen: Any, own: int, *, axis: str) -> Any:
    """Sums what the ranks made of each token that they needed, S → S: [… n, n*t, f] → [… n*t, f].

    Args:
        self: index r is what rank r made of all tokens; of those that it did not need it is left out.
        chosen, own: as of `expand_needed`.
    """
