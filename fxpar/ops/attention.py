"""Attention in a training step: the operator that saves what its gradient needs, and its gradient (DESIGN section 4).

Enters: nothing. Leaves: the records of the pair that stands for PyTorch's attention and for `fxpar.attention` where a
gradient is wanted. Which kernel runs is chosen at lowering; the text is the same for every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.program import TensorType, note, output_types
from fxpar.ir.properties import Property
from fxpar.layout.layout import P, Placement, R
from fxpar.ops import sdpa
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import Gradients, LoweredCall, OnShapes, Operator, Reverse, Saving
from fxpar.ops.random import attention_shape, indexed, own_bits_of_probabilities
from fxpar.signatures.engine import Check, Labelling, Labels, Refusal, Rule, Signature, signature_of_summands
from fxpar.signatures.matmul import attention_labels
from fxpar.signatures.op_call import OpCall, bind_arguments, call_of

_NAMES = ("query", "key", "value", "mask")


def _labels(call: OpCall) -> Labelling | Refusal:
    """Returns labels as of attention; a value's columns are not cut, of which the sums of exponentials know nothing."""
    out, log_sum = call.outputs
    count = sum(name in _NAMES for name in call.names)
    inner = OpCall(call.target, call.arguments, call.operands[:count], call.names[:count], (out,), call.n)
    labelling = attention_labels(inner)
    if isinstance(labelling, Refusal):
        return labelling
    ins = [tuple(None if label == "v" else label for label in labels) for labels in labelling.operands]
    ins += [(None,) * len(kind.shape) for kind in call.operands[count:]]
    result = (*labelling.outputs[0][:-1], None)
    return Labelling(tuple(ins), (result, result[: len(log_sum.shape)]))


def _gradient_labels(call: OpCall) -> Labelling | Refusal:
    """Returns labels in which heads and rows that an operand lacks are summed in its gradient."""
    kinds = dict(zip(call.names, call.operands, strict=True))
    names = tuple(name for name in _NAMES if name in kinds)
    operands = tuple(kinds[name] for name in names)
    out = kinds["out"]
    labelling = attention_labels(OpCall(call.target, call.arguments, operands, names, (out,), call.n))
    if isinstance(labelling, Refusal):
        return labelling
    by_name = {
        n: tuple(None if i == "v" else i for i in labels) for n, labels in zip(names, labelling.operands, strict=True)
    }
    result: Labels = (*labelling.outputs[0][:-1], None)
    by_name |= {"gradient": result, "out": result, "log_sum": result[:-1]}
    ins = tuple(
        by_name.get(name, (None,) * len(kind.shape)) for name, kind in zip(call.names, call.operands, strict=True)
    )
    outs = tuple(by_name[name] for name in _NAMES[: len(call.outputs)])
    lacking = (label for label in result if label is not None and any(label not in labels for labels in outs))
    return Labelling(ins, outs, frozenset(lacking))


def _value_alone(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | None:
    """Places the result, linear in the value, whose columns may be cut; the sums of exponentials ignore the value."""
    value = placements[call.names.index("value")]
    if not _is_whole_beside(call, placements, ("value",)) or not _is_column(call, value):
        return None
    out = len(call.outputs[0].shape) - 1
    return (P if value == P else value.at(out), R)


def _gradient_of_value_alone(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | None:
    """Places gradients: scores get summands of theirs from value and result, or from each column of these."""
    value, out, gradient = (placements[call.names.index(name)] for name in ("value", "out", "gradient"))
    if not _is_whole_beside(call, placements, ("value", "out", "gradient")) or not _is_column(call, value):
        return None
    result = P if value == P else value.at(len(call.operands[call.names.index("out")].shape) - 1)
    if out != result or gradient != (R if value == P else result):
        return None
    return (P, P, R if value == P else value, *(P,) * (len(call.outputs) - 3))


def _is_whole_beside(call: OpCall, placements: Sequence[Placement], names: Sequence[str]) -> bool:
    """Returns whether all operands but those named are whole; several may have one name, as the axes' indices do."""
    return all(p == R for name, p in zip(call.names, placements, strict=True) if name not in names)


def _is_column(call: OpCall, value: Placement) -> bool:
    last = len(call.operands[call.names.index("value")].shape) - 1
    return value == P or (value.is_shard and value.dim == last and not value.is_shared and not value.is_padded)


def _first_of(*checks: Check) -> Check:
    def check(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal | None:
        return next((verdict for candidate in checks if (verdict := candidate(call, placements)) is not None), None)

    return check


def _drawn(call: OpCall, placements: Sequence[Placement]) -> Refusal | None:
    return own_bits_of_probabilities(call, placements) if "rng" in call.names else None


def _as_summands(placement: Placement) -> Placement:
    return replace(placement, partial=True) if placement.is_shared else placement


def _with_summands(rule: Rule) -> Rule:
    """Returns a rule by which heads that several ranks hold get a summand of their gradient on each."""
    assert rule.seed is not None
    seed = rule.seed

    def seeded(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
        signature = seed(call, index, placement)
        if isinstance(signature, Refusal):
            return signature
        ins = (
            _as_summands(p) if name == "gradient" else p for name, p in zip(call.names, signature.operands, strict=True)
        )
        labelling = rule.labels(call) if rule.labels is not None else Refusal("")
        if isinstance(labelling, Refusal):
            return labelling
        label = labelling.operands[index][placement.dim]
        # Of heads that all ranks share, each has part of the queries, every rank has a summand of the gradient.
        outs = [
            P if p == R and label in labels else _as_summands(p)
            for p, labels in zip(signature.outputs, labelling.outputs, strict=True)
        ]
        return Signature(tuple(ins), tuple(outs))

    return replace(rule, seed=seeded, summands=("gradient",))


def _shape(call: OnShapes) -> Any:
    output = attention_shape(call)
    wide = torch.float32 if output.dtype in (torch.float16, torch.bfloat16) else output.dtype
    return output, output.new_empty(output.shape[:-1], dtype=wide)


def _gradient_shape(call: OnShapes) -> Any:
    args = call.by_name
    if args["gradient"].shape != args["out"].shape:
        raise ValueError(f"the gradient of {list(args['out'].shape)} is {list(args['gradient'].shape)}")
    names = _NAMES if args["of_mask"] else _NAMES[:3]
    return [torch.empty_like(args[name]) for name in names]


def _call(args: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the fields of an `SdpaCall`."""
    return tuple(args[name] for name in (*_NAMES, "is_causal", "scale", "enable_gqa"))


def _drops(node: fx.Node, rank: OnRank, args: dict[str, Any]) -> tuple[Any, ...]:
    if args["rng"] is None:
        return ()
    return args["rng"], args["p"], rank.identity(node), rank.element_cuts(node)


def _lower(node: fx.Node, rank: OnRank) -> LoweredCall:
    args = bind_arguments(node)
    return LoweredCall(saving_attention, (_call(args), _drops(node, rank, args)))


def _lower_backward(node: fx.Node, rank: OnRank) -> LoweredCall:
    args = bind_arguments(node)
    values = (args["gradient"], args["out"], args["log_sum"])
    return LoweredCall(attention_gradients, (_call(args), values, _drops(node, rank, args), args["of_mask"]))


def saving_attention(call: Sequence[Any], drops: Sequence[Any]) -> Any:
    """Computes `fxpar.attention_forward` in a lowered graph, from fields of an `SdpaCall` and of `Drops`, if any."""
    return sdpa.forward(sdpa.SdpaCall(*call), sdpa.Drops(*drops) if drops else None)


def attention_gradients(call: Sequence[Any], values: Sequence[Tensor], drops: Sequence[Any], of_mask: bool) -> Any:
    """Computes `fxpar.attention_backward` in a lowered graph; `values` are the gradient, the result and `log_sum`."""
    gradient, out, log_sum = values
    dropout = sdpa.Drops(*drops) if drops else None
    return sdpa.backward(sdpa.SdpaCall(*call), gradient, out, log_sum, dropout, of_mask)


def _derivative(reverse: Reverse) -> Gradients:
    node = reverse.node
    gradient = reverse.tangents[0]
    assert gradient is not None
    args, out, log_sum = bind_arguments(node), reverse.result(0), reverse.result(1)
    of_mask = dict(zip(call_of(node, 1).names, reverse.needs_grad, strict=True)).get("mask", False)
    query, key, value, mask = (args.get(name) for name in _NAMES)
    options = (args["is_causal"], args["scale"], args["enable_gqa"], args.get("indices") or [], of_mask)
    kinds = tuple(output_types(args[name])[0] for name in (_NAMES if of_mask else _NAMES[:3]))
    backward = reverse.call(
        attention_backward,
        *(query, key, value, gradient, out, log_sum, mask, args["rng"], args["p"], *options),
        kind=kinds,
        random=note(node).random,
    )
    gradients = dict(zip(_NAMES, reverse.items(backward), strict=False))
    # By name: one value may be several operands, and has then a gradient as each.
    pairs = zip(call_of(node, 1).names, reverse.needs_grad, strict=True)
    return [gradients.get(name) if flag else None for name, flag in pairs]


# They draw where they are given the generator's state.
_record = partial(Operator, stage=Property.RNG, draws=True)


@partial(
    _record,
    rule=_with_summands(
        indexed(_gradient_labels, _first_of(_gradient_of_value_alone, _drawn), (("gradient",),), signature_of_summands)
    ),
    shape=_gradient_shape,
    lower=_lower_backward,
)
def attention_backward(
    query: Any,
    key: Any,
    value: Any,
    gradient: Any,
    out: Any,
    log_sum: Any,
    mask: Any = None,
    rng: Any = None,
    p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    indices: Any = (),
    of_mask: bool = False,
) -> Any:
    """Returns the gradients of query, key and value of an attention, and where asked for of its mask.

    Args:
        query: as of `attention_forward`, and so `key`, `value`, `mask` and the options.
        gradient: of the result.
        out: the result.
        log_sum: the second result.
        of_mask: whether the mask's gradient is a fourth result.
    """


@partial(
    _record,
    rule=indexed(_labels, _first_of(_value_alone, _drawn), (("value",),)),
    shape=_shape,
    lower=_lower,
    derivative=_derivative,
)
def attention_forward(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    rng: Any = None,
    p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    indices: Any = (),
) -> Any:
    """Computes attention as `fxpar.attention`, without dropout where `rng` is None; and what its gradient needs.

    The second result is the logarithm of each row's sum of exponentials, in float32 or wider.
    """


def saving(node: fx.Node) -> Saving:
    """Puts `attention_forward` in place of an attention of PyTorch's, or of one with dropout."""
    args = bind_arguments(node)
    mask = args.get("mask", args.get("attn_mask"))
    options = (args.get("rng"), args.get("p", 0.0), args["is_causal"], args["scale"], args["enable_gqa"])
    values = (args["query"], args["key"], args["value"], mask)
    (kind,) = output_types(node)
    wide = torch.float32 if kind.dtype in (torch.float16, torch.bfloat16) else kind.dtype
    types = (kind, TensorType(wide, kind.shape[:-1]))
    return Saving(attention_forward, (*values, *options, args.get("indices") or []), types)
