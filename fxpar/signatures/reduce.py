"""Rules of reductions, norms and losses: a reduced dimension is summed (partial result) or cannot be sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpar.layout.layout import P, Placement, R
from fxpar.signatures.engine import Labelling, Labels, Refusal, Rule
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import broadcast, keeps_sums


def _reduced(call: OpCall) -> list[int]:
    rank = len(call.operands[0].shape)
    dims = call.get("dim")
    if dims is None or dims == []:
        return list(range(rank))
    return [d % rank if rank else 0 for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def _reduction(summed: bool) -> Callable[[OpCall], Labelling | Refusal]:
    def labels(call: OpCall) -> Labelling | Refusal:
        rank = len(call.operands[0].shape)
        gone = _reduced(call)
        names = [f"d{i}" for i in range(rank)]
        keep = call.get("keepdim", False)
        out: list[str | None] = [None if i in gone else names[i] for i in range(rank) if keep or i not in gone]
        lost = frozenset(names[i] for i in gone)
        shown: list[str | None] = [label if summed or label not in lost else None for label in names]
        return Labelling((tuple(shown),), tuple(tuple(out) for _ in call.outputs), lost if summed else frozenset())

    return labels


def _topk(call: OpCall) -> Labelling | Refusal:
    """The dimension that is searched stays, shorter, and cannot be sharded."""
    labels: list[str | None] = [f"d{i}" for i in range(len(call.operands[0].shape))]
    if labels:
        labels[int(call.get("dim", -1)) % len(labels)] = None
    return Labelling((tuple(labels),), tuple(tuple(labels) for _ in call.outputs))


def _norm(normalized: Callable[[OpCall], int]) -> Callable[[OpCall], Labelling | Refusal]:
    """Leading dimensions can be sharded; the normalised ones and their weights are needed whole."""

    def labels(call: OpCall) -> Labelling | Refusal:
        rank = len(call.operands[0].shape)
        lead: Labels = tuple(f"d{i}" if i < rank - normalized(call) else None for i in range(rank))
        rest = tuple((None,) * len(kind.shape) for kind in call.operands[1:])
        outs = tuple(lead[: len(kind.shape)] for kind in call.outputs)
        return Labelling((lead, *rest), outs)

    return labels


def _batch_norm(call: OpCall) -> Labelling | Refusal:
    """`_ c …, c, c -> _ c …, c, c`: channels are apart, and everything else is counted."""
    full: Labels = tuple("c" if i == 1 else None for i in range(len(call.operands[0].shape)))
    return Labelling((full, *(("c",) for _ in call.operands[1:])), (full, ("c",), ("c",)))


def norm_of_summands(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | None:
    """The result is linear in weight and bias together, and the statistics do not depend on them."""
    affine = [p for name, p in zip(call.names, placements, strict=True) if name in ("weight", "bias")]
    others = [p for name, p in zip(call.names, placements, strict=True) if name not in ("weight", "bias")]
    if set(affine) != {P} or any(p != R for p in others):
        return None
    return (P, *(R,) * (len(call.outputs) - 1))


def _weight_norm(call: OpCall) -> Labelling | Refusal:
    """`v, g -> v * g / |v|`: the dimension that keeps its norms (-1: there is one norm of all) can be sharded."""
    dim = call.get("dim", 0)
    labels = [tuple("d" if i == dim else None for i in range(len(kind.shape))) for kind in call.operands]
    return Labelling(tuple(labels), (labels[0],))


def _loss(call: OpCall) -> Labelling | Refusal:
    """`n _, n -> n` (reduction none) or a sum over n; a mean divides by a count that no rank knows alone.

    Of probabilities in place of classes `n _, n _ -> n`.
    """
    x, targets = call.operands[:2]
    if len(x.shape) < 2:
        return Refusal("a loss without a batch dimension needs whole operands")
    how = call.get("reduction", 1)
    rows = ("n", *(f"d{i}" for i in range(len(x.shape) - 2)))
    logits: Labels = ("n", None, *rows[1:])
    target: Labels = logits if targets.is_float else rows
    if how == 1:
        logits, target = (None,) * len(logits), (None,) * len(target)
    weights = tuple((None,) * len(kind.shape) for kind in call.operands[2:])
    outs = tuple(rows if kind.shape else () for kind in call.outputs)
    return Labelling((logits, target, *weights), outs, frozenset(rows if how == 2 else ()))


def _row_loss(call: OpCall) -> Labelling | Refusal:
    """`n _, n … -> n` (reduction none) or a sum over n: margins between the classes of a row."""
    if len(call.operands[0].shape) != 2:
        return Refusal("a loss without a batch dimension needs whole operands")
    how = call.get("reduction", 1)
    if how == 1:
        return Refusal("a mean divides by the rows of the whole: it needs whole operands")
    rows = [("n", *(None,) * (len(kind.shape) - 1)) for kind in call.operands[:2]]
    weights = [(None,) * len(kind.shape) for kind in call.operands[2:]]
    return Labelling((*rows, *weights), (("n",) if how == 0 else (),), frozenset("n" if how == 2 else ()))


def _pointwise_loss(call: OpCall) -> Labelling | Refusal:
    """Element by element, with weights that may be broadcast: all elements, or their sum."""
    shape = call.operands[0].shape
    labels = tuple(f"d{i}" for i in range(len(shape)))
    how = call.get("reduction", 1)
    if how == 1:
        return Refusal("a mean divides by the size of the whole: it needs whole operands")
    if call.operands[1].shape != shape or any(len(kind.shape) > len(shape) for kind in call.operands):
        return Refusal("a loss of values and targets of other shapes needs whole operands")
    out, summed = (labels, ()) if how == 0 else ((), labels)
    return Labelling(tuple(broadcast(kind.shape, shape) for kind in call.operands), (out,), frozenset(summed))


def _no_partial_target(call: OpCall, placements: Sequence[Placement]) -> Refusal | None:
    return Refusal("a loss is not linear in partial (P) values: reduce them first") if P in placements else None


def _no_partial_value(call: OpCall, placements: Sequence[Placement]) -> Refusal | None:
    """As `_no_partial_target`, of a loss that is linear in what weighs its elements."""
    values = [p for name, p in zip(call.names, placements, strict=True) if name != "weight"]
    return _no_partial_target(call, values)


_POINTWISE_LOSSES = (
    "mse_loss.default",
    "l1_loss.default",
    "smooth_l1_loss.default",
    "huber_loss.default",
    "kl_div.default",
    "soft_margin_loss.default",
)
_ROW_LOSSES = ("multi_margin_loss.default", "multilabel_margin_loss.default")
# These are linear in what weighs the elements.
_WEIGHED_LOSSES = ("binary_cross_entropy.default", "binary_cross_entropy_with_logits.default")


def _counted(call: OpCall) -> Labelling | Refusal:
    """A histogram between two given bounds: counts of each rank's elements are summands."""
    if call.get("min", 0) == call.get("max", 0):
        return Refusal("the bounds are the least and the largest of all elements")
    labels = tuple(f"d{i}" for i in range(len(call.operands[0].shape)))
    return Labelling((labels,), ((None,),), frozenset(labels))


def reduction_rules() -> dict[str, Rule]:
    """Rules by `aten` overload name."""
    summed = Rule(_reduction(True), (("self",),), check=keeps_sums)
    mean, whole = Rule(_reduction(False), (("self",),)), Rule(_reduction(False))
    names = {
        "sum.default": summed,
        "sum.dim_IntList": summed,
        "nansum.default": Rule(_reduction(True)),
        "count_nonzero.dim_IntList": Rule(_reduction(True)),
        "count_nonzero.default": Rule(_reduction(True)),
        "mean.default": mean,
        "mean.dim": mean,
        "topk.default": Rule(_topk),
        "histc.default": Rule(_counted),
        "_weight_norm.default": Rule(_weight_norm, (("g",),)),
        "layer_norm.default": Rule(_norm(lambda call: len(call.get("normalized_shape"))), (("weight", "bias?"),)),
        "rms_norm.default": Rule(_norm(lambda call: len(call.get("normalized_shape"))), (("weight",),)),
        "native_layer_norm.default": Rule(
            _norm(lambda call: len(call.get("normalized_shape"))), check=norm_of_summands
        ),
        "_native_batch_norm_legit.no_stats": Rule(_batch_norm, check=norm_of_summands),
        "group_norm.default": Rule(_norm(lambda call: len(call.operands[0].shape) - 1), (("weight", "bias?"),)),
        "cross_entropy_loss.default": Rule(_loss, check=_no_partial_target),
        "nll_loss.default": Rule(_loss, (("self",),)),
        "nll_loss_nd.default": Rule(_loss, (("self",),)),
        **dict.fromkeys(_POINTWISE_LOSSES, Rule(_pointwise_loss, check=_no_partial_target)),
        **dict.fromkeys(_ROW_LOSSES, Rule(_row_loss, check=_no_partial_target)),
        **dict.fromkeys(_WEIGHED_LOSSES, Rule(_pointwise_loss, (("weight?",),), check=_no_partial_value)),
    }
    for name in [
        "amax",
        "amin",
        "any.dim",
        "any.dims",
        "any.default",
        "all.dim",
        "all.default",
        "argmax",
        "argmin",
        "max.dim",
        "min.dim",
        "max.default",
        "min.default",
        "var.correction",
        "std.correction",
        "var_mean.correction",
        "logsumexp",
        "linalg_vector_norm",
        "norm.ScalarOpt_dim",
        "prod.dim_int",
        "prod.default",
        "std_mean.correction",
        "median.dim",
        "median.default",
        "nanmedian.dim",
        "nanmedian.default",
        "mode",
        "kthvalue",
    ]:
        names[name if "." in name else f"{name}.default"] = whole
    return {f"aten.{name}": rule for name, rule in names.items()}
