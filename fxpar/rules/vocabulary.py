"""Rules of the operators over a vocabulary that is cut (SPEC section 2.3).

Enters: operations of `aten` that need the whole of the dimension that is cut. Leaves: the composite operator that
stands for each of them, with its one signature. Until the pass `vocab_parallel` has put them in place the layout choice
and the type check take an operation for its composite where its own rule refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxpar.layout.layout import I, P, Placement, R
from fxpar.layout.symbols import Size, product, simplify
from fxpar.program import operators
from fxpar.signatures.engine import Call, Refusal, Rule, Signature

aten = torch.ops.aten

COMPOSITE_OF: Mapping[Any, Callable[..., Any]] = {
    aten.embedding.default: operators.embedding,
    aten.cross_entropy_loss.default: operators.cross_entropy,
    aten.nll_loss.default: operators.nll_loss,
    aten.nll_loss_nd.default: operators.nll_loss,
    aten.log_softmax.int: operators.log_softmax,
    aten.logsumexp.default: operators.logsumexp,
    aten.argmax.default: operators.argmax,
    aten.topk.default: operators.topk,
}

# What a composite operator is on one rank.
ATEN_OF: Mapping[Callable[..., Any], Any] = {composite: target for target, composite in COMPOSITE_OF.items()}

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


def vocabulary_rules() -> dict[str, Rule]:
    """Rules by text name."""
    return {
        "fxpar.embedding": _rule(_table, lambda cut: P),
        "fxpar.cross_entropy": _rule(_classes, lambda cut: I),
        "fxpar.nll_loss": _rule(_classes, lambda cut: P),
        "fxpar.log_softmax": _rule(_searched, lambda cut: cut),
        "fxpar.logsumexp": _rule(_searched, lambda cut: I),
        "fxpar.argmax": _rule(_searched, lambda cut: I),
        "fxpar.topk": _rule(_best, lambda cut: I),
    }


def traffic(call: Call) -> list[tuple[str, str, Size]]:
    """What a composite operator communicates: collective, phase (forward, backward) and elements of the whole value."""
    dims = _searched(call) if call.target not in (operators.cross_entropy, operators.nll_loss) else _classes(call)
    if call.target is operators.embedding or isinstance(dims, Refusal):
        return []
    shape = call.operands[0].shape
    rows = product(size for dim, size in enumerate(shape) if dim != dims["self"])
    weighted, smooth = "weight" in call.names, bool(call.get("label_smoothing"))
    once, both = ("all_reduce", "forward", rows), [("all_reduce", "forward", rows)] * 2
    if call.target is operators.cross_entropy:
        sums: list[tuple[str, str, Size]] = [once, ("all_reduce", "forward", simplify(rows * (3 if smooth else 2)))]
        return sums + [once] * weighted + [("all_reduce", "forward", 1)] * (weighted and smooth)
    if call.target is operators.nll_loss:
        return [once] * weighted
    if call.target is operators.log_softmax:
        return [*both, ("all_reduce", "backward", rows)]
    if call.target is operators.logsumexp:
        return list(both)
    count = call.n * (call.get("k") if call.target is operators.topk else 1)
    return [("all_gather", "forward", simplify(rows * count))] * 2
