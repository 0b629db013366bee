"""Types: layouts recomputed from parameters and inputs alone, compared with the notes.

Enters: a program with coercions in place. Leaves: nothing, or `LayoutError` / `CheckFailed` that names the node, its
module and line, the layouts found, and the one coercion that would make it legal.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpar.errors import CheckFailed, LayoutError
from fxpar.gradients import carried
from fxpar.layout import I, Layout, R, fits
from fxpar.program import Program, note, operands, output_layouts, output_types, tensor_type
from fxpar.rules.inference import describe, infer_node

_RANDOM = frozenset({torch.ops.aten.dropout.default, torch.ops.aten.native_dropout.default})


def check_types(program: Program) -> None:
    """Every operation accepts its operands' layouts, and what follows from them is what the notes say.

    Raises:
        LayoutError: an operation does not accept its operands, or a parameter's shard does not fit.
        CheckFailed: a note contradicts what follows, the loss is not invariant, or an output is partial.
    """
    axes = program.axes
    if not axes:
        return
    flags = carried(program)
    found: dict[fx.Node, tuple[Layout, ...]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            found[node] = (_placeholder(program, node, flags[node][0]),)
        elif node.op == "call_function" and output_types(node):
            inputs = operands(node)
            layouts = [layout for o in inputs for layout in found[o]]
            carries = [flag for o in inputs for flag in flags[o]]
            found[node] = infer_node(node, layouts, carries, flags[node], axes)
            _compare(node, found[node])
            if "rng" in program.properties and node.target in _RANDOM and note(node).random:
                raise CheckFailed("draws bits that depend on the rank's generator", where=describe(node))
    _check_outputs(program, found)


def _placeholder(program: Program, node: fx.Node, carries: bool) -> Layout:
    layouts = output_layouts(node)
    if not layouts:
        raise CheckFailed("has no layout", where=describe(node))
    kind = tensor_type(node)
    for axis, n in program.axes.items():
        placement = layouts[0].on(axis)
        if placement.kind in ("P", "V") or (placement == R and carries) or (placement == I and not carries):
            raise LayoutError(f"a parameter or input cannot be {placement} on axis {axis}", where=describe(node))
        if placement.is_shard and program.parameter(node) is None:
            raise LayoutError(f"an input cannot be {placement} on axis {axis}: every rank gets it whole", where=describe(node))
        if not fits(placement, kind.shape, n):
            raise LayoutError(f"{placement} does not fit {kind} over {n} ranks of {axis}", where=describe(node))
    return layouts[0]


def _compare(node: fx.Node, found: tuple[Layout, ...]) -> None:
    noted = output_layouts(node)
    if len(noted) != len(found):
        raise CheckFailed("the note lacks layouts", where=describe(node))
    for wanted, layout in zip(noted, found, strict=True):
        if dict(wanted) != dict(layout):
            raise CheckFailed(f"the note says {wanted}, its operands give {layout}", where=describe(node))


def _check_outputs(program: Program, found: dict[fx.Node, tuple[Layout, ...]]) -> None:
    for name, node in program.output_nodes().items():
        for axis, placement in found[node][0]:
            if name == program.loss and placement != I:
                raise CheckFailed(
                    f"is {placement} on axis {axis} and must be I: each rank would differentiate something else",
                    where=f"loss {name}",
                    remedy="coerce it with fxpar.reduce_from (P) or fxpar.settle (R)",
                )
            if placement.kind in ("P", "V"):
                raise CheckFailed(f"is {placement} on axis {axis}: reduce it first", where=f"output {name}")
