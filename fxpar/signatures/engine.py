"""Rules as data, and the engine: what a rule says of the layouts of a call on one mesh axis.

Enters: an operation with global shapes, its rule, and the placement of each operand, or of one. Leaves: the placement
of each output, or the signature that the one asks for; a refusal with its reason where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from fxpar.ir.program import TensorType
from fxpar.layout.layout import I, P, Piece, Placement, R, fits
from fxpar.layout.symbolic_sizes import Size, divide
from fxpar.signatures.op_call import OpCall


def transfer(placement: Placement, source: Size, dim: int, size: Size, n: int) -> Placement | Refusal:
    """Moves the cut of a dimension of `source` elements to another dimension with the same label.

    Equal sizes take the same pieces. Where they differ (query and key heads of grouped attention, whose groups are
    neighbours) the runs are as many and in proportion. The ranks that have the query heads of one group share its key
    head; a rank's share must be whole groups, or lie in one.
    """
    if size == source:
        return placement.at(dim)
    piece = placement.piece
    is_run = piece is not None and not piece.padded and piece.in_rank_order
    run = divide(size, piece.outer) if piece is not None and is_run else None
    if piece is None or run is None:
        return Refusal(f"a dimension of {size} cannot follow the cut {placement}", structural=True)
    copies = piece.copies
    group = divide(piece.size, run)
    if divide(run, n // copies) is None and group is not None and isinstance(run, int):
        share = divide(piece.size, n // copies)
        if n % run == 0 and share is not None and divide(group, share) is not None:
            copies = n // run
    # As many copies as ranks: each of them holds all of it.
    if copies == n:
        return R
    if divide(run, n // copies) is None:
        return Refusal(f"a dimension of {size} cannot follow the cut {placement} over {n} ranks", structural=True)
    return Placement("S", dim, (Piece(piece.outer, run, copies=copies),))


def seed_signature(
    rule: Rule, call: OpCall, index: int, placement: Placement, of_gradients: _Gradients | None = None
) -> Signature | Refusal:
    """Returns the signature that makes operand `index` a shard as given.

    Args:
        of_gradients: what is known of the operands that are gradients.
    """
    known = of_gradients or _Gradients()
    if not fits(placement, call.operands[index].shape, call.n):
        return Refusal(f"{placement} of {call.operands[index]} is not divisible by {call.n}", structural=True)
    if not placement.in_rank_order and not _hands_on(rule, call):
        return _out_of_order(placement, call.names[index])
    signature = _seed(rule, call, index, placement, known)
    if not isinstance(signature, Refusal):
        signature = Signature(signature.operands, _zero(rule, signature.outputs))
    if placement.is_padded and not isinstance(signature, Refusal):
        for i, (name, operand) in enumerate(zip(call.names, signature.operands, strict=True)):
            if operand.is_padded and name not in rule.padding and i not in known.zeros:
                return Refusal(f"the operation would compute with the padding of {operand} of {name}")
    return signature


def signature_of_summands(rule: Rule, call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    """Does as `seed_signature`, where several ranks that hold a block hold summands of its gradient."""
    return seed_signature(rule, call, index, placement, _Gradients(frozenset({index})))


def _hands_on(rule: Rule | None, call: OpCall) -> bool:
    """Returns whether an operation does the same with each block: it hands cuts on by labels alone."""
    by_labels = rule is not None and rule.labels is not None and rule.seed is None and rule.check is None
    return by_labels and isinstance(call.target, torch._ops.OpOverload)


def _out_of_order(placement: Placement, name: str) -> Refusal:
    return Refusal(
        f"operand {name} is {placement}, whose blocks are not in the order of the ranks, and the operation may depend "
        "on positions"
    )


def _seed(rule: Rule, call: OpCall, index: int, placement: Placement, known: _Gradients) -> Signature | Refusal:
    if rule.seed is not None:
        return rule.seed(call, index, placement)
    if rule.labels is None:
        return Refusal("the operation needs whole operands")
    labelling = rule.labels(call)
    if isinstance(labelling, Refusal):
        return labelling
    label = labelling.operands[index][placement.dim]
    if label is None:
        return Refusal(f"the operation needs the whole of dimension {placement.dim}")
    if label in labelling.summed and placement.is_shared and not known.partial:
        return Refusal(f"what several ranks hold of {placement} would be summed by each of them")
    if label in labelling.summed and placement.is_padded and not known.zeros:
        return Refusal(f"the padding of {placement} would be summed")
    source = call.operands[index].shape[placement.dim]

    def spread(kinds: Sequence[TensorType], labels: Sequence[Labels], absent: Placement) -> list[Placement | Refusal]:
        return [
            transfer(placement, source, dim_labels.index(label), kind.shape[dim_labels.index(label)], call.n)
            if label in dim_labels
            else absent
            for kind, dim_labels in zip(kinds, labels, strict=True)
        ]

    ins = spread(call.operands, labelling.operands, R)
    outs = spread(call.outputs, labelling.outputs, P if label in labelling.summed else R)
    for item in (*ins, *outs):
        if isinstance(item, Refusal):
            return item
    if label not in labelling.summed and any(label not in dim_labels for dim_labels in labelling.outputs):
        return Refusal(f"an output lacks the sharded dimension {placement.dim}")
    return Signature(tuple(ins), tuple(outs))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Gradients:
    """Operands whose shared blocks are summands, and operands whose padding is zero, by index."""

    partial: frozenset[int] = frozenset()
    zeros: frozenset[int] = frozenset()


def infer(
    rule: Rule | None, call: OpCall, placements: Sequence[Placement], carries: Sequence[bool]
) -> tuple[Placement, ...] | Refusal:
    """Returns placements of the outputs for given operands on one axis.

    Args:
        rule: the operation's rule; None where there is none, which leaves I and R.
        call: the operation.
        placements: one for each operand.
        carries: whether each operand carries a gradient. Those that do not are I and R at once.
    """
    zeros = frozenset(i for i, p in enumerate(placements) if p.zeros)
    if zeros and rule is not None:  # where something else than a linear operand is zero the result is anything
        groups = [group for group in _groups(rule, call) if group <= zeros and _is_linear(rule, call, group)]
        zeros = frozenset().union(*groups)
    known = _Gradients(frozenset(i for i, p in enumerate(placements) if p.partial), zeros)
    for name, p in zip(call.names, placements, strict=True):
        if rule is not None and name in rule.summands and p.is_shared and not p.partial:
            return Refusal(f"what several ranks hold of {name} would be summed by each of them")
    if not known.partial and not known.zeros:
        answer = _infer(rule, call, [p.plain for p in placements], carries, known)
        joined = P in placements and not isinstance(answer, Refusal) and any(p.partial for p in answer)
        if joined and any(carries):
            return Refusal("a segment of which all ranks hold summands would be one of a value with a gradient")
        if joined and any(p.is_shared for p in placements):
            return Refusal("what several ranks hold meets what they hold summands of")
        return answer if rule is None or isinstance(answer, Refusal) else _zero(rule, answer)
    outputs = _infer(rule, call, [p.plain for p in placements], carries, known)
    if isinstance(outputs, Refusal) or rule is None:
        return outputs
    return _of_gradients(rule, call, placements, outputs, known)


def _zero(rule: Rule, outputs: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Gives padded outputs zeros for padding where the rule says that they are zero."""
    return tuple(replace(p, zeros=True) if p.is_padded else p for p in outputs) if rule.zeros else outputs


def _of_gradients(
    rule: Rule, call: OpCall, placements: Sequence[Placement], inferred: Sequence[Placement], known: _Gradients
) -> tuple[Placement, ...] | Refusal:
    """Says which outputs are summands on ranks that share blocks, and which have zeros for padding.

    A linear operation of summands gives summands; blocks that one rank alone has may stand next to them. Where what is
    linear in an operand is zero, the result is.
    """
    groups = [group for group in _groups(rule, call) if _is_linear(rule, call, group)]
    alone = {i for i, p in enumerate(placements) if p == P or (p.is_shard and not p.is_shared)}
    if known.partial and not any(known.partial <= group <= known.partial | alone for group in groups):
        return Refusal("the operation is not linear in what several ranks hold summands of: add those first")
    is_zero = rule.zeros or any(group and group <= known.zeros for group in groups)
    outputs = []
    for placement in inferred:
        if known.partial and placement == R:
            placement = P
        elif known.partial and placement.is_shared:
            placement = replace(placement, partial=True)
        outputs.append(replace(placement, zeros=True) if is_zero and placement.is_padded else placement)
    return tuple(outputs)


def _is_linear(rule: Rule, call: OpCall, group: set[int]) -> bool:
    """Returns whether this very call, with its numbers, makes summands of summands: filling does with zeros alone."""
    placements = [P if i in group else R for i in range(len(call.operands))]
    outputs = _infer(rule, call, placements, [False] * len(placements), _Gradients())
    return not isinstance(outputs, Refusal) and set(outputs) == {P}


def _infer(
    rule: Rule | None, call: OpCall, placements: Sequence[Placement], carries: Sequence[bool], known: _Gradients
) -> tuple[Placement, ...] | Refusal:
    for placement, operand in zip(placements, call.operands, strict=True):
        if not fits(placement, operand.shape, call.n):
            return Refusal(f"{placement} of {operand} is not divisible by {call.n}", structural=True)
    if not _hands_on(rule, call):
        for placement, name in zip(placements, call.names, strict=True):
            if not placement.in_rank_order:
                return _out_of_order(placement, name)
    # Without a gradient I and R say the same. One spelling spares the cases below.
    placements = tuple(R if p == I and not c else p for p, c in zip(placements, carries, strict=True))
    reduced = next((name for name, p in zip(call.names, placements, strict=True) if p.reduced), None)
    if reduced is not None:
        return Refusal(f"operand {reduced} has reduced blocks (I), of which no rank has the whole gradient: share it")
    if rule is not None and rule.check is not None:
        checked = rule.check(call, placements)
        if checked is not None:
            return checked
    kinds = [p.kind for p in placements]
    if rule is not None and rule.varying:
        kinds = ["R" if k == "V" and name in rule.varying else k for k, name in zip(kinds, call.names, strict=True)]
    if "V" in kinds:
        return Refusal("the operation does not accept varying values (V)")
    invariant = [k for k, c in zip(kinds, carries, strict=True) if k == "I" and c]
    replicated = [k for k, c in zip(kinds, carries, strict=True) if k == "R" and c]
    if not {"S", "P"} & set(kinds):
        if invariant and replicated:
            return Refusal("invariant (I) and replicated (R) operands meet: coerce I → R (copy_to)")
        return (I if invariant else R,) * len(call.outputs)
    if invariant:
        return Refusal(f"invariant (I) operands meet {', '.join(sorted({'S', 'P'} & set(kinds)))}: coerce them first")
    if rule is None:
        return Refusal("no rule says how the operation treats shards or partial values: gather or reduce before it")
    if "P" in kinds:
        return _infer_partial(rule, call, kinds)
    index = kinds.index("S")
    # The choice of layouts takes its options from the same function.
    expected = seed_signature(rule, call, index, placements[index], known)
    if isinstance(expected, Refusal):
        return expected
    for i, (kind, want) in enumerate(zip(kinds, expected.operands, strict=True)):
        if rule.varying and call.names[i] in rule.varying:
            continue  # of the axes' indices one varies here: the rule's check has seen which
        actual = placements[i] if kind == "S" else R
        if actual != want.plain:
            return Refusal(
                f"operand {call.names[i]} is {actual} where {want} fits {placements[index]} of {call.names[index]}"
            )
    return expected.outputs


def _infer_partial(rule: Rule, call: OpCall, kinds: Sequence[str]) -> tuple[Placement, ...] | Refusal:
    if "S" in kinds:
        return Refusal("partial (P) operands meet shards (S)")
    partial = {i for i, kind in enumerate(kinds) if kind == "P"}
    if partial in _groups(rule, call):
        return (P,) * len(call.outputs)
    return Refusal("the operation is not linear in its partial (P) operands: reduce them first")


def _groups(rule: Rule, call: OpCall) -> list[set[int]]:
    """Lists the operands that may be partial together, for each group of the rule and each item of a list."""
    groups = []
    for group in rule.partial:
        if group[0].endswith("*"):
            name = group[0].removesuffix("*")
            groups += [{i} for i, other in enumerate(call.names) if other == name]
        else:
            groups.append(_members(call, group))
    # A sum of bools is no bool: ranks cannot hold summands of a mask.
    return [members for members in groups if not any(call.operands[i].dtype == torch.bool for i in members)]


def _members(call: OpCall, group: Sequence[str]) -> set[int]:
    """Returns operands of a group of `Rule.partial`; none where one that it needs was not passed."""
    if any(not name.endswith("?") and name not in call.names for name in group):
        return set()
    group_names = {name.removesuffix("?") for name in group}
    return {i for i, name in enumerate(call.names) if name in group_names}


def partial_signatures(rule: Rule, call: OpCall) -> list[Signature]:
    """Lists all signatures with partial operands, the others being replicated."""
    signatures = []
    for members in _groups(rule, call):
        ins = tuple(P if i in members else R for i in range(len(call.operands)))
        outs = infer(rule, call, ins, [True] * len(ins)) if members else Refusal("")
        if not isinstance(outs, Refusal):
            signatures.append(Signature(ins, outs))
    return signatures


# ---------------------------------------------------------------------- rules


@dataclass(frozen=True)
class Refusal:
    """Why an operation does not accept a layout.

    `structural`: the cut does not fit the shapes (a view tears it, n does not divide it), as opposed to an operation
    that needs the whole dimension (softmax, norm).
    """

    reason: str
    structural: bool = False


@dataclass(frozen=True)
class Signature:
    """Placements of all operands and outputs of an operation on one axis."""

    operands: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


Labels = tuple[str | None, ...]


def numbered(rank: int, *whole: int) -> Labels:
    """Returns a label for each dimension, and none for those that stay whole, counted from either end."""
    dims = {dim % rank for dim in whole} if rank else set()
    return tuple(None if dim in dims else f"d{dim}" for dim in range(rank))


@dataclass(frozen=True)
class Labelling:
    """A label for each dimension of each operand and output (None: cannot be sharded); `summed` yield partials."""

    operands: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    summed: frozenset[str] = frozenset()


Seed = Callable[[OpCall, int, Placement], Signature | Refusal]
Check = Callable[[OpCall, Sequence[Placement]], tuple[Placement, ...] | Refusal | None]


@dataclass(frozen=True)
class Rule:
    """The legal signatures of an operation.

    Attributes:
        labels: the labelling of a call, or the reason why it has none.
        partial: groups of operand names that may be partial together, the others being replicated.
        seed: for operations that labels cannot describe (views): the signature that one operand's shard asks for.
        check: for operations with further conditions: outputs for given operands; None leaves it to the rest.
        varying: names of operands that may be V (axis indices).
        padding: names of operands whose cut may be padded: padding stays finite there, and its gradient stays zero.
        zeros: whether the results are zero, padding included.
        summands: names of gradients, of which ranks that share blocks must hold summands.
    """

    labels: Callable[[OpCall], Labelling | Refusal] | None = None
    partial: tuple[tuple[str, ...], ...] = ()
    seed: Seed | None = None
    check: Check | None = None
    varying: tuple[str, ...] = ()
    padding: tuple[str, ...] = ()
    zeros: bool = False
    summands: tuple[str, ...] = ()


_T = TypeVar("_T")


def by_overload(entries: Mapping[str, _T]) -> dict[str, _T]:
    """Returns entries by the full names of overloads of aten.

    Args:
        entries: by one name or several with blanks between them; one without a dot is that of the default overload.
    """
    # A later entry of the same name takes the place of an earlier one, so that a table may refine a list.
    by_name = {name: entry for names, entry in entries.items() for name in names.split()}
    return {f"aten.{name if '.' in name else f'{name}.default'}": entry for name, entry in by_name.items()}
