"""Calls of the author's autograd functions.

Enters: nothing. Leaves: the record of `fxpar.function`, whose calls are kept whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import fx

from fxpar.layout.layout import Placement
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import LoweredCall, OnShapes, Operator
from fxpar.signatures.autograd_functions import impurity, resolve_function
from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import pointwise_labels, pointwise_rules
from fxpar.signatures.rule import Labelling, Refusal, Rule


def why_whole(call: OpCall) -> str:
    """Why a function takes whole operands; empty where it is element-wise, as a trace of forward and backward shows."""
    path = call.get("path")
    in_lists = set(call.names) & set(call.arguments)
    if in_lists or any(kind.shape != call.outputs[0].shape for kind in (*call.operands, *call.outputs)):
        return f"{path} has differently shaped operands, or lists, so that no rule says how it treats shards"
    other = impurity(call, pointwise_rules().keys())
    return f"{path} {other}, so it is not known to be element-wise" if other else ""


def _labels(call: OpCall) -> Labelling | Refusal:
    """Element-wise where that is proved."""
    reason = why_whole(call)
    return Refusal(reason) if reason else pointwise_labels(call)


def _check(call: OpCall, placements: Sequence[Placement]) -> Refusal | None:
    if any(p.kind == "P" for p in placements):
        return Refusal("the author's function is not known to be linear: reduce the partial (P) value first")
    return None


def _uncounted(call: OpCall) -> str:
    """An element-wise function multiplies no matrices; another may."""
    return str(call.get("path")) if isinstance(_labels(call), Refusal) else ""


def _shape(call: OnShapes) -> Any:
    return resolve_function(str(call.kwargs["path"])).apply(*call.args)


def _lower(node: fx.Node, rank: OnRank) -> LoweredCall:
    path = str(node.kwargs["path"])
    apply = resolve_function(path).apply

    def call(*args: Any) -> Any:
        return apply(*args)

    # FX writes calls by name: each function needs one of its own.
    call.__name__ = call.__qualname__ = path.replace(".", "_")
    return LoweredCall(call, node.args)


@partial(Operator, rule=Rule(_labels, check=_check), shape=_shape, lower=_lower, uncounted=_uncounted, whole=why_whole)
def function(*args: Any, path: str) -> Any:
    """A call of the user's `torch.autograd.Function` at `path`, kept whole so that its backward is the author's."""
