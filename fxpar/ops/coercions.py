"""The coercions: every conversion between two placements on one axis (SPEC section 2.1).

Enters: nothing. Leaves: a record for each row of the table with the collective it costs forward and backward, for the
rows of a factored axis, whose ranks share blocks (f and the slice on its inner factor), and for the bucket of many f;
and what each is in the backward. The placement a coercion converts *to* is the one in the node's note;
`fxpar.ops.coercion_table` says which row converts one placement to another, and `fxpar.ops.coercion_lowering` what a
rank runs.

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
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import fx

from fxpar.ir.grad_flow import owner_of
from fxpar.ir.operators import dual
from fxpar.ir.program import Property, TensorType, note, operands, output_layouts, output_types
from fxpar.ir.stages import is_received
from fxpar.ir.step import BACKWARD, PARAMETER
from fxpar.layout.layout import Layout
from fxpar.ops.coercion_lowering import (
    as_it_is,
    bucket_traffic,
    coalesced_traffic,
    exchange_traffic,
    first_only,
    lower_all_to_all,
    lower_coalesced,
    lower_gather,
    lower_pad_shared,
    lower_r_to_s,
    lower_reduce_from_shared,
    lower_s_to_p,
    lower_scatter,
    lower_split_shared,
    lower_sum,
    lower_sum_gradients,
    shape,
    traffic,
)
from fxpar.ops.operator import Gradients, Operator, Reverse

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
    kind = TensorType(output_types(gradient)[0].dtype, kind.shape)  # sums of half-precision gradients are wider
    phase = PARAMETER if target in (all_reduce, reduce_from_shared) and of_parameter(node) else BACKWARD
    args, kwargs, name = (gradient,), {"axis": node.kwargs["axis"]}, f"{gradient.name}_{target.__name__}"
    return (reverse.emit.call(target, args, kwargs, kind, note(node), layouts=[layout], phase=phase, name=name),)


def of_parameter(node: fx.Node) -> bool:
    """Whether a node sums gradients of a parameter itself: once a step, and not in each microbatch."""
    is_sum = isinstance(node.target, Operator) and node.target.sums_gradients
    owners = [owner_of(source) for source in operands(node)] if is_sum else []
    return is_sum and all(owner.op == "placeholder" and not is_received(owner) for owner in owners)


def dual_layout(layout: Layout) -> Layout:
    """How the gradient of a value of that layout is held."""
    return Layout(tuple((axis, dual(placement)) for axis, placement in layout))


def _together(reverse: Reverse) -> Gradients:
    """One reduction of the gradients that there are."""
    node, sources = reverse.node, operands(reverse.node)
    present = [(i, gradient) for i, gradient in enumerate(reverse.tangents) if gradient is not None]
    kinds = tuple(output_types(gradient)[0] for _, gradient in present)
    layouts = [dual_layout(output_layouts(sources[i])[0]) for i, _ in present]
    gradients, kwargs, place = [gradient for _, gradient in present], {"axis": node.kwargs["axis"]}, note(node)
    phase, axis = PARAMETER if of_parameter(node) else BACKWARD, node.kwargs["axis"]
    name = f"{axis}_sums".replace("-", "_")
    sums = reverse.emit.call(
        all_reduce_coalesced, gradients, kwargs, kinds, place, layouts=layouts, phase=phase, name=name
    )
    summed: list[fx.Node | None] = [None] * len(sources)
    for position, (i, _) in enumerate(present):
        args, layout = (sums, position), [layouts[position]]
        summed[i] = reverse.emit.call(operator.getitem, args, {}, kinds[position], place, layouts=layout, phase=phase)
    return summed


# ---------------------------------------------------------------------- records

_record = partial(Operator, shape=shape, traffic=traffic, stage=Property.COLLECTIVES, derivative=_conjugated)


@partial(
    _record,
    kinds=("I", "R"),
    sends=("", "all_reduce"),
    lower=as_it_is,
    sums_gradients=True,
)
def copy_to(x: Any, *, axis: str) -> Any:
    """I → R (Megatron's f): identity; all-reduce of the gradient."""


@partial(_record, kinds=("P", "I"), sends=("all_reduce", ""), lower=lower_sum, copies=True)
def reduce_from(x: Any, *, axis: str) -> Any:
    """P → I (Megatron's g): all-reduce; identity on the gradient."""


@partial(
    _record,
    kinds=("S", "R"),
    sends=("all_gather", "reduce_scatter"),
    lower=lower_gather,
    copies=True,
)
def all_gather(x: Any, *, axis: str) -> Any:
    """S → R (sequence-parallel gather): all-gather; reduce-scatter of the gradient."""


@partial(
    _record,
    kinds=("P", "S"),
    sends=("reduce_scatter", "all_gather"),
    lower=lower_scatter,
    copies=True,
)
def reduce_scatter(x: Any, *, axis: str) -> Any:
    """P → S (sequence-parallel scatter-reduce): reduce-scatter; all-gather of the gradient."""


@partial(
    _record,
    kinds=("I", "S"),
    sends=("", "all_gather"),
    lower=lower_r_to_s,
)
def i_to_s(x: Any, *, axis: str) -> Any:
    """I → S: each rank keeps its block; all-gather of the gradient."""


@partial(
    _record,
    kinds=("S", "I"),
    sends=("all_gather", ""),
    lower=lower_gather,
    copies=True,
)
def s_to_i(x: Any, *, axis: str) -> Any:
    """S → I: all-gather; each rank keeps its block of the gradient."""


@partial(_record, kinds=("R", "S"), lower=lower_r_to_s)
def r_to_s(x: Any, *, axis: str) -> Any:
    """R → S: each rank keeps its block; the gradient is padded with zeros, a summand."""


@partial(
    _record,
    kinds=("P", "R"),
    sends=("all_reduce", "all_reduce"),
    lower=lower_sum,
    copies=True,
)
def all_reduce(x: Any, *, axis: str) -> Any:
    """P → R: all-reduce, forward and backward."""


@partial(_record, kinds=("R", "I"), lower=as_it_is)
def r_to_i(x: Any, *, axis: str) -> Any:
    """R → I: identity; the gradient is kept on rank 0 and zero elsewhere."""


@partial(_record, kinds=("I", "P"), lower=first_only)
def i_to_p(x: Any, *, axis: str) -> Any:
    """I → P: kept on rank 0, zero elsewhere; identity on the gradient."""


@partial(_record, kinds=("R", "P"), lower=first_only)
def r_to_p(x: Any, *, axis: str) -> Any:
    """R → P: kept on rank 0, zero elsewhere, forward and backward."""


@partial(
    _record,
    kinds=("S", "S"),
    sends=("all_to_all", "all_to_all"),
    traffic=exchange_traffic,
    lower=lower_all_to_all,
    copies=True,
)
def all_to_all(x: Any, *, axis: str) -> Any:
    """S(i) → S(j): all-to-all, forward and backward."""


@partial(
    _record,
    kinds=("S", "S"),
    sends=("", "all_reduce"),
    lower=as_it_is,
    sums_gradients=True,
)
def copy_to_shared(x: Any, *, axis: str) -> Any:
    """S; I → S (f among the ranks that share a block): identity; all-reduce of the gradients of what is shared."""


@partial(_record, kinds=("S", "S"), lower=lower_split_shared)
def split_shared(x: Any, *, axis: str) -> Any:
    """S / c → S: each of the ranks that share a block keeps a part of it; the gradient is padded with zeros."""


# Of gradients alone: the conjugates of coercions that have no conjugate among those above.


@partial(_record, kinds=("S", "P"), lower=lower_s_to_p)
def s_to_p(x: Any, *, axis: str) -> Any:
    """S → P: each rank's block in its place, zeros elsewhere; the conjugate of `r_to_s`."""


@partial(_record, kinds=("S", "S"), lower=lower_pad_shared)
def pad_shared(x: Any, *, axis: str) -> Any:
    """S → S / c; P: a rank's part in its place in a shared block, zeros elsewhere; the conjugate of `split_shared`."""


@partial(_record, kinds=("S", "S"), sends=("all_reduce", ""), lower=lower_reduce_from_shared)
def reduce_from_shared(x: Any, *, axis: str) -> Any:
    """S / c; P → S / c: all-reduce among the ranks that share a block; the conjugate of `copy_to_shared`."""


@partial(_record, shape=lambda call: list(call.args), traffic=coalesced_traffic, lower=lower_coalesced)
def all_reduce_coalesced(*gradients: Any, axis: str) -> Any:
    """Several gradients, each summed as `all_reduce` or `reduce_from_shared` would: one all-reduce of all."""


@partial(
    _record,
    shape=lambda call: list(call.args),
    traffic=bucket_traffic,
    lower=lower_sum_gradients,
    sums_gradients=True,
    derivative=_together,
)
def sum_gradients(*weights: Any, axis: str) -> Any:
    """Several parameters, as `copy_to` or `copy_to_shared` coerce each: identity; one all-reduce of all gradients.

    A weight may also be what another such sum, over other axes, gives of a parameter.
    """


# ---------------------------------------------------------------------- in the backward

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
