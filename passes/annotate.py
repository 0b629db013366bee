"""annotate: a layout for every value, by overrides and cost."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from torch import fx

from fxpar.errors import PassError
from fxpar.ir.program import Program, operands, output_types, update
from fxpar.ir.properties import Property
from fxpar.layout.layout import Layout, Placement
from fxpar.layout.nesting import spelled
from fxpar.manager import register_pass
from fxpar.sharding.batch_sharding import share_out
from fxpar.sharding.choose import Choice, place
from fxpar.sharding.layout_explanation import reason_of
from fxpar.sharding.options import Option, value_of

# Not an argument: a pass that wraps `annotate`, or stands in its place and calls it, is to get them too.
_LAYOUTS: ContextVar[Mapping[str, Layout]] = ContextVar("layouts of a module that exists already")


@register_pass("annotate", requires={Property.CANONICAL}, provides={Property.LAYOUTS})
def annotate(program: Program) -> Program:
    """Gives every value a layout on every mesh axis.

    Before::

        %w = parameter["c_fc.weight"] : f32[96, 384]
        %y = aten.mm.default(%x, %w) : f32[b*s, 384]

    After::

        %w = parameter["c_fc.weight"] : f32[96, 384] tp:S(1)
        %y = aten.mm.default(%x, %w) : f32[b*s, 384] tp:S(1) {needs=tp:R ; tp:S(1)}

    Terms: a *pin* is the placement an override gives a parameter; a *weight* is a value made from parameters alone;
    *needs* are the layouts in which an operation wants its operands. Values stay equal: the pass changes notes only. It
    refuses plan lines that match nothing, contradict each other or ask for a cut that the model cannot carry.

    Algorithm: inputs are cut over their rows on the axes that share out the batch, and every operation follows. The
    rest is solved on what one data rank has (`fxpar.sharding.choose`). Overrides become pins (a fused dimension is
    cut in the way that nothing downstream tears). Every other parameter that an operation uses may be cut. Of all
    choices of legal signatures that one is taken which costs the fewest seconds of a training step (`fxpar.sharding`):
    collectives, forward and backward, matrix products and memory traffic, the optimizer's too. Shards of weights are
    never converted.

    With `Plan(shard=…)` data ranks share out every trained parameter besides, in the first dimension that they divide,
    and with `shard="parameters"` the frozen ones too::

        %w = parameter["c_fc.weight"] : f32[96, 384] dp:S(0) tp:S(1)

    Operations need it whole on these axes as before, so that `insert_collectives` gathers it.
    """
    return _annotate(program, _LAYOUTS.get({}))


@contextmanager
def keeping(layouts: Mapping[str, Layout]) -> Iterator[None]:
    """Has `annotate` keep the layouts of a module that exists already; for its further programs.

    Args:
        layouts: the layouts in which the module holds its parameters, by name. They are taken, whatever a program does
            with the parameters; those that have none stay whole. With no layouts at all `annotate` chooses.
    """
    token = _LAYOUTS.set(layouts)
    try:
        yield
    finally:
        _LAYOUTS.reset(token)


def _annotate(program: Program, layouts: Mapping[str, Layout]) -> Program:
    if program.plan.sequence_parallel and program.axes and Property.SEQUENCE not in program.properties:
        raise PassError(
            "no pass has divided the sequence lengths", where="annotate", remedy="run divide_sequence before"
        )
    placed = place(program, layouts)
    for choice in placed.choices.values():
        _note_reasons(program, choice)
    _write(program, placed.options)
    share_out(program)
    return program


def _note_reasons(program: Program, choice: Choice) -> None:
    """Notes what each parameter and the product it decides are for, and why the layouts are what they are."""
    nodes = {node.name: node for node in program.graph.nodes}
    for node, option in choice.chosen.items():
        if node.name not in nodes:
            continue
        if node.op != "placeholder":
            update(nodes[node.name], origin=option.why)
            continue
        pin, trail = choice.pins.get(node), choice.options.trails.get((node, option.outputs[0]))
        decided = pin or trail
        if decided is not None:
            update(nodes[node.name], role=decided.role)
            if decided.product is not None and decided.role:
                update(nodes[decided.product.name], role=decided.role)
        # A parameter with a single option was not chosen, and a reason would say nothing.
        if pin is not None or option.why or node in choice.options.uncut or len(choice.options.of[node]) > 1:
            update(nodes[node.name], origin=reason_of(choice, node))


def _write(program: Program, placed: Mapping[str, Mapping[fx.Node, Option]]) -> None:
    axes = program.axes
    known: dict[tuple[Placement, ...], Layout] = {}

    def layout(options: Mapping[str, Option], side: str, index: int) -> Layout:
        placements = tuple([getattr(option, side)[index] for option in options.values()])
        if placements not in known:
            known[placements] = spelled(Layout.of(dict(zip(options, placements, strict=True))), axes)
        return known[placements]

    for node in program.graph.nodes:
        kinds = () if node.op == "output" else output_types(node)
        if not kinds:
            continue
        maker, index = value_of(node)
        options = {axis: chosen[maker] for axis, chosen in placed.items()}
        if node.target is operator.getitem:
            update(node, layout=layout(options, "outputs", index))
            continue
        layouts = [layout(options, "outputs", i) for i in range(len(kinds))]
        count = len(operands(node)) if node.op == "call_function" and options else 0
        needs = tuple(layout(options, "operands", i) for i in range(count))
        update(node, layout=tuple(layouts) if len(layouts) > 1 else layouts[0], needs=needs)
