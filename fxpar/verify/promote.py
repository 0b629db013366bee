"""A program in double precision.

Enters: a program. Leaves: the same program with every floating type, cast and literal type float64: losses, norms and
rotary tables are float32 even in a model that was cast to double, and would hide errors below 1e-7.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx.node import map_aggregate

from fxpar.program.program import Note, Parameter, Program, TensorType, note, set_note
from fxpar.program.regions import inlined

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
    """The program in float64; integer and boolean values keep their types."""
    result = inlined(program.copy())
    factories = {"arange", "full", "zeros", "ones", "new_zeros", "new_ones", "new_full", "rand", "randn", "linspace"}
    for node in result.graph.nodes:
        if node.op == "output":
            continue
        kept: Note = note(node)
        set_note(node, Note(**{**vars(kept), "type": _double(kept.type)}))
        node.args = map_aggregate(node.args, _wide)
        node.kwargs = map_aggregate(node.kwargs, _wide)
        if isinstance(node.target, torch._ops.OpOverload):
            name = node.target._schema.name.removeprefix("aten::")
            dtype = _WIDE.get(kept.type.dtype) if isinstance(kept.type, TensorType) else None
            if name in factories and dtype is not None and "dtype" in {a.name for a in node.target._schema.arguments}:
                node.kwargs = {**node.kwargs, "dtype": dtype}
    result.graph_module.recompile()
    return result.with_(
        parameters=tuple(Parameter(**{**vars(p), "type": _double(p.type)}) for p in result.parameters),
        inputs=tuple(replace(i, type=_double(i.type)) for i in result.inputs),
        constants={name: wide(value) for name, value in result.constants.items()},
    )


def _wide(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def wide(value: torch.Tensor) -> torch.Tensor:
    """A floating tensor in float64, others as they are."""
    return value.to(_WIDE.get(value.dtype, value.dtype))
