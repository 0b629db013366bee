"""insert_collectives: the conjugate coercions between producer and consumer layouts."""

from __future__ import annotations

from torch import fx

from fxpar.errors import PassError
from fxpar.layout.layout import I, Layout, Placement, R
from fxpar.manager import register_pass
from fxpar.ops.coercions import coercion
from fxpar.program.gradients import carried
from fxpar.program.program import (
    Note,
    Program,
    note,
    operands,
    output_layouts,
    output_node,
    set_note,
    update,
    with_operands,
)
from fxpar.rules.inference import resting


@register_pass("insert_collectives", requires={"layouts"}, provides={"collectives"})
def insert_collectives(program: Program) -> Program:
    """Inserts a coercion wherever a value is wanted in another layout than it has.

    Before::

        %down = aten.linear.default(%h, %w) : f32[b, s, 96] tp:P
        %out = aten.add.Tensor(%down, %bias) : f32[b, s, 96] tp:I {needs=tp:I ; tp:I}

    After::

        %down = aten.linear.default(%h, %w) : f32[b, s, 96] tp:P
        %down_reduce_from = fxpar.reduce_from[tp](%down) : f32[b, s, 96] tp:P→I
        %out = aten.add.Tensor(%down_reduce_from, %bias) : f32[b, s, 96] tp:I

    The coercions are the rows of SPEC section 2.1. One node serves all users that want the same layout of a value.
    Partial sums are reduced right after they are made, everything else is converted right before its first use.
    Values and gradients stay equal; afterwards every operation's operands have the layouts it needs. The loss ends
    invariant on every axis; other outputs do too, or stay shards. Refuses conversions that the table lacks.
    """
    flags = carried(program)
    made: dict[tuple[fx.Node, str, Placement], fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.op != "call_function" or not note(node).needs:
            continue
        wanted = note(node).needs
        new = [
            _converted(program, made, operand, target, any(flags[operand]), node)
            for operand, target in zip(operands(node), wanted, strict=True)
        ]
        with_operands(node, new)
        update(node, needs=())
    _finish_outputs(program, made, flags)
    return program


def _converted(
    program: Program,
    made: dict[tuple[fx.Node, str, Placement], fx.Node],
    node: fx.Node,
    wanted: Layout,
    carries: bool,
    user: fx.Node,
) -> fx.Node:
    for axis in program.axes:
        source, target = output_layouts(node)[0].on(axis), wanted.on(axis)
        if source == target or (not carries and {source.kind, target.kind} <= {"I", "R"}):
            continue
        # An exchange is between two dimensions: another cut of the same one is taken from the whole.
        is_shared = source.is_shared or target.is_shared
        same = source.is_shard and target.is_shard and source.dim == target.dim and not is_shared
        for step in (R, target) if same else (target,):
            key = (node, axis, step)
            if key not in made:
                made[key] = _insert(program, node, axis, output_layouts(node)[0].on(axis), step, user)
            node = made[key]
    return node


def _insert(program: Program, node: fx.Node, axis: str, source: Placement, target: Placement, user: fx.Node) -> fx.Node:
    row = coercion(source, target)
    if row is None:
        raise PassError(f"nothing converts {source} to {target}", where=f"%{node.name} for %{user.name}")
    # A reduction directly behind its producer frees the partial sum at once.
    anchor = node.next if source.kind == "P" else user
    with program.graph.inserting_before(anchor):
        new = program.graph.create_node(
            "call_function", row.operator, (node,), {"axis": axis}, name=f"{node.name}_{row.operator.__name__}"
        )
    kept = note(node)
    place = kept if source.kind == "P" or user.op == "output" else note(user)
    layout = output_layouts(node)[0].with_(axis, target)
    return set_note(
        new,
        Note(
            type=kept.type,
            layout=layout,
            fqn=place.fqn,
            source=place.source,
            recompute=place.recompute,
            origin=f"{source} to {target} for %{user.name}",
        ),
    )


def _finish_outputs(
    program: Program, made: dict[tuple[fx.Node, str, Placement], fx.Node], flags: dict[fx.Node, tuple[bool, ...]]
) -> None:
    """The loss becomes invariant, other outputs too or stay shards.

    No caller could add the ranks' summands of a partial value, nor give each rank its share of a gradient.
    """
    final = output_node(program.graph)
    values = []
    for name, node in program.output_nodes().items():
        layout = output_layouts(node)[0]
        for axis in program.axes:
            if name == program.loss or not layout.on(axis).is_shard:
                layout = layout.with_(axis, resting(I, any(flags[node])))
        values.append(_converted(program, made, node, layout, any(flags[node]), final))
    final.args = (tuple(values),)
