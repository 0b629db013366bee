"""Rules of fxpar's own operators that take random bits, and of the user's autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpar.layout.layout import I, Placement, R, V
from fxpar.signatures.engine import Call, Check, Labelling, Refusal, Rule, Signature, seed_signature
from fxpar.signatures.functions import impurity
from fxpar.signatures.matmul import attention_labels
from fxpar.signatures.pointwise import broadcast, pointwise_labels, pointwise_rules, same_values


def dropout_labels(call: Call) -> Labelling | Refusal:
    """The values are element-wise; the generator's state and the indices are not sharded."""
    out = call.outputs[0].shape
    ins = [broadcast(call.operands[0].shape, out)]
    ins += [(None,) * len(kind.shape) for kind in call.operands[1:]]
    return Labelling(tuple(ins), (tuple(f"d{i}" for i in range(len(out))),))


def own_bits(call: Call, placements: Sequence[Placement]) -> Refusal | None:
    """An axis index is passed exactly where the values are a shard (SPEC 2.4)."""
    varying = [i for i, name in enumerate(call.names) if name == "indices" and placements[i].kind == "V"]
    is_shard = placements[0].is_shard
    if is_shard and not varying:
        return Refusal("the ranks hold different elements but would draw the same bits: pass fxpar.axis_index")
    if is_shard and len(placements[0].pieces) > 1:
        return Refusal("random bits for a dimension of several segments: split the segments first")
    if varying and not is_shard:
        return Refusal("the ranks hold the same elements but would draw different bits: drop the axis index")
    return None


def own_bits_of_probabilities(call: Call, placements: Sequence[Placement]) -> Refusal | None:
    """As `own_bits`; the query's cut must be the probabilities', from which attention drops."""
    query, out = call.operands[0].shape, call.outputs[0].shape
    lead = any(p.is_shard and p.dim < len(k.shape) - 2 for p, k in zip(placements, call.operands, strict=True))
    is_shard = placements[0].is_shard
    if (lead and not is_shard) or (is_shard and len(query) != len(out)):
        return Refusal("random bits for probabilities that are cut in another way than the query: expand the query")
    return own_bits(call, placements)


def bits_alone(call: Call, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal | None:
    """As `own_bits`; the values of the operand do not matter: for those of a sum all ranks draw the same."""
    is_plain = all(placement in (I, R) for placement in placements[1:])
    return own_bits(call, placements) or (same_values(call, placements) if is_plain else None)


def _indexed(
    labels: Callable[[Call], Labelling | Refusal], check: Check, partial: tuple[tuple[str, ...], ...] = ()
) -> Rule:
    """The rule of an operator that draws bits for its first operand, and takes an index where that is a shard."""
    plain = Rule(labels)

    def seed(call: Call, index: int, placement: Placement) -> Signature | Refusal:
        found = seed_signature(plain, call, index, placement)
        if isinstance(found, Refusal):
            return found
        is_shard = found.operands[0].is_shard
        pairs = zip(call.names, found.operands, strict=True)
        ins = tuple(V if name == "indices" and is_shard else p for name, p in pairs)
        refused = check(call, ins)
        return refused if isinstance(refused, Refusal) else Signature(ins, found.outputs)

    return Rule(labels, partial, seed=seed, check=check, varying=("indices",))


def why_whole(call: Call) -> str:
    """Why a function takes whole operands; empty where it is element-wise, as a trace of forward and backward shows."""
    path = call.get("path")
    in_lists = set(call.names) & set(call.arguments)
    if in_lists or any(kind.shape != call.outputs[0].shape for kind in (*call.operands, *call.outputs)):
        return f"{path} has differently shaped operands, or lists, so that no rule says how it treats shards"
    other = impurity(call, pointwise_rules().keys())
    return f"{path} {other}, so it is not known to be element-wise" if other else ""


def _function_labels(call: Call) -> Labelling | Refusal:
    """Element-wise where that is proved."""
    reason = why_whole(call)
    return Refusal(reason) if reason else pointwise_labels(call)


def _function_check(call: Call, placements: Sequence[Placement]) -> Refusal | None:
    if any(p.kind == "P" for p in placements):
        return Refusal("the author's function is not known to be linear: reduce the partial (P) value first")
    return None


def composite_rules() -> dict[str, Rule]:
    """Rules by text name."""
    return {
        # With the same bits on all ranks a dropped sum is the sum of what is dropped of the summands.
        "fxpar.dropout": _indexed(dropout_labels, own_bits, (("x",),)),
        "fxpar.uniform": Rule(),
        "fxpar.uniform_like": _indexed(dropout_labels, bits_alone),
        "fxpar.attention": _indexed(attention_labels, own_bits_of_probabilities, (("value",),)),
        "fxpar.function": Rule(_function_labels, check=_function_check),
    }
