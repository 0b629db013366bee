"""Layouts of a node from the layouts of its operands, on every axis.

Enters: a node with notes, operand layouts and gradient flags. Leaves: the layouts of its outputs, or a `LayoutError`
that names the node, its module and source line, what was found and what would make it legal.

Rules speak of one axis. A node is judged axis by axis from the outermost, each over the shapes and slices that those
outside it leave (`fxpar.layout.nesting`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from fxpar.errors import LayoutError
from fxpar.ir.operators import axes_of, canonical_placement, in_backward, pending
from fxpar.ir.program import Program, TensorType, operands, output_layouts, output_types
from fxpar.ir.step import is_forward
from fxpar.layout.layout import Layout, Piece, Placement, R, V, fits, shard
from fxpar.layout.nesting import common_order, listed, local_size, misfit, peel, seen_by, spelled
from fxpar.layout.shards import local_bounds
from fxpar.layout.symbolic_sizes import Size
from fxpar.ops.collectives import COERCION_OF, Coercion, all_reduce_coalesced, coercion, sum_gradients
from fxpar.ops.operator import alike
from fxpar.ops.random import axis_index
from fxpar.rules.conversion import bucketed, coalesced, coerced, fail
from fxpar.rules.table import Answers, RowWise, inferred, question, rule_for, rule_of
from fxpar.signatures.engine import Refusal, Rule, seed_signature
from fxpar.signatures.op_call import OpCall, call_of

_ILL_TYPED = (IndexError, KeyError, TypeError, ValueError, ArithmeticError, AttributeError)


@dataclass(frozen=True)
class Context:
    """What a node's operands are, one entry for each tensor among them (several for an operand with several outputs).

    Attributes:
        layouts: of each operand.
        carries: whether a gradient flows through it.
        outputs: whether a gradient flows through each output of the node.
        axes: sizes of the mesh axes.
        local: whether literals speak of a rank's part.
        composite: whether operations may yet become composite ones (`fxpar.ops.vocabulary`).
        row_wise: which operators the plan's batchwise_ops name.
        answers: what was inferred of other nodes of the same check or pass; what is inferred of this one is added.
    """

    layouts: Sequence[Layout]
    carries: Sequence[bool]
    outputs: Sequence[bool]
    axes: Mapping[str, int]
    local: bool = False
    composite: bool = False
    row_wise: RowWise = field(default_factory=RowWise)
    answers: Answers = field(default_factory=dict)

    def found(self, axis: str) -> list[Placement]:
        """Returns placements of the operands on an axis."""
        return [layout.on(axis) for layout in self.layouts]


def context_of(
    program: Program,
    node: fx.Node,
    layouts: Mapping[fx.Node, Sequence[Layout]],
    flags: Mapping[fx.Node, Sequence[bool]],
    row_wise: RowWise,
    answers: Answers,
    *,
    local: bool = False,
    composite: bool = False,
) -> Context:
    """Returns what a node's operands are; in the backward nothing carries a gradient, so I and R are one.

    Args:
        layouts: of each operand's tensors.
        flags: as of `fxpar.ir.grad_flow.carried`.
        row_wise: which operators the plan's batchwise_ops name.
        answers: of the nodes before it.
    """
    inputs = operands(node)
    operand_layouts = [layout for o in inputs for layout in layouts[o]]
    carries = [flag for o in inputs for flag in flags[o]]
    if not is_forward(node):
        operand_layouts = [_in_backward(layout) for layout in operand_layouts]
        carries = [False] * len(carries)
    return Context(operand_layouts, carries, flags[node], program.axes, local, composite, row_wise, answers)


@dataclass(frozen=True)
class AxisInference:
    """An operation as one axis sees it.

    Attributes:
        axis: the axis.
        call: over what the axes outside it leave.
        operands: placements of the operands.
        found: placements of the outputs, or why there are none.
    """

    axis: str
    call: OpCall
    operands: tuple[Placement, ...]
    found: tuple[Placement, ...] | Refusal


def steps(node: fx.Node, context: Context) -> Iterator[AxisInference]:
    """Yields an operation as each axis sees it, from the outermost; ends with the first that refuses.

    Raises:
        LayoutError: the operands' axes nest in different orders, or the arguments do not fit the operator.
    """
    order = common_order(context.layouts, context.axes)
    if order is None:
        inner = next(
            axis for layout in context.layouts for axis, placement in reversed(list(layout)) if placement.is_shard
        )
        fail(
            node, inner, f"the operands' axes nest in different orders ({shown(node, context.layouts)})", "convert one"
        )
    layouts = [_listed(layout, context.axes, order) for layout in context.layouts]
    try:
        call: OpCall | Refusal = call_of(node, context.axes[order[0]])
        if context.local and layouts and not isinstance(call, Refusal):
            call = whole_call(call, layouts[0], context.axes)
    except _ILL_TYPED as error:
        call = _ill_typed(error)
    for axis, inside in zip(order, (*order[1:], None), strict=True):
        placements = tuple(layout.on(axis) for layout in layouts)
        if isinstance(call, Refusal):
            fail(node, axis, f"{call.reason} ({shown(node, placements)})")
        call = replace(call, target=target_on(node, axis), rows=context.row_wise.of(node, axis))
        outputs = judged(call, placements, context)
        yield AxisInference(axis, call, placements, outputs)
        if isinstance(outputs, Refusal):
            return
        if inside is not None:
            call = _inside(call, placements, outputs, context.axes[inside])


def target_on(node: fx.Node, axis: str) -> Any:
    """Returns a node's target on an axis; for a composite operator that does not name it, the torch one it is like."""
    is_other = axes_of(node) and axis not in axes_of(node)
    return alike(node.target) if is_other else node.target


def _listed(layout: Layout, axes: Mapping[str, int], order: Sequence[str]) -> Layout:
    ordered = listed(layout, axes, order)
    assert ordered is not None  # the order is common to all
    return ordered


def _inside(call: OpCall, operands: Sequence[Placement], outputs: Sequence[Placement], n: int) -> OpCall | Refusal:
    try:
        return replace(peeled_call(call, operands, outputs), n=n)
    except _ILL_TYPED as error:
        return _ill_typed(error)


def _ill_typed(error: Exception) -> Refusal:
    """Refuses a call: rules take it for granted that arguments and types fit the operator."""
    return Refusal(f"the arguments and types do not fit the operator ({type(error).__name__}: {error})")


def judged(call: OpCall, placements: Sequence[Placement], context: Context) -> tuple[Placement, ...] | Refusal:
    """Returns placements of the outputs of an operation on one axis, or the reason why it has none."""
    try:
        answer = inferred(call, placements, context.carries, composite=context.composite)
    except _ILL_TYPED as error:
        return _ill_typed(error)
    if isinstance(answer, Refusal):
        return answer
    return tuple(canonical_placement(placement, flag) for placement, flag in zip(answer, context.outputs, strict=True))


def infer_node(node: fx.Node, context: Context) -> tuple[Layout, ...]:
    """Returns layouts of the outputs of a call.

    Raises:
        LayoutError: the operation does not accept the layouts on some axis; says which coercion would make it legal.
    """
    if node.target is operator.getitem:
        layouts: Sequence[Layout] = (context.layouts[int(node.args[1])],)  # type: ignore[arg-type]
    elif node.target is axis_index:
        layouts = (Layout.of({axis: V if axis in axes_of(node) else R for axis in context.axes}),)
    elif node.target is sum_gradients:
        layouts = [bucketed(node, layout, context.axes) for layout in context.layouts]
    elif node.target is all_reduce_coalesced:
        layouts = [coalesced(node, layout, context.axes) for layout in context.layouts]
    elif node.target in COERCION_OF:
        layouts = (coerced(node, context.layouts[0], context.axes),)
    else:
        layouts = _operation(node, context)
    return tuple(layout if flag else _canonical(layout) for layout, flag in zip(layouts, context.outputs, strict=True))


@lru_cache(maxsize=65536)
def _canonical(layout: Layout) -> Layout:
    """Returns a layout as values without gradient are written."""
    return Layout(tuple((axis, canonical_placement(placement, False)) for axis, placement in layout))


@lru_cache(maxsize=65536)
def _in_backward(layout: Layout) -> Layout:
    """Returns a layout as the backward reads a value of the forward."""
    return Layout(tuple((axis, in_backward(placement)) for axis, placement in layout))


def _operation(node: fx.Node, context: Context) -> Sequence[Layout]:
    rows = tuple((axis, context.row_wise.of(node, axis)) for axis in context.axes)
    flags = tuple(context.carries), tuple(context.outputs), context.local, context.composite
    # Equal layers ask the same questions, so each is inferred once.
    key = (question(node), tuple(context.layouts), flags, tuple(context.axes.items()), rows)
    if key not in context.answers:
        context.answers[key] = tuple(_inferred(node, context))
    return context.answers[key]


def _inferred(node: fx.Node, context: Context) -> list[Layout]:
    entries: list[list[tuple[str, Placement]]] = [[] for _ in output_types(node)]
    for step in steps(node, context):
        if isinstance(step.found, Refusal):
            rule = rule_of(node.target)
            indexed = rule is not None and rule.varying and step.operands[0].kind != "P"
            remedy = "" if indexed else _remedy(node, context, step)  # else the reason says what the indices lack
            fail(node, step.axis, f"{step.found.reason} ({shown(node, step.operands)})", remedy)
        for entry, placement in zip(entries, step.found, strict=True):
            entry.append((step.axis, placement))
    layouts = [spelled(Layout(tuple(entry)), context.axes) for entry in entries]
    for layout, kind in zip(layouts, output_types(node), strict=True):
        wrong = misfit(layout, kind.shape, context.axes) if any(p.is_padded for _, p in layout) else ""
        if wrong:
            fail(node, wrong, f"{kind} is padded in a dimension that another axis cuts too ({layout})")
    return layouts


def shown(node: fx.Node, placements: Sequence[Placement | Layout]) -> str:
    """Shows the operands of a node as they were found: `%x is P, %bias is I`."""
    names = [o.name for o in operands(node) for _ in output_types(o)]
    return ", ".join(f"%{name} is {item}" for name, item in zip(names, placements, strict=True))


def remedy_of(node: fx.Node, context: Context, axis: str, *, exactly: bool = False) -> str:
    """Names the one coercion that makes a node legal, or gives what its note says: `insert fxpar.reduce_from[tp](%x)`.

    Empty where there is none, or where the node is a coercion itself.
    """
    if node.op != "call_function" or node.target in COERCION_OF or node.target is operator.getitem:
        return ""
    try:
        step = next((step for step in steps(node, context) if step.axis == axis), None)
    except LayoutError:
        return ""
    return "" if step is None else _remedy(node, context, step, exactly=exactly)


def _remedy(node: fx.Node, context: Context, step: AxisInference, *, exactly: bool = False) -> str:
    expected = [layout.on(step.axis) for layout in output_layouts(node)]

    def judge(placements: Sequence[Placement]) -> Sequence[Placement] | Refusal:
        return judged(step.call, placements, context)

    try:
        best = suggest(judge, rule_for(step.call), step.call, step.operands, expected, exactly=exactly)
    except _ILL_TYPED:
        return ""
    if best is None:
        return ""
    index, row, target = best
    names = [o.name for o in operands(node) for _ in output_types(o)]
    call = f"fxpar.{row.operator.__name__}[{step.axis}](%{names[index]})"
    return f"insert {call} : {step.axis}:{step.operands[index]}→{target}"


Judgement = Callable[[Sequence[Placement]], Sequence[Placement] | Refusal]


def suggest(
    judge: Judgement,
    rule: Rule | None,
    call: OpCall,
    placements: Sequence[Placement],
    expected: Sequence[Placement],
    *,
    exactly: bool = False,
) -> tuple[int, Coercion, Placement] | None:
    """Returns index of the operand, row of the table and target placement; None where no single coercion helps.

    Args:
        judge: outputs for placements of the operands, written as in notes.
        rule: the operation's rule, which knows the shards that fit those of other operands.
        call: the operation.
        placements: the operands' placements.
        expected: what the note says of the outputs.
        exactly: whether the outputs must be the wanted ones.
    """
    first = None
    for index, placement in enumerate(placements):
        for row in COERCION_OF.values():
            if row.source != placement.kind:
                continue
            for target in _targets(row, rule, call, placements, index):
                if coercion(placement, target) is not row:
                    continue
                outputs = judge([*placements[:index], target, *placements[index + 1 :]])
                if isinstance(outputs, Refusal):
                    continue
                if tuple(outputs) == tuple(expected):
                    return index, row, target
                if first is None and not exactly:
                    first = (index, row, target)
    return first


def _targets(
    row: Coercion, rule: Rule | None, call: OpCall, placements: Sequence[Placement], index: int
) -> Iterator[Placement]:
    """Yields what a row can make of an operand: its kind, or shards that fit the others, then every plain shard."""
    if row.target != "S":
        yield Placement(row.target)
        return
    seen = {placements[index]}
    if placements[index].reduced:
        yield pending(placements[index])
    for other, placement in enumerate(placements):
        if rule is not None and placement.is_shard and other != index:
            signature = seed_signature(rule, call, other, placement)
            target = None if isinstance(signature, Refusal) else signature.operands[index]
            if target is not None and target.is_shard and target not in seen:
                seen.add(target)
                yield target
    for dim, size in enumerate(call.operands[index].shape):
        target = shard(dim, size)
        if target not in seen and fits(target, call.operands[index].shape, call.n):
            yield target


def whole_call(call: OpCall, layout: Layout, axes: Mapping[str, int]) -> OpCall | Refusal:
    """Returns the call with global bounds where it slices a dimension that is cut; else the call itself.

    Args:
        call: over global shapes, its bounds those of a rank's part.
        layout: of what it slices.
        axes: sizes of the mesh axes.
    """
    cuts = [(axis, placement) for axis, placement in layout if _is_sliced(call, placement)]
    if not cuts or _is_everything(call, cuts[0][1].dim):
        return replace(call, arguments={**call.arguments, **_EVERYTHING}) if cuts else call
    seen = seen_by(layout, call.operands[0].shape, axes)
    for axis, placement in reversed(cuts):
        bounds = _whole_bounds(call, placement, seen[axis][placement.dim], axes[axis])
        if isinstance(bounds, Refusal):
            return bounds
        call = replace(call, arguments={**call.arguments, "start": bounds[0], "end": bounds[1]})
    return call


_EVERYTHING = {"start": 0, "end": None, "step": 1}


def _is_sliced(call: OpCall, placement: Placement) -> bool:
    if call.target is not torch.ops.aten.slice.Tensor or not placement.is_shard:
        return False
    return int(call.get("dim", 0)) % len(call.operands[0].shape) == placement.dim


def _is_everything(call: OpCall, dim: int) -> bool:
    return call.outputs[0].shape[dim] == call.operands[0].shape[dim]


def _whole_bounds(call: OpCall, placement: Placement, size: Size, n: int) -> tuple[int, int] | Refusal:
    """Returns the bounds of a slice as the axis sees them, for those of what it leaves."""
    part, step = local_size(placement, n), call.get("step", 1)
    bounds = _in_numbers(call, part)
    if bounds is None or not isinstance(size, int) or not isinstance(part, int):
        return Refusal(f"the slice {call.get('start')}:{call.get('end')} of {placement} is not known in numbers")
    if not 0 < step <= part:
        return Refusal(f"the step {step} is none of a rank's part of {part} elements")
    whole = global_bounds(placement.pieces, *bounds, step, n)
    if whole is None:
        low, high = bounds
        return Refusal(f"the slice {low}:{high}:{step} of a rank's part tears {placement} over {n} ranks")
    return whole


def _in_numbers(call: OpCall, size: Size) -> tuple[int, int] | None:
    """Returns the bounds of a slice of a dimension of `size` elements, from its start and end."""
    start, end = call.get("start"), call.get("end")
    low, high = 0 if start is None else start, size if end is None else end
    if not all(isinstance(value, int) for value in (low, high, size, call.get("step", 1))):
        return None
    return tuple(max(0, min(size, value + size if value < 0 else value)) for value in (low, high))  # type: ignore[return-value]


def peeled_call(call: OpCall, operands: Sequence[Placement], outputs: Sequence[Placement]) -> OpCall:
    """Returns the call as the axes inside see it, once its axis has cut operands and outputs as given.

    Raises:
        ValueError: a slice tears what the axis cuts, or a size is not divisible.
    """
    arguments = call.arguments
    if operands and _is_sliced(call, operands[0]):
        dim, step = operands[0].dim, call.get("step", 1)
        bounds = _in_numbers(call, call.operands[0].shape[dim])
        if _is_everything(call, dim):
            arguments = {**arguments, **_EVERYTHING}
        elif bounds is None:
            raise ValueError(
                f"the slice {call.get('start')}:{call.get('end')} of {operands[0]} is not known in numbers"
            )
        else:
            start, end = local_bounds(operands[0].pieces, *bounds, step, call.n)
            arguments = {**arguments, "start": start, "end": end}
    return replace(
        call,
        arguments=arguments,
        operands=_peeled(call.operands, operands, call.n),
        outputs=_peeled(call.outputs, outputs, call.n),
    )


def _peeled(kinds: Sequence[TensorType], placements: Sequence[Placement], n: int) -> tuple[TensorType, ...]:
    pairs = zip(kinds, placements, strict=True)
    return tuple(replace(kind, shape=peel(kind.shape, placement, n)) for kind, placement in pairs)


def global_bounds(pieces: Sequence[Piece], start: int, stop: int, step: int, n: int) -> tuple[int, int] | None:
    """Finds global bounds whose `local_bounds` are the given ones; None where there are none."""
    last = _global_position(pieces, stop, n)
    for phase in range(step):
        first = _global_position(pieces, start - phase, n)
        if first is None or last is None or first + phase >= last:
            continue
        try:
            if local_bounds(pieces, first + phase, last, step, n) == (start, stop):
                return first + phase, last
        except ValueError:
            continue
    return None


def _global_position(pieces: Sequence[Piece], local: int, n: int) -> int | None:
    """Finds the position between two runs whose `local_position` is the given one."""
    offset = 0
    for piece in pieces:
        length, size = int(piece.length), int(piece.size)
        part = length * piece.copies // n if piece.sharded else length
        if 0 <= local <= part:
            if not piece.sharded:
                return offset + local
            runs, inside = divmod(local, size * piece.copies // n)
            return None if inside else offset + runs * size
        local, offset = local - part, offset + length
    return None
