"""Layouts of a node from the layouts of its operands, on every axis.

Enters: a node with notes, operand layouts and gradient flags. Leaves: the layouts of its outputs, or a `LayoutError`
that names the node, its module and source line, what was found and what would make it legal.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import fx

from fxpar.errors import LayoutError
from fxpar.layout.layout import I, Layout, Placement, R, V, fits
from fxpar.program.coercions import coercion, unsettled
from fxpar.program.operators import COERCION_OF, axis_index, sum_gradients
from fxpar.program.program import note, operands, output_layouts, output_types
from fxpar.rules.engine import Call, Refusal, call_of
from fxpar.rules.local import whole_call
from fxpar.rules.suggest import suggest
from fxpar.rules.table import inferred, rule_of

_ILL_TYPED = (IndexError, KeyError, TypeError, ValueError, ArithmeticError, AttributeError)


def describe(node: fx.Node) -> str:
    """`%name (fqn, file.py:41)`."""
    kept = note(node)
    place = ", ".join(part for part in (kept.fqn, kept.source) if part)
    return f"%{node.name} ({place})" if place else f"%{node.name}"


def _fail(node: fx.Node, axis: str, reason: str, remedy: str = "") -> NoReturn:
    raise LayoutError(f"on axis {axis}: {reason}", where=describe(node), remedy=remedy)


def resting(placement: Placement, carries: bool) -> Placement:
    """A value without gradient is written R, whether a rule called it I or R; shared blocks of one are not settled."""
    if carries:
        return placement
    return R if placement == I else unsettled(placement)


def coerced(node: fx.Node, source: Placement, target: Placement, axis: str, n: int) -> Placement:
    """Checks a coercion node; its target placement is the one it was made for.

    A value without gradient is R: nothing converts it from or to I.

    Raises:
        LayoutError: the operator does not convert between these placements, or a shard does not fit.
    """
    row = COERCION_OF[node.target]  # type: ignore[index]
    wanted = coercion(source, target)
    remedy = f"use fxpar.{wanted.operator.__name__}[{axis}]" if wanted else ""
    if source.kind == target.kind != "S":
        remedy = "remove it"
    shown = ", ".join(f"%{o.name} is {source}" for o in operands(node))
    if source.kind != row.source:
        remedy = remedy or f"{row.target} cannot be had from {source.kind}"
        _fail(node, axis, f"takes {row.source} and finds {source} ({shown}, the note says {target})", remedy)
    if row.target != target.kind:
        _fail(node, axis, f"gives {row.target}, the note says {target} ({shown})", remedy)
    for placement in (source, target):
        if not fits(placement, output_types(node)[0].shape, n):
            _fail(node, axis, f"{placement} does not fit {output_types(node)[0]} over {n} ranks")
    if source == target:
        _fail(node, axis, f"converts {source} to itself", "remove it")
    if wanted is not row:
        _fail(node, axis, f"does not convert {source} to {target}", remedy or "convert the segments one by one")
    return target


def _summed(node: fx.Node, placement: Placement, axis: str) -> Placement:
    """What a bucket makes of a parameter: I → R, or of shared blocks that are settled ones that are not."""
    if placement == I:
        return R
    if not placement.settled:
        _fail(node, axis, f"sums gradients of what is {placement}", "leave it out of the bucket")
    return unsettled(placement)


def _judged(
    node: fx.Node,
    found: Sequence[Placement],
    carries: Sequence[bool],
    outputs: Sequence[bool],
    n: int,
    local: bool,
    composite: bool,
) -> tuple[Placement, ...] | Refusal:
    """Placements of the outputs of an operation, or the reason why it has none.

    Rules take it for granted that arguments and types fit the operator; where they do not, there is none either.
    """
    try:
        call: Call | Refusal = whole_call(call_of(node, n), found) if local else call_of(node, n)
        answer = call if isinstance(call, Refusal) else inferred(call, found, carries, composite=composite)
    except _ILL_TYPED as error:
        return Refusal(f"the arguments and types do not fit the operator ({type(error).__name__}: {error})")
    if isinstance(answer, Refusal):
        return answer
    return tuple(resting(placement, flag) for placement, flag in zip(answer, outputs, strict=True))


@dataclass(frozen=True)
class Context:
    """What a node's operands are, one entry for each tensor among them (several for an operand with several outputs).

    Attributes:
        layouts: of each operand.
        carries: whether a gradient flows through it.
        outputs: whether a gradient flows through each output of the node.
        axes: sizes of the mesh axes.
        local: whether literals speak of a rank's part.
        composite: whether operations may yet become composite ones (`fxpar.rules.vocabulary`).
    """

    layouts: Sequence[Layout]
    carries: Sequence[bool]
    outputs: Sequence[bool]
    axes: Mapping[str, int]
    local: bool = False
    composite: bool = False

    def found(self, axis: str) -> list[Placement]:
        """Placements of the operands on an axis."""
        return [layout.on(axis) for layout in self.layouts]


def infer_node(node: fx.Node, given: Context) -> tuple[Layout, ...]:
    """Layouts of the outputs of a call.

    Raises:
        LayoutError: the operation does not accept the layouts on some axis; says which coercion would make it legal.
    """
    result = [Layout() for _ in output_types(node)]
    for axis, n in given.axes.items():
        placements = given.found(axis)
        if node.target is operator.getitem:
            found: Sequence[Placement] = (placements[int(node.args[1])],)  # type: ignore[arg-type]
        elif node.target is axis_index:
            found = (V if node.kwargs["axis"] == axis else R,)
        elif node.target is sum_gradients:
            found = placements
            if node.kwargs["axis"] == axis:
                found = tuple(_summed(node, placement, axis) for placement in placements)
        elif node.target in COERCION_OF:
            found = placements
            if node.kwargs["axis"] == axis:
                found = (coerced(node, placements[0], output_layouts(node)[0].on(axis), axis, n),)
        else:
            answer = _judged(node, placements, given.carries, given.outputs, n, given.local, given.composite)
            if isinstance(answer, Refusal):
                rule = rule_of(node.target)
                indexed = rule is not None and rule.varying and placements[0].kind != "P"
                remedy = "" if indexed else remedy_of(node, given, axis)  # else the reason says what the indices lack
                _fail(node, axis, f"{answer.reason} ({shown(node, placements)})", remedy)
            found = answer
        for i, placement in enumerate(found):
            result[i] = result[i].with_(axis, resting(placement, given.outputs[i]))
    return tuple(result)


def shown(node: fx.Node, placements: Sequence[Placement]) -> str:
    """`%x is P, %bias is I`: the operands of a node as they were found."""
    names = [o.name for o in operands(node) for _ in output_types(o)]
    return ", ".join(f"%{name} is {placement}" for name, placement in zip(names, placements, strict=True))


def remedy_of(node: fx.Node, given: Context, axis: str, *, exactly: bool = False) -> str:
    """`insert fxpar.reduce_from[tp](%x)`: the one coercion that makes the node legal, or gives what its note says.

    Empty where there is none, or where the node is a coercion itself.
    """
    if node.op != "call_function" or node.target in COERCION_OF or node.target is operator.getitem:
        return ""
    n, found = given.axes[axis], given.found(axis)
    wanted = [layout.on(axis) for layout in output_layouts(node)]

    def judge(placements: Sequence[Placement]) -> Sequence[Placement] | Refusal:
        return _judged(node, placements, given.carries, given.outputs, n, given.local, given.composite)

    try:
        best = suggest(judge, rule_of(node.target), call_of(node, n), found, wanted, exactly=exactly)
    except _ILL_TYPED:
        return ""
    if best is None:
        return ""
    index, row, target = best
    names = [o.name for o in operands(node) for _ in output_types(o)]
    call = f"fxpar.{row.operator.__name__}[{axis}](%{names[index]})"
    return f"insert {call} : {axis}:{found[index]}→{target}"
