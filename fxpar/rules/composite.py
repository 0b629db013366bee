"""Rules of fxpar's own operators that take random bits, and of the user's autograd functions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar.errors import InputError
from fxpar.layout import Placement, V
from fxpar.rules.engine import Call, Labelling, Refusal, Rule, Signature, seed_signature
from fxpar.rules.matmul import attention_labels
from fxpar.rules.pointwise import broadcast, pointwise_labels, pointwise_rules


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


_Check = Callable[[Call, Sequence[Placement]], Refusal | None]


def _indexed(
    labels: Callable[[Call], Labelling | Refusal], check: _Check, partial: tuple[tuple[str, ...], ...] = ()
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
        return check(call, ins) or Signature(ins, found.outputs)

    return Rule(labels, partial, seed=seed, check=check, varying=("indices",))


# What the author's function may raise on operands that are not the traced ones.
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError)
_RANDOM = ("aten.dropout.default", "aten.native_dropout.default")


@lru_cache(maxsize=256)
def _impurity(path: str, arguments: tuple[Any, ...], rank: int) -> str:
    """Empty where forward and backward of the function at `path` are element-wise; else what is not.

    Args:
        arguments: in order, element types for tensors and constants as they are.
        rank: number of dimensions of the tensors.
    """
    known = pointwise_rules().keys() - set(_RANDOM)
    apply = resolve_function(path).apply
    shape = tuple(range(2, 2 + rank))

    def both(*tensors: torch.Tensor) -> Any:
        remaining = iter(tensors)
        out = apply(*(next(remaining) if isinstance(a, torch.dtype) else a for a in arguments))
        return torch.autograd.grad(out, [t for t in tensors if t.requires_grad], torch.ones_like(out))

    kinds = [a for a in arguments if isinstance(a, torch.dtype)]
    operands = [torch.ones(shape, dtype=d, requires_grad=d.is_floating_point) for d in kinds]
    try:
        traced = make_fx(both)(*operands)
    except _FAILURES as error:
        return f"what cannot be traced ({type(error).__name__}: {error})"
    for node in traced.graph.nodes:
        if node.op == "call_function" and str(node.target) not in known:
            return str(node.target)
        if node.op == "get_attr" and getattr(traced, str(node.target)).numel() > 1:
            return "a tensor of its own"
    return ""


def resolve_function(path: str) -> Any:
    """The class a `fxpar.function` node calls.

    Raises:
        InputError: there is no such autograd function.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if not (isinstance(found, type) and issubclass(found, torch.autograd.Function)):
        raise InputError(
            "there is no such autograd function", where=path, remedy="define it at the top level of a module"
        )
    return found


def _function_labels(call: Call) -> Labelling | Refusal:
    """Element-wise where tracing its forward and backward shows nothing else."""
    in_lists = set(call.names) & set(call.arguments)
    if in_lists or any(kind.shape != call.outputs[0].shape for kind in call.operands):
        return Refusal("a function of differently shaped operands, or of lists, has no rule for shards")
    path = str(call.get("path"))
    given = {k: v for k, v in call.arguments.items() if k != "path"}
    given.update(zip(call.names, (kind.dtype for kind in call.operands), strict=True))
    arguments = tuple(given[name] for name in sorted(given, key=int))
    try:
        other = _impurity(path, arguments, len(call.outputs[0].shape))
    except TypeError:  # a constant that cannot be hashed
        other = "a list as a constant"
    if other:
        return Refusal(f"{path} contains {other}, so it is not known to be element-wise")
    return pointwise_labels(call)


def _function_check(call: Call, placements: Sequence[Placement]) -> Refusal | None:
    if any(p.kind == "P" for p in placements):
        return Refusal("the author's function is not known to be linear: reduce the partial (P) value first")
    return None


def composite_rules() -> dict[str, Rule]:
    """Rules by text name."""
    return {
        # With the same bits on all ranks a dropped sum is the sum of what is dropped of the summands.
        "fxpar.dropout": _indexed(dropout_labels, own_bits, (("x",),)),
        "fxpar.attention": _indexed(attention_labels, own_bits_of_probabilities, (("value",),)),
        "fxpar.function": Rule(_function_labels, check=_function_check),
    }
