"""Rules of operations that take elements at indices, and of gradients that are put in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fxpar.layout.layout import P, Placement, R
from fxpar.layout.symbolic_sizes import Size
from fxpar.signatures.engine import Labelling, Labels, Refusal, Rule, infer
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import broadcast
from fxpar.signatures.views import numbered, wrap

_SELF = (("self",),)


def _index(call: OpCall) -> Labelling | Refusal:
    """`x[i, j, :]`: indices are broadcast and replace the dimensions they stand at, which must be neighbours."""
    entries = call.get("indices") or []
    entries = entries or [call.position("indices")] * call.names.count("indices")
    places = [i for i, entry in enumerate(entries) if entry is not None]
    if not places or places != list(range(places[0], places[-1] + 1)):
        return Refusal("indices that stand apart have no rule for shards")
    indices = call.operands[1:]
    if any(kind.dtype.is_floating_point or str(kind.dtype) == "torch.bool" for kind in indices):
        return Refusal("a boolean index has a result of unknown size")
    shape, out = call.operands[0].shape, call.outputs[0].shape
    width = len(out) - (len(shape) - len(places))
    first, count = places[0], len(places)
    labels: Labels = tuple(
        None if first <= i < first + count else (f"d{i}" if i < first else f"d{i - count + width}")
        for i in range(len(shape))
    )
    spread = tuple(f"d{first + i}" for i in range(width))
    taken = out[first : first + width]
    return Labelling((labels, *(broadcast(k.shape, taken, spread) for k in indices)), (tuple(numbered(len(out))),))


def _gather(call: OpCall) -> Labelling | Refusal:
    """The index may be cut along `dim`; along the others only where it covers them."""
    shape, index = call.operands[0].shape, call.operands[1].shape
    dim = wrap(call.get("dim", 0), len(shape)) if shape else 0
    labels = numbered(len(index))
    source = [None if i == dim or shape[i] != index[i] else labels[i] for i in range(len(shape))]
    other = [labels[i] if i == dim or source[i] else None for i in range(len(index))]
    return Labelling((tuple(source), tuple(other)), (tuple(other),))


def _embedding(call: OpCall) -> Labelling | Refusal:
    """`_ h, i… -> i… h`; cutting the vocabulary needs masks and belongs to a composite operator."""
    lead = numbered(len(call.operands[1].shape))
    if call.get("scale_grad_by_freq"):  # the gradient is divided by counts over all indices
        return Labelling(((None, "h"), (None,) * len(lead)), ((*(None for _ in lead), "h"),))
    return Labelling(((None, "h"), tuple(lead)), ((*lead, "h"),))


def _index_select(call: OpCall) -> Labelling | Refusal:
    labels = numbered(len(call.operands[0].shape))
    dim = wrap(call.get("dim", 0), len(labels))
    source = [None if i == dim else label for i, label in enumerate(labels)]
    return Labelling((tuple(source), (labels[dim],)), (tuple(labels),))


def _one_hot(call: OpCall) -> Labelling | Refusal:
    """`... -> ... _`; without a number of classes that is how large the largest index is, of the whole."""
    if int(call.get("num_classes", -1)) < 0:
        return Refusal("the number of classes is read off all indices")
    labels = tuple(numbered(len(call.operands[0].shape)))
    return Labelling((labels,), ((*labels, None),))


def indexing_rules() -> dict[str, Rule]:
    """Rules by `aten` overload name."""
    return {
        "aten.index.Tensor": Rule(_index, _SELF, padding=("self",)),
        "aten._unsafe_index.Tensor": Rule(_index, _SELF, padding=("self",)),
        "aten.gather.default": Rule(_gather, _SELF),
        "aten.one_hot.default": Rule(_one_hot),
        "aten.index_select.default": Rule(_index_select, _SELF),
        "aten.embedding.default": Rule(_embedding, (("weight",),)),
    }


_Check = Callable[[OpCall, Sequence[Placement]], tuple[Placement, ...] | Refusal | None]


def ignoring(unread: Callable[[OpCall], Sequence[str]], rule: Rule) -> Rule:
    """The rule with operands that may be partial because their values are not read."""

    def check(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal | None:
        names = unread(call)
        effective = [R if p == P and name in names else p for name, p in zip(call.names, placements, strict=True)]
        if effective == list(placements):
            return None
        return infer(rule, call, effective, [False] * len(effective))

    return replace(rule, check=check)


def _numbered(rank: int) -> list[str | None]:
    return [f"d{i}" for i in range(rank)]


def _of_rows(labels: Callable[[OpCall], Labelling | Refusal], rows: Callable[[OpCall], Labels]) -> _Check:
    """What is added may be cut where it is indexed: each rank adds its own, to a summand of what is added to.

    Args:
        labels: of a call whose indexed dimensions are whole.
        rows: labels of the dimensions of the indices.
    """

    def check(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal | None:
        self_index = call.names.index("self")
        cut = next((i for i, p in enumerate(placements) if p.is_shard), None)
        if placements[self_index] != P or cut is None:
            return None
        labelling = labels(call)
        if isinstance(labelling, Refusal):
            return labelling
        label = labelling.operands[cut][placements[cut].dim]
        if label is None or label not in rows(call):
            return Refusal("partial (P) operands meet shards (S)")
        if placements[cut].is_padded or placements[cut].is_shared:
            return Refusal(f"what several ranks hold of {placements[cut]}, or nothing, would be added by each of them")
        for i, (name, placement, mine) in enumerate(zip(call.names, placements, labelling.operands, strict=True)):
            expected = placements[cut].at(mine.index(label)) if label in mine else R
            if i != self_index and placement != expected:
                return Refusal(f"operand {name} is {placement} where {expected} fits {placements[cut]}")
        return (P,)

    return check


def _scatter(call: OpCall) -> Labelling | Refusal:
    """A dimension gets elements at places of its own: it stays whole; the others go along where all have them whole.

    Along `dim` index and source are one (`rows`), which is summed.
    """
    known = dict(zip(call.names, call.operands, strict=True))
    shapes = [kind.shape for kind in call.operands]
    labels = _numbered(len(shapes[0]))
    if not labels:
        return Labelling(tuple((None,) * len(shape) for shape in shapes), ((),))
    dim = int(call.get("dim")) % len(labels)
    whole = [None if i == dim or any(s[i] != shapes[0][i] for s in shapes) else f"d{i}" for i in range(len(labels))]
    alike = "src" in known and known["index"].shape[dim] == known["src"].shape[dim]
    moved = [("rows" if alike else None) if i == dim else label for i, label in enumerate(whole)]
    ins = tuple(tuple(whole if name == "self" else moved) for name in call.names)
    return Labelling(ins, (tuple(whole),))


def _scatter_in_place_of(call: OpCall) -> Labelling | Refusal:
    """As `_scatter`; of two elements at one place each rank would keep another, so that `dim` stays whole there too."""
    labelling = _scatter(call)
    if isinstance(labelling, Refusal):
        return labelling
    ins = tuple(tuple(None if label == "rows" else label for label in labels) for labels in labelling.operands)
    return Labelling(ins, labelling.outputs)


def _rows(call: OpCall) -> Labels:
    return ("rows",)


def _index_add(call: OpCall) -> Labelling | Refusal:
    """`dim` gets the rows of `source` at their places."""
    labels = _numbered(len(call.operands[0].shape))
    dim = int(call.get("dim")) % max(len(labels), 1)
    whole = tuple(None if i == dim else label for i, label in enumerate(labels))
    source = tuple("rows" if i == dim else label for i, label in enumerate(labels))
    known: dict[str, Labels] = {"self": whole, "index": ("rows",), "source": source}
    return Labelling(tuple(known[name] for name in call.names), (whole,))


def _index_rows(call: OpCall) -> Labels:
    indices = [k for name, k in zip(call.names, call.operands, strict=True) if name == "indices"]
    return tuple(f"i{i}" for i in range(max((len(kind.shape) for kind in indices), default=0)))


def _index_put(call: OpCall) -> Labelling | Refusal:
    """`x[i, j, :] += values`: what is indexed stays whole; dimensions behind and before it go along."""
    entries = call.get("indices") or []
    entries = entries or [call.position("indices")] * call.names.count("indices")
    places = [i for i, entry in enumerate(entries) if entry is not None]
    if not call.get("accumulate") or not places or places != list(range(places[0], places[-1] + 1)):
        return Refusal("indices that stand apart, or that replace, have no rule for shards")
    labels = _numbered(len(call.operands[0].shape))
    values = call.operands[call.names.index("values")].shape
    if any(kind.dtype.is_floating_point or str(kind.dtype) == "torch.bool" for kind in call.operands[1:-1]):
        return Refusal("a boolean index takes an unknown number of values")
    spread = _index_rows(call)
    for place in places:
        labels[place] = None
    shape: tuple[Size, ...] = values[places[0] : places[0] + len(spread)]
    moved: Labels = (*labels[: places[0]], *spread, *labels[places[-1] + 1 :])
    if len(moved) != len(values):
        return Refusal("values that are broadcast have no rule for shards")
    whole = call.operands[0].shape
    sizes = (*whole[: places[0]], *shape, *whole[places[-1] + 1 :])
    if values != sizes:
        return Refusal("values that are broadcast have no rule for shards")
    known = {"self": tuple(labels), "values": moved}
    ins = tuple(
        broadcast(kind.shape, shape, spread) if name == "indices" else known[name]
        for name, kind in zip(call.names, call.operands, strict=True)
    )
    return Labelling(ins, (tuple(labels),))


def _behind(count: int) -> Callable[[OpCall], Labelling | Refusal]:
    """Gradient and operand of what pools or pads the last dimensions, which stay whole."""

    def labels(call: OpCall) -> Labelling | Refusal:
        rank = len(call.operands[0].shape)
        lead: Labels = tuple(f"d{i}" if i < rank - count else None for i in range(rank))
        return Labelling((lead,) * len(call.operands), (lead,))

    return labels


def _value_unread(call: OpCall) -> tuple[str, ...]:
    return ("self",)


def _convolution(call: OpCall) -> Labelling | Refusal:
    """`n c …, o c …, o -> n o …`, with groups `n …` alone."""
    rank = len(call.outputs[0].shape)
    if len(call.operands[0].shape) != rank or rank != len(call.operands[1].shape):
        return Refusal("a convolution without a batch dimension has no rule for shards")
    c, o = ("c", "o") if call.get("groups") == 1 and not call.get("transposed") else (None, None)
    if "bias" in call.names:
        c = None  # it would be added by each rank
    space = (None,) * (rank - 2)
    labels: dict[str, Labels] = {"input": ("n", c, *space), "weight": (o, c, *space), "bias": (o,)}
    return Labelling(tuple(labels[name] for name in call.names), (("n", o, *space),), frozenset("c" if c else ""))


def _one_gradient(call: OpCall) -> int | None:
    """Which of the gradients of input, weight and bias is computed; None where it is not one of the first two."""
    needed = [i for i, flag in enumerate(call.get("output_mask")) if flag]
    return needed[0] if needed in ([0], [1]) else None


def _convolution_backward(call: OpCall) -> Labelling | Refusal:
    """`n o …, n c …, o c … -> n c …` or `-> o c …`; what is not computed has no elements, and goes along."""
    index = _one_gradient(call)
    rank = len(call.operands[0].shape)
    if index is None or any(len(kind.shape) != rank for kind in call.operands):
        return Refusal("several gradients of a convolution at once, or of one image alone, need whole operands")
    c, o = ("c", "o") if call.get("groups") == 1 and not call.get("transposed") else (None, None)
    space = (None,) * (rank - 2)
    ins: tuple[Labels, ...] = (("n", o, *space), ("n", c, *space), (o, c, *space))
    gradients: list[Labels] = [(None,), (None,), (None,)]
    gradients[index] = ins[index + 1]
    outs = gradients if len(call.outputs) == len(gradients) else [gradients[index]]
    return Labelling(ins, tuple(outs), frozenset(label for label in ("n", o, c) if label))


def _shape_alone(call: OpCall) -> tuple[str, ...]:
    """Of what the gradient is, the shape alone is read."""
    index = _one_gradient(call)
    return () if index is None else (("input",), ("weight",))[index]


def _diagonal(call: OpCall) -> Labelling | Refusal:
    """The two dimensions of a diagonal stay whole, and so does the last one, which is the diagonal."""
    rank = max(len(kind.shape) for kind in (*call.operands, *call.outputs))
    across = {int(call.get(name)) % rank for name in ("dim1", "dim2")}
    wide: Labels = tuple(None if i in across else f"d{i}" for i in range(rank))
    narrow: Labels = (*(label for i, label in enumerate(wide) if i not in across), None)
    is_taken = len(call.operands[0].shape) == rank
    return Labelling((wide,), (narrow,)) if is_taken else Labelling((narrow,), (wide,))


_PADDED_BEHIND = {"1d": 1, "2d": 2, "3d": 3}


def scattering_rules() -> dict[str, Rule]:
    """Rules by `aten` overload name."""
    sums = (("self", "values"),)
    index_put = Rule(_index_put, sums, check=_of_rows(_index_put, _index_rows))
    pads = {
        f"aten.{name}_pad{dims}_backward.default": ignoring(_value_unread, Rule(_behind(count), (("grad_output",),)))
        for name in ("reflection", "replication")
        for dims, count in _PADDED_BEHIND.items()
    }
    pool = ignoring(_value_unread, Rule(_behind(2), (("grad_output",),)))
    convolution = Rule(_convolution_backward, (("grad_output",), ("input",), ("weight",)))
    return {
        **pads,
        "aten.diagonal.default": Rule(_diagonal, (("self",),)),
        "aten.diag_embed.default": Rule(_diagonal, (("self",),)),
        "aten.scatter.src": Rule(_scatter_in_place_of, (("self", "src"),)),
        "aten.scatter.value": Rule(_scatter_in_place_of),
        "aten.scatter_add.default": Rule(_scatter, (("self", "src"),), check=_of_rows(_scatter, _rows)),
        "aten.index_add.default": Rule(_index_add, (("self", "source"),), check=_of_rows(_index_add, _rows)),
        "aten.index_put.default": index_put,
        "aten._unsafe_index_put.default": index_put,
        "aten._adaptive_avg_pool2d_backward.default": pool,
        "aten.convolution.default": Rule(_convolution, (("input", "bias?"), ("weight", "bias?"))),
        "aten.convolution_backward.default": ignoring(_shape_alone, convolution),
    }
