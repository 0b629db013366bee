"""annotate: a layout for every value, by overrides and cost."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from fxpar.choice.choose import Choice, choose
from fxpar.choice.explain import reason_of
from fxpar.choice.options import Option, value_of
from fxpar.choice.overrides import match_lines
from fxpar.errors import PassError
from fxpar.layout.layout import Layout
from fxpar.manager import Pass, register_pass
from fxpar.program.program import Program, operands, output_types, update
from fxpar.program.properties import Property


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

    Algorithm: overrides become pins (a fused dimension is cut in the way that nothing downstream tears). Every other
    parameter that an operation uses may be cut. Of all choices of legal signatures that one is taken which costs the
    fewest seconds of a training step (`fxpar.choice`): collectives, forward and backward, matrix products and memory
    traffic, the optimizer's too. Shards of weights are never converted.
    """
    return _annotate(program, {})


def keeping(layouts: Mapping[str, Layout]) -> Pass:
    """`annotate` for a further program of a module that exists already.

    Args:
        layouts: the layouts in which the module holds its parameters, by name. They are taken, whatever this program
            does with the parameters; those that have none stay whole.
    """
    return replace(annotate, run=partial(_annotate, layouts=layouts))


def _annotate(program: Program, layouts: Mapping[str, Layout]) -> Program:
    if program.plan.sequence_parallel and program.axes and Property.SEQUENCE not in program.properties:
        raise PassError(
            "no pass has divided the sequence lengths", where="annotate", remedy="run divide_sequence before"
        )
    lines = match_lines(program)
    solved = {axis: choose(program, axis, lines, layouts) for axis in program.axes}
    for choice in solved.values():
        _note_reasons(choice)
    _write(program, solved)
    return program


def _note_reasons(choice: Choice) -> None:
    """Notes what each parameter and the product it decides are for, and why the layouts are what they are."""
    for node, option in choice.chosen.items():
        if node.op != "placeholder":
            update(node, origin=option.why)
            continue
        pin, trail = choice.pins.get(node), choice.options.trails.get((node, option.outputs[0]))
        decided = pin or trail
        if decided is not None:
            update(node, role=decided.role)
            if decided.product is not None and decided.role:
                update(decided.product, role=decided.role)
        if pin is not None or option.why or node in choice.options.uncut or len(choice.options.of[node]) > 1:
            update(node, origin=reason_of(choice, node))


def _write(program: Program, solved: Mapping[str, Choice]) -> None:
    for node in program.graph.nodes:
        kinds = () if node.op == "output" else output_types(node)
        if not kinds:
            continue
        maker, index = value_of(node)
        chosen: dict[str, Option] = {axis: found.chosen[maker] for axis, found in solved.items()}
        if node.target is operator.getitem:
            update(node, layout=Layout.of({axis: option.outputs[index] for axis, option in chosen.items()}))
            continue
        layouts = [Layout.of({axis: option.outputs[i] for axis, option in chosen.items()}) for i in range(len(kinds))]
        count = len(operands(node)) if node.op == "call_function" and chosen else 0
        needs = [Layout.of({axis: option.operands[i] for axis, option in chosen.items()}) for i in range(count)]
        update(node, layout=tuple(layouts) if len(layouts) > 1 else layouts[0], needs=tuple(needs))
