"""The operators over a vocabulary that is cut (SPEC section 2.3).

Enters: operations of `aten` that need the whole of the dimension that is cut. Leaves: the record of the composite
operator that stands for each of them, with its one signature, its derivative, and the operators of
the gradients. Until the pass `vocab_parallel` has
put them in place the layout choice and the type check take an operation for its composite where its own rule refuses.
What a rank computes is in `fxpar.ops.words`.
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
from fxpar.ir.program import TensorType, operands, output_layouts, output_types
from fxpar.ir.properties import Property
from fxpar.layout.layout import I, P, Piece, Placement, fits
from fxpar.ops import words
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import Gradients, LoweredCall, OnShapes, Operator, Reverse, Saving
from fxpar.ops.words import (
    best,
    best_rows,
    by_rows,
    classes,
    cross_entropy_rows,
    log_softmax_rows,
    logsumexp_rows,
    lowered,
    nll_loss_rows,
    rule,
    searched,
    searched_of_gradient,
    table,
)
from fxpar.signatures.engine import Labelling, Labels, Refusal, Rule
from fxpar.signatures.op_call import OpCall, bind_arguments

aten = torch.ops.aten

# ---------------------------------------------------------------------- shapes and derivatives


def _topk_shape(call: OnShapes) -> Any:
    """Returns the shape of what is found in the whole, which may have more words than a rank."""
    x, dim = call.args[0], int(bind_arguments(call.node)["dim"])
    cut = output_types(operands(call.node)[0])[0].shape
    shape = [int(cut[dim]) if d == dim % len(cut) else size for d, size in enumerate(x.shape)]
    options = {name: value for name, value in call.kwargs.items() if name != "axis"}
    return aten.topk.default(x.new_empty(shape), *call.args[1:], **options)


def _saving_cross_entropy(node: fx.Node) -> Saving:
    (kind,), target = output_types(node), output_types(operands(node)[1])[0]
    wide = torch.float32 if kind.dtype in (torch.float16, torch.bfloat16) else kind.dtype
    return Saving(cross_entropy_forward, node.args, (kind, TensorType(wide, target.shape)))


def _nll_loss_gradient(reverse: Reverse) -> Gradients:
    bound, kind = bind_arguments(reverse.node), output_types(operands(reverse.node)[0])[0]
    options = (bound[name] for name in ("weight", "reduction", "ignore_index"))
    gradient = reverse.call(nll_loss_backward, bound["self"], bound["target"], reverse.tangents[0], *options, kind=kind)
    return reverse.of_first(gradient)


def _log_softmax_gradient(reverse: Reverse) -> Gradients:
    bound, kind = bind_arguments(reverse.node), output_types(operands(reverse.node)[0])[0]
    args = (reverse.node, reverse.tangents[0], bound["dim"], kind.dtype)
    return [reverse.call(log_softmax_backward, *args, kind=kind)]


def _logsumexp_gradient(reverse: Reverse) -> Gradients:
    bound, kind = bind_arguments(reverse.node), output_types(operands(reverse.node)[0])[0]
    args = (bound["self"], reverse.tangents[0], reverse.node, bound["dim"], bound["keepdim"])
    return [reverse.call(logsumexp_backward, *args, kind=kind)]


def _topk_gradient(reverse: Reverse) -> Gradients:
    bound, kind = bind_arguments(reverse.node), output_types(operands(reverse.node)[0])[0]
    args = (bound["self"], reverse.result(1), reverse.tangents[0], bound["dim"])
    return [reverse.call(topk_backward, *args, kind=kind)]


def _embedding_gradient(reverse: Reverse) -> Gradients:
    bound, (weight, *_) = bind_arguments(reverse.node), operands(reverse.node)
    kind = output_types(weight)[0]
    cuts = [p for _, p in output_layouts(weight)[0] if p.is_shard and p.dim == 0]
    padded = next((p.pieces[0].padded for p in cuts), 0)
    args = (reverse.tangents[0], bound["indices"], int(kind.shape[0]), bound["padding_idx"], padded)
    return [reverse.call(embedding_backward, *args, kind=kind), None]


# ---------------------------------------------------------------------- records


def _composite(*targets: torch._ops.OpOverload) -> Callable[..., Operator]:
    """Returns the record of an operator that stands for some of torch, of which the last takes what this one does."""
    return partial(Operator, stage=Property.VOCABULARY, stands_for=targets, like=targets[-1])


@partial(
    _composite(aten.embedding.default),
    rule=rule(table, lambda cut: P),
    lower=lowered(words.embedding),
    derivative=_embedding_gradient,
)
def embedding(weight: Any, indices: Any, padding_idx: int = -1, *, axis: str) -> Any:
    """Computes `aten.embedding` of a table whose rows are cut over the axis: a partial sum (SPEC section 2.3)."""


@partial(
    _composite(aten.cross_entropy_loss.default),
    rule=rule(classes, lambda cut: I),
    traffic=by_rows(classes, cross_entropy_rows),
    lower=lowered(words.cross_entropy),
    saving=_saving_cross_entropy,
)
def cross_entropy(
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    axis: str,
) -> Any:
    """Computes `aten.cross_entropy_loss` of logits whose classes are cut over the axis; the loss is invariant."""


@partial(
    _composite(aten.nll_loss.default, aten.nll_loss_nd.default),
    rule=rule(classes, lambda cut: P),
    traffic=by_rows(classes, nll_loss_rows),
    lower=lowered(words.nll_loss),
    derivative=_nll_loss_gradient,
)
def nll_loss(
    self: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100, *, axis: str
) -> Any:
    """Computes `aten.nll_loss_nd` of log-probabilities whose classes are cut over the axis: a partial sum."""


@partial(
    _composite(aten.log_softmax.int),
    rule=rule(searched, lambda cut: cut),
    traffic=by_rows(searched, log_softmax_rows),
    lower=lowered(words.log_softmax),
    derivative=_log_softmax_gradient,
)
def log_softmax(self: Any, dim: int, dtype: Any = None, *, axis: str) -> Any:
    """Computes `aten.log_softmax` over a dimension that is cut over the axis; the result is cut alike."""


@partial(
    _composite(aten.logsumexp.default),
    rule=rule(searched, lambda cut: I),
    traffic=by_rows(searched, logsumexp_rows),
    lower=lowered(words.logsumexp),
    derivative=_logsumexp_gradient,
)
def logsumexp(self: Any, dim: Any, keepdim: bool = False, *, axis: str) -> Any:
    """Computes `aten.logsumexp` over a dimension that is cut over the axis; the result is invariant."""


@partial(
    _composite(aten.argmax.default),
    rule=rule(searched, lambda cut: I),
    traffic=by_rows(searched, best_rows),
    lower=lowered(words.argmax),
)
def argmax(self: Any, dim: int, keepdim: bool = False, *, axis: str) -> Any:
    """Computes `aten.argmax` over a dimension that is cut over the axis; the result is the same on every rank."""


@partial(
    _composite(aten.topk.default),
    rule=rule(best, lambda cut: I),
    shape=_topk_shape,
    traffic=by_rows(searched, best_rows),
    lower=lowered(words.topk),
    derivative=_topk_gradient,
)
def topk(self: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, axis: str) -> Any:
    """Computes `aten.topk` over a dimension that is cut over the axis; values are invariant."""


# ---------------------------------------------------------------------- layouts


def _like_self(placement: Placement) -> Placement:
    """Returns the placement of the gradient of what is cut so: padding gets none."""
    return replace(placement, zeros=placement.is_padded)


def _table_gradient(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal:
    """Places a table's gradient, of which each rank makes its rows from whole operands."""
    odd = next((p for p in placements if p.kind not in "IR"), None)
    words, padded = call.get("words"), call.get("padded")
    if odd is not None:
        return Refusal(f"the gradient of a table that is cut is made of whole values and not of {odd}")
    placement = Placement("S", 0, (Piece(1, words, padded=padded),), zeros=bool(padded))
    if not fits(placement, call.outputs[0].shape, call.n):
        return Refusal(f"{words} words, {padded} with padding, are not divisible by {call.n}")
    return (placement,)


def _rows_of_loss(call: OpCall) -> Labelling | Refusal:
    """Labels, on other axes, rows of logits, targets and what is saved of them; with a mean they are whole."""
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
    """Labels, on other axes, `… h, … -> _ h`."""
    lead: Labels = tuple(f"d{i}" for i in range(len(call.operands[1].shape)))
    return Labelling(((*lead, "h"), lead), ((None, "h"),), frozenset(label for label in lead if label is not None))


def _all_but_dim(call: OpCall) -> Labelling | Refusal:
    """Labels, on other axes, all but what is searched or normalised, which a reduction leaves out."""
    rank, dim = len(call.operands[0].shape), call.get("dim")
    dim = int(dim[0] if isinstance(dim, (list, tuple)) else dim) % rank
    full: Labels = tuple(None if i == dim else f"d{i}" for i in range(rank))
    reduced: Labels = tuple(label for i, label in enumerate(full) if i != dim)
    ins = tuple(full if len(kind.shape) == rank else reduced for kind in call.operands)
    return Labelling(ins, (full,))


def _never(node: fx.Node, rank: OnRank) -> LoweredCall:
    raise AssertionError(f"{node.target} names an axis")


def _beside(labels: Callable[[OpCall], Labelling | Refusal], linear: tuple[tuple[str, ...], ...] = ()) -> Operator:
    """Returns what an operator is on the axes that it does not name."""

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
    """Returns the gradient of the table of `fxpar.embedding`, cut as the table.

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
    """Returns the gradient of the logits of `fxpar.cross_entropy_forward`, cut as they are."""


def _cross_entropy_gradient(reverse: Reverse) -> Gradients:
    bound, kind = bind_arguments(reverse.node), output_types(operands(reverse.node)[0])[0]
    items = {user.args[1]: user for user in reverse.node.users}
    options = (bound[name] for name in ("weight", "reduction", "ignore_index", "label_smoothing"))
    args = (bound["self"], bound["target"], reverse.tangents[0], items[1], *options)
    gradient = reverse.call(cross_entropy_backward, *args, kind=kind)
    return reverse.of_first(gradient)


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
    """Computes `fxpar.cross_entropy`, and what its gradient needs: log Σ exp of each row, in float32 or wider."""


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
    """Returns the gradient of `fxpar.nll_loss`'s log-probabilities, cut as they are; it does not read their values."""


@partial(
    _of_gradients,
    rule=rule(searched_of_gradient, _like_self),
    shape=lambda call: torch.empty_like(call.args[0], dtype=call.args[3]),
    traffic=by_rows(searched, lambda call, rows: iter([("all_reduce", "forward", rows)])),
    lower=lowered(words.log_softmax_backward),
    like=_beside(_all_but_dim, (("gradient",),)),
)
def log_softmax_backward(self: Any, gradient: Any, dim: int, dtype: Any, *, axis: str) -> Any:
    """Returns the gradient of the operand of `fxpar.log_softmax`; `self` is the result, `dtype` the operand's type."""


@partial(
    _of_gradients,
    rule=rule(searched, _like_self),
    shape=_shape_of_self,
    lower=lowered(words.logsumexp_backward),
    like=_beside(_all_but_dim, (("gradient",),)),
)
def logsumexp_backward(self: Any, gradient: Any, out: Any, dim: Any, keepdim: bool = False, *, axis: str) -> Any:
    """Returns the gradient of the operand of `fxpar.logsumexp`, whose result is `out`."""


@partial(
    _of_gradients,
    rule=rule(searched, _like_self),
    shape=_shape_of_self,
    lower=lowered(words.topk_backward),
    like=_beside(_all_but_dim, (("gradient",),)),
)
def topk_backward(self: Any, indices: Any, gradient: Any, dim: int = -1, *, axis: str) -> Any:
    """Returns the gradient of the operand of `fxpar.topk`; it does not read the operand's values."""
