"""What the operators over a vocabulary that is cut have in common: their one signature, traffic and lowering.

Enters: calls, of which some operands have the vocabulary. Leaves: which dimension that is, the rule by which it is cut
wherever it occurs, what is communicated for each row, and what a rank runs on its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from fxpar.ir.program import operands
from fxpar.layout.layout import Placement, R
from fxpar.layout.symbolic_sizes import Size, product, simplify
from fxpar.ops import words
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import CollectiveSite, LoweredCall, Sent
from fxpar.signatures.op_call import OpCall, bind_arguments
from fxpar.signatures.rule import Refusal, Rule, Signature

# ---------------------------------------------------------------------- rules

# For each operand that has the vocabulary the dimension that is it; a reason where the call has none.
Dims = Callable[[OpCall], Mapping[str, int] | Refusal]


def table(call: OpCall) -> Mapping[str, int] | Refusal:
    """Of a lookup: the rows of the table."""
    if call.get("scale_grad_by_freq") or call.get("sparse"):
        return Refusal("gradients that are sparse, or divided by counts, need the whole table")
    return {"weight": 0}


def classes(call: OpCall) -> Mapping[str, int] | Refusal:
    """Of a loss: the classes of its logits, and of the weights of classes."""
    if call.operands[1].is_float:
        return Refusal("a loss with probabilities as target needs whole operands")
    return {"self": 1 if len(call.operands[0].shape) > 1 else 0, "weight": 0}


def searched(call: OpCall) -> Mapping[str, int] | Refusal:
    """Of what searches or normalises one dimension: that one."""
    dims = call.get("dim", -1)
    if isinstance(dims, (list, tuple)):
        dims = dims[0] if len(dims) == 1 else None
    rank = len(call.operands[0].shape)
    if dims is None or not rank:
        return Refusal("the operation runs over several dimensions")
    return {"self": int(dims) % rank}


def searched_of_gradient(call: OpCall) -> Mapping[str, int] | Refusal:
    """Result and gradient of what is cut alike."""
    cut_dims = searched(call)
    return cut_dims if isinstance(cut_dims, Refusal) else {**cut_dims, "gradient": cut_dims["self"]}


def best(call: OpCall) -> Mapping[str, int] | Refusal:
    """Of a search for several: which of equal values it takes is torch's own, and a model that computes with it (a
    router, say, whose weights begin at zero) must go on with those of one device."""
    if call.decides:
        return Refusal("what topk finds decides what is computed, and of equal values it takes those of the whole")
    return searched(call)


def rule(dims: Dims, output: Callable[[Placement], Placement]) -> Rule:
    """The one signature: the vocabulary is cut wherever it occurs, everything else is whole."""

    def signature(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
        cut_dims = dims(call)
        if isinstance(cut_dims, Refusal):
            return cut_dims
        piece = placement.piece
        if cut_dims.get(call.names[index]) != placement.dim:
            return Refusal("the operation cuts its vocabulary alone")
        if piece is None or piece.outer != 1 or piece.copies > 1 or not isinstance(piece.size, int):
            return Refusal("the vocabulary must be cut into one block for each rank")
        if not piece.padded and piece.size % call.n:
            return Refusal(f"{piece.size} words are not divisible by {call.n}", structural=True)
        ins = [placement.at(cut_dims[name]) if name in cut_dims else R for name in call.names]
        return Signature(tuple(ins), (output(ins[0]),) * len(call.outputs))

    def check(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal:
        first = next((i for i, placement in enumerate(placements) if placement.is_shard), None)
        if first is None:
            return Refusal("no operand has a vocabulary that is cut: use the operation of aten")
        expected = signature(call, first, placements[first])
        if isinstance(expected, Refusal):
            return expected
        for name, actual, target in zip(call.names, placements, expected.operands, strict=True):
            if actual != target:
                return Refusal(f"operand {name} is {actual} where {target} fits the vocabulary")
        return expected.outputs

    return Rule(seed=signature, check=check, padding=("weight", "self"))


# ---------------------------------------------------------------------- traffic

# Collective, phase and number of rows, which are what an operator communicates one value of.
Rows = Iterator[tuple[str, str, Size]]


def by_rows(dims: Dims, sent: Callable[[OpCall, Size], Rows]) -> Callable[[CollectiveSite], Iterator[Sent]]:
    """Traffic of one value or several for each row; halves are summed in float32."""

    def traffic(crossing: CollectiveSite) -> Iterator[Sent]:
        call = crossing.call
        cut_dims = dims(call)
        if isinstance(cut_dims, Refusal):
            return
        kind = call.operands[0]
        rows = product(size for dim, size in enumerate(kind.shape) if dim != cut_dims["self"])
        for collective, phase, elements in sent(call, rows):
            if phase == "forward" or any(crossing.reached):
                yield Sent(collective, phase, simplify(elements * max(kind.dtype.itemsize, 4)))

    return traffic


def cross_entropy_rows(call: OpCall, rows: Size) -> Rows:
    """The largest logit of each row, then all sums over it; with weights, the weights of targets and of all classes."""
    weighted, smooth = "weight" in call.names, bool(call.get("label_smoothing"))
    yield "all_reduce", "forward", rows
    yield "all_reduce", "forward", simplify(rows * (3 if smooth else 2))
    if weighted:
        yield "all_reduce", "forward", rows
    if weighted and smooth:
        yield "all_reduce", "forward", 1


def nll_loss_rows(call: OpCall, rows: Size) -> Rows:
    """The weights of the targets' classes, where there are any."""
    if "weight" in call.names:
        yield "all_reduce", "forward", rows


def logsumexp_rows(call: OpCall, rows: Size) -> Rows:
    """The largest value of each row, then the sum of exponentials."""
    yield "all_reduce", "forward", rows
    yield "all_reduce", "forward", rows


def log_softmax_rows(call: OpCall, rows: Size) -> Rows:
    """As `logsumexp_rows`, and the sum of gradients of each row."""
    yield from logsumexp_rows(call, rows)
    yield "all_reduce", "backward", rows


def best_rows(call: OpCall, rows: Size) -> Rows:
    """Each rank's best values, and which words they are."""
    count = simplify(rows * (call.n * call.get("k", 1)))
    yield "all_gather", "forward", count
    yield "all_gather", "forward", count


# ---------------------------------------------------------------------- lowering


def lowered(function: Callable[..., Any]) -> Callable[[fx.Node, OnRank], LoweredCall]:
    """Arguments as in the graph with defaults, then the vocabulary's block."""
    blocked = words.with_block(function)

    def lower(node: fx.Node, rank: OnRank) -> LoweredCall:
        bound = {name: value for name, value in bind_arguments(node).items() if name != "axis"}
        cut = next(p for operand in operands(node) if (p := rank.placed(operand, node)).is_shard)
        ranks = rank.ranks(node)
        return LoweredCall(blocked, (*bound.values(), int(cut.pieces[0].size), ranks.group, ranks.size, ranks.index))

    return lower
