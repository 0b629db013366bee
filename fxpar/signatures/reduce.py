"""Rules of reductions, norms and losses: a reduced dimension is summed (partial result) or cannot be sharded.

Behind them are those of the operations that autograd's formulas make and models do not. Each is linear in the gradient
that it takes: summands (P) of one give summands of the other. What is reduced in the forward is spread again, and what
was spread is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fxpar.layout.layout import P, Placement, R
from fxpar.layout.symbolic_sizes import Size
from fxpar.signatures.engine import Labelling, Labels, Refusal, Rule, by_overload, numbered
from fxpar.signatures.indexing import ignoring, scattering_rules
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import broadcast, keeps_sums, pointwise_labels
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


# Gradients.

# Element-wise, with the name of the gradient; the values next to it may be those of padding.
_POINTWISE = """
gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward elu_backward hardtanh_backward
hardsigmoid_backward hardswish_backward leaky_relu_backward mish_backward softplus_backward softshrink_backward
hardshrink_backward logit_backward log_sigmoid_backward native_dropout_backward
""".split()
_UNBOUNDED = ("logit_backward",)  # infinite, or none, of what padding may be
_GRADIENT_NAMES = ("grad_output", "grad_out", "grad")
_LOSSES = "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward"


def _gradient_name(name: str) -> str:
    schema = getattr(torch.ops.aten, name).default._schema
    names = [argument.name for argument in schema.arguments]
    return next(known for known in _GRADIENT_NAMES if known in names)


def _rank(call: OpCall, index: int = 0) -> int:
    return len(call.operands[index].shape)


def _trilinear(call: OpCall) -> Labelling | Refusal:
    """Multiplies three operands that get dimensions of size one (`expand1` …), and sums over some (`sumdim`)."""
    rank = len(call.operands[0].shape) + len(call.get("expand1"))
    shapes: list[list[Size]] = []
    for kind, name in zip(call.operands, ("expand1", "expand2", "expand3"), strict=True):
        remaining, expanded = list(kind.shape), {dim % rank for dim in call.get(name)}
        shapes.append([1 if dim in expanded else remaining.pop(0) for dim in range(rank)])
    sizes = [next((shape[dim] for shape in shapes if shape[dim] != 1), 1) for dim in range(rank)]
    gone = {dim % rank for dim in call.get("sumdim")}
    ins = []
    for shape, name in zip(shapes, ("expand1", "expand2", "expand3"), strict=True):
        expanded = {dim % rank for dim in call.get(name)}
        dims = [dim for dim in range(rank) if dim not in expanded]
        ins.append(tuple(f"d{dim}" if shape[dim] != 1 or sizes[dim] == 1 else None for dim in dims))
    # A sum over what an operand lacks is its product with every element: cut there it is summed all the same.
    out = tuple(f"d{dim}" for dim in range(rank) if dim not in gone)
    return Labelling(tuple(ins), (out,), frozenset(f"d{dim}" for dim in gone))


def _layer_norm_backward(call: OpCall) -> Labelling | Refusal:
    """Cuts rows, which are summed in the gradients of weight and bias."""
    rank, normalized = _rank(call), len(call.get("normalized_shape"))
    rows = numbered(rank - normalized)
    full: Labels = (*rows, *(None,) * normalized)
    of_rows = ("grad_out", "input", "mean", "rstd")
    pairs = zip(call.names, call.operands, strict=True)
    ins = tuple(full if name in of_rows else (None,) * len(kind.shape) for name, kind in pairs)
    # Without elements where it is not asked for: then there are no rows of it.
    first = full if call.get("output_mask")[0] else (None,) * len(call.outputs[0].shape)
    outs = (first, *((None,) * len(kind.shape) for kind in call.outputs[1:]))
    return Labelling(ins, outs, frozenset(filter(None, rows)))


def _batch_norm_backward(call: OpCall) -> Labelling | Refusal:
    """Cuts channels; everything else is summed."""
    full: Labels = tuple("c" if i == 1 else None for i in range(_rank(call)))
    ins = tuple(full if name in ("grad_out", "input") else ("c",) for name in call.names)
    known = list(zip((full, ("c",), ("c",)), call.get("output_mask"), strict=True))
    # What is not asked for has no elements, of which there is any sum, or is not there.
    there = known if len(call.outputs) == len(known) else [pair for pair in known if pair[1]]
    pairs = zip(there, call.outputs, strict=True)
    outs = tuple(labels if needed else (None,) * len(kind.shape) for (labels, needed), kind in pairs)
    return Labelling(ins, outs, frozenset() if all(needed for _, needed in there) else frozenset({"c"}))


def _embedding_backward(call: OpCall) -> Labelling | Refusal:
    """Sums the words: `… h, … -> _ h`."""
    lead = numbered(_rank(call, 1))
    if call.get("scale_grad_by_freq"):
        lead = (None,) * len(lead)
    return Labelling(((*lead, "h"), lead), ((None, "h"),), frozenset(filter(None, lead)))


def _nll_labels(call: OpCall) -> tuple[dict[str, Labels], Labels] | Refusal:
    """Returns labels of log-probabilities, targets and weights, and of what has one value a row."""
    shape = call.operands[call.names.index("self")].shape
    if len(shape) < 2:
        return Refusal("a loss without a batch dimension needs whole operands")
    rows: Labels = ("n", *numbered(len(shape) - 2))
    if call.get("reduction", 1) == 1:
        rows = (None,) * len(rows)
    return {"self": (rows[0], None, *rows[1:]), "target": rows, "weight": (None,), "total_weight": ()}, rows


def _nll_forward(call: OpCall) -> Labelling | Refusal:
    """Gives the loss of each row or their sum, and the sum of weights."""
    labels = _nll_labels(call)
    if isinstance(labels, Refusal):
        return labels
    known, rows = labels
    outs: tuple[Labels, ...] = (rows if call.outputs[0].shape else (), ())
    return Labelling(tuple(known[name] for name in call.names), outs, frozenset(filter(None, rows)))


def _nll_backward(call: OpCall) -> Labelling | Refusal:
    labels = _nll_labels(call)
    if isinstance(labels, Refusal):
        return labels
    known, rows = labels
    known["grad_output"] = rows if call.operands[0].shape else ()
    return Labelling(tuple(known[name] for name in call.names), (known["self"],))


def _nll_partial(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal | None:
    """Gives P for the loss, linear in log-probabilities, on which the sum of weights (R) does not depend."""
    position = call.position("self")
    if placements[position or 0] != P or any(p != R for i, p in enumerate(placements) if i != position):
        return None
    return (P, R)


def _nll_unread(call: OpCall) -> tuple[str, ...]:
    """Names what is not read: of log-probabilities all but the shape, and the sum of weights unless for a mean."""
    return ("self",) if call.get("reduction", 1) == 1 else ("self", "total_weight")


def _norm_backward_partial(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal | None:
    """Gives P for the input's gradient, linear in the weight, on which those of weight and bias do not depend."""
    known = dict(zip(call.names, placements, strict=True))
    if known.pop("weight", R) != P:
        return None
    bias = known.pop("bias", R)
    if bias not in (P, R) or any(p != R for p in known.values()):
        return None
    return (P, *(R,) * (len(call.outputs) - 1))


def _loss_backward(call: OpCall) -> Labelling | Refusal:
    """Cuts element by element: a sum spreads its gradient. Refuses a mean, which divides by the size of the whole."""
    if call.get("reduction", 1) == 1:
        return Refusal("a mean divides by the size of the whole: it needs whole operands")
    shape = call.outputs[0].shape
    return Labelling(tuple(broadcast(kind.shape, shape) for kind in call.operands), (numbered(len(shape)),))


def gradient_rules() -> dict[str, Rule]:
    """Returns rules by `aten` overload name."""
    gradient = (("grad_output",),)
    pointwise: dict[str, Rule] = {}
    for name in _POINTWISE:
        schema = getattr(torch.ops.aten, name).default._schema
        tensors = tuple(argument.name for argument in schema.arguments)
        padding = () if name in _UNBOUNDED else tensors
        pointwise[name] = Rule(pointwise_labels, ((_gradient_name(name),),), padding=padding)
    return scattering_rules() | by_overload(
        {
            **pointwise,
            _LOSSES: Rule(_loss_backward, gradient),
            "binary_cross_entropy_backward": Rule(_loss_backward, (("grad_output",), ("weight?",))),
            "_softmax_backward_data _log_softmax_backward_data": Rule(along, gradient),
            "nll_loss_forward nll_loss2d_forward": Rule(_nll_forward, check=_nll_partial),
            "nll_loss_backward nll_loss2d_backward": ignoring(_nll_unread, Rule(_nll_backward, gradient)),
            "native_layer_norm_backward": Rule(_layer_norm_backward, (("grad_out",),), check=_norm_backward_partial),
            "native_batch_norm_backward": Rule(_batch_norm_backward, (("grad_out",),), check=_norm_backward_partial),
            "log_sigmoid_forward _prelu_kernel": Rule(pointwise_labels),
            "_prelu_kernel_backward": Rule(pointwise_labels, gradient),
            "_trilinear": Rule(_trilinear, (("i1",), ("i2",), ("i3",))),
            "cumprod": Rule(along),
            "embedding_dense_backward": Rule(_embedding_backward, gradient),
        }
    )
