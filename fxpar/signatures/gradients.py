"""Rules of the operations that autograd's formulas make and models do not: what derivatives are computed with.

Each is linear in the gradient that it takes: summands (P) of one give summands of the other. What is reduced in the
forward is spread again, and what was spread is summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxpar.layout.layout import P, Placement, R
from fxpar.layout.symbolic_sizes import Size
from fxpar.signatures.engine import Labelling, Labels, Refusal, Rule, by_overload, numbered
from fxpar.signatures.indexing import ignoring, scattering_rules
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import broadcast, pointwise_labels
from fxpar.signatures.views import along

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
