"""Rules of the operations that autograd's formulas make and models do not: what derivatives are computed with.

Each is linear in the gradient that it takes: summands (P) of one give summands of the other. What is reduced in the
forward is spread again, and what was spread is summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxpar.layout.layout import P, Placement, R
from fxpar.layout.symbols import Size
from fxpar.signatures.engine import Call, Labelling, Labels, Refusal, Rule
from fxpar.signatures.pointwise import broadcast, pointwise_labels

# Element-wise, with the name of the gradient; the values beside it may be those of padding.
_POINTWISE = """
gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward elu_backward hardtanh_backward
hardsigmoid_backward hardswish_backward leaky_relu_backward mish_backward softplus_backward softshrink_backward
hardshrink_backward logit_backward log_sigmoid_backward native_dropout_backward
""".split()
_GRADIENT_NAMES = ("grad_output", "grad_out", "grad")
_LOSSES = """
mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward soft_margin_loss_backward
""".split()


def _gradient_name(name: str) -> str:
    schema = getattr(torch.ops.aten, name).default._schema
    names = [argument.name for argument in schema.arguments]
    return next(known for known in _GRADIENT_NAMES if known in names)


def _rank(call: Call, index: int = 0) -> int:
    return len(call.operands[index].shape)


def _numbered(rank: int) -> list[str | None]:
    return [f"d{i}" for i in range(rank)]


def _keeping_dim(call: Call) -> Labelling | Refusal:
    """Gradient and result of what runs over one dimension, which stays whole."""
    labels = _numbered(_rank(call))
    if labels:
        labels[int(call.get("dim")) % len(labels)] = None
    return Labelling((tuple(labels),) * 2, (tuple(labels),))


def _layer_norm_backward(call: Call) -> Labelling | Refusal:
    """Rows are apart, and summed in the gradients of weight and bias."""
    rank, normalized = _rank(call), len(call.get("normalized_shape"))
    rows: Labels = tuple(f"d{i}" for i in range(rank - normalized))
    full: Labels = (*rows, *(None,) * normalized)
    statistics: Labels = (*rows, *(None,) * normalized)
    known = {"grad_out": full, "input": full, "mean": statistics, "rstd": statistics}
    ins = tuple(known.get(name, (None,) * len(k.shape)) for name, k in zip(call.names, call.operands, strict=True))
    outs = (full, *((None,) * len(kind.shape) for kind in call.outputs[1:]))
    return Labelling(ins, outs, frozenset(label for label in rows if label is not None))


def _embedding_backward(call: Call) -> Labelling | Refusal:
    """`… h, … -> _ h`, the words summed."""
    lead: Labels = tuple(f"d{i}" for i in range(_rank(call, 1)))
    if call.get("scale_grad_by_freq"):
        lead = (None,) * len(lead)
    return Labelling(((*lead, "h"), lead), ((None, "h"),), frozenset(label for label in lead if label is not None))


def _nll_labels(call: Call) -> tuple[dict[str, Labels], Labels] | Refusal:
    """Labels of log-probabilities, targets and weights, and of what has one value a row."""
    shape = call.operands[call.names.index("self")].shape
    if len(shape) < 2:
        return Refusal("a loss without a batch dimension needs whole operands")
    rows: Labels = ("n", *(f"d{i}" for i in range(len(shape) - 2)))
    if call.get("reduction", 1) == 1:
        rows = (None,) * len(rows)
    return {"self": (rows[0], None, *rows[1:]), "target": rows, "weight": (None,), "total_weight": ()}, rows


def _nll_forward(call: Call) -> Labelling | Refusal:
    """The loss of each row or their sum, and the sum of weights."""
    found = _nll_labels(call)
    if isinstance(found, Refusal):
        return found
    known, rows = found
    outs: tuple[Labels, ...] = (rows if call.outputs[0].shape else (), ())
    return Labelling(tuple(known[name] for name in call.names), outs, frozenset(r for r in rows if r is not None))


def _nll_backward(call: Call) -> Labelling | Refusal:
    found = _nll_labels(call)
    if isinstance(found, Refusal):
        return found
    known, rows = found
    known["grad_output"] = rows if call.operands[0].shape else ()
    return Labelling(tuple(known[name] for name in call.names), (known["self"],))


def _total_weight_unread(call: Call, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal | None:
    """The sum of weights is read for a mean alone: of a sum it may be a summand."""
    position = call.position("total_weight")
    if position is None or placements[position] != P:
        return None
    if call.get("reduction", 1) == 1:
        return Refusal("a mean divides by the sum of weights: reduce it first")
    rest = [p for i, p in enumerate(placements) if i != position]
    if all(p == R for p in rest):
        return (R,)
    cut = next((p for p in rest if p.is_shard), None)
    if cut is None:
        return (P,) if rest[0] == P and all(p == R for p in rest[1:]) else None
    found = _nll_backward(call)
    if isinstance(found, Refusal):
        return found
    first = next(i for i, p in enumerate(placements) if p.is_shard)
    label = found.operands[first][cut.dim]
    if label is None:
        return Refusal(f"the operation needs the whole of dimension {cut.dim}")
    for i, (p, labels) in enumerate(zip(placements, found.operands, strict=True)):
        wanted = cut.at(labels.index(label)) if label in labels else R
        if i != position and p != wanted:
            return Refusal(f"operand {call.names[i]} is {p} where {wanted} fits {cut}")
    return (cut.at(found.outputs[0].index(label)),)


def _loss_backward(call: Call) -> Labelling | Refusal:
    """Element by element; the gradient of a sum is spread, a mean divides by the size of the whole."""
    if call.get("reduction", 1) == 1:
        return Refusal("a mean divides by the size of the whole: it needs whole operands")
    shape = call.outputs[0].shape
    return Labelling(tuple(broadcast(kind.shape, shape) for kind in call.operands), (tuple(_numbered(len(shape))),))


def _scatter(call: Call) -> Labelling | Refusal:
    """A dimension gets elements at places of its own: it stays whole; the others go along where all have them whole."""
    shapes = [kind.shape for kind in call.operands]
    labels = _numbered(len(shapes[0]))
    if not labels:
        return Labelling(tuple((None,) * len(shape) for shape in shapes), ((),))
    dim = int(call.get("dim")) % len(labels)
    own = [None if i == dim or any(s[i] != shapes[0][i] for s in shapes) else f"d{i}" for i in range(len(labels))]
    return Labelling((tuple(own),) * len(shapes), (tuple(own),))


def _index_add(call: Call) -> Labelling | Refusal:
    """`dim` gets the rows of `source` at their places; rows may be cut, and are then summed."""
    labels = _numbered(_rank(call))
    dim = int(call.get("dim")) % max(len(labels), 1)
    whole = tuple(None if i == dim else label for i, label in enumerate(labels))
    known: dict[str, Labels] = {"self": whole, "index": (None,), "source": whole}
    return Labelling(tuple(known[name] for name in call.names), (whole,))


def _index_put(call: Call) -> Labelling | Refusal:
    """`x[i, j, :] += values`: what is indexed stays whole; dimensions behind and before it go along."""
    entries = call.get("indices") or []
    entries = entries or [call.position("indices")] * call.names.count("indices")
    places = [i for i, entry in enumerate(entries) if entry is not None]
    if not call.get("accumulate") or not places or places != list(range(places[0], places[-1] + 1)):
        return Refusal("indices that stand apart, or that replace, have no rule for shards")
    own: list[str | None] = [f"d{i}" for i in range(_rank(call))]
    indices = [k for name, k in zip(call.names, call.operands, strict=True) if name == "indices"]
    values = call.operands[call.names.index("values")].shape
    width = max((len(kind.shape) for kind in indices), default=0)
    for place in places:
        own[place] = None
    spread: Labels = tuple(f"i{i}" for i in range(width))
    shape: tuple[Size, ...] = values[places[0] : places[0] + width]
    moved: Labels = (*own[: places[0]], *spread, *own[places[-1] + 1 :])
    if len(moved) != len(values):
        return Refusal("values that are broadcast have no rule for shards")
    known = {"self": tuple(own), "values": moved}
    ins = tuple(
        broadcast(kind.shape, shape, spread) if name == "indices" else known[name]
        for name, kind in zip(call.names, call.operands, strict=True)
    )
    return Labelling(ins, (tuple(own),), frozenset(label for label in spread if label is not None))


def _slice_backward(call: Call) -> Labelling | Refusal:
    """The dimension that was sliced stays whole."""
    labels = _numbered(_rank(call))
    labels[int(call.get("dim")) % len(labels)] = None
    return Labelling((tuple(labels),), (tuple(labels),))


def _convolution(call: Call) -> Labelling | Refusal:
    """`n c …, o c …, o -> n o …`, with groups `n …` alone."""
    rank = len(call.outputs[0].shape)
    c, o = ("c", "o") if call.get("groups") == 1 and not call.get("transposed") else (None, None)
    space = (None,) * (rank - 2)
    found: dict[str, Labels] = {"input": ("n", c, *space), "weight": (o, c, *space), "bias": (o,)}
    if "bias" in call.names:
        c = None
        found["input"], found["weight"] = ("n", None, *space), (o, None, *space)
    return Labelling(tuple(found[name] for name in call.names), (("n", o, *space),), frozenset("c" if c else ""))


def _convolution_backward(call: Call) -> Labelling | Refusal:
    """`n o …, n c …, o c … -> n c …, o c …, o`: images are summed in the weight's gradient, channels in the input's."""
    rank = _rank(call)
    c, o = ("c", "o") if call.get("groups") == 1 and not call.get("transposed") else (None, None)
    space = (None,) * (rank - 2)
    ins: tuple[Labels, ...] = (("n", o, *space), ("n", c, *space), (o, c, *space))
    outs: list[Labels] = [("n", c, *space), (o, c, *space), (o,)]
    made = [labels if len(k.shape) == len(labels) else (None,) for labels, k in zip(outs, call.outputs, strict=True)]
    return Labelling(ins, tuple(made), frozenset(label for label in ("n", o) if label))


def gradient_rules() -> dict[str, Rule]:
    """Rules by `aten` overload name."""
    found: dict[str, Rule] = {}
    for name in _POINTWISE:
        schema = getattr(torch.ops.aten, name).default._schema
        tensors = tuple(argument.name for argument in schema.arguments)
        found[f"aten.{name}.default"] = Rule(pointwise_labels, ((_gradient_name(name),),), padding=tensors)
    for name in _LOSSES:
        found[f"aten.{name}.default"] = Rule(_loss_backward, (("grad_output",),))
    for name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        found[f"aten.{name}.default"] = Rule(_keeping_dim, (("grad_output",),))
    for name in ("nll_loss_forward", "nll_loss2d_forward"):
        found[f"aten.{name}.default"] = Rule(_nll_forward)
    for name in ("nll_loss_backward", "nll_loss2d_backward"):
        found[f"aten.{name}.default"] = Rule(_nll_backward, (("grad_output",),), check=_total_weight_unread)
    scatter = Rule(_scatter, (("self", "src"),))
    return found | {
        "aten.native_layer_norm_backward.default": Rule(_layer_norm_backward, (("grad_out",),)),
        "aten.embedding_dense_backward.default": Rule(_embedding_backward, (("grad_output",),)),
        "aten.scatter.src": scatter,
        "aten.scatter_add.default": scatter,
        "aten.index_add.default": Rule(_index_add, (("self", "source"),)),
        "aten.index_put.default": Rule(_index_put, (("self", "values"),)),
        "aten._unsafe_index_put.default": Rule(_index_put, (("self", "values"),)),
        "aten.slice_backward.default": Rule(_slice_backward, (("grad_output",),)),
        "aten.convolution.default": Rule(_convolution, (("input", "bias?"), ("weight", "bias?"))),
        "aten.convolution_backward.default": Rule(_convolution_backward, (("grad_output",),)),
    }
