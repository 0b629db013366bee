"""insert_collectives: the conjugate coercions between producer and consumer layouts."""

from __future__ import annotations

from torch import fx

from fxpar.errors import PassError
from fxpar.ir.grad_flow import carried
from fxpar.ir.operators import canonical_placement
from fxpar.ir.program import (
    Note,
    Program,
    insert_call,
    note,
    operands,
    output_layouts,
    output_node,
    update,
    with_operands,
)
from fxpar.ir.properties import Property
from fxpar.ir.step import is_buffer
from fxpar.layout.layout import I, Layout
from fxpar.manager import register_pass
from fxpar.rules.conversion import Conversion, conversions

# The conversions that are there: of a value, to a layout.
Made = dict[tuple[fx.Node, Layout], fx.Node]


@register_pass("insert_collectives", requires={Property.LAYOUTS}, provides={Property.COLLECTIVES})
def insert_collectives(program: Program) -> Program:
    """Inserts a coercion wherever an operation needs a value in another layout.

    Before::

        %down = aten.linear.default(%h, %w) : f32[b, s, 96] tp:P
        %out = aten.add.Tensor(%down, %bias) : f32[b, s, 96] tp:I {needs=tp:I ; tp:I}

    After::

        %down = aten.linear.default(%h, %w) : f32[b, s, 96] tp:P
        %down_reduce_from = fxpar.reduce_from[tp](%down) : f32[b, s, 96] tp:P→I
        %out = aten.add.Tensor(%down_reduce_from, %bias) : f32[b, s, 96] tp:I

    The coercions are the rows of SPEC section 2.1, those that send least (`fxpar.rules.conversion`): what changes alike
    on several axes is one reduction over their joined group. One node serves all users that want the same layout of a
    value.
    Partial sums are reduced right after they are made, everything else is converted right before its first use.
    Values and gradients stay equal; afterwards every operation's operands have the layouts it needs. The loss ends
    invariant on every axis; other outputs do too, or stay shards; new
    values of buffers end whole. Refuses conversions that the table lacks.
    """
    flags = carried(program)
    known: Made = {}
    for node in list(program.graph.nodes):
        if node.op != "call_function" or not note(node).needs:
            continue
        needs = note(node).needs
        new = [
            _converted(program, known, operand, target, any(flags[operand]), node)
            for operand, target in zip(operands(node), needs, strict=True)
        ]
        with_operands(node, new)
        update(node, needs=())
    _finish_outputs(program, known, flags)
    return program


def _converted(program: Program, known: Made, node: fx.Node, target: Layout, carries: bool, user: fx.Node) -> fx.Node:
    source = output_layouts(node)[0]
    way = conversions(source, target, program.axes, carries, program.plan.cost)
    if way is None:
        pairs = [(p, target.on(axis)) for axis, p in source if p != target.on(axis)]
        before, after = (" ".join(map(str, side)) for side in zip(*pairs, strict=True))
        raise PassError(f"nothing converts {before} to {after}", where=f"%{node.name} for %{user.name}")
    for step in way:
        # The key is the value on the way and not the source, so that
        # conversions which begin alike share their first steps.
        key = (node, step.layout)
        if key not in known:
            known[key] = _insert(node, step, user)
        node = known[key]
    return node


def _insert(node: fx.Node, step: Conversion, user: fx.Node) -> fx.Node:
    noted = note(node)
    before, axes = output_layouts(node)[0], "-".join(step.axes)
    is_sum = step.row.source == "P"
    # A reduction directly after its producer frees the partial sum at once.
    anchor = node.next if is_sum else user
    place = noted if is_sum or user.op == "output" else note(user)
    texts = [" ".join(dict.fromkeys(str(layout.on(axis)) for axis in step.axes)) for layout in (before, step.layout)]
    converted = Note(
        type=noted.type,
        layout=step.layout,
        fqn=place.fqn,
        source=place.source,
        recompute=place.recompute,
        origin=f"{texts[0]} to {texts[1]} for %{user.name}",
    )
    operator = step.row.operator
    return insert_call(anchor, operator, (node,), converted, f"{node.name}_{operator.__name__}", axis=axes)


def _finish_outputs(program: Program, known: Made, flags: dict[fx.Node, tuple[bool, ...]]) -> None:
    """Makes the loss invariant, and buffers whole on every rank; other outputs become so or stay shards.

    No caller could add the ranks' summands of a partial value, nor give each rank its share of a gradient.
    """
    final = output_node(program.graph)
    values = []
    for name, node in program.output_nodes().items():
        layout = output_layouts(node)[0]
        for axis in program.axes:
            # R would do for the value alone. I says that the gradient is the
            # same on all ranks too, as a tangent of 1 is.
            if name == program.loss or is_buffer(name) or not layout.on(axis).is_shard:
                layout = layout.with_(axis, canonical_placement(I, any(flags[node])))
        values.append(_converted(program, known, node, layout, any(flags[node]), final))
    final.args = (tuple(values),)
