"""Defaults of operators that depend on the element type, as numbers.

PyTorch takes a missing `eps` or `posinf` from the type of the operand, each time it runs. A program says the number:
in float64 it would be another one, and the reference another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fxpar.ir.program import tensor_type

aten = torch.ops.aten


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which kernels compute: half precision in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# By operator: names of arguments that may be missing, and the number that PyTorch takes for an operand of a type.
_DEFAULTS: Mapping[Any, Mapping[str, Callable[[torch.dtype], float]]] = {
    aten.rms_norm.default: {"eps": lambda dtype: torch.finfo(_computed_in(dtype)).eps},
    aten._fused_rms_norm.default: {"eps": lambda dtype: torch.finfo(_computed_in(dtype)).eps},
    aten.nan_to_num.default: {
        "nan": lambda dtype: 0.0,
        "posinf": lambda dtype: torch.finfo(dtype).max,
        "neginf": lambda dtype: torch.finfo(dtype).min,
    },
}


def write_defaults(nodes: Iterable[fx.Node]) -> None:
    """Writes the number wherever an operator would take it from the type of its operand.

    Args:
        nodes: with notes; calls of integers are left as they are.
    """
    for node in nodes:
        defaults = _DEFAULTS.get(node.target, {}) if node.op == "call_function" else {}
        if not defaults:
            continue
        dtype = tensor_type(node.args[0]).dtype  # type: ignore[arg-type]
        if not dtype.is_floating_point and not dtype.is_complex:
            continue
        places = {argument.name: i for i, argument in enumerate(node.target._schema.arguments)}  # type: ignore[union-attr]
        for name, number in defaults.items():
            place = places[name]
            if place < len(node.args):
                if node.args[place] is None:
                    node.update_arg(place, number(dtype))
            elif node.kwargs.get(name) is None:
                node.update_kwarg(name, number(dtype))
