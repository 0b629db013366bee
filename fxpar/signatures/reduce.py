"""Rules of reductions, norms and losses: a reduced dimension is summed (partial result) or cannot be sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpar.layout.layout import P, Placement, R
from fxpar.signatures.engine import Labelling, Labels, Refusal, Rule, by_overload, numbered
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import broadcast, keeps_sums
from fxpar.signatures.views import along


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
        names, remaining = numbered(rank), numbered(rank, *gone)
        out = remaining if call.get("keepdim", False) else tuple(label for label in remaining if label is not None)
        lost = frozenset(f"d{dim}" for dim in gone) if summed else frozenset()
        return Labelling((names if summed else remaining,), (out,) * len(call.outputs), lost)

    return labels


def _norm(normalized: Callable[[OpCall], int]) -> Callable[[OpCall], Labelling | Refusal]:
    """Cuts leading dimensions; the normalised ones and their weights are needed whole."""

    def labels(call: OpCall) -> Labelling | Refusal:
        rank = len(call.operands[0].shape)
        lead = numbered(rank, *range(rank - normalized(call), rank))
        rest = tuple((None,) * len(kind.shape) for kind in call.operands[1:])
        outs = tuple(lead[: len(kind.shape)] for kind in call.outputs)
        return Labelling((lead, *rest), outs)

    return labels


def _batch_norm(call: OpCall) -> Labelling | Refusal:
    """Cuts `_ c …, c, c -> _ c …, c, c`: channels are apart, and everything else is counted."""
    full: Labels = tuple("c" if i == 1 else None for i in range(len(call.operands[0].shape)))
    return Labelling((full, *(("c",) for _ in call.operands[1:])), (full, ("c",), ("c",)))


def norm_of_summands(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | None:
    """Gives P for the result, linear in weight and bias together, on which the statistics do not depend."""
    affine = [p for name, p in zip(call.names, placements, strict=True) if name in ("weight", "bias")]
    others = [p for name, p in zip(call.names, placements, strict=True) if name not in ("weight", "bias")]
    if set(affine) != {P} or any(p != R for p in others):
        return None
    return (P, *(R,) * (len(call.outputs) - 1))


def _weight_norm(call: OpCall) -> Labelling | Refusal:
    """Cuts `v, g -> v * g / |v|` along the dimension that keeps its norms (-1: there is one norm of all)."""
    dim = call.get("dim", 0)
    labels = [tuple("d" if i == dim else None for i in range(len(kind.shape))) for kind in call.operands]
    return Labelling(tuple(labels), (labels[0],))


def _loss(call: OpCall) -> Labelling | Refusal:
    """Cuts `n _, n -> n` (reduction none) or a sum over n; a mean divides by a count that no rank knows alone.

    Of probabilities in place of classes `n _, n _ -> n`.
    """
    x, targets = call.operands[:2]
    if len(x.shape) < 2:
        return Refusal("a loss without a batch dimension needs whole operands")
    how = call.get("reduction", 1)
    rows = ("n", *numbered(len(x.shape) - 2))
    logits: Labels = ("n", None, *rows[1:])
    target: Labels = logits if targets.is_float else rows
    if how == 1:
        logits, target = (None,) * len(logits), (None,) * len(target)
    weights = tuple((None,) * len(kind.shape) for kind in call.operands[2:])
    outs = tuple(rows if kind.shape else () for kind in call.outputs)
    return Labelling((logits, target, *weights), outs, frozenset(filter(None, rows if how == 2 else ())))


def _row_loss(call: OpCall) -> Labelling | Refusal:
    """Cuts `n _, n … -> n` (reduction none) or a sum over n: margins are between the classes of a row."""
    if len(call.operands[0].shape) != 2:
        return Refusal("a loss without a batch dimension needs whole operands")
    how = call.get("reduction", 1)
    if how == 1:
        return Refusal("a mean divides by the rows of the whole: it needs whole operands")
    rows = [("n", *(None,) * (len(kind.shape) - 1)) for kind in call.operands[:2]]
    weights = [(None,) * len(kind.shape) for kind in call.operands[2:]]
    return Labelling((*rows, *weights), (("n",) if how == 0 else (),), frozenset("n" if how == 2 else ()))


def _pointwise_loss(call: OpCall) -> Labelling | Refusal:
    """Cuts element by element, with weights that may be broadcast: all elements, or their sum."""
    shape = call.operands[0].shape
    labels = numbered(len(shape))
    how = call.get("reduction", 1)
    if how == 1:
        return Refusal("a mean divides by the size of the whole: it needs whole operands")
    if call.operands[1].shape != shape or any(len(kind.shape) > len(shape) for kind in call.operands):
        return Refusal("a loss of values and targets of other shapes needs whole operands")
    out, summed = (labels, ()) if how == 0 else ((), labels)
    return Labelling(
        tuple(broadcast(kind.shape, shape) for kind in call.operands), (out,), frozenset(filter(None, summed))
    )


def _no_partial_target(call: OpCall, placements: Sequence[Placement]) -> Refusal | None:
    return Refusal("a loss is not linear in partial (P) values: reduce them first") if P in placements else None


def _no_partial_value(call: OpCall, placements: Sequence[Placement]) -> Refusal | None:
    """Does as `_no_partial_target`, of a loss that is linear in what weighs its elements."""
    values = [p for name, p in zip(call.names, placements, strict=True) if name != "weight"]
    return _no_partial_target(call, values)


def _counted(call: OpCall) -> Labelling | Refusal:
    """Counts in a histogram between two given bounds: counts of each rank's elements are summands."""
    if call.get("min", 0) == call.get("max", 0):
        return Refusal("the bounds are the least and the largest of all elements")
    labels = numbered(len(call.operands[0].shape))
    return Labelling((labels,), ((None,),), frozenset(filter(None, labels)))


# Reductions of which a rank's part says nothing of the result.
_OF_ALL = """
amax amin any.dim any.dims any all.dim all argmax argmin max.dim min.dim max min var.correction std.correction
var_mean.correction std_mean.correction logsumexp linalg_vector_norm norm.ScalarOpt_dim prod.dim_int prod median.dim
median nanmedian.dim nanmedian mode kthvalue
"""


def reduction_rules() -> dict[str, Rule]:
    """Returns rules by `aten` overload name."""
    normalized = _norm(lambda call: len(call.get("normalized_shape")))
    return by_overload(
        {
            "sum sum.dim_IntList": Rule(_reduction(True), (("self",),), check=keeps_sums),
            "nansum count_nonzero.dim_IntList count_nonzero": Rule(_reduction(True)),
            "mean mean.dim": Rule(_reduction(False), (("self",),)),
            _OF_ALL: Rule(_reduction(False)),
            "topk": Rule(along),
            "histc": Rule(_counted),
            "_weight_norm": Rule(_weight_norm, (("g",),)),
            "layer_norm": Rule(normalized, (("weight", "bias?"),)),
            "rms_norm": Rule(normalized, (("weight",),)),
            "native_layer_norm": Rule(normalized, check=norm_of_summands),
            "_native_batch_norm_legit.no_stats": Rule(_batch_norm, check=norm_of_summands),
            "group_norm": Rule(_norm(lambda call: len(call.operands[0].shape) - 1), (("weight", "bias?"),)),
            "cross_entropy_loss": Rule(_loss, check=_no_partial_target),
            "nll_loss nll_loss_nd": Rule(_loss, (("self",),)),
            "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss": Rule(
                _pointwise_loss, check=_no_partial_target
            ),
            "multi_margin_loss multilabel_margin_loss": Rule(_row_loss, check=_no_partial_target),
            # These are linear in what weighs the elements.
            "binary_cross_entropy binary_cross_entropy_with_logits": Rule(
                _pointwise_loss, (("weight?",),), check=_no_partial_value
            ),
        }
    )
