"""The operators over a vocabulary that is cut (SPEC section 2.3).

Enters: operations of `aten` that need the whole of the dimension that is cut. Leaves: the record of the composite
operator that stands for each of them, with its one signature and its derivative. Until the pass `vocab_parallel` has
put them in place the layout choice and the type check take an operation for its composite where its own rule refuses.
What a rank computes is in `fxpar.ops.words`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.ir.program import Property, TensorType, operands, output_layouts, output_types
from fxpar.layout.layout import I, P
from fxpar.ops import words
from fxpar.ops.operator import Gradients, OnShapes, Operator, Reverse, Saving
from fxpar.ops.vocabulary_gradients import (
    cross_entropy_forward,
    embedding_backward,
    log_softmax_backward,
    logsumexp_backward,
    nll_loss_backward,
    topk_backward,
)
from fxpar.ops.vocabulary_rules import (
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
    table,
)
from fxpar.signatures.op_call import bind_arguments

aten = torch.ops.aten

# ---------------------------------------------------------------------- shapes and derivatives


def _topk_shape(call: OnShapes) -> Any:
    """Of more words than a rank has: searched is the whole."""
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
    return [gradient, *[None] * (len(reverse.wanted) - 1)]


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
    """The record of an operator that stands for some of torch, of which the last takes what this one does."""
    return partial(Operator, stage=Property.VOCABULARY, stands_for=targets, like=targets[-1])


@partial(
    _composite(aten.embedding.default),
    rule=rule(table, lambda cut: P),
    lower=lowered(words.embedding),
    derivative=_embedding_gradient,
)
def embedding(weight: Any, indices: Any, padding_idx: int = -1, *, axis: str) -> Any:
    """`aten.embedding` of a table whose rows are cut over the axis: a partial sum (SPEC section 2.3)."""


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
    """`aten.cross_entropy_loss` of logits whose classes are cut over the axis; the loss is invariant."""


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
    """`aten.nll_loss_nd` of log-probabilities whose classes are cut over the axis: a partial sum."""


@partial(
    _composite(aten.log_softmax.int),
    rule=rule(searched, lambda cut: cut),
    traffic=by_rows(searched, log_softmax_rows),
    lower=lowered(words.log_softmax),
    derivative=_log_softmax_gradient,
)
def log_softmax(self: Any, dim: int, dtype: Any = None, *, axis: str) -> Any:
    """`aten.log_softmax` over a dimension that is cut over the axis; cut alike."""


@partial(
    _composite(aten.logsumexp.default),
    rule=rule(searched, lambda cut: I),
    traffic=by_rows(searched, logsumexp_rows),
    lower=lowered(words.logsumexp),
    derivative=_logsumexp_gradient,
)
def logsumexp(self: Any, dim: Any, keepdim: bool = False, *, axis: str) -> Any:
    """`aten.logsumexp` over a dimension that is cut over the axis; invariant."""


@partial(
    _composite(aten.argmax.default),
    rule=rule(searched, lambda cut: I),
    traffic=by_rows(searched, best_rows),
    lower=lowered(words.argmax),
)
def argmax(self: Any, dim: int, keepdim: bool = False, *, axis: str) -> Any:
    """`aten.argmax` over a dimension that is cut over the axis; the same on every rank."""


@partial(
    _composite(aten.topk.default),
    rule=rule(best, lambda cut: I),
    shape=_topk_shape,
    traffic=by_rows(searched, best_rows),
    lower=lowered(words.topk),
    derivative=_topk_gradient,
)
def topk(self: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, axis: str) -> Any:
    """`aten.topk` over a dimension that is cut over the axis; values are invariant."""
