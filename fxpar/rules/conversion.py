"""Conversions between layouts over several axes: which are legal, and the cheapest way from one layout to another.

Enters: a coercion node with its operand's layout; or two layouts of a value. Leaves: the layout that the node gives, or
a `LayoutError`; or the coercions that lead from the one to the other.

A coercion converts what its axes cut innermost, over one axis or over several joined ones (`dp-tp`). What the other
axes hold stays as it is; listed outside the converted ones, their placements must be the same before and after.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import fx

from fxpar.errors import LayoutError
from fxpar.ir.operators import axes_of, canonical_placement, held_fraction, misnamed, pending
from fxpar.ir.program import describe, note, operands, output_layouts, output_types
from fxpar.layout.layout import I, Layout, Placement, R
from fxpar.layout.nesting import innermost, joined_cut, misfit, spelled
from fxpar.ops.collectives import COERCION_OF, Coercion, coercion, gradient_coercion
from fxpar.plan.cost import Cost


def fail(node: fx.Node, axis: str, reason: str, remedy: str = "") -> NoReturn:
    """Refuses what a node does on an axis."""
    raise LayoutError(f"on axis {axis}: {reason}", where=describe(node), remedy=remedy)


def coerced(node: fx.Node, source: Layout, axes: Mapping[str, int]) -> Layout:
    """Checks a coercion node against its note, which says what it was made for; gives the layout of its output.

    It converts the blocks that its axes cut innermost: what the other axes hold must be the same before and after. An
    axis that is nested in a converted one holds other elements afterwards, in other pieces, and the note must say so.
    A value without gradient is R: nothing converts it from or to I.

    Raises:
        LayoutError: the operator does not convert between these layouts, or a shard does not fit.
    """
    names, kind, noted = axes_of(node), output_types(node)[0], output_layouts(node)[0]
    right = misnamed(node, axes)
    if right:
        fail(node, names[0], f"is over {'-'.join(names)}", f"name the axes as the mesh does: {right}")
    for layout in (source, noted):
        wrong = misfit(layout, kind.shape, axes)
        if wrong:
            fail(node, wrong, f"{layout.on(wrong)} does not fit {kind} over {axes[wrong]} ranks")
    before, after = (innermost(layout, axes, names) for layout in (source, noted))
    if before is None or after is None:
        inner = next(axis for axis, placement in source if axis not in names and placement.is_shard)
        remedy = f"undo the cut of {inner} first, and cut again after"
        fail(node, names[-1], f"converts {source} to {noted}, where {inner} cuts across its blocks", remedy)
    for axis, placement in before:
        if axis not in names and placement != after.on(axis):
            remedy = f"undo the cut of {axis} first, and cut again after"
            reason = f"converting {'-'.join(names)} leaves it {placement}, the note says {after.on(axis)}"
            fail(node, axis, reason, remedy)
    for axis in names:
        _check_row(node, before.on(axis), after.on(axis), axis)
    if len(names) > 1:
        _check_joined(node, before, after, axes)
    return noted


def bucketed(node: fx.Node, source: Layout, axes: Mapping[str, int]) -> Layout:
    """Returns what a bucket makes of one of its parameters: I → R, or of reduced shared blocks ones that are not.

    Raises:
        LayoutError: it is held in another way, or by several axes in ways that no sum over all of them is of.
    """
    names = axes_of(node)
    for axis in names:
        placement = source.on(axis)
        if placement != I and not placement.reduced:
            fail(node, axis, f"sums gradients of what is {placement}", "leave it out of the bucket")
    target = source
    for axis in names:
        target = target.with_(axis, R if source.on(axis) == I else pending(source.on(axis)))
    before, after = (innermost(layout, axes, names) for layout in (source, target))
    if before is None or after is None:
        fail(node, names[-1], f"sums gradients of {source}, into which another axis cuts", "leave it out of the bucket")
    if len(names) > 1:
        _check_joined(node, before, after, axes)
    return target


def coalesced(node: fx.Node, source: Layout, axes: Mapping[str, int]) -> Layout:
    """Returns what one reduction of many makes of one of its gradients: P → R, or the sums of shared blocks.

    Raises:
        LayoutError: it is no summand.
    """
    target = source
    for axis in axes_of(node):
        placement = source.on(axis)
        if placement.kind != "P" and not placement.partial:
            fail(node, axis, f"sums what is {placement}", "leave it out of the reduction")
        target = target.with_(axis, R if placement.kind == "P" else placement.plain)
    return target


def _check_row(node: fx.Node, source: Placement, target: Placement, axis: str) -> None:
    """Checks that the operator is the row of the table that converts these placements."""
    row = COERCION_OF[node.target]
    expected = (gradient_coercion if note(node).phase else coercion)(source, target)
    remedy = f"use fxpar.{expected.operator.__name__}[{axis}]" if expected else ""
    if source.kind == target.kind != "S":
        remedy = "remove it" if len(axes_of(node)) == 1 else f"leave {axis} out"
    shown = ", ".join(f"%{o.name} is {source}" for o in operands(node))
    if source.kind != row.source:
        remedy = remedy or f"{row.target} cannot be had from {source.kind}"
        fail(node, axis, f"takes {row.source} and finds {source} ({shown}, the note says {target})", remedy)
    if row.target != target.kind:
        fail(node, axis, f"gives {row.target}, the note says {target} ({shown})", remedy)
    if source == target:
        fail(node, axis, f"converts {source} to itself", "remove it")
    if not (source.in_rank_order and target.in_rank_order):
        fail(node, axis, f"does not convert {source} to {target}", "leave the blocks in the order of the ranks")
    if expected is not row:
        fail(node, axis, f"does not convert {source} to {target}", remedy or "convert the segments one by one")


def _check_joined(node: fx.Node, before: Layout, after: Layout, axes: Mapping[str, int]) -> None:
    """Checks that a shard over several axes at once is one run of blocks, in the order of the ranks."""
    names = axes_of(node)
    for layout in (before, after):
        if any(layout.on(axis).is_shard for axis in names) and joined_cut(layout, axes, names) is None:
            reason = f"{layout} is not one run of blocks over {'-'.join(names)}"
            fail(node, names[-1], reason, "take the axes one by one, the innermost first")


# ---------------------------------------------------------------------- the way from one layout to another


@dataclass(frozen=True)
class Conversion:
    """One coercion on the way.

    Attributes:
        axes: over which it goes, outermost first.
        row: the row of the table.
        layout: afterwards.
    """

    axes: tuple[str, ...]
    row: Coercion
    layout: Layout


# What a collective sends, in sizes of the value that it is about.
_SENT: Mapping[str, float] = {"": 0.0, "all_reduce": 2.0}
_STEP = 1e-3  # of two ways that send the same the shorter one
_LATE = 1e-6  # and that which sends first: what sums a parameter's gradient stands at the parameter


def conversions(
    source: Layout, target: Layout, axes: Mapping[str, int], carries: bool, cost: Cost
) -> list[Conversion] | None:
    """Finds the legal coercions from one layout to another that send least, forward and backward; None without any.

    Args:
        axes: sizes of the mesh axes.
        carries: whether the value carries a gradient; without one I and R are the same.
        cost: on slower axes a byte counts for more.
    """
    start, end = (layout if carries else _without_gradient(layout) for layout in (source, target))
    # Dijkstra's search: no step has a negative cost, so a layout is first taken off the heap with its cheapest way.
    ways: list[tuple[float, int, Layout, tuple[Conversion, ...]]] = [(0.0, 0, start, ())]
    seen: set[Layout] = set()
    # The number decides between equal costs: layouts have no order, and comparing two would fail.
    count = itertools.count(1)
    while ways:
        sent, _, layout, path = heapq.heappop(ways)
        if layout == end:
            return list(path)
        if layout in seen:
            continue
        seen.add(layout)
        for step in _next(layout, end, axes):
            late = _LATE * len(path) if step.row.forward or step.row.backward else 0.0
            more = _cost(layout, step, axes, cost) + late
            heapq.heappush(ways, (sent + more, next(count), step.layout, (*path, step)))
    return None


def _without_gradient(layout: Layout) -> Layout:
    return Layout(tuple((axis, canonical_placement(placement, False)) for axis, placement in layout))


def _cost(layout: Layout, step: Conversion, axes: Mapping[str, int], cost: Cost) -> float:
    """Returns what a step sends, in sizes of its value; more where its axes are slower than the usual ones."""
    part = cost.bandwidth / cost.on(step.axes).bandwidth
    for axis, placement in layout:
        if axis not in step.axes:
            part *= held_fraction(placement, axes[axis])
    return part * sum(_SENT.get(way, 1.0) for way in (step.row.forward, step.row.backward)) + _STEP


def _next(layout: Layout, target: Layout, axes: Mapping[str, int]) -> Iterator[Conversion]:
    """Yields coercions of one axis to what the target has of it or the whole, and of several axes that change alike."""
    changed = [axis for axis in axes if layout.on(axis) != target.on(axis)]
    kinds = {axis: (layout.on(axis), target.on(axis)) for axis in changed}
    # One collective over joined axes sends less than one for each axis.
    for size in range(len(changed), 1, -1):
        for names in itertools.combinations(changed, size):
            alike = {kinds[axis] for axis in names}
            if len(alike) == 1 and not any(placement.is_shard for pair in alike for placement in pair):
                yield from _made(layout, names, [next(iter(alike))[1]] * size, axes)
    for axis in axes:
        before = innermost(layout, axes, [axis])
        if before is None:
            continue
        wholes = [R] if before.on(axis).is_shard else []
        after = _restricted(target, layout, axes, axis)
        options = [after.on(axis)] if after is not None and _outside(after, axis) == _outside(before, axis) else []
        for placement in dict.fromkeys((*options, *wholes)):
            if not _recuts(before.on(axis), placement):
                yield from _made(before, (axis,), [placement], axes)


def _recuts(source: Placement, target: Placement) -> bool:
    """Returns whether the same dimension is cut anew, from the whole: an exchange is between two dimensions."""
    is_shared = source.is_shared or target.is_shared
    return source.is_shard and target.is_shard and source.dim == target.dim and not is_shared


def _outside(layout: Layout, axis: str) -> dict[str, Placement]:
    return {name: placement for name, placement in layout if name != axis}


def _restricted(target: Layout, layout: Layout, axes: Mapping[str, int], axis: str) -> Layout | None:
    """Returns the target with `axis` listed last, less the cuts of other axes that the layout lacks as yet."""
    missing = [name for name in axes if name != axis and target.on(name).is_shard and not layout.on(name).is_shard]
    behind = innermost(target, axes, missing)
    if behind is None:
        return None
    for name, placement in layout:
        if name in missing or (name != axis and not placement.is_shard):
            behind = behind.with_(name, placement)
    return innermost(behind, axes, [axis])


def _made(
    layout: Layout, names: Sequence[str], placements: Sequence[Placement], axes: Mapping[str, int]
) -> Iterator[Conversion]:
    rows = [coercion(layout.on(axis), placement) for axis, placement in zip(names, placements, strict=True)]
    row = rows[0]
    if row is None or any(other is not row for other in rows):
        return
    for axis, placement in zip(names, placements, strict=True):
        layout = layout.with_(axis, placement)
    yield Conversion(tuple(names), row, spelled(layout, axes))
