"""Rules of matrix products, convolution and attention: labels as in einsum, the contracted one is summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fxpar.layout.symbolic_sizes import Size
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import broadcast
from fxpar.signatures.rule import Labelling, Labels, Refusal, Rule


def _read(part: str, rank: int) -> Labels:
    """`... k` for a rank: the dots stand for as many leading labels as are left, `_` for none."""
    words = part.split()
    if words and words[0] == "...":
        lead = rank - len(words) + 1
        words = [f"d{i}" for i in range(lead)] + words[1:]
    return tuple(None if word == "_" else word for word in words)


def formula(text: str, *names: str) -> Callable[[OpCall], Labelling | Refusal]:
    """Labels written as `... k, o k, o -> ... o`, one part for each of `names`; `{k}` around a label sums it.

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
    """Summed labels are lost where the operand `name` is added once: the sum would count it n times."""

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
    """`self + first @ second`: `self` is broadcast to the result."""
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
    """`torch.matmul` for every rank: leading dimensions are broadcast."""
    a, b = (kind.shape for kind in call.operands)
    out = call.outputs[0].shape
    rows: Labels = ("m",) if len(a) > 1 else ()
    columns: Labels = ("n",) if len(b) > 1 else ()
    lead = out[: len(out) - len(rows) - len(columns)]
    names = tuple(f"d{i}" for i in range(len(lead)))
    left = (*broadcast(a[:-2], lead, names), *rows, "k")
    right = (*broadcast(b[:-2], lead, names), "k", *columns)
    return Labelling((left, right), ((*names, *rows, *columns),), frozenset("k"))


def attention_labels(call: OpCall) -> Labelling | Refusal:
    """`… s e, … t e, … t v, mask -> … s v`; the query rows too where no causal mask ties them to the key rows."""
    lead = call.outputs[0].shape[:-2]
    names = tuple(f"d{i}" for i in range(len(lead)))
    rows = None if call.get("is_causal") else "s"

    def head(shape: tuple[Size, ...]) -> Labels:  # fewer kv heads than query heads are cut in proportion, one is not
        return broadcast(shape[:-2], lead, names)

    ins = []
    for name, kind in zip(call.names, call.operands, strict=True):
        if name == "query":
            ins.append((*head(kind.shape), rows, None))
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
    """`n c …, o c …, o -> n o …`, with groups `n …` alone; spatial dimensions need their neighbours."""
    rank = len(call.outputs[0].shape)
    if len(call.operands[0].shape) != rank or rank != len(call.operands[1].shape):
        return Refusal("a convolution without a batch dimension has no rule for shards")
    c, o = ("c", "o") if call.get("groups") == 1 else (None, None)
    space = (None,) * (rank - 2)
    labels: dict[str, Labels] = {"input": ("n", c, *space), "weight": (o, c, *space), "bias": (o,)}
    return Labelling(tuple(labels[name] for name in call.names), (("n", o, *space),), frozenset("c" if c else ""))


def matmul_rules() -> dict[str, Rule]:
    """Rules by `aten` overload name."""
    linear = formula("... k, o k, o -> ... o", "input", "weight", "bias")
    either = (("input", "bias?"), ("weight", "bias?"))
    rules = {
        "aten.linear.default": Rule(_without("bias", linear), either),
        "aten.mm.default": Rule(formula("m k, k n -> m n", "self", "mat2"), (("self",), ("mat2",))),
        "aten.bmm.default": Rule(formula("b m k, b k n -> b m n", "self", "mat2"), (("self",), ("mat2",))),
        "aten.mv.default": Rule(formula("m k, k -> m", "self", "vec"), (("self",), ("vec",))),
        "aten.dot.default": Rule(formula("k, k -> ", "self", "tensor"), (("self",), ("tensor",))),
        "aten.matmul.default": Rule(matmul_labels, (("self",), ("other",))),
        "aten.addmm.default": Rule(_added("m k, k n -> m n", "mat1", "mat2"), (("self", "mat1"), ("self", "mat2"))),
        "aten.baddbmm.default": Rule(
            _added("b m k, b k n -> b m n", "batch1", "batch2"), (("self", "batch1"), ("self", "batch2"))
        ),
        "aten.scaled_dot_product_attention.default": Rule(attention_labels, (("value",),)),
    }
    for key in ("aten.linear.default", "aten.mm.default", "aten.bmm.default", "aten.matmul.default"):
        rules[key] = replace(rules[key], padding=("weight", "mat2", "other", "self", "input"))
    for name in ("conv1d", "conv2d", "conv3d"):
        for overload in ("default", "padding"):
            rules[f"aten.{name}.{overload}"] = Rule(_without("bias", _convolution), either)
    return rules
