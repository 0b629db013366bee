"""A program in double precision.

Enters: a program. Leaves: the same program with every floating type, cast and literal type float64: losses, norms and
rotary tables are float32 even in a model that was cast to double, and would hide errors below 1e-7.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fxpar.errors import CheckFailed
from fxpar.program.program import (
    Note,
    Parameter,
    Program,
    TensorType,
    describe,
    note,
    operands,
    output_types,
    set_note,
    tensor_type,
)
from fxpar.program.regions import inlined
from fxpar.signatures.defaults import write_defaults

_WIDE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}


def _double(kind: Any) -> Any:
    if isinstance(kind, TensorType) and kind.dtype in _WIDE:
        return TensorType(_WIDE[kind.dtype], kind.shape)
    if isinstance(kind, tuple):
        return tuple(_double(k) for k in kind)
    return kind


def promote(program: Program) -> Program:
    """Returns the program in float64; integer and boolean values keep their types.

    Numbers that torch would take from a type are those of the program's own types. Floating values that torch makes of
    integers alone (`ids / 7`), in its default type, are cast.

    Raises:
        CheckFailed: the program reads the bits of floating numbers, which are others in float64.
    """
    result = inlined(program.copy())
    write_defaults(result.graph.nodes)
    for node in result.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype):
        _check_bits(node)
    for node in list(result.graph.nodes):
        if node.op == "output":
            continue
        has_default_type = _has_default_type(node)
        noted: Note = note(node)
        set_note(node, Note(**{**vars(noted), "type": _double(noted.type)}))
        node.args = map_aggregate(node.args, _wide)
        node.kwargs = map_aggregate(node.kwargs, _wide)
        if has_default_type:
            _leave_default_type(result.graph, node)
    result.graph_module.recompile()
    return result.with_(
        parameters=tuple(Parameter(**{**vars(p), "type": _double(p.type)}) for p in result.parameters),
        inputs=tuple(replace(i, type=_double(i.type)) for i in result.inputs),
        constants={name: wide(value) for name, value in result.constants.items()},
    )


def _is_inexact(kind: Any) -> bool:
    return isinstance(kind, TensorType) and (kind.dtype.is_floating_point or kind.dtype.is_complex)


def _has_default_type(node: fx.Node) -> bool:
    """Returns whether the result has torch's default type, which neither an operand nor an argument says."""
    if not isinstance(node.target, torch._ops.OpOverload) or not _is_inexact(note(node).type):
        return False
    if any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values())):
        return False
    ignores_operands = node.target._schema.name in ("aten::linspace", "aten::logspace")
    return ignores_operands or not any(_is_inexact(kind) for x in operands(node) for kind in output_types(x))


def _leave_default_type(graph: fx.Graph, node: fx.Node) -> None:
    """Has a node, whose note is float64, give that type: by its argument, or cast behind it."""
    dtype = tensor_type(node).dtype
    target: Any = node.target
    if "dtype" in {argument.name for argument in target._schema.arguments}:
        node.update_kwarg("dtype", dtype)
        return
    with graph.inserting_after(node):
        cast = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
    set_note(cast, replace(note(node), random=0))
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


def _check_bits(node: fx.Node) -> None:
    if {tensor_type(node).dtype, tensor_type(node.args[0]).dtype} & _WIDE.keys():  # type: ignore[arg-type]
        raise CheckFailed(
            "reads the bits of floating numbers, which are others in float64",
            where=describe(node),
            remedy="check this program statically (--level static)",
        )


def _wide(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def wide(value: torch.Tensor) -> torch.Tensor:
    """A floating tensor in float64, others as they are."""
    return value.to(_WIDE.get(value.dtype, value.dtype))
