"""The gradients of the operators over a vocabulary that is cut (SPEC section 2.3).

Enters: what the composite operators of `fxpar.ops.vocabulary` take and give, and gradients of their results. Leaves:
the records of the backward's operators, and of the loss that saves what its gradient needs. On the axes that such an
operator does not name it has rules by labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.operators import axes_of
from fxpar.ir.program import Property, operands, output_types
from fxpar.layout.layout import I, Piece, Placement, fits
from fxpar.ops import words
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import Gradients, LoweredCall, OnShapes, Operator, Reverse
from fxpar.ops.vocabulary_rules import (
    by_rows,
    classes,
    cross_entropy_rows,
    lowered,
    nll_loss_rows,
    rule,
    searched,
    searched_of_gradient,
)
from fxpar.signatures.op_call import OpCall, bind_arguments
from fxpar.signatures.rule import Labelling, Labels, Refusal, Rule

aten = torch.ops.aten

# ---------------------------------------------------------------------- layouts


def _like_self(placement: Placement) -> Placement:
    """The gradient of what is cut so: padding gets none."""
    return replace(placement, zeros=placement.is_padded)


def _table_gradient(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal:
    """Each rank makes its rows of the table's gradient from whole operands."""
    odd = next((p for p in placements if p.kind not in "IR"), None)
    words, padded = call.get("words"), call.get("padded")
    if odd is not None:
        return Refusal(f"the gradient of a table that is cut is made of whole values and not of {odd}")
    placement = Placement("S", 0, (Piece(1, words, padded=padded),), zeros=bool(padded))
    if not fits(placement, call.outputs[0].shape, call.n):
        return Refusal(f"{words} words, {padded} with padding, are not divisible by {call.n}")
    return (placement,)


def _rows_of_loss(call: OpCall) -> Labelling | Refusal:
    """On other axes: rows of logits, targets and of what is saved of them; with a mean they are whole."""
    x = call.operands[0]
    if len(x.shape) < 2:
        return Refusal("a loss without a batch dimension needs whole operands")
    how = call.get("reduction", 1)
    rows: Labels = ("n", *(f"d{i}" for i in range(len(x.shape) - 2)))
    logits: Labels = ("n", None, *rows[1:])
    if how == 1:
        rows, logits = (None,) * len(rows), (None,) * len(logits)
    known = {"self": logits, "target": rows, "log_sum": rows, "gradient": rows if how == 0 else (), "weight": (None,)}
    outs = tuple(logits if kind.shape == x.shape else rows if kind.shape else () for kind in call.outputs)
    summed = frozenset(label for label in rows if label is not None)
    return Labelling(tuple(known[name] for name in call.names), outs, summed)


def _rows_of_table(call: OpCall) -> Labelling | Refusal:
    """On other axes: `… h, … -> _ h`."""
    lead: Labels = tuple(f"d{i}" for i in range(len(call.operands[1].shape)))
    return Labelling(((*lead, "h"), lead), ((None, "h"),), frozenset(label for label in lead if label is not None))


def _all_but_dim(call: OpCall) -> Labelling | Refusal:
    """On other axes: everything but what is searched or normalised, which a reduction leaves out."""
    rank, dim = len(call.operands[0].shape), call.get("dim")
    dim = int(dim[0] if isinstance(dim, (list, tuple)) else dim) % rank
    full: Labels = tuple(None if i == dim else f"d{i}" for i in range(rank))
    reduced: Labels = tuple(label for i, label in enumerate(full) if i != dim)
    ins = tuple(full if len(kind.shape) == rank else reduced for kind in call.operands)
    return Labelling(ins, (full,))


def _never(node: fx.Node, rank: OnRank) -> LoweredCall:
    raise AssertionError(f"{node.target} names an axis")


def _beside(labels: Callable[[OpCall], Labelling | Refusal], linear: tuple[tuple[str, ...], ...] = ()) -> Operator:
    """What an operator is on the axes that it does not name."""

    def beside() -> None:
        """Has rules alone."""

    return Operator(beside, lower=_never, shape=lambda call: call.outputs, rule=Rule(labels, linear))


# ---------------------------------------------------------------------- shapes and lowering


def _shape_of_self(call: OnShapes) -> Tensor:
    return torch.empty_like(call.args[0])


def _saving_shape(call: OnShapes) -> Any:
    x, target = call.args[:2]
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    options = {**dict(zip(names, call.args[2:], strict=False)), **call.kwargs}
    options = {name: value for name, value in options.items() if name != "axis"}
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return aten.cross_entropy_loss.default(x, target, **options), x.new_empty(target.shape, dtype=wide)


def _table_shape(call: OnShapes) -> Tensor:
    gradient, words = call.args[0], bind_arguments(call.node)
    rows = int(words["padded"] or words["words"])
    if not call.axes:
        rows = int(words["words"])
    else:
        rows //= math.prod(call.axes[axis] for axis in axes_of(call.node))
    return torch.empty((rows, gradient.shape[-1]), dtype=gradient.dtype, device=gradient.device)


def _lower_table(node: fx.Node, rank: OnRank) -> LoweredCall:
    bound, ranks = bind_arguments(node), rank.ranks(node)
    args = (*(bound[name] for name in ("gradient", "indices", "padding_idx", "padded")), bound["words"])
    return LoweredCall(words.with_block(words.embedding_backward), (*args, ranks.group, ranks.size, ranks.index))


# ---------------------------------------------------------------------- records

_of_gradients = partial(Operator, stage=Property.VOCABULARY)


@partial(
    _of_gradients,
    rule=Rule(check=_table_gradient),
    shape=_table_shape,
    lower=_lower_table,
    like=_beside(_rows_of_table, (("gradient",),)),
)
def embedding_backward(
    gradient: Any, indices: Any, words: int, padding_idx: int = -1, padded: int = 0, *, axis: str
) -> Any:
    """The gradient of the table of `fxpar.embedding`, cut as the table.

    Args:
        gradient: of the lookup.
        words: rows of the whole table.
        padded: rows that all ranks hold, padding included; 0 where there is none.
    """


@partial(
    _of_gradients,
    rule=rule(classes, _like_self),
    shape=_shape_of_self,
    traffic=by_rows(classes, nll_loss_rows),
    lower=lowered(words.cross_entropy_backward),
    like=_beside(_rows_of_loss, (("gradient",),)),
)
def cross_entropy_backward(
    self: Any,
    target: Any,
    gradient: Any,
    log_sum: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    axis: str,
) -> Any:
    """The gradient of the logits of `fxpar.cross_entropy_forward`, cut as they are."""


def _cross_entropy_gradient(reverse: Reverse) -> Gradients:
    bound, kind = bind_arguments(reverse.node), output_types(operands(reverse.node)[0])[0]
    items = {user.args[1]: user for user in reverse.node.users}
    options = (bound[name] for name in ("weight", "reduction", "ignore_index", "label_smoothing"))
    args = (bound["self"], bound["target"], reverse.tangents[0], items[1], *options)
    gradient = reverse.call(cross_entropy_backward, *args, kind=kind)
    return [gradient, *[None] * (len(reverse.wanted) - 1)]


@partial(
    _of_gradients,
    rule=rule(classes, lambda cut: I),
    shape=_saving_shape,
    traffic=by_rows(classes, cross_entropy_rows),
    lower=lowered(words.cross_entropy_forward),
    like=_beside(_rows_of_loss),
    derivative=_cross_entropy_gradient,
)
def cross_entropy_forward(
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    axis: str,
) -> Any:
    """`fxpar.cross_entropy`, and what its gradient needs: log Σ exp of each row, in float32 or wider."""


@partial(
    _of_gradients,
    rule=rule(classes, _like_self),
    shape=_shape_of_self,
    traffic=by_rows(classes, nll_loss_rows),
    lower=lowered(words.nll_loss_backward),
    like=_beside(_rows_of_loss, (("gradient",),)),
)
def nll_loss_backward(
    self: Any,
    target: Any,
    gradient: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    *,
    axis: str,
) -> Any:
    """The gradient of the log-probabilities of `fxpar.nll_loss`, cut as they are; of their values it needs none."""


@partial(
    _of_gradients,
    rule=rule(searched_of_gradient, _like_self),
    shape=lambda call: torch.empty_like(call.args[0], dtype=call.args[3]),
    traffic=by_rows(searched, lambda call, rows: iter([("all_reduce", "forward", rows)])),
    lower=lowered(words.log_softmax_backward),
    like=_beside(_all_but_dim, (("gradient",),)),
)
def log_softmax_backward(self: Any, gradient: Any, dim: int, dtype: Any, *, axis: str) -> Any:
    """The gradient of the operand of `fxpar.log_softmax`; `self` is the result, `dtype` the operand's type."""


@partial(
    _of_gradients,
    rule=rule(searched, _like_self),
    shape=_shape_of_self,
    lower=lowered(words.logsumexp_backward),
    like=_beside(_all_but_dim, (("gradient",),)),
)
def logsumexp_backward(self: Any, gradient: Any, out: Any, dim: Any, keepdim: bool = False, *, axis: str) -> Any:
    """The gradient of the operand of `fxpar.logsumexp`, whose result is `out`."""


@partial(
    _of_gradients,
    rule=rule(searched, _like_self),
    shape=_shape_of_self,
    lower=lowered(words.topk_backward),
    like=_beside(_all_but_dim, (("gradient",),)),
)
def topk_backward(self: Any, indices: Any, gradient: Any, dim: int = -1, *, axis: str) -> Any:
    """The gradient of the operand of `fxpar.topk`; of its values it needs none."""
