"""The operators over a vocabulary that is cut (SPEC section 2.3).

Enters: operations of `aten` that need the whole of the dimension that is cut. Leaves: the record of the composite
operator that stands for each of them, with its one signature. Until the pass `vocab_parallel` has put them in place the
layout choice and the type check take an operation for its composite where its own rule refuses. What a rank computes is
in `fxpar.ops.words`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.layout.layout import I, P, Placement, R
from fxpar.layout.symbols import Size, product, simplify
from fxpar.ops import words
from fxpar.ops.onrank import OnRank
from fxpar.ops.operator import Crossing, OnShapes, Operator, Run, Sent
from fxpar.program.program import operands, output_types
from fxpar.program.properties import Property
from fxpar.signatures.engine import Call, Refusal, Rule, Signature, bind_arguments

aten = torch.ops.aten

# ---------------------------------------------------------------------- rules

# For each operand that has the vocabulary the dimension that is it; a reason where the call has none.
Dims = Callable[[Call], Mapping[str, int] | Refusal]


def _table(call: Call) -> Mapping[str, int] | Refusal:
    if call.get("scale_grad_by_freq") or call.get("sparse"):
        return Refusal("gradients that are sparse, or divided by counts, need the whole table")
    return {"weight": 0}


def _classes(call: Call) -> Mapping[str, int] | Refusal:
    if call.operands[1].is_float:
        return Refusal("a loss with probabilities as target needs whole operands")
    return {"self": 1 if len(call.operands[0].shape) > 1 else 0, "weight": 0}


def _searched(call: Call) -> Mapping[str, int] | Refusal:
    dims = call.get("dim", -1)
    if isinstance(dims, (list, tuple)):
        dims = dims[0] if len(dims) == 1 else None
    rank = len(call.operands[0].shape)
    if dims is None or not rank:
        return Refusal("the operation runs over several dimensions")
    return {"self": int(dims) % rank}


def _best(call: Call) -> Mapping[str, int] | Refusal:
    """Of a search for several: which of equal values it takes is torch's own, and a model that computes with it (a
    router, say, whose weights begin at zero) must go on with those of one device."""
    if call.decides:
        return Refusal("what topk finds decides what is computed, and of equal values it takes those of the whole")
    return _searched(call)


def _rule(dims: Dims, output: Callable[[Placement], Placement]) -> Rule:
    """The one signature: the vocabulary is cut wherever it occurs, everything else is whole."""

    def signature(call: Call, index: int, placement: Placement) -> Signature | Refusal:
        found = dims(call)
        if isinstance(found, Refusal):
            return found
        piece = placement.piece
        if found.get(call.names[index]) != placement.dim:
            return Refusal("the operation cuts its vocabulary alone")
        if piece is None or piece.outer != 1 or piece.copies > 1 or not isinstance(piece.size, int):
            return Refusal("the vocabulary must be cut into one block for each rank")
        if not piece.padded and piece.size % call.n:
            return Refusal(f"{piece.size} words are not divisible by {call.n}", structural=True)
        ins = [placement.at(found[name]) if name in found else R for name in call.names]
        return Signature(tuple(ins), (output(ins[0]),) * len(call.outputs))

    def check(call: Call, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal:
        first = next((i for i, placement in enumerate(placements) if placement.is_shard), None)
        if first is None:
            return Refusal("no operand has a vocabulary that is cut: use the operation of aten")
        wanted = signature(call, first, placements[first])
        if isinstance(wanted, Refusal):
            return wanted
        for name, found, target in zip(call.names, placements, wanted.operands, strict=True):
            if found != target:
                return Refusal(f"operand {name} is {found} where {target} fits the vocabulary")
        return wanted.outputs

    return Rule(seed=signature, check=check, padding=("weight", "self"))


# ---------------------------------------------------------------------- traffic

# Collective, phase and number of rows, which are what an operator communicates one value of.
Rows = Iterator[tuple[str, str, Size]]


def _by_rows(dims: Dims, sent: Callable[[Call, Size], Rows]) -> Callable[[Crossing], Iterator[Sent]]:
    """Traffic of one value or several for each row; halves are summed in float32."""

    def traffic(crossing: Crossing) -> Iterator[Sent]:
        call = crossing.call
        found = dims(call)
        if isinstance(found, Refusal):
            return
        kind = call.operands[0]
        rows = product(size for dim, size in enumerate(kind.shape) if dim != found["self"])
        for collective, phase, elements in sent(call, rows):
            if phase == "forward" or any(crossing.reached):
                yield Sent(collective, phase, simplify(elements * max(kind.dtype.itemsize, 4)))

    return traffic


def _cross_entropy_rows(call: Call, rows: Size) -> Rows:
    weighted, smooth = "weight" in call.names, bool(call.get("label_smoothing"))
    yield "all_reduce", "forward", rows
    yield "all_reduce", "forward", simplify(rows * (3 if smooth else 2))
    if weighted:
        yield "all_reduce", "forward", rows
    if weighted and smooth:
        yield "all_reduce", "forward", 1


def _nll_loss_rows(call: Call, rows: Size) -> Rows:
    if "weight" in call.names:
        yield "all_reduce", "forward", rows


def _logsumexp_rows(call: Call, rows: Size) -> Rows:
    yield "all_reduce", "forward", rows
    yield "all_reduce", "forward", rows


def _log_softmax_rows(call: Call, rows: Size) -> Rows:
    yield from _logsumexp_rows(call, rows)
    yield "all_reduce", "backward", rows


def _best_rows(call: Call, rows: Size) -> Rows:
    """Each rank's best values, and which words they are."""
    count = simplify(rows * (call.n * call.get("k", 1)))
    yield "all_gather", "forward", count
    yield "all_gather", "forward", count


# ---------------------------------------------------------------------- shapes and lowering


def _topk_shape(call: OnShapes) -> Any:
    """Of more words than a rank has: searched is the whole."""
    x, dim = call.args[0], int(bind_arguments(call.node)["dim"])
    cut = output_types(operands(call.node)[0])[0].shape
    shape = [int(cut[dim]) if d == dim % len(cut) else size for d, size in enumerate(x.shape)]
    given = {name: value for name, value in call.kwargs.items() if name != "axis"}
    return aten.topk.default(x.new_empty(shape), *call.args[1:], **given)


def _lowered(function: Callable[..., Any]) -> Callable[[fx.Node, OnRank], Run]:
    """Arguments as in the graph with defaults, then the vocabulary's block."""
    blocked = words.with_block(function)

    def lower(node: fx.Node, rank: OnRank) -> Run:
        given = {name: value for name, value in bind_arguments(node).items() if name != "axis"}
        cut = next(p for operand in operands(node) if (p := rank.placed(operand, node)).is_shard)
        ranks = rank.ranks(node)
        return Run(blocked, (*given.values(), int(cut.pieces[0].size), ranks.group, ranks.size, ranks.index))

    return lower


# ---------------------------------------------------------------------- records


def _composite(*targets: torch._ops.OpOverload) -> Callable[..., Operator]:
    """The record of an operator that stands for some of torch, of which the last takes what this one does."""
    return partial(Operator, stage=Property.VOCABULARY, stands_for=targets, like=targets[-1])


@partial(
    _composite(aten.embedding.default),
    rule=_rule(_table, lambda cut: P),
    lower=_lowered(words.embedding),
)
def embedding(weight: Any, indices: Any, padding_idx: int = -1, *, axis: str) -> Any:
    """`aten.embedding` of a table whose rows are cut over the axis: a partial sum (SPEC section 2.3)."""


@partial(
    _composite(aten.cross_entropy_loss.default),
    rule=_rule(_classes, lambda cut: I),
    traffic=_by_rows(_classes, _cross_entropy_rows),
    lower=_lowered(words.cross_entropy),
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
    rule=_rule(_classes, lambda cut: P),
    traffic=_by_rows(_classes, _nll_loss_rows),
    lower=_lowered(words.nll_loss),
)
def nll_loss(
    self: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100, *, axis: str
) -> Any:
    """`aten.nll_loss_nd` of log-probabilities whose classes are cut over the axis: a partial sum."""


@partial(
    _composite(aten.log_softmax.int),
    rule=_rule(_searched, lambda cut: cut),
    traffic=_by_rows(_searched, _log_softmax_rows),
    lower=_lowered(words.log_softmax),
)
def log_softmax(self: Any, dim: int, dtype: Any = None, *, axis: str) -> Any:
    """`aten.log_softmax` over a dimension that is cut over the axis; cut alike."""


@partial(
    _composite(aten.logsumexp.default),
    rule=_rule(_searched, lambda cut: I),
    traffic=_by_rows(_searched, _logsumexp_rows),
    lower=_lowered(words.logsumexp),
)
def logsumexp(self: Any, dim: Any, keepdim: bool = False, *, axis: str) -> Any:
    """`aten.logsumexp` over a dimension that is cut over the axis; invariant."""


@partial(
    _composite(aten.argmax.default),
    rule=_rule(_searched, lambda cut: I),
    traffic=_by_rows(_searched, _best_rows),
    lower=_lowered(words.argmax),
)
def argmax(self: Any, dim: int, keepdim: bool = False, *, axis: str) -> Any:
    """`aten.argmax` over a dimension that is cut over the axis; the same on every rank."""


@partial(
    _composite(aten.topk.default),
    rule=_rule(_best, lambda cut: I),
    shape=_topk_shape,
    traffic=_by_rows(_searched, _best_rows),
    lower=_lowered(words.topk),
)
def topk(self: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, axis: str) -> Any:
    """`aten.topk` over a dimension that is cut over the axis; values are invariant."""
