"""Rules of operations that take elements at indices: indexing, gathers, rows of a table."""

from __future__ import annotations

from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import broadcast
from fxpar.signatures.rule import Labelling, Labels, Refusal, Rule
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
