"""Layouts of a node from the layouts of its operands, on every axis.

Enters: a node with notes, operand layouts and gradient flags. Leaves: the layouts of its outputs, or a `LayoutError`
that names the node, its module and source line, what was found and what would make it legal.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import NoReturn

from torch import fx

from fxpar.errors import LayoutError
from fxpar.layout import I, Layout, Placement, R, V, fits
from fxpar.operators import COERCION_OF, COERCIONS, axis_index
from fxpar.program import note, operands, output_layouts, output_types
from fxpar.rules.engine import Refusal, call_of, infer
from fxpar.rules.table import rule_of


def describe(node: fx.Node) -> str:
    """`%name (fqn, file.py:41)`."""
    kept = note(node)
    place = ", ".join(part for part in (kept.fqn, kept.source) if part)
    return f"%{node.name} ({place})" if place else f"%{node.name}"


def _fail(node: fx.Node, axis: str, reason: str, remedy: str = "") -> NoReturn:
    raise LayoutError(f"on axis {axis}: {reason}", where=describe(node), remedy=remedy)


def resting(placement: Placement, carries: bool) -> Placement:
    """A value without gradient is written R, whether a rule called it I or R."""
    return R if placement == I and not carries else placement


def coerced(node: fx.Node, source: Placement, target: Placement, axis: str, n: int, carries: bool) -> Placement:
    """Checks a coercion node; its target placement is the one it was made for.

    Raises:
        LayoutError: the operator does not convert between these placements, or a shard does not fit.
    """
    row = COERCION_OF[node.target]  # type: ignore[index]
    if row.source in "IR" and source.kind in "IR" and not carries:
        source = Placement(row.source)
    if source.kind != row.source:
        wanted = COERCIONS.get((source.kind, row.target))
        remedy = f"use fxpar.{wanted.operator.__name__}" if wanted else f"{row.target} cannot be had from {source.kind}"
        _fail(node, axis, f"takes {row.source} and finds {source}", remedy)
    if row.target != target.kind and not (row.target in "IR" and target == R and not carries):
        _fail(node, axis, f"gives {row.target}, the note says {target}")
    if target.is_shard and not fits(target, output_types(node)[0].shape, n):
        _fail(node, axis, f"{target} does not fit {output_types(node)[0]} over {n} ranks")
    if row.source == row.target == "S" and source == target:
        _fail(node, axis, f"converts {source} to itself", "remove it")
    return target


def infer_node(
    node: fx.Node,
    layouts: Sequence[Layout],
    carries: Sequence[bool],
    outputs: Sequence[bool],
    axes: Mapping[str, int],
) -> tuple[Layout, ...]:
    """Layouts of the outputs of a call.

    Args:
        node: the call.
        layouts: one for each tensor operand (`operands(node)`; all outputs of an operand with several).
        carries: whether each of those carries a gradient.
        outputs: whether each output carries one.
        axes: sizes of the mesh axes.

    Raises:
        LayoutError: the operation does not accept the layouts on some axis.
    """
    result = [Layout() for _ in output_types(node)]
    for axis, n in axes.items():
        placements = [layout.on(axis) for layout in layouts]
        if node.target is operator.getitem:
            found: Sequence[Placement] = (placements[int(node.args[1])],)  # type: ignore[arg-type]
        elif node.target is axis_index:
            found = (V if node.kwargs["axis"] == axis else R,)
        elif node.target in COERCION_OF:
            found = placements
            if node.kwargs["axis"] == axis:
                target = output_layouts(node)[0].on(axis)
                found = (coerced(node, placements[0], target, axis, n, carries[0]),)
        else:
            inferred = infer(rule_of(node.target), call_of(node, n), placements, carries)
            if isinstance(inferred, Refusal):
                shown = ", ".join(f"%{o.name} is {p}" for o, p in zip(operands(node), placements, strict=False))
                _fail(node, axis, f"{inferred.reason} ({shown})")
            found = inferred
        for i, placement in enumerate(found):
            result[i] = result[i].with_(axis, resting(placement, outputs[i]))
    return tuple(result)
