"""The heads of placeholders in a program's text: inputs, and what the program owns.

Enters: a line at the bracket behind the kind. Leaves: what the head says, or a `TextError` without a place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fxpar.layout.symbolic_sizes import product
from fxpar.program.program import TensorType
from fxpar.text.scanning import Scanner, fail, parse_value


@dataclass(frozen=True)
class Owned:
    """The head of a placeholder: kind and name of an input, parameter, buffer or constant, and what it says of it."""

    kind: str
    path: str
    frozen: bool
    tied: tuple[str, ...]
    values: list[Any] | None
    carries: bool
    left_out: bool


def read_owned(scanner: Scanner, kind: str) -> Owned:
    """The head behind its opening bracket.

    Args:
        kind: input, parameter, buffer or constant.
    """
    path, frozen, carries, left_out = scanner.string(), False, False, False
    tied: list[str] = []
    values: list[Any] | None = None
    scanner.expect("]")
    if scanner.take("("):
        for _ in scanner.items(")"):
            if scanner.take("tied="):
                tied.append(scanner.string())
            elif scanner.take("frozen"):
                frozen = True
            elif scanner.take("gradient"):
                carries = True
            elif scanner.take("left_out"):
                left_out = True
            else:
                values = parse_value(scanner, {})
    if (frozen and kind != "parameter") or (tied and kind == "input"):
        fail(f"the {kind} {path} is frozen or tied", "mark only parameters as frozen, and tie no input")
    if left_out and (kind != "parameter" or frozen):
        fail(f"the {kind} {path} is left out of the gradients", "mark trainable parameters alone")
    if carries and kind != "input":
        fail(f"the {kind} {path} is marked as having a gradient", "mark inputs alone: parameters have one")
    if (values is not None) != (kind == "constant") or not isinstance(values, list | None):
        fail(f"the {kind} {path} has no list of values or has one too many", 'write constant["name"]([1, 2])')
    return Owned(kind, path, frozen, tuple(tied), values, carries, left_out)


def constant(values: list[Any], kind: TensorType) -> torch.Tensor:
    """The tensor of a constant from its flat list."""
    shape = [size for size in kind.shape if isinstance(size, int)]
    if len(shape) != len(kind.shape) or product(shape) != len(values):
        fail(f"{len(values)} values do not fill {kind}", "write one value for each element")
    allowed = (bool,) if kind.dtype is torch.bool else (int, float) if kind.is_float else (int,)
    if kind.dtype.is_complex or not all(type(value) in allowed for value in values):
        fail(f"the values are not of the type {kind}", f"write {' or '.join(a.__name__ for a in allowed)} values")
    if not kind.is_float and kind.dtype is not torch.bool:
        limits = torch.iinfo(kind.dtype)
        if not all(limits.min <= value <= limits.max for value in values):
            fail(f"a value does not fit into {kind}", f"stay within [{limits.min}, {limits.max}]")
    try:
        return torch.tensor(values, dtype=kind.dtype).reshape(shape)
    except (OverflowError, RuntimeError):
        fail(f"the values do not fit into {kind}", "write smaller numbers or sizes")
