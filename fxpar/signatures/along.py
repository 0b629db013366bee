"""Rules of operations that run along some dimensions and leave the others apart.

Order statistics and scans along one dimension, pooling and resampling of the last ones, linear algebra on matrices of a
batch, distances between rows. A dimension that an operation runs along is needed whole; every other one may be cut.
Next to each forward stand the operators of its derivative that models do not call.
"""

from __future__ import annotations

from collections.abc import Callable

from fxpar.layout.layout import Placement
from fxpar.layout.nesting import through_view
from fxpar.layout.symbolic_sizes import Size
from fxpar.signatures.engine import Labelling, Labels, Refusal, Rule, Signature, by_overload, numbered
from fxpar.signatures.indexing import ignoring
from fxpar.signatures.op_call import RESAMPLED, OpCall
from fxpar.signatures.pointwise import broadcast
from fxpar.signatures.views import along, mixed, wrap

_SELF = (("self",),)
_GRADIENT = (("grad_output",),)

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
