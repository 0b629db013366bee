"""Rules of contractions whose labels stand in the call itself: einsum, tensordot, and what is spelt like them.

Enters: a call. Leaves: its labels, and the steps in which more than two operands are contracted.

einsum's equation is a rule already: equal letters are cut together, a letter that the result lacks is summed. Not every
letter can be cut. One that stands twice in an operand takes its diagonal, which no block of either dimension holds; a
dimension of one element that is broadcast is whole on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpar.ir.program import TensorType
from fxpar.layout.symbolic_sizes import Size
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import broadcast
from fxpar.signatures.rule import Labelling, Labels, Refusal, Rule

Terms = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ContractionStep:
    """One contraction of two operands, or the summation of one: sizes of all its labels, and those that it sums."""

    sizes: Mapping[str, Size]
    summed: frozenset[str]
    operands: int


def einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[Terms, tuple[str, ...]] | Refusal:
    """The labels of each operand and of the result, dots written out as `.0`, `.1`, … aligned from the right.

    Without an arrow the result has the dots and the letters that occur once, in the order of their codes.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    widths = [rank - len(part.replace("...", "")) for part, rank in zip(parts, ranks, strict=False)]
    if len(parts) != len(ranks) or any(w < 0 or (w and "..." not in p) for p, w in zip(parts, widths, strict=True)):
        return Refusal(f"the equation {equation} does not fit operands of {list(ranks)} dimensions")
    width = max((w for part, w in zip(parts, widths, strict=True) if "..." in part), default=0)

    def read(part: str, dots: int) -> tuple[str, ...]:
        before, ellipsis, behind = part.partition("...")
        return (*before, *(f".{i}" for i in range(width - dots, width) if ellipsis), *behind)

    terms = tuple(read(part, dots) for part, dots in zip(parts, widths, strict=True))
    if not arrow:
        counts = Counter(label for term in terms for label in term if not label.startswith("."))
        right = ("..." if width else "") + "".join(sorted(label for label, count in counts.items() if count == 1))
    return terms, read(right, width)


def _sizes(terms: Terms, kinds: Sequence[TensorType]) -> dict[str, Size]:
    """The size of each label: that of the operands that are not broadcast along it."""
    sizes: dict[str, Size] = {}
    for term, kind in zip(terms, kinds, strict=True):
        for label, size in zip(term, kind.shape, strict=True):
            if sizes.get(label, 1) == 1:
                sizes[label] = size
    return sizes


def einsum_labels(call: OpCall) -> Labelling | Refusal:
    """The labels of the equation, without those that cannot be cut."""
    read = einsum_terms(str(call.get("equation")), [len(kind.shape) for kind in call.operands])
    if isinstance(read, Refusal):
        return read
    terms, result = read
    sizes = _sizes(terms, call.operands)
    diagonal = {label for term in terms for label, count in Counter(term).items() if count > 1}

    def shown(term: tuple[str, ...], shape: tuple[Size, ...]) -> Labels:
        pairs = zip(term, shape, strict=True)
        return tuple(None if label in diagonal or size != sizes[label] else label for label, size in pairs)

    ins = tuple(shown(term, kind.shape) for term, kind in zip(terms, call.operands, strict=True))
    outs = (shown(result, call.outputs[0].shape),)
    return Labelling(ins, outs, frozenset(sizes.keys() - diagonal - set(result)))


def einsum_steps(call: OpCall) -> list[ContractionStep] | Refusal:
    """The contractions in the order in which torch does them: by `path`, else from left to right."""
    read = einsum_terms(str(call.get("equation")), [len(kind.shape) for kind in call.operands])
    if isinstance(read, Refusal):
        return read
    terms, result = read
    sizes = _sizes(terms, call.operands)
    left = [frozenset(term) for term in terms]
    path = [int(i) for i in call.get("path") or ()]
    steps = []
    if len(left) == 1:
        steps.append(ContractionStep(sizes, left[0] - set(result), 1))
    while len(left) > 1:
        first, second = sorted(path[:2] or (0, 1))
        path = path[2:]
        pair = left[first] | left[second]
        rest = [labels for i, labels in enumerate(left) if i not in (first, second)]
        remaining = pair & frozenset(result).union(*rest)
        steps.append(ContractionStep({label: sizes[label] for label in pair}, pair - remaining, 2))
        left = [*rest, remaining] if call.get("path") else [remaining, *rest]
    return steps


def contracted_dims(call: OpCall) -> tuple[list[int], list[int]]:
    """The dimensions of both operands that tensordot sums."""
    ranks = [len(kind.shape) for kind in call.operands]
    first, second = ([int(d) % rank for d in dims] for dims, rank in zip(_given_dims(call), ranks, strict=True))
    return first, second


def _given_dims(call: OpCall) -> tuple[Sequence[int], Sequence[int]]:
    return call.get("dims_self"), call.get("dims_other")


def _tensordot(call: OpCall) -> Labelling | Refusal:
    """`a… k…, k… b… -> a… b…`; a dimension of one element is broadcast along that of the other operand."""
    dims = contracted_dims(call)
    shapes = [kind.shape for kind in call.operands]
    labels: list[list[str | None]] = [[f"{'ab'[i]}{d}" for d in range(len(shape))] for i, shape in enumerate(shapes)]
    for i, (a, b) in enumerate(zip(*dims, strict=True)):
        one = shapes[0][a] == shapes[1][b]
        labels[0][a] = f"k{i}" if one or shapes[0][a] != 1 else None
        labels[1][b] = f"k{i}" if one or shapes[1][b] != 1 else None
    out = tuple(label for term, gone in zip(labels, dims, strict=True) for d, label in enumerate(term) if d not in gone)
    summed = frozenset(label for term in labels for label in term if label is not None and label not in out)
    return Labelling((tuple(labels[0]), tuple(labels[1])), (out,), summed)


def _inner(call: OpCall) -> Labelling | Refusal:
    """`a… k, b… k -> a… b…`; a scalar is multiplied."""
    first, second = (len(kind.shape) for kind in call.operands)
    if not first or not second:
        out = call.outputs[0].shape
        names = tuple(f"d{i}" for i in range(len(out)))
        return Labelling(tuple(broadcast(kind.shape, out) for kind in call.operands), (names,))
    a, b = (tuple(f"{name}{d}" for d in range(rank - 1)) for name, rank in (("a", first), ("b", second)))
    return Labelling(((*a, "k"), (*b, "k")), ((*a, *b),), frozenset("k"))


def _outer(call: OpCall) -> Labelling | Refusal:
    return Labelling((("a",), ("b",)), (("a", "b"),))


def _bilinear(call: OpCall) -> Labelling | Refusal:
    """`… i, … j, o i j, o -> … o`; with a bias, which is added once, i and j are needed whole."""
    lead = tuple(f"d{i}" for i in range(len(call.outputs[0].shape) - 1))
    i, j = (None, None) if "bias" in call.names else ("i", "j")
    labels: dict[str, Labels] = {"input1": (*lead, i), "input2": (*lead, j), "weight": ("o", i, j), "bias": ("o",)}
    summed = frozenset(label for label in (i, j) if label)
    return Labelling(tuple(labels[name] for name in call.names), ((*lead, "o"),), summed)


def contraction_rules() -> dict[str, Rule]:
    """Rules by `aten` overload name."""
    either = (("self",), ("other",))
    return {
        "aten.einsum.default": Rule(einsum_labels, (("tensors*",),), padding=("tensors",)),
        "aten.tensordot.default": Rule(_tensordot, either, padding=("self", "other")),
        "aten.inner.default": Rule(_inner, either, padding=("self", "other")),
        "aten.outer.default": Rule(_outer, (("self",), ("vec2",)), padding=("self", "vec2")),
        "aten.bilinear.default": Rule(_bilinear, (("input1", "bias?"), ("input2", "bias?"), ("weight", "bias?"))),
    }
