"""What a check may spend on one operation: a text must not be able to exhaust time or memory.

Enters: a call on shapes and numbers. Leaves: nothing, or `ValueError` with the reason.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.program.program import output_types

# Numbers of a program are sizes and what is computed from them: they fit 64 bits.
_BITS = 63
_POWERS = (operator.pow, operator.lshift, math.pow, math.ldexp)
_FEW = 1024


def check_cost(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses numbers beyond 64 bits, and operations that give many more tensors than the note says.

    Raises:
        ValueError: says which.
    """
    for number in _numbers((args, kwargs)):
        if number.bit_length() > _BITS + 1:
            raise ValueError(f"a number of {number.bit_length()} bits is no size")
    if node.target in _POWERS and any(abs(number) > _BITS for number in _numbers(args[1:])):
        raise ValueError("the power is no size")
    if isinstance(node.target, torch._ops.OpOverload) and _gives_list(node.target):
        noted = len(output_types(node))
        if _parts(node.target, args, kwargs) > noted + _FEW:
            raise ValueError(f"gives many more tensors than the {noted} of the note")


def _gives_list(target: torch._ops.OpOverload) -> bool:
    return any("List[Tensor]" in str(item.type) for item in target._schema.returns)


def _parts(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many tensors an operation makes of one at most; 0 for those of lists."""
    schema = target._schema.arguments
    arguments = {a.name: a.default_value for a in schema if a.has_default_value()}
    arguments |= {**dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
    source, dim = arguments.get("self"), arguments.get("dim", 0)
    if not isinstance(source, Tensor) or not source.dim() or not isinstance(dim, int):
        return 0
    size = source.shape[dim % source.dim()]
    for name in ("chunks", "sections"):
        count = arguments.get(name)
        if isinstance(count, int):
            return min(count, size)
    if any(isinstance(value, (list, tuple)) for value in arguments.values()):
        return 0  # as many as the list has
    step = arguments.get("split_size", 1)
    return -(-size // step) if isinstance(step, int) and step > 0 else size


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)
