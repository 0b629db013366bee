"""Rules of element-wise operations, of random and of complex numbers.

Operands are aligned from the right, and every dimension can be sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from fxpar.layout.layout import P, Placement, R
from fxpar.layout.symbolic_sizes import Size
from fxpar.signatures.engine import Labelling, Labels, Refusal, Rule, Signature, by_overload, numbered, seed_signature
from fxpar.signatures.op_call import OpCall, bind_arguments


def broadcast(shape: tuple[Size, ...], out: tuple[Size, ...], labels: Labels | None = None) -> Labels:
    """Returns labels of an operand that is broadcast to `out`: none where it has size 1 and the output has not."""
    names = labels if labels is not None else numbered(len(out))
    offset = len(out) - len(shape)
    return tuple(names[offset + i] if size != 1 or out[offset + i] == 1 else None for i, size in enumerate(shape))


def pointwise_labels(call: OpCall) -> Labelling | Refusal:
    """Cuts `d0 d1 …, … -> d0 d1 …`."""
    out = call.outputs[0].shape
    names = numbered(len(out))
    if any(len(kind.shape) > len(out) for kind in call.operands):
        return Refusal("an operand has more dimensions than the result")
    return Labelling(tuple(broadcast(k.shape, out) for k in call.operands), tuple(names for _ in call.outputs))


def keeps_sums(call: OpCall, placements: Sequence[Placement]) -> Refusal | None:
    """Refuses to cast summands, also by `dtype`, to booleans or from floating point to integers: it is not linear."""
    source, target = call.operands[0], call.outputs[0]
    if P in placements and (target.dtype == torch.bool or (source.is_float and not target.is_float)):
        return Refusal("a partial (P) value would be cast to integers rank by rank: reduce it first")
    return None


def _zero_only(name: str) -> Callable[[OpCall, Sequence[Placement]], Refusal | None]:
    """Refuses to fill summands with any number but zero: it would be summed over the ranks."""

    def check(call: OpCall, placements: Sequence[Placement]) -> Refusal | None:
        if P in placements and call.get(name) != 0:
            return Refusal("a number that fills in a partial (P) value would be added by every rank: reduce it first")
        return None

    return check


def same_values(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | None:
    """Gives R for summands too: the values of the result do not depend on those of the operand."""
    return (R,) * len(call.outputs) if P in placements else None


def _each_for_itself(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | None:
    """Gives each result the placement of its own operand: a sum where that is one."""
    return tuple(placements) if P in placements and set(placements) <= {P, R} else None


def _prelu_labels(call: OpCall) -> Labelling | Refusal:
    """Cuts `n c …, c -> n c …`; a single weight is broadcast."""
    labelling = pointwise_labels(call)
    if isinstance(labelling, Refusal):
        return labelling
    values, weight = labelling.operands[0], call.operands[1].shape
    return Labelling((values, (None if weight[0] == 1 or len(values) < 2 else values[1],)), labelling.outputs)


_UNARY = """
abs acos acosh asin asinh atan atanh bitwise_not ceil celu cos cosh elu erf erfc erfinv exp exp2 expm1 floor
frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu log log10 log1p log2
log_sigmoid logical_not logit mish reciprocal relu relu6 round rsqrt selu sgn sigmoid sign silu sin sinh
softplus softshrink sqrt square tan tanh threshold trunc
digamma i0 isneginf isposinf lgamma polygamma signbit sinc special_entr special_erfcx special_i0e special_i1
special_i1e special_log_ndtr special_ndtri
"""

_BINARY = """
add.Scalar atan2 bitwise_and.Scalar bitwise_and.Tensor bitwise_or.Scalar bitwise_or.Tensor bitwise_xor.Tensor
__and__.Scalar __and__.Tensor __or__.Scalar __or__.Tensor __xor__.Tensor clamp clamp.Tensor clamp_max
clamp_min div.Scalar_mode div.Tensor_mode eq.Scalar eq.Tensor floor_divide floor_divide.Scalar fmod.Scalar
fmod.Tensor ge.Scalar ge.Tensor gt.Scalar gt.Tensor le.Scalar le.Tensor logical_and logical_or logical_xor
copysign.Scalar copysign.Tensor fmax fmin heaviside hypot logaddexp logaddexp2 nextafter clamp_max.Tensor
clamp_min.Tensor special_zeta
lt.Scalar lt.Tensor max.other maximum min.other minimum ne.Scalar ne.Tensor nan_to_num pow.Scalar pow.Tensor_Scalar
pow.Tensor_Tensor remainder.Scalar remainder.Tensor rsub.Scalar sub.Scalar where.Scalar native_dropout
"""

_LINEAR: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "neg deg2rad rad2deg ldexp.Tensor clone alias contiguous detach lift_fresh_copy": (("self",),),
    "mul.Scalar div.Tensor div.Scalar xlogy.Tensor special_xlog1py": (("self",),),
    "mul.Tensor": (("self",), ("other",)),
    "add.Tensor sub.Tensor rsub.Tensor where.self": (("self", "other"),),
    "masked_fill.Tensor": (("self", "value"),),
    "lerp.Scalar lerp.Tensor": (("self", "end"),),
    "addcmul": (("self", "tensor1"), ("self", "tensor2")),
    "addcdiv": (("self", "tensor1"),),
}

# Operands that may be padded shards: of whatever stands there the result is finite, and a zero gradient stays zero.
_PADDED: Mapping[str, tuple[str, ...]] = {
    "neg clone alias contiguous detach tanh sigmoid silu gelu relu mul.Scalar div.Scalar div.Tensor": ("self",),
    "mul.Tensor add.Tensor sub.Tensor rsub.Tensor": ("self", "other"),
    "where.self": ("condition", "self", "other"),
    "where.ScalarOther": ("condition", "self"),
    "where.ScalarSelf": ("condition", "other"),
    "masked_fill.Scalar masked_fill.Tensor": ("self", "mask"),
    "_to_copy to.dtype": ("self",),
}


def pointwise_rules() -> dict[str, Rule]:
    """Returns rules by `aten` overload name."""
    by_name = {
        _UNARY: Rule(pointwise_labels),
        _BINARY: Rule(pointwise_labels),
        **{names: Rule(pointwise_labels, partial) for names, partial in _LINEAR.items()},
        "masked_fill.Scalar": Rule(pointwise_labels, (("self",),), check=_zero_only("value")),
        "where.ScalarOther": Rule(pointwise_labels, (("self",),), check=_zero_only("other")),
        "where.ScalarSelf": Rule(pointwise_labels, (("other",),), check=_zero_only("self")),
        "zeros_like": Rule(pointwise_labels, check=same_values, padding=("self",), zeros=True),
        "ones_like full_like fill.Scalar": Rule(pointwise_labels, check=same_values),
        "fill.Tensor": Rule(pointwise_labels, (("value",),)),
        "broadcast_tensors": Rule(pointwise_labels, (("tensors",),), check=_each_for_itself),
        "prelu": Rule(_prelu_labels),
        "_to_copy to.dtype to.device": Rule(pointwise_labels, (("self",),), check=keeps_sums),
    }
    rules = by_overload(by_name)
    for name, padding in by_overload(_PADDED).items():
        rules[name] = replace(rules[name], padding=padding)
    return rules


aten = torch.ops.aten

# Bits of the shape of the first operand, whose values do not matter.
SHAPED = """
bernoulli.p cauchy exponential geometric log_normal normal_functional rand_like randint_like randint_like.low_dtype
randn_like uniform
""".split()
# Bits for the values of the operands, element by element.
VALUED = "bernoulli bernoulli.Tensor normal.Tensor_float rrelu".split()
_RECURRENT = frozenset({"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"})


def draws_bits(node: fx.Node) -> bool:
    """Returns whether a node calls an operator that PyTorch tags as seeded, and is not told to drop nothing."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = bind_arguments(node)
    if target._schema.name in _RECURRENT:  # which drop between their layers
        return bool(arguments["train"] and arguments["dropout"] and arguments["num_layers"] > 1)
    is_dropout = "dropout" in target._schema.name or "attention" in target._schema.name
    probability = arguments.get("p", arguments.get("dropout_p")) if is_dropout else None
    idle = arguments.get("train", arguments.get("training")) is False
    return not idle and not (isinstance(probability, (int, float)) and probability == 0)


def _seed(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    if placement.is_shard and len(placement.pieces) > 1:
        return Refusal("random bits for a dimension of several segments: split the segments first")
    return seed_signature(Rule(pointwise_labels), call, index, placement)


def random_rules() -> Mapping[str, Rule]:
    """Returns rules by `aten` overload name."""
    return by_overload(
        {
            " ".join(SHAPED): Rule(pointwise_labels, seed=_seed, check=same_values),
            " ".join(VALUED): Rule(pointwise_labels, seed=_seed),
            # With the same bits on all ranks a dropped sum is the sum of what is dropped of the summands.
            "dropout": Rule(pointwise_labels, (("input",),), seed=_seed),
        }
    )


_SELF = (("self",),)


def _with_parts(call: OpCall) -> Labelling:
    """Cuts `d… -> d… 2`."""
    labels = numbered(len(call.operands[0].shape))
    return Labelling((labels,), ((*labels, None),))


def _of_parts(call: OpCall) -> Labelling:
    """Cuts `d… 2 -> d…`."""
    labels = numbered(len(call.outputs[0].shape))
    return Labelling(((*labels, None),), (labels,))


def complex_rules() -> dict[str, Rule]:
    """Returns rules by `aten` overload name."""
    return by_overload(
        {
            # Of polar PyTorch's gradient divides by a positive `abs`, and summands may be negative.
            "angle polar": Rule(pointwise_labels),
            # Products of a table that is padded are differentiated by these.
            "_conj _conj_physical resolve_conj": Rule(pointwise_labels, _SELF, padding=("self",)),
            "conj_physical resolve_neg real imag": Rule(pointwise_labels, _SELF),
            "complex": Rule(pointwise_labels, (("real", "imag"),)),
            "view_as_real": Rule(_with_parts, _SELF),
            "view_as_complex": Rule(_of_parts, _SELF),
        }
    )
