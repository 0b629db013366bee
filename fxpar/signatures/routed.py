"""Rules of the operators on rows of experts (`fxpar.ops.permute`, `capacity`, `weighed`, `gates`, `blocks`).

Each index of the leading dimensions is computed by itself. Where each row says which token is its own, rows are cut;
elsewhere rows and experts of one index are whole, because an expert's rows stand together.
"""

from __future__ import annotations

from collections.abc import Callable

from fxpar.signatures.matmul import formula
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.rule import Labelling, Labels, Rule


def _lead(rank: int, of: int) -> Labels:
    """Labels of `rank` leading dimensions, which are the innermost of `of`."""
    return tuple(f"d{i}" for i in range(of - rank, of))


def _summed(ins: tuple[Labels, ...], out: Labels) -> Labelling:
    return Labelling(ins, (out,), frozenset(label for part in ins for label in part if label and label not in out))


def _linear(call: OpCall) -> Labelling:
    x, weight, _ = (len(kind.shape) for kind in call.operands)
    lead = _lead(x - 2, x - 2)
    matrix: Labels = ("i", "o") if call.get("transposed") else ("o", "i")
    weight_labels: Labels = (*_lead(weight - 3, x - 2), None, *matrix)
    return _summed(((*lead, None, "i"), weight_labels, (*lead, None)), (*lead, None, "o"))


def _outer(call: OpCall) -> Labelling:
    rank = len(call.operands[0].shape)
    lead = _lead(rank - 2, rank - 2)
    out: Labels = (*_lead(len(call.outputs[0].shape) - 3, rank - 2), None, "i", "o")
    return _summed(((*lead, None, "i"), (*lead, None, "o"), (*lead, None)), out)


def _spread(call: OpCall) -> Labelling:
    rank = len(call.outputs[0].shape)
    lead = _lead(rank - 2, rank - 2)
    rows: Labels = (*_lead(len(call.operands[0].shape) - 2, rank - 2), None, "o")
    return _summed((rows, (*lead, None)), (*lead, None, "o"))


def _sum(call: OpCall) -> Labelling:
    rank = len(call.operands[0].shape)
    lead = _lead(rank - 2, rank - 2)
    out: Labels = (*_lead(len(call.outputs[0].shape) - 2, rank - 2), None, "o")
    return _summed(((*lead, None, "o"), (*lead, None)), out)


def routed_rules() -> dict[str, Rule]:
    """Rules by overload name."""
    labels: dict[str, tuple[Callable[[OpCall], Labelling], tuple[tuple[str, ...], ...]]] = {
        "grouped_linear": (_linear, (("x",), ("weight",))),
        "grouped_outer": (_outer, (("a",), ("b",))),
        "expand_by_expert": (_spread, (("v",),)),
        "sum_by_expert": (_sum, (("y",),)),
    }
    weighed = {
        "moe_combine": (("... _ h, ... _ _, ... _ -> ... _ h", "y", "weights", "order"), ("y", "weights")),
        "take_weighed": (("... _ h, ... _ _, ... m -> ... m h", "x", "weights", "order"), ("x", "weights")),
        "dot_rows": (("... _ h, ... _ h, ... _ -> ... _ _", "x", "y", "order"), ("x", "y")),
    }
    return {
        "fxpar.sort_by_expert.default": Rule(formula("... _ _ -> ... _, ... _", "indices")),
        "fxpar.drop_by_position.default": Rule(formula("... _ _ -> ... _ _", "indices")),
        "fxpar.drop_by_probability.default": Rule(formula("... _ _, ... _ _ -> ... _ _", "indices", "weights")),
        "fxpar.dispatch_indices.default": Rule(formula("... _, ... _ -> ... _", "order", "counts")),
        "fxpar.block_excess.default": Rule(formula("... _ -> ... _", "counts")),
        "fxpar.received_order.default": Rule(formula("... _ _ -> ... _, ... _", "counts")),
        "fxpar.arrived_order.default": Rule(formula("... _ _ -> ... _, ... _", "counts")),
        "fxpar.swiglu_rows.default": Rule(formula("... _ _ n, ... _ -> ... _ n", "x", "counts")),
        "fxpar.swiglu_gradient.default": Rule(
            formula("... _ n, ... _ _ n, ... _ -> ... _ _ n", "gradient", "x", "counts"), (("gradient",),)
        ),
        "fxpar.group_sizes.default": Rule(formula("... _ -> ... _", "ends")),
        "fxpar.resize_rows.default": Rule(formula("... _ h -> ... _ h", "x"), (("x",),)),
        "fxpar.moe_permute.default": Rule(formula("... _ h, ... m -> ... m h", "x", "order"), (("x",),)),
        "fxpar.moe_unpermute.default": Rule(formula("... m h, ... m -> ... _ h", "y", "order"), (("y",),)),
        **{
            f"fxpar.{name}.default": Rule(formula(*text), (operands[:1], operands[1:]))
            for name, (text, operands) in weighed.items()
        },
        **{f"fxpar.{name}.default": Rule(*args) for name, args in labels.items()},
    }
