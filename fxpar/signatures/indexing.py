"""Rules of operations that take elements at indices, of gradients that are put in their places, and of what runs along.

An operation runs along some dimensions and leaves the others apart: order statistics and scans along one dimension,
pooling and resampling of the last ones, linear algebra on matrices of a batch, distances between rows. A dimension that
an operation runs along is needed whole; every other one may be cut. Next to each forward stand the operators of its
derivative that models do not call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fxpar.layout.layout import P, Placement, R
from fxpar.layout.nesting import through_view
from fxpar.layout.symbolic_sizes import Size
from fxpar.signatures.engine import Labelling, Labels, Refusal, Rule, Signature, by_overload, infer, numbered
from fxpar.signatures.op_call import RESAMPLED, OpCall
from fxpar.signatures.pointwise import broadcast
from fxpar.signatures.views import along, mixed, wrap

_SELF = (("self",),)


def _index(call: OpCall) -> Labelling | Refusal:
    """Broadcasts the indices of `x[i, j, :]`; they replace the dimensions they stand at, which must be neighbours."""
    entries = call.get("indices") or []
    entries = entries or [call.position("indices")] * call.names.count("indices")
    places = [i for i, entry in enumerate(entries) if entry is not None]
    if not places or places != list(range(places[0], places[-1] + 1)):
        return Refusal("indices that stand apart have no rule for shards")
    indices = call.operands[1:]
    if any(kind.dtype.is_floating_point or str(kind.dtype) == "torch.bool" for kind in indices):
        return Refusal("a boolean index has a result of unknown size")
    out, first, count = call.outputs[0].shape, places[0], len(places)
    width = len(out) - len(call.operands[0].shape) + count
    result, behind = numbered(len(out)), first + width
    labels = (*result[:first], *(None,) * count, *result[behind:])
    spread, taken = result[first:behind], out[first:behind]
    return Labelling((labels, *(broadcast(k.shape, taken, spread) for k in indices)), (result,))


def _gather(call: OpCall) -> Labelling | Refusal:
    """Cuts the index along `dim`, and along other dimensions only where it covers them."""
    shape, index = call.operands[0].shape, call.operands[1].shape
    dim = wrap(call.get("dim", 0), len(shape)) if shape else 0
    labels = numbered(len(index))
    source = [None if i == dim or shape[i] != index[i] else labels[i] for i in range(len(shape))]
    other = [labels[i] if i == dim or source[i] else None for i in range(len(index))]
    return Labelling((tuple(source), tuple(other)), (tuple(other),))


def _embedding(call: OpCall) -> Labelling | Refusal:
    """Reads `_ h, i… -> i… h`.

    A cut of the vocabulary needs masks: it belongs to a composite operator.
    """
    lead = numbered(len(call.operands[1].shape))
    if call.get("scale_grad_by_freq"):  # the gradient is divided by counts over all indices
        lead = (None,) * len(lead)
    return Labelling(((None, "h"), lead), ((*lead, "h"),))


def _index_select(call: OpCall) -> Labelling | Refusal:
    labels, dim = numbered(len(call.operands[0].shape)), call.get("dim", 0)
    return Labelling((numbered(len(labels), dim), (labels[dim],)), (labels,))


def _one_hot(call: OpCall) -> Labelling | Refusal:
    """Cuts `... -> ... _`. Refuses a missing number of classes, which the largest index of the whole decides."""
    if int(call.get("num_classes", -1)) < 0:
        return Refusal("the number of classes is read off all indices")
    labels = numbered(len(call.operands[0].shape))
    return Labelling((labels,), ((*labels, None),))


def indexing_rules() -> dict[str, Rule]:
    """Returns rules by `aten` overload name."""
    return by_overload(
        {
            "index.Tensor _unsafe_index.Tensor": Rule(_index, _SELF, padding=("self",)),
            "gather": Rule(_gather, _SELF),
            "one_hot": Rule(_one_hot),
            "index_select": Rule(_index_select, _SELF),
            "embedding": Rule(_embedding, (("weight",),)),
        }
    )


_Check = Callable[[OpCall, Sequence[Placement]], tuple[Placement, ...] | Refusal | None]


def ignoring(unread: Callable[[OpCall], Sequence[str]], rule: Rule) -> Rule:
    """Returns the rule with operands that may be partial because their values are not read."""

    def check(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal | None:
        names = unread(call)
        effective = [R if p == P and name in names else p for name, p in zip(call.names, placements, strict=True)]
        if effective == list(placements):
            return None
        return infer(rule, call, effective, [False] * len(effective))

    return replace(rule, check=check)


def _of_rows(labels: Callable[[OpCall], Labelling | Refusal], rows: Callable[[OpCall], Labels]) -> _Check:
    """Lets what is added be cut where it is indexed: each rank adds its part, to a summand of what is added to.

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
    """Keeps the dimension whole whose elements get new places; the others go along where all operands have them whole.

    Along `dim` index and source are one (`rows`), which is summed.
    """
    known = dict(zip(call.names, call.operands, strict=True))
    shapes = [kind.shape for kind in call.operands]
    rank = len(shapes[0])
    if not rank:
        return Labelling(tuple((None,) * len(shape) for shape in shapes), ((),))
    dim = int(call.get("dim")) % rank
    whole = numbered(rank, dim, *(i for i in range(rank) if any(s[i] != shapes[0][i] for s in shapes)))
    alike = "src" in known and known["index"].shape[dim] == known["src"].shape[dim]
    moved = (*whole[:dim], "rows" if alike else None, *whole[dim + 1 :])
    return Labelling(tuple(whole if name == "self" else moved for name in call.names), (whole,))


def _scatter_in_place_of(call: OpCall) -> Labelling | Refusal:
    """Cuts as `_scatter`, with `dim` whole even there: of two elements at one place each rank would keep another."""
    labelling = _scatter(call)
    if isinstance(labelling, Refusal):
        return labelling
    ins = tuple(tuple(None if label == "rows" else label for label in labels) for labels in labelling.operands)
    return Labelling(ins, labelling.outputs)


def _rows(call: OpCall) -> Labels:
    return ("rows",)


def _index_add(call: OpCall) -> Labelling | Refusal:
    """Puts the rows of `source` in their places of `dim`."""
    rank, dim = len(call.operands[0].shape), call.get("dim")
    whole = numbered(rank, dim)
    source = tuple("rows" if label is None else label for label in whole)
    known: dict[str, Labels] = {"self": whole, "index": ("rows",), "source": source}
    return Labelling(tuple(known[name] for name in call.names), (whole,))


def _index_rows(call: OpCall) -> Labels:
    indices = [k for name, k in zip(call.names, call.operands, strict=True) if name == "indices"]
    return tuple(f"i{i}" for i in range(max((len(kind.shape) for kind in indices), default=0)))


def _index_put(call: OpCall) -> Labelling | Refusal:
    """Keeps what `x[i, j, :] += values` indexes whole; dimensions before and after it go along."""
    entries = call.get("indices") or []
    entries = entries or [call.position("indices")] * call.names.count("indices")
    places = [i for i, entry in enumerate(entries) if entry is not None]
    if not call.get("accumulate") or not places or places != list(range(places[0], places[-1] + 1)):
        return Refusal("indices that stand apart, or that replace, have no rule for shards")
    labels = numbered(len(call.operands[0].shape), *places)
    values = call.operands[call.names.index("values")].shape
    if any(kind.dtype.is_floating_point or str(kind.dtype) == "torch.bool" for kind in call.operands[1:-1]):
        return Refusal("a boolean index takes an unknown number of values")
    spread = _index_rows(call)
    shape: tuple[Size, ...] = values[places[0] : places[0] + len(spread)]
    moved: Labels = (*labels[: places[0]], *spread, *labels[places[-1] + 1 :])
    if len(moved) != len(values):
        return Refusal("values that are broadcast have no rule for shards")
    whole = call.operands[0].shape
    sizes = (*whole[: places[0]], *shape, *whole[places[-1] + 1 :])
    if values != sizes:
        return Refusal("values that are broadcast have no rule for shards")
    known = {"self": labels, "values": moved}
    ins = tuple(
        broadcast(kind.shape, shape, spread) if name == "indices" else known[name]
        for name, kind in zip(call.names, call.operands, strict=True)
    )
    return Labelling(ins, (labels,))


def _value_unread(call: OpCall) -> tuple[str, ...]:
    """Returns the operand of which only the shape is read."""
    return ("self",)


def _convolution(call: OpCall) -> Labelling | Refusal:
    """Cuts `n c …, o c …, o -> n o …`, with groups `n …` alone."""
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
    """Returns which gradient of input, weight and bias is computed; None where it is not one of the first two."""
    needed = [i for i, flag in enumerate(call.get("output_mask")) if flag]
    return needed[0] if needed in ([0], [1]) else None


def _convolution_backward(call: OpCall) -> Labelling | Refusal:
    """Cuts `n o …, n c …, o c … -> n c …` or `-> o c …`; what is not computed has no elements, and goes along."""
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
    return Labelling(ins, tuple(outs), frozenset(filter(None, ("n", o, c))))


def _shape_alone(call: OpCall) -> tuple[str, ...]:
    """Names the operand whose gradient this is: of it the shape alone is read."""
    index = _one_gradient(call)
    return () if index is None else (("input",), ("weight",))[index]


def _diagonal(call: OpCall) -> Labelling | Refusal:
    """Keeps the two dimensions of a diagonal whole, and the last one, which is the diagonal."""
    rank = max(len(kind.shape) for kind in (*call.operands, *call.outputs))
    wide = numbered(rank, call.get("dim1"), call.get("dim2"))
    narrow: Labels = (*(label for label in wide if label is not None), None)
    is_taken = len(call.operands[0].shape) == rank
    return Labelling((wide,), (narrow,)) if is_taken else Labelling((narrow,), (wide,))


def _padding_backward(count: int) -> Rule:
    return ignoring(_value_unread, Rule(mixed(count), (("grad_output",),)))


def scattering_rules() -> dict[str, Rule]:
    """Returns rules by `aten` overload name."""
    convolution = Rule(_convolution_backward, (("grad_output",), ("input",), ("weight",)))
    return by_overload(
        {
            "reflection_pad1d_backward replication_pad1d_backward": _padding_backward(1),
            "reflection_pad2d_backward replication_pad2d_backward": _padding_backward(2),
            "reflection_pad3d_backward replication_pad3d_backward": _padding_backward(3),
            "_adaptive_avg_pool2d_backward": _padding_backward(2),
            "diagonal diag_embed": Rule(_diagonal, _SELF),
            "scatter.src": Rule(_scatter_in_place_of, (("self", "src"),)),
            "scatter.value": Rule(_scatter_in_place_of),
            "scatter_add": Rule(_scatter, (("self", "src"),), check=_of_rows(_scatter, _rows)),
            "index_add": Rule(_index_add, (("self", "source"),), check=_of_rows(_index_add, _rows)),
            "index_put _unsafe_index_put": Rule(
                _index_put, (("self", "values"),), check=_of_rows(_index_put, _index_rows)
            ),
            "convolution": Rule(_convolution, (("input", "bias?"), ("weight", "bias?"))),
            "convolution_backward": ignoring(_shape_alone, convolution),
        }
    )


_GRADIENT = (("grad_output",),)

# What runs along some dimensions.

# How many dimensions at the end each of these mixes, by the end of its name.
_SPACES = {"1d": 1, "2d": 2, "3d": 3}


def space_of(name: str) -> int:
    """Returns how many dimensions at the end an operator mixes that is named after them."""
    return next(count for ending, count in _SPACES.items() if ending in name)


def _one_apart(call: OpCall) -> Labelling | Refusal:
    """Cuts slices along `dim` apart, and keeps all other dimensions whole (renorm)."""
    rank = len(call.operands[0].shape)
    dim = wrap(call.get("dim"), rank)
    labels: Labels = tuple("d" if i == dim else None for i in range(rank))
    return Labelling((labels,), (labels,))


def _unfold(call: OpCall) -> Labelling | Refusal:
    """Takes windows along a dimension, whose elements are a new last one."""
    labels = numbered(len(call.operands[0].shape), call.get("dimension"))
    return Labelling((labels,), ((*labels, None),))


def _repeat_interleave(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    """Follows a cut through repeated elements, which stand one after the other: a block becomes a block."""
    shape, times, dim = call.operands[0].shape, call.get("repeats"), call.get("dim")
    if call.get("output_size") is not None:
        return Refusal("the length of the result is a number in the call, which is that of the whole")
    at = len(shape) if dim is None else wrap(dim, len(shape)) + 1
    moved = placement.at(placement.dim + (placement.dim >= at))
    after = through_view(moved, (*shape[:at], times, *shape[at:]), call.outputs[0].shape, call.n)
    if after is None:
        reason = f"repeating {times} times to {call.outputs[0]} tears {placement} over {call.n} ranks"
        return Refusal(reason, structural=True)
    return Signature((placement,), (after,))


def _searched(call: OpCall) -> Labelling | Refusal:
    """Cuts rows of sorted values with rows of what is looked up there; of one sorted row all elements are apart."""
    known = dict(zip(call.names, call.operands, strict=True))
    if "self" not in known:  # a number is looked up
        return Refusal("a number is looked up in all of it")
    apart, row = numbered(len(known["self"].shape)), len(known["sorted_sequence"].shape)
    lead = () if row == 1 else apart[:-1]
    labels: dict[str, Labels] = {"self": apart, **dict.fromkeys(("sorted_sequence", "sorter"), (*lead, None))}
    return Labelling(tuple(labels[name] for name in call.names), (labels["self"],))


def _bucketize(call: OpCall) -> Labelling | Refusal:
    labels = numbered(len(call.operands[0].shape))
    return Labelling((labels, (None,)), (labels,))


def _is_in(call: OpCall) -> Labelling | Refusal:
    """Cuts the elements, of which each is looked up among all test elements."""
    known = dict(zip(call.names, call.operands, strict=True))
    labels = numbered(len(call.outputs[0].shape))
    ins = tuple(labels if name == "elements" else (None,) * len(known[name].shape) for name in call.names)
    return Labelling(ins, (labels,))


def _matrices(call: OpCall) -> Labelling | Refusal:
    """Cuts the dimensions in front of the matrices of one operand, for results of any rank.

    Other factorings have no rule, for their backward writes into diagonals and unpacks them.
    """
    lead = numbered(len(call.operands[0].shape) - 2)
    outs = tuple((*lead, *(None,) * (len(kind.shape) - len(lead))) for kind in call.outputs)
    if any(
        len(kind.shape) < len(lead) or kind.shape[: len(lead)] != call.operands[0].shape[:-2] for kind in call.outputs
    ):
        return Refusal("a result has no matrix for each of the batch")
    return Labelling(((*lead, None, None),), outs)


def _triangular(call: OpCall) -> Labelling | Refusal:
    """Cuts `… _ _, … _ c -> … _ c`: right-hand sides by columns, or by rows where the matrix stands right."""
    out = call.outputs[0].shape
    lead = numbered(len(out) - 2)
    matrix, right = call.operands
    sides: Labels = (None, "c") if call.get("left", True) else ("c", None)

    def spread(shape: tuple[Size, ...], ends: Labels) -> Labels:
        return (*broadcast(shape[:-2], out[:-2], lead), *ends)

    return Labelling((spread(matrix.shape, (None, None)), spread(right.shape, sides)), ((*lead, *sides),))


def _distances(call: OpCall) -> Labelling | Refusal:
    """Cuts rows of both: `… p _, … r _ -> … p r`. Refuses to broadcast rows: a gradient would be a sum over copies."""
    out = call.outputs[0].shape
    if any(kind.shape[:-2] != out[:-2] for kind in call.operands):
        return Refusal("distances of rows that are broadcast have no rule for shards")
    lead = numbered(len(out) - 2)
    return Labelling(((*lead, "p", None), (*lead, "r", None)), ((*lead, "p", "r"),))


def _distances_backward(call: OpCall) -> Labelling | Refusal:
    """Sums for each row over those that it was compared with: `… p r, … p _, … r _, … p r -> … p _`."""
    lead = numbered(len(call.outputs[0].shape) - 2)
    if any(kind.shape[:-2] != call.outputs[0].shape[:-2] for kind in call.operands):
        return Refusal("distances of rows that are broadcast have no rule for shards")
    pairs, rows, others = (*lead, "p", "r"), (*lead, "p", None), (*lead, "r", None)
    return Labelling((pairs, rows, others, pairs), (rows,), frozenset("r"))


def _sampled(call: OpCall) -> Labelling | Refusal:
    """Cuts an image, and where to read it, by rows: `n _ …, n … _ -> n _ …`; all of an image is read.

    Channels are not cut, since the gradient of the places is a sum over them.
    """
    image, grid = (kind.shape for kind in call.operands)
    behind = (None,) * (len(image) - 1)
    return Labelling((("n", *behind), ("n", *(None,) * (len(grid) - 1))), (("n", *behind),))


def _sampled_backward(call: OpCall) -> Labelling | Refusal:
    """Cuts the gradients of image and grid by rows; that of the grid is a sum over channels."""
    ins = tuple(("n", *(None,) * (len(kind.shape) - 1)) for kind in call.operands)
    mask = call.get("output_mask") or [True] * len(call.outputs)
    if not all(mask):
        return Refusal("one gradient alone of a sampled image has no rule for shards")
    return Labelling(ins, tuple(("n", *(None,) * (len(kind.shape) - 1)) for kind in call.outputs))


def _columns(call: OpCall) -> Labelling | Refusal:
    """Turns windows of an image into columns, or back: `n … -> n …`, channels and windows being one dimension."""
    rank = len(call.operands[0].shape)
    if rank != len(call.outputs[0].shape) + (1 if call.target._schema.name == "aten::im2col" else -1):
        return Refusal("windows of an image have no rule for these shapes")
    first: Labels = ("n",) if rank == (4 if call.target._schema.name == "aten::im2col" else 3) else (None,)
    return Labelling(((*first, *(None,) * (rank - 1)),), ((*first, *(None,) * (len(call.outputs[0].shape) - 1)),))


def _instance_norm(call: OpCall) -> Labelling | Refusal:
    """Norms each channel of each row: `n c …, c, c -> n c …`. Refuses running statistics, which mix rows."""
    if not call.get("use_input_stats") or {"running_mean", "running_var"} & set(call.names):
        return Refusal("running statistics are those of all rows")
    space = (None,) * (len(call.operands[0].shape) - 2)
    ins = tuple(("n", "c", *space) if name == "input" else ("c",) for name in call.names)
    return Labelling(ins, (("n", "c", *space),))


def _scatter_reduce(call: OpCall) -> Labelling | Refusal:
    """Keeps `dim` whole, as `scatter` does; the others go along where all operands have them whole."""
    shapes = [kind.shape for kind in call.operands]
    rank = len(shapes[0])
    uneven = (i for i in range(rank) if any(shape[i] != shapes[0][i] for shape in shapes))
    labels = numbered(rank, call.get("dim"), *uneven)
    return Labelling((labels,) * len(shapes), (labels,))


def _unread(*names: str) -> Callable[[OpCall], tuple[str, ...]]:
    return lambda call: names


def _pooling() -> dict[str, Rule]:
    """Returns the rules of pooling and resampling, with their gradients."""
    rules: dict[str, Rule] = {}
    for name in ("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool3d"):
        rules[name] = Rule(mixed(space_of(name)), _SELF)
        rules[f"{name}_backward"] = ignoring(_unread("self"), Rule(mixed(space_of(name)), _GRADIENT))
    for name in ("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d"):
        rules[name] = Rule(mixed(space_of(name)))
        rules[f"{name}_backward"] = ignoring(_unread("self"), Rule(mixed(space_of(name)), _GRADIENT))
    for name in RESAMPLED:
        rules[name] = Rule(mixed(space_of(name)), _SELF)
        rules[f"{name}.vec"] = Rule(mixed(space_of(name)), (("input",),))
        rules[f"{name}_backward"] = Rule(mixed(space_of(name)), _GRADIENT)
    for name in ("grid_sampler_2d", "grid_sampler_3d"):
        rules[name] = Rule(_sampled, (("input",),))
        rules[f"{name}_backward"] = Rule(_sampled_backward, _GRADIENT)
    return rules


def along_rules() -> dict[str, Rule]:
    """Returns rules by `aten` overload name."""
    return by_overload(
        {
            **_pooling(),
            "linalg_inv linalg_inv_ex linalg_cholesky linalg_cholesky_ex cholesky_inverse": Rule(_matrices),
            "linalg_solve_triangular": Rule(_triangular, (("B",),)),
            "linalg_cross": Rule(along, (("self",), ("other",))),
            "_cdist_forward _euclidean_dist": Rule(_distances),
            "_cdist_backward": Rule(_distances_backward, (("grad",),)),
            "cummax cummin argsort argsort.stable sort.stable": Rule(along),
            "rot90": Rule(along, _SELF),
            "renorm": Rule(_one_apart),
            "glu": Rule(along),
            "glu_backward": Rule(along, _GRADIENT),
            "unfold": Rule(_unfold, _SELF),
            "repeat_interleave.self_int": Rule(partial=_SELF, seed=_repeat_interleave),
            "searchsorted.Tensor": Rule(_searched),
            "bucketize.Tensor": Rule(_bucketize),
            "isin.Tensor_Tensor": Rule(_is_in),
            "im2col col2im": Rule(_columns, _SELF),
            "instance_norm": Rule(_instance_norm),
            "scatter_reduce.two": Rule(_scatter_reduce),
        }
    )
