"""The arguments of a call over the whole, nodes in place of values: what `localize` rewrote is undone."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar.derivatives.traced_derivative import Number
from fxpar.errors import PassError
from fxpar.layout.symbolic_sizes import Size
from fxpar.program.program import Program, describe, operands, output_layouts, output_types
from fxpar.program.properties import Property
from fxpar.rules import Refusal, bind_arguments, call_of
from fxpar.rules.local import whole_call
from fxpar.signatures.sized import SIZED, name_of_sizes

aten = torch.ops.aten

_SPLITS = frozenset({aten.split_with_sizes.default, aten.split.sizes})

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def whole_call_of(program: Program, node: fx.Node) -> Arguments:
    """Arguments of a call over the whole.

    Raises:
        PassError: the bounds of a slice are those of no slice of the whole.
    """
    if Property.LOCAL not in program.properties:
        return node.args, dict(node.kwargs)
    target: Any = node.target
    if target in SIZED:
        at = SIZED[target]
        sizes = [_number(size) for size in output_types(node)[0].shape]
        kwargs = {name: value for name, value in node.kwargs.items() if name != name_of_sizes(target)}
        return (*node.args[:at], sizes, *node.args[at + 1 :]), kwargs
    if node.target in _SPLITS:
        source, dim = operands(node)[0], int(bind_arguments(node).get("dim", 0))
        return (source, [_number(kind.shape[dim]) for kind in output_types(node)], dim), {}
    if node.target is aten.slice.Tensor and output_layouts(node):
        call = whole_call(call_of(node, 1), output_layouts(operands(node)[0])[0], program.axes)
        if isinstance(call, Refusal):
            raise PassError(call.reason, where=describe(node))
        bounds = [call.get(name) for name in ("dim", "start", "end", "step")]
        return (operands(node)[0], *(_number(bound) for bound in bounds)), {}
    return node.args, dict(node.kwargs)


def _number(size: Size | None) -> Any:
    return size if size is None or isinstance(size, int) else Number(size)
