"""Shapes: every operation, run on shapes alone, gives the type that its note claims.

Enters: a program, global or localised. Leaves: nothing, or `CheckFailed` that names the node and both shapes.

The program runs on meta tensors at one choice of sizes that is not the example's, so that a size baked into a literal
shows. In a localised program each rank's shape must be the global one with the layout applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fxpar.errors import CheckFailed
from fxpar.layout import Layout, local_shape
from fxpar.operators import COERCION_OF, OPERATORS
from fxpar.program import Program, ScalarType, TensorType, note, operands, output_layouts, output_types
from fxpar.rules.inference import describe
from fxpar.symbols import evaluate


def check_shapes(program: Program) -> None:
    """Runs the program on shapes and compares with the notes.

    Raises:
        CheckFailed: an operation cannot run, or gives another element type or shape than its note.
    """
    sizes = {s.name: 2 * s.example for s in program.symbols}
    values: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "output" or note(node).type is None:  # the return and asserts
            continue
        wanted = _expected(program, node, sizes)
        if node.op == "placeholder" or _is_ours(node):
            values[node] = wanted[0]
            if node.target in COERCION_OF:
                _same_type(node)
            continue
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        target: Any = node.target
        if _makes_tensors(node) or "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        try:
            values[node] = target(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise CheckFailed(f"cannot run on a rank's shapes: {reason}", where=describe(node)) from None
        _compare(node, values[node], wanted, sizes)


def _is_ours(node: fx.Node) -> bool:
    return OPERATORS.get(getattr(node.target, "__name__", "")) is node.target


def _makes_tensors(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or operands(node):
        return False
    return any(a.name == "device" for a in target._schema.arguments)


def _expected(program: Program, node: fx.Node, sizes: Mapping[str, int]) -> list[Tensor]:
    layouts = output_layouts(node) if "local" in program.properties else ()
    found = []
    for i, kind in enumerate(output_types(node)):
        layout = layouts[i] if layouts else Layout()
        try:
            shape = [evaluate(size, sizes) for size in local_shape(kind.shape, layout, program.axes)]
        except ValueError as error:
            raise CheckFailed(f"{layout} does not fit {kind}: {error}", where=describe(node)) from None
        found.append(torch.empty(shape, dtype=kind.dtype, device="meta"))
    return found


def _same_type(node: fx.Node) -> None:
    before, after = output_types(operands(node)[0])[0], output_types(node)[0]
    if before != after:
        raise CheckFailed(f"a coercion of {before} cannot give {after}", where=describe(node))


def _compare(node: fx.Node, value: Any, wanted: list[Tensor], sizes: Mapping[str, int]) -> None:
    kind = note(node).type
    if isinstance(kind, ScalarType):
        expected = evaluate(kind.value, sizes)
        if value != expected:
            raise CheckFailed(f"is {value} where the note's {kind.value} is {expected}", where=describe(node))
        return
    found = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(found) != len(wanted) or isinstance(kind, TensorType) and isinstance(value, (tuple, list)):
        raise CheckFailed(f"gives {len(found)} tensors where the note has {len(wanted)}", where=describe(node))
    for mine, other in zip(found, wanted, strict=True):
        if mine.dtype != other.dtype or mine.shape != other.shape:
            raise CheckFailed(
                f"gives {list(mine.shape)} of {mine.dtype} where the note and its layout give "
                f"{list(other.shape)} of {other.dtype}",
                where=describe(node),
            )
