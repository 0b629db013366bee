"""Types: layouts recomputed from parameters and inputs alone, compared with the notes.

Enters: a program with layouts chosen (`check_choice`) or coercions in place (`check_types`). Leaves: nothing, or
`LayoutError` / `CheckFailed` that names the node, its module and line, the layouts found, and the one coercion that
would make it legal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxpar.errors import CheckFailed, LayoutError
from fxpar.ir.operators import as_parameter, canonical_placement, pending
from fxpar.ir.program import Program, describe, note, operands, output_layouts, output_types, tensor_type
from fxpar.ir.properties import Property
from fxpar.ir.stages import is_sent, received_name
from fxpar.ir.step import gradient_name, input_gradient_name, is_buffer, is_forward, is_gradient, output_of
from fxpar.layout.layout import I, Layout, Placement, R, shard
from fxpar.layout.nesting import misfit
from fxpar.mesh.axes import Cuts
from fxpar.ops.collectives import coercion, dual_layout
from fxpar.ops.small_operators import size
from fxpar.rules import bind_arguments
from fxpar.rules.inference import Context, context_of, infer_node, remedy_of, shown
from fxpar.rules.table import Answers
from fxpar.sharding.batch_sharding import declared
from fxpar.signatures.check_cache import Facts, facts_of


def check_types(program: Program, facts: Facts | None = None) -> None:
    """Checks that every operation accepts its operands' layouts, and what follows from them is what the notes say.

    Args:
        facts: of the program, where they are known.

    Raises:
        LayoutError: an operation does not accept its operands, or a parameter's shard does not fit.
        CheckFailed: a note contradicts what follows, the loss is not invariant, or an output is partial.
    """
    axes = program.axes
    if not axes:
        return
    facts = facts or facts_of(program)
    flags, row_wise, answers = facts.flags, declared(program), Answers()
    is_local, composite = Property.LOCAL in program.properties, _open(program)
    # Of nodes of which this was told the same, by what their operands are: the layouts, which are those of the notes.
    sound = facts.known("types", is_local, composite, tuple(row_wise.globs), tuple(row_wise.rows.items()))
    layouts: dict[fx.Node, tuple[Layout, ...]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            layouts[node] = (_placeholder(program, node, flags[node][0]),)
        elif node.op == "call_function" and output_types(node):
            key = (facts.numbers[node], flags[node], *[(layouts[o], flags[o]) for o in facts.operands[node]])
            if key in sound:
                layouts[node] = sound[key]
                continue
            context = context_of(program, node, layouts, flags, row_wise, answers, local=is_local, composite=composite)
            layouts[node] = infer_node(node, context)
            _compare(node, layouts[node], context)
            sound[key] = layouts[node]
        elif node.op == "call_function":
            _check_number(node, layouts)
    _check_outputs(program, layouts, flags)


def _open(program: Program) -> bool:
    """Returns whether `vocab_parallel` has yet to run."""
    return program.properties.isdisjoint({Property.VOCABULARY, Property.LOCAL})


def check_choice(program: Program, facts: Facts | None = None) -> None:
    """Checks before coercions that what each operation needs gives its layouts, and can be had by coercions.

    Args:
        facts: of the program, where they are known.

    Raises:
        LayoutError: an operation does not accept what it needs, or nothing converts an operand to that.
        CheckFailed: a note contradicts what follows.
    """
    if not program.axes:
        return
    facts = facts or facts_of(program)
    flags, row_wise, answers = facts.flags, declared(program), Answers()
    sound = facts.known("choice", tuple(row_wise.globs), tuple(row_wise.rows.items()))
    for node in program.graph.nodes:
        if node.op == "placeholder":
            _placeholder(program, node, flags[node][0])
        elif node.op == "call_function" and output_types(node):
            inputs = facts.operands[node]
            key = (facts.numbers[node], flags[node], *[flags[o] for o in inputs])
            if key in sound:
                continue
            sources = [layout for o in inputs for layout in output_layouts(o)]
            carries = [flag for o in inputs for flag in flags[o]]
            needs = list(note(node).needs) or sources
            if len(needs) != len(sources):
                raise CheckFailed(f"has {len(needs)} needs for {len(sources)} operands", where=describe(node))
            names = [o.name for o in inputs for _ in flags[o]]
            for name, source, target, flag in zip(names, sources, needs, carries, strict=True):
                _convertible(node, name, source, target, flag)
            context = Context(
                needs, carries, flags[node], program.axes, composite=True, row_wise=row_wise, answers=answers
            )
            _compare(node, infer_node(node, context), context)
            sound[key] = True
        elif node.op == "call_function":
            _check_number(node, {o: output_layouts(o) for o in operands(node)})


def _check_number(node: fx.Node, layouts: Mapping[fx.Node, tuple[Layout, ...]]) -> None:
    """Checks that a number that is read off a tensor is the same on every rank, and on one device.

    Raises:
        LayoutError: it is the size of a dimension that is cut, or made of elements that differ by rank.
    """
    if node.target is size:
        return  # it speaks of the whole
    for operand in operands(node):
        for layout, kind in zip(layouts[operand], output_types(operand), strict=True):
            for axis, placement in layout:
                if placement.kind in "IR":
                    continue
                if node.target is torch.ops.aten.sym_size.int:
                    dim: Any = bind_arguments(node).get("dim")
                    if not isinstance(dim, int) or not -len(kind.shape) <= dim < len(kind.shape):
                        raise LayoutError(f"reads the size of dimension {dim} of {kind}", where=describe(node))
                    if not placement.is_shard or dim % len(kind.shape) != placement.dim:
                        continue
                raise LayoutError(
                    f"on axis {axis}: reads a number off %{operand.name}, which is {placement}: ranks would read "
                    "another than one device",
                    where=describe(node),
                    remedy="read it off an input or another value that is whole",
                )


def _convertible(node: fx.Node, name: str, source: Layout, target: Layout, carries: bool) -> None:
    for axis, needed in target:
        actual = source.on(axis)
        is_free = actual == needed or (not carries and {actual.kind, needed.kind} <= {"I", "R"})
        if not is_free and coercion(actual, needed) is None:
            raise LayoutError(f"on axis {axis}: needs %{name} as {needed}, which is {actual}", where=describe(node))


def _placeholder(program: Program, node: fx.Node, carries: bool) -> Layout:
    """Checks that parameters are I or shards without copies, and what carries no gradient R or a shard."""
    layout, kind, whole = output_layouts(node)[0], tensor_type(node), canonical_placement(I, carries)
    if not is_forward(node):
        return _tangent(program, node, layout)
    wrong = misfit(layout, kind.shape, program.axes)
    if not wrong and node.name in {entry.node for entry in program.inputs if received_name(entry.path)}:
        return layout  # what the stage before has sent, which `check_neighbours` compares
    for axis, placement in layout:
        if not placement.is_shard and placement != whole:
            raise LayoutError(
                f"on axis {axis}: a {'parameter' if carries else 'value without gradient'} cannot be {placement}",
                where=describe(node),
                remedy=_start(node, axis, whole, placement),
            )
        if placement.is_shard and program.parameter(node) is None and axis not in program.plan.axes_for(Cuts.BATCH):
            raise LayoutError(
                f"on axis {axis}: an input cannot be {placement}: every rank gets it whole",
                where=describe(node),
                remedy=_start(node, axis, R, placement),
            )
        if axis == wrong:
            ranks = f"{program.axes[axis]} ranks"
            raise LayoutError(f"on axis {axis}: {placement} does not fit {kind} over {ranks}", where=describe(node))
        if not placement.in_rank_order:
            raise LayoutError(
                f"on axis {axis}: {placement} has blocks that are not in the order of the ranks, as which nothing is "
                "placed on them",
                where=describe(node),
                remedy=_start(node, axis, whole, shard(placement.dim, kind.shape[placement.dim])),
            )
        rest = as_parameter(placement) if carries else pending(placement)
        if placement != rest:
            reason = "has blocks that several ranks hold, whose gradients nothing would sum"
            raise LayoutError(
                f"on axis {axis}: {placement} {reason if carries else 'carries no gradient that could be reduced'}",
                where=describe(node),
                remedy=_start(node, axis, rest, placement),
            )
    return layout


def _tangent(program: Program, node: fx.Node, layout: Layout) -> Layout:
    """Checks that the gradient of an output is held as the dual of that output."""
    path = next(i.path for i in program.inputs if i.node == node.name)
    output = program.output_nodes().get(output_of(path))
    if output is None:
        raise CheckFailed(f"is the gradient of no output ({path})", where=describe(node), remedy="name an output")
    dual = dual_layout(output_layouts(output)[0])
    if layout != dual:
        raise CheckFailed(
            f"is {layout}, and the gradient of {describe(output)} is {dual}",
            where=describe(node),
            remedy=f"write {dual}",
        )
    return layout


def _check_gradient(name: str, node: fx.Node, layout: Layout, owner: fx.Node | None) -> None:
    """Checks that the gradient of a parameter or an input is its dual, which an optimizer takes as it is."""
    if owner is None:
        raise CheckFailed(
            "is the gradient of nothing", where=f"output {name}", remedy="name a parameter of the program"
        )
    dual = dual_layout(output_layouts(owner)[0])
    if layout != dual:
        raise CheckFailed(
            f"is {layout}, and the gradient of %{owner.name} is {dual}", where=f"output {name} = {describe(node)}"
        )


def _start(node: fx.Node, axis: str, whole: Placement, placement: Placement) -> str:
    row = coercion(whole, placement)
    behind = f" and insert fxpar.{row.operator.__name__}[{axis}](%{node.name})" if row else ""
    return f"write {axis}:{whole}{behind}"


def _compare(node: fx.Node, layouts: tuple[Layout, ...], context: Context) -> None:
    for noted, layout in zip(output_layouts(node), layouts, strict=True):
        for axis in context.axes:
            claim, mine = noted.on(axis), layout.on(axis)
            if claim == mine:
                continue
            raise CheckFailed(
                f"on axis {axis}: the note says {claim}, its operands give {mine} ({shown(node, context.found(axis))})",
                where=describe(node),
                remedy=_conversion(node, context, axis, mine, claim),
            )


def _conversion(node: fx.Node, context: Context, axis: str, mine: Placement, claim: Placement) -> str:
    """Returns the coercion of an operand, or of a sum that is made here, that gives what the note says."""
    row = coercion(mine, claim)
    behind = f"insert fxpar.{row.operator.__name__}[{axis}](%{node.name}) : {axis}:{mine}→{claim}" if row else ""
    made_here = mine.kind == "P" and not any(placement.kind == "P" for placement in context.found(axis))
    before = "" if made_here else remedy_of(node, context, axis, exactly=True)
    return before or ("" if claim.kind == "P" else behind)


def _check_outputs(
    program: Program, layouts: dict[fx.Node, tuple[Layout, ...]], flags: dict[fx.Node, tuple[bool, ...]]
) -> None:
    """Checks that outputs are invariant (R without gradient) or shards: callers differentiate them as if on one rank.

    New values of buffers are whole, as the buffers are.
    """
    if program.loss and any(p.trainable for p in program.parameters):
        node = program.output_nodes()[program.loss]
        if not flags[node][0]:
            raise CheckFailed("carries no gradient to any parameter", where=f"loss {program.loss} = {describe(node)}")
    owners = {gradient_name(p.fqn): p.node for p in reversed(program.parameters)}
    owners = {**{input_gradient_name(i.path): i.node for i in program.inputs if i.carries}, **owners}
    placeholders = program.placeholders()
    for name, node in program.output_nodes().items():
        if is_gradient(name):
            _check_gradient(name, node, layouts[node][0], placeholders[owners[name]] if name in owners else None)
            continue
        if is_sent(name):  # the next stage takes it as it is, and its gradient is the dual
            continue
        for axis, placement in layouts[node][0]:
            whole = canonical_placement(I, flags[node][0])
            if placement.is_shared:
                raise CheckFailed(
                    f"on axis {axis}: {placement} has elements that several ranks hold: nothing would sum its gradient",
                    where=f"output {name} = {describe(node)}",
                    remedy="return the segments as outputs of their own",
                )
            if placement == whole or (placement.is_shard and name != program.loss and not is_buffer(name)):
                continue
            row = coercion(placement, whole)
            why = "every rank holds the buffer" if is_buffer(name) else "each rank would differentiate something else"
            raise CheckFailed(
                f"on axis {axis}: is {placement} and must be {whole}: {why}",
                where=f"{'loss' if name == program.loss else 'output'} {name} = {describe(node)}",
                remedy=f"insert fxpar.{row.operator.__name__}[{axis}](%{node.name})" if row else "",
            )
