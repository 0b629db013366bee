"""Loops over experts that a trace cannot hold: which they are, and what to do.

Enters: an error of a trace, or a node whose size depends on values. Leaves: whether rows are picked there for experts,
and an error that says so (`fxpar.program.picked`).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpar.capture.expert_modules import is_named_so
from fxpar.capture.places import place_of
from fxpar.program.picked import loop_of_experts

# `where(mask)`, and `mask.nonzero(as_tuple=True)`, which is the same.
FINDS, FINDS_TOO = torch.ops.aten.where.default, torch.ops.aten.nonzero_numpy.default
_TOPK = torch.ops.aten.topk.default


def choice_of(node: fx.Node) -> fx.Node | None:
    """The top-k of whose indices a value is made, and of nothing else but numbers: so experts find their rows."""
    pending, seen = [node], set[fx.Node]()
    while pending:
        source = pending.pop()
        if source.target is _TOPK:
            return source
        value = source.meta.get("val")
        if source in seen or (isinstance(value, Tensor) and value.is_floating_point()):
            continue
        seen.add(source)
        pending.extend(source.all_input_nodes)
    return None


def refuse_loop(error: BaseException, model: nn.Module, prefix: str) -> None:
    """Refuses a loop over experts that a trace has failed in.

    Args:
        error: of the trace.
        model: that was traced.
        prefix: what module paths begin with besides the author's names.

    Raises:
        CaptureError: the innermost module of the author's that it was raised in is one of experts.
    """
    if not isinstance(error, GuardOnDataDependentSymNode):
        return
    # By what their attributes are in: a trace may call a module by a proxy that shares them.
    paths = {id(vars(module)): (path, module) for path, module in model.named_modules()}
    entry, innermost = error.__traceback__, None
    while entry is not None:
        receiver = entry.tb_frame.f_locals.get("self")
        innermost = paths.get(id(vars(receiver)), innermost) if isinstance(receiver, nn.Module) else innermost
        entry = entry.tb_next
    if innermost is not None and is_named_so(innermost[1]):
        raise loop_of_experts(place_of(error), innermost[0].removeprefix(prefix)) from error
