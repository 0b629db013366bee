"""Derivatives: what stands on a gradient's way has one.

Enters: a program and which values carry a gradient. Leaves: nothing, or `CheckFailed` that names the operation. PyTorch
says so in the backward alone, hours into a compilation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fxpar.errors import CheckFailed
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.program.grad_flow import reached
from fxpar.program.program import Program, ScalarType, TensorType, describe, note, output_types
from fxpar.signatures.check_cache import Facts

_MISSING = re.compile(r"(the )?derivative for \S+ is not implemented")
# Operators that have one, with the types of their operands: an operator does not lose its derivative.
_known: set[Any] = set()
# What else shapes may not fit, other checks say.
_FAILURES = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError, ArithmeticError)


def check_derivatives(program: Program, facts: Facts) -> None:
    """Differentiates each operator of torch once in a process, on shapes, as a program uses it first.

    Raises:
        CheckFailed: PyTorch has no derivative of it.
    """
    sizes, flags = {s.name: s.example for s in program.all_symbols}, facts.flags
    differentiated, sound = reached(program, flags), facts.known("derivatives")
    for node in program.graph.nodes:
        if node not in differentiated or not isinstance(node.target, torch._ops.OpOverload):
            continue
        operand_flags = tuple([flags[operand] for operand in facts.operands[node]])
        if (facts.numbers[node], operand_flags) in sound:
            continue
        kinds = tuple(kind.dtype for operand in facts.operands[node] for kind in output_types(operand))
        key = node.target, kinds, operand_flags
        if key not in _known and _is_differentiated(node, flags, sizes):
            _known.add(key)
        if key in _known:
            sound[facts.numbers[node], operand_flags] = True


def _is_differentiated(node: fx.Node, flags: Mapping[fx.Node, tuple[bool, ...]], sizes: Mapping[str, int]) -> bool:
    """Whether PyTorch came to the end of it: of operands that do not fit one another it says nothing.

    Raises:
        CheckFailed: there is no derivative.
    """
    tracked: list[Tensor] = []

    def value(operand: fx.Node) -> Any:
        kind = note(operand).type
        if isinstance(kind, ScalarType):
            return evaluate(kind.value, sizes)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        tensors = []
        for item, flag in zip(kinds, flags[operand], strict=True):
            assert isinstance(item, TensorType)
            shape = [evaluate(size, sizes) for size in item.shape]
            tensors.append(torch.empty(shape, dtype=item.dtype, device="meta", requires_grad=flag))
            tracked.extend(tensors[-1:] if flag else [])
        return tensors if isinstance(kind, tuple) else tensors[0]

    try:
        args, kwargs = map_arg((node.args, node.kwargs), value)
        with torch.enable_grad():
            outputs = node.target(*args, **kwargs)  # type: ignore[operator]
        made_of_it = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        results = [r for r in made_of_it if isinstance(r, Tensor) and r.requires_grad]
        torch.autograd.grad(results, tracked, [torch.empty_like(r) for r in results], allow_unused=True)
    except _FAILURES as error:
        if missing := _MISSING.search(str(error)):
            raise CheckFailed(missing[0], where=describe(node), remedy="detach its operand, or use another") from None
        return False
    return True
