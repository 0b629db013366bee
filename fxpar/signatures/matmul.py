"""Rules of matrix products, convolution and attention: labels as in einsum, the contracted one is summed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fxpar.ir.program import TensorType
from fxpar.layout.symbolic_sizes import Size
from fxpar.signatures.engine import Labelling, Labels, Refusal, Rule, by_overload, numbered
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import broadcast


def _read(part: str, rank: int) -> Labels:
    """Reads `... k` for a rank: the dots stand for as many leading labels as are left, `_` for none."""
    words = part.split()
    if words and words[0] == "...":
        lead = rank - len(words) + 1
        words = [f"d{i}" for i in range(lead)] + words[1:]
    return tuple(None if word == "_" else word for word in words)


def formula(text: str, *names: str) -> Callable[[OpCall], Labelling | Refusal]:
    """Reads labels written as `... k, o k, o -> ... o`, one part for each of `names`; `{k}` around a label sums it.

    Operands that were not passed leave their part out. A label that an absent output cannot take is summed.
    """
    left, right = text.split("->")
    parts = dict(zip(names, left.split(","), strict=True))

    def labels(call: OpCall) -> Labelling | Refusal:
        ins = tuple(_read(parts[name], len(kind.shape)) for name, kind in zip(call.names, call.operands, strict=True))
        outs = tuple(_read(part, len(kind.shape)) for part, kind in zip(right.split(","), call.outputs, strict=True))
        if any(
            len(part) != len(kind.shape)
            for part, kind in zip((*ins, *outs), (*call.operands, *call.outputs), strict=True)
        ):
            return Refusal(f"ranks do not match {text}")
        remaining = {label for part in outs for label in part}
        summed = frozenset(label for part in ins for label in part if label and label not in remaining)
        return Labelling(ins, outs, summed)

    return labels


def _without(name: str, rule: Callable[[OpCall], Labelling | Refusal]) -> Callable[[OpCall], Labelling | Refusal]:
    """Drops summed labels where the operand `name` is added once: the sum would count it n times."""

    def labels(call: OpCall) -> Labelling | Refusal:
        labelling = rule(call)
        if isinstance(labelling, Refusal) or name not in call.names:
            return labelling
        ins = tuple(
            tuple(None if label in labelling.summed else label for label in part) for part in labelling.operands
        )
        return Labelling(ins, labelling.outputs)

    return labels


def _added(text: str, first: str, second: str) -> Callable[[OpCall], Labelling | Refusal]:
    """Broadcasts `self` to the result of `self + first @ second`."""
    product = formula(text, first, second)

    def labels(call: OpCall) -> Labelling | Refusal:
        inner = OpCall(call.target, call.arguments, call.operands[1:], call.names[1:], call.outputs, call.n)
        labelling = product(inner)
        if isinstance(labelling, Refusal):
            return labelling
        addend = broadcast(call.operands[0].shape, call.outputs[0].shape, labelling.outputs[0])
        ins = tuple(
            tuple(None if label in labelling.summed else label for label in part) for part in labelling.operands
        )
        return Labelling((addend, *ins), labelling.outputs)

    return labels


def matmul_labels(call: OpCall) -> Labelling | Refusal:
    """Labels the operands of `torch.matmul` for every rank: leading dimensions are broadcast."""
    a, b = (kind.shape for kind in call.operands)
    out = call.outputs[0].shape
    rows: Labels = ("m",) if len(a) > 1 else ()
    columns: Labels = ("n",) if len(b) > 1 else ()
    lead = out[: len(out) - len(rows) - len(columns)]
    names = numbered(len(lead))
    left = (*broadcast(a[:-2], lead, names), *rows, "k")
    right = (*broadcast(b[:-2], lead, names), "k", *columns)
    return Labelling((left, right), ((*names, *rows, *columns),), frozenset("k"))


def attention_labels(call: OpCall) -> Labelling | Refusal:
    """Cuts `… s e, … t e, … t v, mask -> … s v`; query rows too where no causal mask ties them to the key rows."""
    lead = call.outputs[0].shape[:-2]
    names = numbered(len(lead))
    rows = None if call.get("is_causal") else "s"

    def head(shape: tuple[Size, ...]) -> Labels:  # fewer kv heads than query heads are cut in proportion, one is not
        return broadcast(shape[:-2], lead, names)

    ins = []
    for name, kind in zip(call.names, call.operands, strict=True):
        if name == "query":
            ins.append((*head(kind.shape), rows, None))
        # A softmax over a part of the keys has another denominator: the rows of keys are never cut.
        elif name == "key":
            ins.append((*head(kind.shape), None, None))
        elif name == "value":
            ins.append((*head(kind.shape), None, "v"))
        elif name in ("attn_mask", "mask"):
            shape = kind.shape
            ins.append((*broadcast(shape[:-2], lead, names), None if shape[-2] == 1 else rows, None))
        else:
            ins.append((None,) * len(kind.shape))
    return Labelling(tuple(ins), ((*names, rows, "v"),))


def _convolution(call: OpCall) -> Labelling | Refusal:
    """Cuts `n c …, o c …, o -> n o …`, with groups `n …` alone; spatial dimensions need their neighbours."""
    rank = len(call.outputs[0].shape)
    if len(call.operands[0].shape) != rank or rank != len(call.operands[1].shape):
        return Refusal("a convolution without a batch dimension has no rule for shards")
    # With groups, an output channel reads only some input channels, which labels cannot say.
    c, o = ("c", "o") if call.get("groups") == 1 else (None, None)
    space = (None,) * (rank - 2)
    labels: dict[str, Labels] = {"input": ("n", c, *space), "weight": (o, c, *space), "bias": (o,)}
    return Labelling(tuple(labels[name] for name in call.names), (("n", o, *space),), frozenset("c" if c else ""))


def matmul_rules() -> dict[str, Rule]:
    """Returns rules by `aten` overload name."""
    linear = formula("... k, o k, o -> ... o", "input", "weight", "bias")
    either = (("input", "bias?"), ("weight", "bias?"))
    added, batched = _added("m k, k n -> m n", "mat1", "mat2"), _added("b m k, b k n -> b m n", "batch1", "batch2")
    # Padded rows and columns of an operand give padded ones of the product, and no
    # others. Padding that is summed is refused by the engine.
    padded = partial(Rule, padding=("weight", "mat2", "other", "self", "input"))
    return by_overload(
        {
            "linear": padded(_without("bias", linear), either),
            "mm": padded(formula("m k, k n -> m n", "self", "mat2"), (("self",), ("mat2",))),
            "bmm": padded(formula("b m k, b k n -> b m n", "self", "mat2"), (("self",), ("mat2",))),
            "mv": Rule(formula("m k, k -> m", "self", "vec"), (("self",), ("vec",))),
            "dot": Rule(formula("k, k -> ", "self", "tensor"), (("self",), ("tensor",))),
            "matmul": padded(matmul_labels, (("self",), ("other",))),
            "addmm": Rule(added, (("self", "mat1"), ("self", "mat2"))),
            "baddbmm": Rule(batched, (("self", "batch1"), ("self", "batch2"))),
            "scaled_dot_product_attention": Rule(attention_labels, (("value",),)),
            "conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding": Rule(
                _without("bias", _convolution), either
            ),
        }
    )


Terms = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ContractionStep:
    """One contraction of two operands, or the summation of one: sizes of all its labels, and those that it sums."""

    sizes: Mapping[str, Size]
    summed: frozenset[str]
    operands: int


def einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[Terms, tuple[str, ...]] | Refusal:
    """Returns the labels of each operand and of the result, dots written out as `.0`, `.1`, … from the right.

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
    """Returns the size of each label: that of the operands that are not broadcast along it."""
    sizes: dict[str, Size] = {}
    for term, kind in zip(terms, kinds, strict=True):
        for label, size in zip(term, kind.shape, strict=True):
            if sizes.get(label, 1) == 1:
                sizes[label] = size
    return sizes


def einsum_labels(call: OpCall) -> Labelling | Refusal:
    """Returns the labels of the equation, without those that cannot be cut."""
    read = einsum_terms(str(call.get("equation")), [len(kind.shape) for kind in call.operands])
    if isinstance(read, Refusal):
        return read
    terms, result = read
    sizes = _sizes(terms, call.operands)
    # A repeated label takes a diagonal, and one axis cannot cut both of its dimensions.
    diagonal = {label for term in terms for label, count in Counter(term).items() if count > 1}

    def shown(term: tuple[str, ...], shape: tuple[Size, ...]) -> Labels:
        pairs = zip(term, shape, strict=True)
        return tuple(None if label in diagonal or size != sizes[label] else label for label, size in pairs)

    ins = tuple(shown(term, kind.shape) for term, kind in zip(terms, call.operands, strict=True))
    outs = (shown(result, call.outputs[0].shape),)
    return Labelling(ins, outs, frozenset(sizes.keys() - diagonal - set(result)))


def einsum_steps(call: OpCall) -> list[ContractionStep] | Refusal:
    """Lists the contractions in the order in which torch does them: by `path`, else from left to right."""
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
        # With a path torch puts each result last; without one it goes on with the result.
        left = [*rest, remaining] if call.get("path") else [remaining, *rest]
    return steps


def contracted_dims(call: OpCall) -> tuple[list[int], list[int]]:
    """Returns the dimensions of both operands that tensordot sums."""
    ranks = [len(kind.shape) for kind in call.operands]
    first, second = ([int(d) % rank for d in dims] for dims, rank in zip(_given_dims(call), ranks, strict=True))
    return first, second


def _given_dims(call: OpCall) -> tuple[Sequence[int], Sequence[int]]:
    return call.get("dims_self"), call.get("dims_other")


def _tensordot(call: OpCall) -> Labelling | Refusal:
    """Cuts `a… k…, k… b… -> a… b…`; a dimension of one element is broadcast along that of the other operand."""
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
    """Cuts `a… k, b… k -> a… b…`; a scalar is multiplied."""
    first, second = (len(kind.shape) for kind in call.operands)
    if not first or not second:
        out = call.outputs[0].shape
        names = numbered(len(out))
        return Labelling(tuple(broadcast(kind.shape, out) for kind in call.operands), (names,))
    a, b = (tuple(f"{name}{d}" for d in range(rank - 1)) for name, rank in (("a", first), ("b", second)))
    return Labelling(((*a, "k"), (*b, "k")), ((*a, *b),), frozenset("k"))


def _outer(call: OpCall) -> Labelling | Refusal:
    return Labelling((("a",), ("b",)), (("a", "b"),))


def _bilinear(call: OpCall) -> Labelling | Refusal:
    """Cuts `… i, … j, o i j, o -> … o`; with a bias, which is added once, i and j are needed whole."""
    lead = numbered(len(call.outputs[0].shape) - 1)
    i, j = (None, None) if "bias" in call.names else ("i", "j")
    labels: dict[str, Labels] = {"input1": (*lead, i), "input2": (*lead, j), "weight": ("o", i, j), "bias": ("o",)}
    summed = frozenset(filter(None, (i, j)))
    return Labelling(tuple(labels[name] for name in call.names), ((*lead, "o"),), summed)


def contraction_rules() -> dict[str, Rule]:
    """Returns rules by `aten` overload name."""
    either = (("self",), ("other",))
    return by_overload(
        {
            "einsum": Rule(einsum_labels, (("tensors*",),), padding=("tensors",)),
            "tensordot": Rule(_tensordot, either, padding=("self", "other")),
            "inner": Rule(_inner, either, padding=("self", "other")),
            "outer": Rule(_outer, (("self",), ("vec2",)), padding=("self", "vec2")),
            "bilinear": Rule(_bilinear, (("input1", "bias?"), ("input2", "bias?"), ("weight", "bias?"))),
        }
    )
